"""Messages that nobody would send, to every gRPC call: a clear refusal, nothing held, no fault."""

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from kvferry.client import SamplingParams
from kvferry.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)

PROMPT = [45, 300, 12, 7, 77, 130, 299, 8, 45]
NUM_MESSAGES = 120
CALL_TIMEOUT_S = 0.5
# What a caller is told where the fault is ours.
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED}

INTEGERS = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "x",
    "\0",
    "é" * 300,
    "a" * 20_000,
    "../../etc/passwd",
    "127.0.0.1:1",
    "nowhere:0",
    "~",
    "req~1.2",
)


def a_value(rng: random.Random, field: Any) -> Any:
    """Some value of a field's type, which need not make sense."""
    kind = field.cpp_type
    if kind == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return rng.choice(FLOATS)
    if kind == field.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 77))
    if kind == field.CPPTYPE_STRING:
        return (
            rng.choice(TEXTS)
            if field.type == field.TYPE_STRING
            else rng.randbytes(rng.choice((0, 1, 16, 999)))
        )
    low = 0 if kind in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else -(2**31)
    high = 2**31 if kind in (field.CPPTYPE_INT32,) else 2**32 if kind == field.CPPTYPE_UINT32 else 2**63
    return rng.choice([n for n in INTEGERS if low <= n < high])


def mutate(rng: random.Random, message: Any) -> None:
    """Changes one field of a message, or of one within it."""
    field = rng.choice(message.DESCRIPTOR.fields)
    is_message = field.cpp_type == field.CPPTYPE_MESSAGE
    if is_message and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        getattr(message, field.name)[a_value(rng, key)] = a_value(rng, value)
    elif field.is_repeated:
        values = getattr(message, field.name)
        if rng.random() < 0.3:
            message.ClearField(field.name)
        elif is_message:
            mutate(rng, values.add())
        else:
            values.extend([a_value(rng, field)] * rng.choice((1, 1, 3, 70)))
    elif is_message:
        if rng.random() < 0.15:
            message.ClearField(field.name)
        else:
            getattr(message, field.name).SetInParent()
            if field.message_type.fields:
                mutate(rng, getattr(message, field.name))
    elif rng.random() < 0.15:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, a_value(rng, field))


def mutants(seed: int, base: Any, num: int = NUM_MESSAGES) -> Iterable[Any]:
    """Messages that differ from `base` by a few changes each."""
    rng = random.Random(seed)
    for _ in range(num):
        message = type(base)()
        message.CopyFrom(base)
        for _ in range(rng.choice((1, 1, 2, 5))):
            mutate(rng, message)
        yield message


async def outcome(call: Any) -> grpc.StatusCode:
    """How a call ended; a stream is read to its end."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        # What this client's own library says when a call ends while it sends.
        is_ours = error.details() != "Internal error from Core"
        return error.code() if is_ours else grpc.StatusCode.CANCELLED
    return grpc.StatusCode.OK


async def still_well(system: Any) -> None:
    """Nothing is held, and a request is served."""
    await system.all_free(within_s=5.0)
    result = await system.client.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True)).wait()
    assert result.usage.num_output_tokens == 5
    await system.all_free(within_s=5.0)


def sampling() -> Any:
    return common_pb2.SamplingParams(max_tokens=6, seed=1, ignore_eos=True, stop_token_ids=[3])


@pytest.fixture
async def system(start_system):
    return await start_system(1, 1)


@pytest.fixture
async def channels(system):
    """A channel to the router and to each worker, by name."""
    addresses = system.addresses | {"router": system.grpc_address}
    opened = {name: grpc.aio.insecure_channel(address) for name, address in addresses.items()}
    yield opened
    for channel in opened.values():
        await channel.close()


async def test_generate(system, channels):
    base = inference_pb2.GenerateRequest(sampling=sampling())
    base.token_ids.ids.extend(PROMPT)
    stub = inference_pb2_grpc.InferenceServiceStub(channels["router"])
    for message in mutants(1, base):
        code = await outcome(stub.Generate(message, timeout=CALL_TIMEOUT_S))
        assert code not in OURS, message
    await still_well(system)


async def test_prefill(system, channels):
    base = prefill_pb2.PrefillRequest(
        request_id="mutant", prompt_token_ids=PROMPT, sampling=sampling(), deadline_s=0.3, router_id="other"
    )
    base.target.address = system.addresses["decode-0"]
    base.target.lease.request_id = "mutant"
    stub = prefill_pb2_grpc.PrefillServiceStub(channels["prefill-0"])
    for message in mutants(2, base):
        code = await outcome(stub.Prefill(message, timeout=CALL_TIMEOUT_S))
        assert code not in OURS, message
    await still_well(system)


async def test_reserve_and_release(system, channels):
    base = decode_pb2.ReserveRequest(
        request_id="mutant",
        router_id=system.router.router_id,
        prompt_token_ids=PROMPT,
        sampling=sampling(),
        deadline_s=0.2,
    )
    stub = decode_pb2_grpc.DecodeServiceStub(channels["decode-0"])
    for message in mutants(3, base):
        assert await outcome(stub.Reserve(message, timeout=CALL_TIMEOUT_S)) not in OURS, message
        release = decode_pb2.ReleaseRequest(request_ids=[message.request_id, *TEXTS])
        assert await outcome(stub.Release(release, timeout=CALL_TIMEOUT_S)) is grpc.StatusCode.OK
    await still_well(system)


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), float("-inf")])
async def test_a_deadline_that_never_comes_is_refused(system, channels, deadline_s):
    reserve = decode_pb2.ReserveRequest(
        request_id="mutant",
        router_id=system.router.router_id,
        prompt_token_ids=PROMPT,
        sampling=sampling(),
        deadline_s=deadline_s,
    )
    prefill = prefill_pb2.PrefillRequest(
        request_id="mutant", prompt_token_ids=PROMPT, sampling=sampling(), deadline_s=deadline_s
    )
    for call in (
        decode_pb2_grpc.DecodeServiceStub(channels["decode-0"]).Reserve(reserve),
        prefill_pb2_grpc.PrefillServiceStub(channels["prefill-0"]).Prefill(prefill, timeout=5),
    ):
        assert await outcome(call) is grpc.StatusCode.INVALID_ARGUMENT
    await still_well(system)


@pytest.mark.parametrize("field", ["prompt_token_ids", "output_token_ids"])
async def test_a_token_that_the_model_has_not_is_refused(system, channels, field):
    vocab_size = system.workers["prefill-0"].loop._engine.info.vocab_size
    tokens = {"prompt_token_ids": PROMPT, field: [*PROMPT, vocab_size]}
    reserve = decode_pb2.ReserveRequest(
        request_id="mutant", router_id=system.router.router_id, sampling=sampling(), deadline_s=5, **tokens
    )
    prefill = prefill_pb2.PrefillRequest(request_id="mutant", sampling=sampling(), deadline_s=5, **tokens)
    for call in (
        decode_pb2_grpc.DecodeServiceStub(channels["decode-0"]).Reserve(reserve),
        prefill_pb2_grpc.PrefillServiceStub(channels["prefill-0"]).Prefill(prefill, timeout=5),
    ):
        assert await outcome(call) is grpc.StatusCode.INVALID_ARGUMENT
    await still_well(system)


async def test_push(system, channels):
    """With a good lease and with mutants of it; blocks, their shape and order, and the end."""
    reserve = decode_pb2_grpc.DecodeServiceStub(channels["decode-0"])
    push = kv_transfer_pb2_grpc.KvTransferServiceStub(channels["decode-0"])
    rng = random.Random(4)
    for number in range(NUM_MESSAGES):
        response = await reserve.Reserve(
            decode_pb2.ReserveRequest(
                request_id=f"mutant-{number}",
                router_id=system.router.router_id,
                prompt_token_ids=[number % 300, *PROMPT],
                sampling=sampling(),
                deadline_s=5,
            )
        )
        shape = system.workers["decode-0"].loop._engine.cache.shape
        header = kv_transfer_pb2.PushHeader(
            lease=response.lease, block_bytes=shape.num_bytes, num_blocks=3 - response.num_held_blocks
        )
        block = kv_transfer_pb2.Block(
            generation=response.lease.generation, layer_end=1, head_end=1, data=bytes(shape.num_bytes)
        )
        messages = [
            kv_transfer_pb2.PushRequest(header=header),
            kv_transfer_pb2.PushRequest(blocks=kv_transfer_pb2.Blocks(blocks=[block])),
            kv_transfer_pb2.PushRequest(shared_blocks=kv_transfer_pb2.SharedBlocks(indices=[1])),
            kv_transfer_pb2.PushRequest(end=kv_transfer_pb2.PushEnd(first_token_id=9)),
        ]
        chosen = rng.sample(messages[1:], rng.choice((0, 1, 2, 3)))
        for message in (each := rng.choice([*chosen, messages[0]]), *([each] if rng.random() < 0.3 else [])):
            mutate(rng, message)
        stream = messages[:1] * rng.choice((1, 1, 1, 0, 2)) + chosen
        code = await outcome(push.Push(iter(stream), timeout=CALL_TIMEOUT_S))
        assert code not in OURS, stream
        await reserve.Release(decode_pb2.ReleaseRequest(request_ids=[f"mutant-{number}"]))
    await still_well(system)


async def test_join(system, channels):
    """A worker that says anything of itself harms no request of the others."""
    registration = registry_pb2.Registration(
        worker_id="mutant", epoch=5, role=common_pb2.ROLE_PREFILL, address="127.0.0.1:1"
    )
    real = next(w for w in system.router.registry if w.is_prefill).registration
    registration.capabilities.CopyFrom(real.capabilities)
    loads = list(mutants(6, registry_pb2.LoadReport(num_running=1), 40))
    steps = list(mutants(7, registry_pb2.StepUpdate(generations=[1], output_indices=[0], token_ids=[4]), 40))
    stub = registry_pb2_grpc.RegistryServiceStub(channels["router"])
    for number, mutant in enumerate(mutants(5, registration, 40)):

        async def messages(mutant=mutant, number=number):
            yield registry_pb2.JoinRequest(registration=mutant)
            yield registry_pb2.JoinRequest(load=loads[number])
            yield registry_pb2.JoinRequest(step=steps[number])
            await asyncio.sleep(0.02)
            generation = system.client.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
            assert (await generation.wait()).usage.num_output_tokens == 3

        if mutant.worker_id in system.workers:
            continue
        code = await outcome(stub.Join(messages(), timeout=10))
        assert code not in OURS, (mutant, loads[number], steps[number])
    await still_well(system)


async def test_admin_calls_take_what_they_do_not_know(system, channels):
    unknown = inference_pb2.GenerateRequest(model="x", label="y").SerializeToString()
    admin = admin_pb2_grpc.AdminServiceStub(channels["router"])
    worker = admin_pb2_grpc.WorkerServiceStub(channels["prefill-0"])
    for call, kind in (
        (admin.ListWorkers, admin_pb2.ListWorkersRequest),
        (admin.AuditDeployment, admin_pb2.AuditDeploymentRequest),
        (worker.Audit, admin_pb2.AuditRequest),
    ):
        assert await outcome(call(kind.FromString(unknown), timeout=5)) is grpc.StatusCode.OK

"""What a whole deployment holds, and for whom, over the router's gRPC."""

import grpc

from kvferry.audit import culprits
from kvferry.client import SamplingParams
from kvferry.v1 import common_pb2, decode_pb2, decode_pb2_grpc


async def test_a_running_request_is_found_on_router_and_worker_and_nothing_is_amiss(start_system):
    system = await start_system(1, 1, decode={"engine": {"step_time_s": 0.02}})
    async with system.client.generate([5, 7, 9], SamplingParams(max_tokens=200, ignore_eos=True)) as running:
        await anext(running)
        await anext(running)
        audit = await system.client.audit()
        (live,) = audit.requests
        assert (live.request_id, live.decode_worker_id) == (running.request_id, "decode-0")
        assert (live.stage, live.num_output_tokens >= 2) == ("DECODE", True)
        by_name = {worker.worker_id: worker for worker in audit.workers}
        (held,) = by_name["decode-0"].holdings
        assert (held.request_id, held.state, held.router_id) == (
            running.request_id,
            "RUNNING",
            audit.router_id,
        )
        assert by_name["decode-0"].num_requests == 1
        assert culprits([audit]) == []
    await system.all_free()
    audit = await system.client.audit()
    assert audit.requests == ()
    assert culprits([audit]) == []


async def test_a_prompt_that_is_computed_names_its_router(start_system):
    system = await start_system(1, 1, prefill={"engine": {"step_time_s": 0.5}})
    async with system.client.generate([5, 7, 9], SamplingParams(max_tokens=4)):
        while not (holdings := (await system.audit("prefill-0")).holdings):
            pass
        assert holdings[0].router_id == system.router.router_id
        assert culprits([await system.client.audit()]) == []


async def test_what_is_held_by_no_live_request_is_the_culprit(start_system):
    system = await start_system(1, 1)
    async with grpc.aio.insecure_channel(system.addresses["decode-0"]) as channel:
        sampling = common_pb2.SamplingParams(max_tokens=4, seed=1)
        await decode_pb2_grpc.DecodeServiceStub(channel).Reserve(
            decode_pb2.ReserveRequest(
                request_id="nobodys",
                router_id=system.router.router_id,
                prompt_token_ids=[1, 2, 3],
                sampling=sampling,
                deadline_s=60,
            )
        )
    (culprit,) = culprits([await system.client.audit()])
    assert (culprit.name, "RESERVED" in culprit.what) == ("nobodys", True)
    assert culprit.where.startswith("decode-0 ")


async def test_a_worker_that_cannot_be_asked_is_named(start_system, monkeypatch):
    system = await start_system(1, 1)
    (worker,) = [w for w in system.router.registry if w.is_prefill]
    worker.registration.address = "127.0.0.1:9"
    (culprit,) = culprits([await system.client.audit()])
    assert culprit.where.startswith("prefill-0 ")
    assert "does not answer: UNAVAILABLE" in culprit.what

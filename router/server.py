"""The router's gRPC calls: from protos to the router and back, and nothing else."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from pydantic import ValidationError

from kvferry.results import ChatMessage
from kvferry.sampling import SamplingParams
from kvferry.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from kvferry.v1 import inference_pb2 as pb
from router.errors import InvalidRequest
from router.events import Delta, Finished, RequestSpec
from router.router import Router
from router.validation import explain
from router.worker import Worker
from rpc.errors import Refused
from rpc.server import GrpcServer

logger = logging.getLogger(__name__)

# Four heartbeats: a worker that says nothing for so long is gone, though its connection may stand. Its
# requests carry on elsewhere; when it was only slow it joins again.
SILENCE_S = 0.8
LISTEN_S = 0.1
# A registration follows the call at once.
REGISTRATION_TIMEOUT_S = 5.0


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """InferenceService over a router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        accepted = await self._router.validate(_spec(request, context.time_remaining()))
        yield pb.GenerateResponse(
            accepted=pb.Accepted(
                request_id=accepted.request_id,
                model=self._router.model_name,
                num_prompt_tokens=len(accepted.prompt_token_ids),
            )
        )
        async with aclosing(self._router.run(accepted)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield pb.GenerateResponse(delta=_delta(event))
                else:
                    yield pb.GenerateResponse(finished=_finished(event))


def _spec(request: pb.GenerateRequest, timeout_s: float | None) -> RequestSpec:
    try:
        sampling = SamplingParams.from_message(request.sampling)
    except ValidationError as error:
        raise explain(error) from error
    prompt: str | list[ChatMessage] | list[int]
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        prompt = [ChatMessage(m.role, m.content) for m in request.chat.messages]
    elif kind == "token_ids":
        prompt = list(request.token_ids.ids)
    elif kind == "text":
        prompt = request.text
    else:
        raise InvalidRequest("prompt", "give one of text, chat and token_ids")
    return RequestSpec(
        prompt,
        sampling,
        request.model,
        request.priority,
        request.label,
        timeout_s,
        cache_salt=request.cache_salt,
    )


def _delta(delta: Delta) -> pb.Delta:
    message = pb.Delta(text=delta.text, token_ids=delta.token_ids)
    for entry in delta.logprobs:
        top = [common_pb2.TopLogprob(token_id=i, logprob=value) for i, value in entry.top]
        message.logprobs.add(logprob=entry.logprob, top=top)
    return message


def _finished(finished: Finished) -> pb.Finished:
    return pb.Finished(
        finish_reason=f"FINISH_REASON_{finished.reason.upper()}",
        usage=pb.Usage(
            num_prompt_tokens=finished.num_prompt_tokens,
            num_output_tokens=finished.num_output_tokens,
            num_cached_tokens=finished.num_cached_tokens,
        ),
        moments=[pb.Moment(name=m.name, at_s=m.at_s, worker_id=m.worker_id) for m in finished.moments],
    )


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """RegistryService over a router: a worker is in its pool while its stream is open."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Join(
        self,
        request_iterator: AsyncIterator[registry_pb2.JoinRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[registry_pb2.JoinResponse]:
        worker = self._router.registry.add(await _registration(request_iterator))
        tasks = [
            asyncio.create_task(self._listen(worker, request_iterator)),
            asyncio.create_task(_silence(worker)),
        ]
        for task in tasks:
            task.add_done_callback(lambda _: worker.news_for_it.set())
        why = "it closed its stream"
        try:
            while not (worker.lost or any(task.done() for task in tasks)):
                worker.news_for_it.clear()
                response = registry_pb2.JoinResponse(
                    router_id=self._router.router_id,
                    incompatible=worker.incompatible,
                    resend_blocks=worker.has_lost_blocks,
                )
                worker.has_lost_blocks = False
                yield response
                await worker.news_for_it.wait()
            why = next((task.result() for task in tasks if task.done()), worker.lost)
        finally:
            for task in tasks:
                task.cancel()
            self._router.registry.remove(worker, why)

    async def _listen(self, worker: Worker, messages: AsyncIterator[registry_pb2.JoinRequest]) -> str:
        """Takes a worker's reports and tokens until its stream ends; returns why it did."""
        async for message in messages:
            worker.num_messages += 1
            if message.HasField("load"):
                self._router.registry.report(worker, message.load)
            elif message.HasField("step"):
                step = message.step
                if not len(step.generations) == len(step.output_indices) == len(step.token_ids):
                    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "step: the lists differ in length")
                worker.take_step(step)
        return "it closed its stream"


async def _registration(messages: AsyncIterator[registry_pb2.JoinRequest]) -> registry_pb2.Registration:
    try:
        async with asyncio.timeout(REGISTRATION_TIMEOUT_S):
            first = await anext(messages)
    except TimeoutError:
        raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, "registration: none came") from None
    except StopAsyncIteration:
        raise Refused(grpc.StatusCode.CANCELLED, "it closed its stream") from None
    if not first.HasField("registration"):
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "registration: must be first")
    if field := _unfit(first.registration):
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"registration.{field}: must be set")
    return first.registration


def _unfit(registration: registry_pb2.Registration) -> str:
    """The field without which nothing can be placed on a worker; "" where all are there."""
    capabilities = registration.capabilities
    has = {
        "worker_id": bool(registration.worker_id),
        "address": bool(registration.address),
        "role": registration.role in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE),
        "capabilities.block_size": capabilities.block_size > 0,
        "capabilities.num_blocks": capabilities.num_blocks > 0,
    }
    return next((field for field, is_there in has.items() if not is_there), "")


async def _silence(worker: Worker) -> str:
    """Returns when a worker has said nothing for `SILENCE_S`.

    Counts its own rounds, not the time: when this process was held up, messages may wait to be read.
    """
    num_rounds = 0
    while num_rounds * LISTEN_S < SILENCE_S:
        num_messages = worker.num_messages
        await asyncio.sleep(LISTEN_S)
        num_rounds = num_rounds + 1 if worker.num_messages == num_messages else 0
    return f"it said nothing for {SILENCE_S:g} s"


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService over a router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ListWorkersResponse:
        now_s = asyncio.get_running_loop().time()
        return admin_pb2.ListWorkersResponse(
            model=self._router.model_name,
            num_requests=self._router.num_requests,
            num_queued=self._router.admission.num_queued,
            workers=[
                admin_pb2.WorkerStatus(
                    registration=w.registration,
                    load=w.load,
                    report_age_s=now_s - w.reported_s,
                    incompatible=w.incompatible,
                )
                for w in self._router.registry
            ],
        )

    async def AuditDeployment(
        self, request: admin_pb2.AuditDeploymentRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.AuditDeploymentResponse:
        return await self._router.audit()


def build_server(router: Router, max_message_bytes: int) -> GrpcServer:
    """All of the router's gRPC services."""
    server = GrpcServer(max_message_bytes)
    server.add(
        "kvferry.v1.InferenceService",
        InferenceServicer(router),
        inference_pb2_grpc.add_InferenceServiceServicer_to_server,
    )
    server.add(
        "kvferry.v1.RegistryService",
        RegistryServicer(router),
        registry_pb2_grpc.add_RegistryServiceServicer_to_server,
    )
    server.add(
        "kvferry.v1.AdminService", AdminServicer(router), admin_pb2_grpc.add_AdminServiceServicer_to_server
    )
    return server

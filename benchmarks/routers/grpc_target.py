"""The same closed loop as over HTTP, over kvferry's own gRPC calls."""

import time
from collections.abc import Iterator

import grpc

from benchmarks.load.driver import Run, closed_loop
from benchmarks.load.outcome import Job, Outcome
from kvferry.v1 import inference_pb2 as pb
from kvferry.v1 import inference_pb2_grpc
from kvferry.v1.common_pb2 import SamplingParams

_TIMEOUT_S = 60.0


class GrpcTarget:
    """A kvferry router under load. Call it on one event loop."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Drops the connection."""
        await self._channel.close(None)

    async def run_closed(
        self, jobs: Iterator[Job], num_streams: int, duration_s: float, max_requests: int
    ) -> Run:
        """As `Target.run_closed`."""
        outcomes: list[Outcome] = []

        async def send(job: Job) -> None:
            outcomes.append(await self._send(job))

        begin_s, end_s = await closed_loop(send, jobs, num_streams, duration_s, max_requests)
        return Run(outcomes, begin_s, end_s)

    async def _send(self, job: Job) -> Outcome:
        sampling = SamplingParams(max_tokens=job.num_output_tokens, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(text=job.prompt, sampling=sampling)
        started_s = time.monotonic()
        times_s: list[float] = []
        num_tokens = 0
        error = ""
        try:
            async for response in self._stub.Generate(request, timeout=_TIMEOUT_S):
                if response.HasField("delta"):
                    times_s.append(time.monotonic())
                    num_tokens += len(response.delta.token_ids)
        except grpc.aio.AioRpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"
        if not error and num_tokens != job.num_output_tokens:
            error = f"{num_tokens} tokens instead of {job.num_output_tokens}"
        return Outcome(started_s, time.monotonic(), times_s, num_tokens, 0, error)

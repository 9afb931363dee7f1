"""The life of one request in the router: reserve, prefill, stream, release.

    place and Reserve on decode worker D            -> reserved
    Prefill on prefill worker P, which pushes to D  -> prefill_started, first_token, transfer_*
    tokens from D's stream                          -> decode_started
    the end, whoever brings it                      -> finished

Whatever the end is (a finish reason, an error, a deadline, the client leaving), `_let_go` runs: P's call is
closed and D is told to release, so that neither holds anything for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from typing import Any, Protocol, TypeVar

import grpc

from kvferry.results import FinishReason, Moment, TokenLogprobs
from kvferry.v1 import common_pb2, prefill_pb2, registry_pb2
from router.admission import Admission
from router.calls import Calls, Placed, prefill_error
from router.errors import DeadlineExceeded, Overloaded, RequestError, WorkerFailed
from router.events import Delta, Finished, Request
from router.inbox import Inbox, News, NewToken
from router.output import OutputBuilder
from router.prefix_index import PromptBlocks
from router.registry import Registry
from router.worker import Worker
from scheduling.placement import Need
from scheduling.sequence import blocks_for

T = TypeVar("T")

_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Context(Protocol):
    """What a request needs of the router."""

    router_id: str
    registry: Registry
    admission: Admission

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something to its end, whatever becomes of the request."""
        ...


class Lifecycle:
    """One request, from its admission to its end. `events` is run once."""

    def __init__(self, context: Context, request: Request, output: OutputBuilder) -> None:
        self.stage = "QUEUED"
        self.moments = [
            Moment("received", 0.0),
            Moment("tokenised", request.tokenised_s - request.received_s),
        ]
        self._context = context
        self._request = request
        self._output = output
        self._prompt = PromptBlocks(request.prompt_token_ids, request.cache_salt)
        self._calls = Calls(context.registry.channels, context.router_id, request)
        self._inbox = Inbox()
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._early: dict[int, NewToken] = {}
        self._ended: FinishReason | None = None
        self._placed: Placed | None = None
        self._decode_has_ended = False

    async def events(self) -> AsyncGenerator[Delta | Finished, None]:
        """Deltas, then `Finished`. Raises `RequestError`."""
        prefill: asyncio.Task[None] | None = None
        try:
            need = self._need()
            admitted = self._context.admission.admit(self._request.priority, lambda: self._reserve(need))
            placed = self._placed = await self._in_time(admitted)
            placed.decode.inboxes[placed.lease.generation] = self._inbox
            self._moment("reserved", placed.decode)
            self.stage = "PREFILL"
            prefill = asyncio.create_task(self._prefill(placed, need))
            while self._output.finish_reason is None:
                delta = self._digest(await self._in_time(self._inbox.take()))
                if delta.token_ids or delta.text:
                    yield delta
            self._moment("finished")
            yield Finished(
                self._output.finish_reason,
                len(self._request.prompt_token_ids),
                self._output.num_output_tokens,
                sorted(self.moments, key=lambda m: m.at_s),
                self._num_cached_tokens,
            )
        finally:
            self._let_go(prefill)

    async def _in_time(self, awaited: Awaitable[T]) -> T:
        # Around each wait, never around a yield: a time-out there would strike the reader's own await.
        try:
            async with asyncio.timeout_at(self._request.deadline_s):
                return await awaited
        except TimeoutError:
            raise DeadlineExceeded(f"deadline exceeded in stage {self.stage}") from None

    def _need(self) -> Need:
        # While no worker is there `rank` says so, whatever the need is.
        block_size = self._context.registry.block_size() or 1
        num_prompt_tokens = len(self._request.prompt_token_ids)
        return Need(
            num_prompt_tokens=num_prompt_tokens,
            num_prompt_blocks=blocks_for(num_prompt_tokens, block_size),
            num_max_blocks=blocks_for(num_prompt_tokens + self._request.max_tokens, block_size),
        )

    async def _reserve(self, need: Need) -> Placed | None:
        """Asks the decode workers in order of placement. None: no room anywhere now."""
        for prefill, decode in self._context.registry.rank(need, self._prompt):
            response = None
            try:
                response = await self._calls.reserve(decode)
            finally:
                # Cancelled or unanswered, it may have been done all the same.
                if response is None:
                    self._context.in_background(self._calls.release(decode))
            if response is not None and response.HasField("lease"):
                decode.num_requests += 1
                decode.num_dispatched_blocks += need.num_prompt_blocks - response.num_held_blocks
                return Placed(prefill, decode, response.lease, response.num_held_blocks)
        return None

    async def _prefill(self, placed: Placed, need: Need) -> None:
        """Runs the prompt on P, or on another one where P's queue is full; the news go to the inbox."""
        prefill: Worker | None = placed.prefill
        tried: set[str] = set()
        while prefill is not None:
            try:
                await self._call_prefill(prefill, placed)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    # Once D decodes it has all it needs, and only the word of it was lost.
                    if self.stage != "DECODE":
                        self._inbox.put(prefill_error(prefill, error))
                    return
            tried.add(prefill.worker_id)
            registry = self._context.registry
            prefill = registry.best_prefill(placed.decode.group, need, self._prompt, tried)
        self._inbox.put(
            Overloaded("the queue of every prefill worker is full", self._context.admission.retry_after_s())
        )

    async def _call_prefill(self, prefill: Worker, placed: Placed) -> None:
        # What the worker will have to compute, as far as is known.
        num_tokens = self._prompt.num_tokens - prefill.num_cached_tokens(self._prompt)
        prefill.num_requests += 1
        prefill.num_dispatched_tokens += num_tokens
        sent_s = self._now_s()
        try:
            async for response in self._calls.prefill(placed, prefill):
                if response.HasField("first_token"):
                    prefill.num_dispatched_tokens -= num_tokens
                    num_tokens = 0
                    self._note_prefill(prefill, sent_s, response.first_token)
                    self._inbox.put(response.first_token)
                else:
                    self._moment("transfer_ended", prefill, sent_s + response.handed_off.transfer_ended_s)
        finally:
            prefill.num_requests -= 1
            prefill.num_dispatched_tokens -= num_tokens

    def _note_prefill(self, prefill: Worker, sent_s: float, first: prefill_pb2.FirstToken) -> None:
        """P tells its moments as seconds since the call arrived, so that no two clocks are compared."""
        self._moment("prefill_started", prefill, sent_s + first.prefill_started_s)
        if first.transfer_started_s:
            self._moment("transfer_started", prefill, sent_s + first.transfer_started_s)
        self._moment("first_token", prefill, sent_s + first.first_token_s)

    def _digest(self, news: list[News]) -> Delta:
        """Takes what has come; gives what the client is to see of it."""
        for item in news:
            if isinstance(item, RequestError):
                raise item
            if isinstance(item, NewToken):
                self._early[item.index] = item
            elif isinstance(item, prefill_pb2.FirstToken):
                self._take_first(item)
            elif isinstance(item, registry_pb2.Ended):
                self._take_end(item)
        # D's tokens may overtake the first one, which comes from P.
        tokens: list[NewToken] = []
        while (token := self._early.pop(self._num_tokens, None)) is not None:
            if self._num_tokens == 1:
                self.stage = "DECODE"
                assert self._placed is not None
                self._moment("decode_started", self._placed.decode)
            self._num_tokens += 1
            tokens.append(token)
        return self._output.push(
            [t.token_id for t in tokens],
            [_logprobs(t) for t in tokens if t.logprobs is not None],
            self._ended if self._num_tokens else None,
        )

    def _take_first(self, first: prefill_pb2.FirstToken) -> None:
        logprobs = first.logprobs if first.HasField("logprobs") else None
        self._early[0] = NewToken(0, first.token_id, logprobs)
        self._num_cached_tokens = first.num_cached_tokens
        self.stage = "HANDOFF"
        self._ended = _REASONS.get(first.finish_reason, self._ended)

    def _take_end(self, ended: registry_pb2.Ended) -> None:
        self._decode_has_ended = True
        if ended.error:
            assert self._placed is not None
            raise WorkerFailed(f"{self._placed.decode.worker_id}: {ended.error}")
        self._ended = _REASONS[ended.finish_reason]

    def _let_go(self, prefill: "asyncio.Task[None] | None") -> None:
        if prefill is not None:
            prefill.cancel()
        if self._placed is None:
            return
        decode = self._placed.decode
        decode.num_requests -= 1
        decode.inboxes.pop(self._placed.lease.generation, None)
        if not self._decode_has_ended:
            self._context.in_background(self._calls.release(decode))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _moment(self, name: str, worker: Worker | None = None, at_s: float | None = None) -> None:
        since_received_s = (self._now_s() if at_s is None else at_s) - self._request.received_s
        self.moments.append(Moment(name, since_received_s, worker.worker_id if worker else ""))


def _logprobs(token: NewToken) -> TokenLogprobs:
    assert token.logprobs is not None
    top = tuple((entry.token_id, entry.logprob) for entry in token.logprobs.top)
    return TokenLogprobs(token.token_id, token.logprobs.logprob, top)

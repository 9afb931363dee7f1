"""The life of one request in the router: reserve, prefill, stream, release.

    place and Reserve on decode worker D            -> reserved
    Prefill on prefill worker P, which pushes to D  -> prefill_started, first_token, transfer_*
    tokens from D's stream                          -> decode_started
    the end, whoever brings it                      -> finished

Whatever the end is (a finish reason, an error, a deadline, the client leaving), P's call is closed and D is
told to release, so that neither holds anything for it (`Attempt.let_go`).

A lost worker is not the end: another attempt carries on from the tokens that the client has (`_recover`). As
sampling depends on nothing but tokens, parameters, seed and position, and text is made here, the client sees
one stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from kvferry.results import FinishReason, Moment, TokenLogprobs
from kvferry.v1 import admin_pb2, common_pb2, prefill_pb2, registry_pb2
from router.attempt import Attempt, Context
from router.errors import DeadlineExceeded, Overloaded, RequestError, Unavailable, WorkerFailed, WorkerLost
from router.events import Delta, Finished, Request
from router.inbox import News, NewToken
from router.output import OutputBuilder
from router.worker import Worker

logger = logging.getLogger(__name__)

# Attempts after the first. What ends more workers than this is no bad luck.
MAX_RECOVERIES = 3
# Losses without a token between them after which the request itself is taken for the cause.
MAX_LOSSES_AT_ONE_TOKEN = 2

T = TypeVar("T")

_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


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
        self._token_ids: list[int] = []
        self._num_cached_tokens: int | None = None
        self._early: dict[int, NewToken] = {}
        # Why it has ended, and with how many tokens.
        self._ended: tuple[FinishReason, int] | None = None
        self._attempt = self._new_attempt(0)
        # Of each worker that was lost: how many tokens there were.
        self._losses: list[int] = []

    def describe(self) -> admin_pb2.LiveRequest:
        """Where it stands, for an audit."""
        placed = self._attempt.placed
        return admin_pb2.LiveRequest(
            request_id=self._request.request_id,
            stage=self.stage,
            age_s=self._now_s() - self._request.received_s,
            decode_worker_id=placed.decode.worker_id if placed else "",
            num_output_tokens=len(self._token_ids),
        )

    async def events(self) -> AsyncGenerator[Delta | Finished, None]:
        """Deltas, then `Finished`. Raises `RequestError`."""
        try:
            await self._in_time(self._attempt.begin())
            self.stage = "PREFILL"
            while self._output.finish_reason is None:
                news = await self._in_time(self._attempt.inbox.take())
                if isinstance(news[0], WorkerLost):
                    await self._in_time(self._recover(news[0]))
                    continue
                delta = self._digest(news)
                if delta.token_ids or delta.text:
                    yield delta
            self._moment("finished")
            yield Finished(
                self._output.finish_reason,
                len(self._request.prompt_token_ids),
                self._output.num_output_tokens,
                sorted(self.moments, key=lambda m: m.at_s),
                self._num_cached_tokens or 0,
            )
        finally:
            self._attempt.let_go()

    async def _in_time(self, awaited: Awaitable[T]) -> T:
        # Around each wait, never around a yield: a time-out there would strike the reader's own await.
        try:
            async with asyncio.timeout_at(self._request.deadline_s):
                return await awaited
        except TimeoutError:
            raise DeadlineExceeded(f"deadline exceeded in stage {self.stage}") from None

    def _digest(self, news: list[News]) -> Delta:
        """Takes what has come; gives what the client is to see of it. Raises the error that is first."""
        for item in news:
            if isinstance(item, WorkerLost):
                # What came before it is the client's first.
                self._attempt.inbox.put(item)
                break
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
        while (token := self._early.pop(len(self._token_ids), None)) is not None:
            if not self._attempt.is_decoding and token.index > self._attempt.num_known_tokens:
                self.stage = "DECODE"
                self._attempt.is_decoding = True
                self._moment("decode_started", self._decode)
            self._token_ids.append(token.token_id)
            tokens.append(token)
        reason, num_at_end = self._ended or (None, None)
        num_tokens = len(self._token_ids)
        is_short = num_at_end is not None and num_tokens != num_at_end
        if num_tokens > self._attempt.num_known_tokens and (self._early or is_short):
            # D tells all in order: what is not here by now will not come.
            self._attempt.inbox.put(
                WorkerLost(f"a token of decode worker {self._decode.worker_id} was lost on its way")
            )
        return self._output.push(
            [t.token_id for t in tokens],
            [_logprobs(t) for t in tokens if t.logprobs is not None],
            reason if num_tokens == num_at_end else None,
        )

    def _take_first(self, first: prefill_pb2.FirstToken) -> None:
        logprobs = first.logprobs if first.HasField("logprobs") else None
        index = self._attempt.num_known_tokens
        self._early[index] = NewToken(index, first.token_id, logprobs)
        # A recovery finds other things cached, which is not the client's affair.
        if self._num_cached_tokens is None:
            self._num_cached_tokens = first.num_cached_tokens
        self.stage = "HANDOFF"
        if first.finish_reason in _REASONS:
            self._ended = _REASONS[first.finish_reason], index + 1

    def _take_end(self, ended: registry_pb2.Ended) -> None:
        self._attempt.decode_has_ended = True
        if ended.error:
            raise WorkerFailed(f"{self._decode.worker_id}: {ended.error}")
        self._ended = _REASONS[ended.finish_reason], ended.num_output_tokens

    async def _recover(self, loss: WorkerLost) -> None:
        """Carries on elsewhere, from the tokens so far. Raises `Unavailable` where that has no end."""
        self._attempt.let_go()
        self._losses.append(len(self._token_ids))
        where = f"in stage {self.stage} after {len(self._token_ids)} tokens"
        if self._losses.count(self._losses[-1]) >= MAX_LOSSES_AT_ONE_TOKEN:
            raise Unavailable(f"{loss}; {len(self._losses)} workers were lost {where}, it may be the request")
        if len(self._losses) > MAX_RECOVERIES:
            raise Unavailable(f"{loss}; gave up {where}, after {MAX_RECOVERIES} recoveries")
        logger.warning("%s carries on elsewhere, %s: %s", self._request.request_id, where, loss)
        self._context.recovered()
        self._early.clear()
        self._ended = None
        self._attempt = self._new_attempt(len(self._losses))
        self.stage = "RECOVERY"
        try:
            await self._attempt.begin()
        except Overloaded as error:
            raise Unavailable(f"{loss}; no other workers could carry on: {error}") from error
        self.stage = "PREFILL"

    def _new_attempt(self, number: int) -> Attempt:
        return Attempt(self._context, self._request, number, list(self._token_ids), self._moment)

    @property
    def _decode(self) -> Worker:
        assert self._attempt.placed is not None
        return self._attempt.placed.decode

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _moment(self, name: str, worker: Worker | None = None, at_s: float | None = None) -> None:
        since_received_s = (self._now_s() if at_s is None else at_s) - self._request.received_s
        self.moments.append(Moment(name, since_received_s, worker.worker_id if worker else ""))


def _logprobs(token: NewToken) -> TokenLogprobs:
    assert token.logprobs is not None
    top = tuple((entry.token_id, entry.logprob) for entry in token.logprobs.top)
    return TokenLogprobs(token.token_id, token.logprobs.logprob, top)

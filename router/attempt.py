"""One try at a request: a decode worker with its reservation, and the prefill worker that fills it.

A request has one attempt, and another whenever a worker that it cannot do without is lost. Each goes by an id
of its own on the workers: a late word about a former attempt then cannot strike the present one.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import grpc

from kvferry.audit import ATTEMPT_MARK
from kvferry.v1 import prefill_pb2
from router.admission import Admission
from router.calls import Calls, Placed, prefill_error
from router.errors import Overloaded, RequestError, Unavailable, WorkerLost
from router.events import Request
from router.inbox import Inbox
from router.prefix_index import PromptBlocks
from router.registry import Registry
from router.worker import Worker
from scheduling.placement import Need
from scheduling.sequence import blocks_for

logger = logging.getLogger(__name__)

# Before an accepted request asks prefill workers again whose queues were all full.
FULL_QUEUES_WAIT_S = 0.2

NoteMoment = Callable[[str, Worker | None, float | None], None]
"""Name, worker, and the event loop's time; None: now."""


class Context(Protocol):
    """What an attempt needs of the router."""

    router_id: str
    registry: Registry
    admission: Admission

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something to its end, whatever becomes of the request."""
        ...

    def recovered(self) -> None:
        """Counts a request that carries on after it has lost a worker."""
        ...


class Attempt:
    """Runs a request on a pair of workers from the tokens that it has; its news go to `inbox`.

    number: 0 for the first. output_token_ids: the output so far, which other workers have generated. While
    it has no first token of its own, another prefill worker may take over under the same reservation.
    """

    def __init__(
        self,
        context: Context,
        request: Request,
        number: int,
        output_token_ids: list[int],
        note_moment: NoteMoment,
    ) -> None:
        self.inbox = Inbox()
        self.num_known_tokens = len(output_token_ids)
        self.placed: Placed | None = None
        self.has_first_token = False
        self.is_decoding = False
        self.decode_has_ended = False
        self._context = context
        self._request = request
        self._is_recovery = number > 0
        self._output_token_ids = output_token_ids
        self._moment = note_moment
        self._blocks = PromptBlocks([*request.prompt_token_ids, *output_token_ids], request.cache_salt)
        self._number = number
        self._num_tries = 0
        self._calls = self._new_calls()
        self._prefilling: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Reserves on a decode worker, waiting in the queue for it, and starts the prefill.

        Raises `Overloaded`, `Unavailable` and what a worker refuses the request with.
        """
        self.placed = await self._context.admission.admit(
            self._request.priority, self._blocks.num_tokens, self._reserve, is_accepted=self._is_recovery
        )
        decode = self.placed.decode
        decode.inboxes[self.placed.lease.generation] = self.inbox
        self._moment("reserved", decode, None)
        self._prefilling = asyncio.create_task(self._prefill(self.placed))

    def let_go(self) -> None:
        """Ends it in whatever state it is, so that neither worker holds anything for it."""
        if self._prefilling is not None:
            self._prefilling.cancel()
        if self.placed is None:
            return
        decode = self.placed.decode
        decode.num_requests -= 1
        decode.inboxes.pop(self.placed.lease.generation, None)
        if not self.decode_has_ended and not decode.lost:
            self._context.in_background(self._calls.release(decode))

    def _new_calls(self) -> Calls:
        """For one try at reserving: the release of an unanswered one may come after the next is granted."""
        number = f"{self._number}.{self._num_tries}"
        name = self._request.request_id + ("" if number == "0.0" else ATTEMPT_MARK + number)
        self._num_tries += 1
        context = self._context
        return Calls(
            context.registry.channels, context.router_id, self._request, name, self._output_token_ids
        )

    def _need(self) -> Need:
        # Asked for anew each time: the workers may have changed since. While there is none, `rank` says so,
        # whatever the need is.
        block_size = self._context.registry.block_size() or 1
        num_tokens = self._blocks.num_tokens
        num_max_tokens = len(self._request.prompt_token_ids) + self._request.max_tokens
        return Need(num_tokens, blocks_for(num_tokens, block_size), blocks_for(num_max_tokens, block_size))

    async def _reserve(self) -> Placed | None:
        """Asks the decode workers in order of placement. None: no room anywhere now."""
        need = self._need()
        try:
            pairs = self._context.registry.rank(need, self._blocks)
        except Unavailable:
            if not self._is_recovery:
                raise
            return None  # The request was accepted; lost workers are started again.
        for prefill, decode in pairs:
            response = None
            try:
                response = await self._calls.reserve(decode)
            finally:
                # Cancelled or unanswered, it may have been done all the same.
                if response is None:
                    self._context.in_background(self._calls.release(decode))
                    self._calls = self._new_calls()
            if response is not None and response.HasField("lease"):
                decode.num_requests += 1
                decode.num_dispatched_blocks += need.num_prompt_blocks - response.num_held_blocks
                return Placed(prefill, decode, response.lease, response.num_held_blocks)
        return None

    async def _prefill(self, placed: Placed) -> None:
        """Runs the prompt on P, or on another one where P is full or lost; the news go to the inbox."""
        prefill: Worker | None = placed.prefill
        num_asked = 0
        tried: set[str] = set()
        failure: RequestError | None = None
        while prefill is not None:
            try:
                await self._call_prefill(prefill, placed, writer=num_asked)
                return
            except RequestError as error:
                failure = error
            # Once D decodes it has all it needs, and only the word of it was lost.
            if self.is_decoding:
                return
            # After the first token another worker would have to be told of it: that is a new attempt.
            if self.has_first_token or not isinstance(failure, Overloaded | WorkerLost):
                break
            logger.warning("%s: %s", self._request.request_id, failure)
            num_asked += 1
            tried.add(prefill.worker_id)
            prefill = self._best_prefill(placed, tried)
            if prefill is None and self._is_recovery and isinstance(failure, Overloaded):
                # The request was accepted long ago: it waits.
                await asyncio.sleep(FULL_QUEUES_WAIT_S)
                tried.clear()
                prefill = self._best_prefill(placed, tried)
        assert failure is not None
        self.inbox.put(failure)

    def _best_prefill(self, placed: Placed, tried: set[str]) -> Worker | None:
        group = placed.decode.group
        return self._context.registry.best_prefill(group, self._need(), self._blocks, tried)

    async def _call_prefill(self, prefill: Worker, placed: Placed, writer: int) -> None:
        # What the worker will have to compute, as far as is known.
        num_tokens = self._blocks.num_tokens - prefill.num_cached_tokens(self._blocks)
        prefill.num_requests += 1
        prefill.num_dispatched_tokens += num_tokens
        sent_s = asyncio.get_running_loop().time()
        call = self._calls.prefill(placed, prefill, writer)
        prefill.calls.add(call)
        try:
            async for response in call:
                if response.HasField("first_token"):
                    prefill.num_dispatched_tokens -= num_tokens
                    num_tokens = 0
                    self.has_first_token = True
                    self._note_prefill(prefill, sent_s, response.first_token)
                    self.inbox.put(response.first_token)
                else:
                    ended_s = sent_s + response.handed_off.transfer_ended_s
                    self._moment("transfer_ended", prefill, ended_s)
        except grpc.aio.AioRpcError as error:
            raise prefill_error(prefill, error, self._context.admission.retry_after_s()) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not prefill.lost or (task is not None and task.cancelling()):
                raise
            raise WorkerLost(f"prefill worker {prefill.worker_id} was lost: {prefill.lost}") from None
        finally:
            prefill.calls.discard(call)
            prefill.num_requests -= 1
            prefill.num_dispatched_tokens -= num_tokens

    def _note_prefill(self, prefill: Worker, sent_s: float, first: prefill_pb2.FirstToken) -> None:
        """P tells its moments as seconds since the call arrived, so that no two clocks are compared."""
        self._moment("prefill_started", prefill, sent_s + first.prefill_started_s)
        if first.transfer_started_s:
            self._moment("transfer_started", prefill, sent_s + first.transfer_started_s)
        self._moment("first_token", prefill, sent_s + first.first_token_s)

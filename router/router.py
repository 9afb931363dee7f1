"""The router, whole: what both its servers call, and what its requests share."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from kvferry import models
from kvferry.config import RouterConfig
from kvferry.v1 import admin_pb2
from router.admission import Admission
from router.calls import audit_worker
from router.errors import RequestError
from router.events import Delta, Finished, Request, RequestSpec
from router.lifecycle import Lifecycle
from router.metrics import Metrics
from router.model_spec import ModelSpec
from router.output import OutputBuilder
from router.registry import Registry
from router.tokenizer import Tokenizer
from router.validation import validate
from scheduling.queue_policies import QUEUE_POLICIES

logger = logging.getLogger(__name__)

# About 2 ms of tokenising.
LONG_PROMPT_CHARS = 4096


class Router:
    """One model's router. Runs on one event loop; see `router.service.Service` for what it offers."""

    def __init__(self, config: RouterConfig, model_dir: Path, model_name: str) -> None:
        """Raises `FileNotFoundError` or `ValueError` for a model directory that lacks what it needs."""
        self.router_id = f"router-{uuid.uuid4().hex[:12]}"
        self.model_name = model_name
        self.tokenizer = Tokenizer.load(model_dir)
        self.admission = Admission(config.max_queued, config.queue_timeout_s, QUEUE_POLICIES[config.policy]())
        self.registry = Registry(model_name, models.tokenizer_digest(model_dir), self.admission.wake)
        self._config = config
        self._model = ModelSpec.load(model_dir, model_name)
        self._metrics = Metrics(self.registry, lambda: self.admission.num_queued)
        self._requests: set[Lifecycle] = set()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    async def audit(self) -> admin_pb2.AuditDeploymentResponse:
        """What its requests and its workers hold now."""
        workers = await asyncio.gather(*(audit_worker(w, self.registry.channels) for w in self.registry))
        # Only now: a request that has begun since then is not missed.
        requests = [lifecycle.describe() for lifecycle in self._requests]
        return admin_pb2.AuditDeploymentResponse(router_id=self.router_id, requests=requests, workers=workers)

    async def validate(self, spec: RequestSpec) -> Request:
        """Everything that can be refused is refused here. Raises `router.errors.InvalidRequest`."""
        check = partial(
            validate,
            spec,
            self._model,
            self.tokenizer,
            now_s=asyncio.get_running_loop().time(),
            default_timeout_s=self._config.request_timeout_s,
        )
        # A thread costs more than it saves for a short prompt; a long one would hold up everybody's tokens.
        is_long = spec.num_chars > LONG_PROMPT_CHARS
        request = await asyncio.to_thread(check) if is_long else check()
        # Where the client names no bound, the caches' size is one more.
        if spec.sampling.max_tokens is None and (capacity := self.registry.max_tokens()) is not None:
            request = request.bounded(capacity - len(request.prompt_token_ids))
        return request

    async def run(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        """Serves the request: deltas, then `Finished`. Raises `router.errors.RequestError`."""
        lifecycle = Lifecycle(self, request, OutputBuilder(request, self.tokenizer))
        self._requests.add(lifecycle)
        self._metrics.accepted(len(request.prompt_token_ids))
        outcome = "cancelled"
        error = ""
        try:
            async with aclosing(lifecycle.events()) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        outcome = event.reason
                    else:
                        self._metrics.sent(len(event.token_ids))
                    yield event
        except RequestError as failure:
            outcome, error = type(failure).__name__, str(failure)
            raise
        finally:
            self._requests.discard(lifecycle)
            self._metrics.ended(outcome, lifecycle.moments)
            level = logging.WARNING if error else logging.INFO
            logger.log(
                level, "%s ended in stage %s: %s %s", request.request_id, lifecycle.stage, outcome, error
            )

    def why_not_ready(self) -> str:
        """Empty when at least one compatible pair of workers can take a request now, else the reason."""
        if reason := self.registry.why_no_pair():
            return reason
        return "the queue is full" if self.admission.is_full else ""

    def metrics(self) -> bytes:
        """Prometheus text."""
        return self._metrics.text()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something to its end, whatever becomes of the request that asked for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def recovered(self) -> None:
        """Counts a request that carries on after it has lost a worker."""
        self._metrics.recovered()

    async def close(self) -> None:
        """Lets what runs in the background end; then drops the connections to the workers."""
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.registry.channels.close()

"""One deployment under load and faults, and what is found afterwards."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.chaos.clients import Answer, Clients
from benchmarks.chaos.deployment import LinkedDeployment
from benchmarks.chaos.faults import Fault, inject, make_faults
from benchmarks.chaos.footprint import Footprint, footprints, growth
from benchmarks.chaos.jobs import Job, make_jobs
from benchmarks.chaos.oracle import Oracle, UnharmedOracle, judge
from kvferry.audit import SETTLE_S, Culprit, culprits, lasting
from kvferry.client import AsyncClient, KvferryError
from kvferry.errors import Unavailable

_PROBE_JOBS = 24
_PROBE_STREAMS = 8
# Two loads of a shared machine differ by so much without any harm.
_FULL_RATE_SHARE = 0.6
_FULL_RATE_TIMEOUT_S = 90.0
_MEND_TIMEOUT_S = 60.0
_QUIET_S = 3.0
_POLL_S = 0.25


@dataclass(slots=True)
class Found:
    """What a trial was and what it found."""

    injected: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    num_recovered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    held_after: int = 0
    seconds_to_full_rate: float = 0.0
    begin: dict[str, Footprint] = field(default_factory=dict)
    end: dict[str, Footprint] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the benchmark prints it."""
        return {
            "requests": self.num_requests,
            "injected": dict(self.injected),
            "recovered": self.num_recovered,
            "failed_honestly": self.failures.total(),
            "failures": dict(self.failures),
            "violations": self.violations,
            "held_after": self.held_after,
            "seconds_to_full_rate": round(self.seconds_to_full_rate, 2),
            "processes": {
                name: {"begin": asdict(was), "end": asdict(self.end[name])}
                for name, was in self.begin.items()
                if name in self.end
            },
        }


class Trial:
    """A seed's jobs and faults over a deployment. oracle: None keeps an unharmed run of the jobs first."""

    def __init__(
        self,
        deployment: LinkedDeployment,
        clients: Clients,
        oracle: Oracle | None,
        *,
        seed: int,
        num_jobs: int,
        max_tokens: int,
        seconds: float,
    ) -> None:
        self._deployment = deployment
        self._clients = clients
        self._oracle = oracle
        self._seed = seed
        self._jobs = make_jobs(seed, num_jobs, max_tokens)
        self._probe = [
            Job(-1 - n, "grpc", f"probe {n}", {"max_tokens": max_tokens // 2, "ignore_eos": True})
            for n in range(_PROBE_JOBS)
        ]
        self._seconds = seconds
        self._found = Found(num_requests=num_jobs)

    async def run(self) -> Found:
        """Unharmed, harmed, and what is left of it."""
        found = self._found
        oracle = self._oracle or UnharmedOracle(await self._unharmed())
        await self._probe_rate()
        unharmed_rate = await self._probe_rate()
        found.begin = await self._footprints()
        answers = await self._harmed()
        self._judge(answers, oracle)
        mended_s = time.monotonic()
        await self._wait_until_mended()
        await self._audit()
        await self._wait_for_full_rate(unharmed_rate, mended_s)
        found.end = await self._footprints()
        found.violations += growth(found.begin, found.end)
        return found

    async def _unharmed(self) -> Mapping[int, Answer]:
        whole = [Job(job.number, job.api, job.question, job.sampling) for job in self._jobs]
        answers = await self._closed_loop(whole)
        self._found.violations += [
            f"unharmed request {job.number}: {answer.error}: {answer.message}"
            for job, answer in zip(whole, answers, strict=True)
            if answer.error
        ]
        return {job.number: answer for job, answer in zip(whole, answers, strict=True)}

    async def _closed_loop(self, jobs: Sequence[Job]) -> list[Answer]:
        room = asyncio.Semaphore(_PROBE_STREAMS)

        async def ask(job: Job) -> Answer:
            async with room:
                return await self._clients.ask(job)

        return await asyncio.gather(*(ask(job) for job in jobs))

    async def _probe_rate(self) -> float:
        """Output tokens a second of a small closed loop; 0 where any of it failed."""
        began_s = time.monotonic()
        answers = await self._closed_loop(self._probe)
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        failed = any(answer.error for answer in answers)
        return 0.0 if failed else num_tokens / (time.monotonic() - began_s)

    async def _harmed(self) -> list[Answer]:
        """Jobs and faults at their moments, until all have ended."""
        rng = random.Random(f"arrivals {self._seed}")
        arrivals_s = sorted(rng.uniform(0, self._seconds) for _ in self._jobs)
        names = [member.name for member in self._deployment.workers]
        end_s = max(1.0, self._seconds - 2.0)
        faults = make_faults(self._seed, 0.5, end_s, names, list(self._deployment.links))
        for job in self._jobs:
            self._found.injected["cancel"] += job.cancel_after is not None
            self._found.injected["deadline"] += job.timeout_s is not None
        began_s = time.monotonic()

        async def ask(job: Job, at_s: float) -> Answer:
            await asyncio.sleep(began_s + at_s - time.monotonic())
            return await self._clients.ask(job)

        asks = [ask(job, at_s) for job, at_s in zip(self._jobs, arrivals_s, strict=True)]
        harms = [self._harm(fault, began_s) for fault in faults]
        answers, _ = await asyncio.gather(asyncio.gather(*asks), asyncio.gather(*harms))
        return answers

    async def _harm(self, fault: Fault, began_s: float) -> None:
        await asyncio.sleep(began_s + fault.at_s - time.monotonic())
        if await inject(fault, self._deployment):
            self._found.injected[fault.kind] += 1

    def _judge(self, answers: Sequence[Answer], oracle: Oracle) -> None:
        for job, answer in zip(self._jobs, answers, strict=True):
            wrong = judge(job, answer, oracle)
            self._found.violations += wrong
            self._found.num_recovered += answer.was_recovered and not answer.error
            if answer.error and answer.error != "left" and not wrong:
                self._found.failures[_kind(answer)] += 1

    async def _wait_until_mended(self) -> None:
        """Until every worker is in its pool again, with a new process where it had died."""
        names = {member.name for member in self._deployment.workers}
        give_up_s = time.monotonic() + _MEND_TIMEOUT_S
        missing = names
        while time.monotonic() < give_up_s:
            missing = names - await self._joined()
            if not missing:
                return
            await asyncio.sleep(_POLL_S)
        self._found.violations.append(f"not back within {_MEND_TIMEOUT_S:g} s: {', '.join(sorted(missing))}")

    async def _joined(self) -> set[str]:
        assert self._deployment.addresses is not None
        async with AsyncClient(self._deployment.addresses.grpc) as client:
            try:
                return {worker.worker_id for worker in (await client.list_workers()).workers}
            except KvferryError:
                return set()

    async def _audit(self) -> None:
        """Whatever is held for longer than a second after the last request is at fault."""
        assert self._deployment.addresses is not None
        found: list[Culprit] = []
        async with AsyncClient(self._deployment.addresses.grpc) as client:
            for number in range(2):
                try:
                    audit = await client.audit()
                except Unavailable as error:
                    self._found.violations.append(f"no audit: {error}")
                    return
                found = culprits([audit]) if number == 0 else lasting(found, culprits([audit]))
                self._found.held_after = sum(h.num_blocks for w in audit.workers for h in w.holdings)
                await asyncio.sleep(SETTLE_S)
        self._found.violations += [f"held after the end: {c.where} {c.name} {c.what}" for c in found]

    async def _wait_for_full_rate(self, unharmed_rate: float, since_s: float) -> None:
        rate = 0.0
        while time.monotonic() < since_s + _FULL_RATE_TIMEOUT_S:
            rate = await self._probe_rate()
            if rate >= _FULL_RATE_SHARE * unharmed_rate:
                self._found.seconds_to_full_rate = time.monotonic() - since_s
                return
            await asyncio.sleep(_POLL_S)
        self._found.seconds_to_full_rate = time.monotonic() - since_s
        self._found.violations.append(f"{rate:.0f} tokens/s at the end, {unharmed_rate:.0f} unharmed")

    async def _footprints(self) -> dict[str, Footprint]:
        await asyncio.sleep(_QUIET_S)
        return footprints(await asyncio.to_thread(self._deployment.processes))


def _kind(answer: Answer) -> str:
    """A failure's class and message without what differs from request to request."""
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f.:]*", "#", f"{answer.error}: {answer.message}")

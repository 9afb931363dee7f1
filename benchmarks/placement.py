"""Where prompts go: random, least-loaded and cache-aware placement over the same trace, in simulated time.

python -m benchmarks.placement
python -m benchmarks.placement --quick --json

The placement, the prefill schedulers and the block allocators are the ones that serve; only the engine is a
formula: a step takes STEP_S, and TOKEN_S for each of its tokens, however long their context is. A trace's
prompts are shortened to one token in SHRINK, their shared blocks stay shared, and its arrival times are
stretched or squeezed by one factor, so that without any reuse the workers would be busy for the stated share
of the time ("load"). A prompt's blocks are given back with its first token, the transfer taking no time, and
the router knows the workers' state of now; live it is up to a heartbeat old.
"""

import heapq
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scheduling.allocator import BlockAllocator
from scheduling.block_hash import BlockHashes
from scheduling.placement import DecodeSnapshot, Need, Placement, PrefillSnapshot
from scheduling.prefill import PrefillScheduler
from scheduling.sequence import Scheduled, blocks_for
from scheduling.sequence import Sequence as TokenSequence

TRACES = ("conversation", "synthetic")
# The traces' prompts have 12,000 to 15,000 tokens in the mean and 512 in a block.
SHRINK = 16
BLOCK_SIZE = 512 // SHRINK
# About what the demo model takes on one CPU core.
STEP_S = 0.01
TOKEN_S = 0.001
MAX_STEP_TOKENS = 512
# With 8 workers about a sixth of the conversation trace's distinct blocks, and three quarters of the
# synthetic one's.
BLOCKS_PER_WORKER = 4096
QUICK_REQUESTS = 2000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class _Request:
    """One line of a trace: `at_s` in the trace's own time, its length before and its blocks' names."""

    at_s: float
    num_tokens: int
    block_ids: Sequence[int]

    def tokens(self) -> list[int]:
        """Token ids that are equal exactly where the trace's blocks are."""
        repeated = [block_id for block_id in self.block_ids for _ in range(BLOCK_SIZE)]
        return repeated[: self.num_tokens]


@dataclass(slots=True)
class _Worker:
    """A prefill worker: real scheduler and blocks, and the step that runs."""

    worker_id: str
    allocator: BlockAllocator = field(default_factory=lambda: BlockAllocator(BLOCKS_PER_WORKER))
    scheduler: PrefillScheduler = field(init=False)
    step: list[Scheduled] = field(default_factory=list)
    num_computed: int = 0

    def __post_init__(self) -> None:
        # No bound on waiting: a prompt that is refused would go to another worker, which is not the question.
        self.scheduler = PrefillScheduler(self.allocator, BLOCK_SIZE, MAX_STEP_TOKENS, max_waiting=10**9)

    def start_step(self, now_s: float) -> float | None:
        """Begins a step where there is work and none runs; returns how long it takes."""
        if self.step or not (scheduled := self.scheduler.schedule(now_s)):
            return None
        self.step = scheduled
        num_tokens = sum(chunk.end - chunk.start for chunk in scheduled)
        self.num_computed += num_tokens
        return STEP_S + TOKEN_S * num_tokens

    def end_step(self) -> Iterator[str]:
        """The step has run; gives the requests that have their first token."""
        self.scheduler.advance(self.step)
        for chunk in self.step:
            if chunk.is_last:
                self.allocator.free(chunk.sequence.request_id)
                yield chunk.sequence.request_id
        self.step = []

    def num_cached(self, sequence: TokenSequence) -> int:
        """Tokens of a prompt that it would not have to compute."""
        hashes = sequence.block_hashes((len(sequence.tokens) - 1) // BLOCK_SIZE)
        return len(self.allocator.cache.match(hashes)) * BLOCK_SIZE

    def snapshot(self, num_cached_tokens: int) -> PrefillSnapshot:
        """Its load for placement."""
        scheduler = self.scheduler
        return PrefillSnapshot(
            self.worker_id,
            "all",
            scheduler.num_pending_tokens,
            scheduler.num_waiting + scheduler.num_running,
            BLOCKS_PER_WORKER,
            num_cached_tokens,
        )


_Choice = Callable[[Sequence[_Worker], TokenSequence], _Worker]


def _by_placement(*, knows_caches: bool) -> _Choice:
    placement = Placement()
    decode = DecodeSnapshot("decode", "all", 0, 10**9, 10**9)

    def choose(workers: Sequence[_Worker], sequence: TokenSequence) -> _Worker:
        num_blocks = blocks_for(len(sequence.tokens), BLOCK_SIZE)
        snapshots = [w.snapshot(w.num_cached(sequence) if knows_caches else 0) for w in workers]
        best = placement.rank(snapshots, [decode], Need(len(sequence.tokens), num_blocks, num_blocks))[0]
        return next(w for w in workers if w.worker_id == best.prefill_id)

    return choose


def _at_random() -> _Choice:
    generator = random.Random(0)
    return lambda workers, _sequence: generator.choice(workers)


_POLICIES: dict[str, Callable[[], _Choice]] = {
    "random": _at_random,
    "least-loaded": lambda: _by_placement(knows_caches=False),
    "cache-aware": lambda: _by_placement(knows_caches=True),
}


@app.command()
def main(
    traces: Annotated[Path, typer.Option(help="Folder of the traces.")] = Path("../shared/traces"),
    workers: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 8,
    loads: Annotated[str, typer.Option(help="Loads, by commas; see the module.")] = "0.8,1.1",
    quick: Annotated[bool, typer.Option("--quick", help=f"The first {QUICK_REQUESTS} requests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Mean TTFT of three placements side by side."""
    rows: list[dict[str, Any]] = []
    for name in TRACES:
        path = traces / f"{name}.jsonl"
        if not path.is_file():
            sys.stderr.write(f"{path} is not there; {name} is left out\n")
            continue
        requests = _load(path, QUICK_REQUESTS if quick else None)
        for load in map(float, loads.split(",")):
            rows += _compare(name, requests, workers, load)
    if as_json:
        constants = {"step_s": STEP_S, "token_s": TOKEN_S, "shrink": SHRINK, "num_workers": workers}
        constants |= {"blocks_per_worker": BLOCKS_PER_WORKER, "block_size": BLOCK_SIZE}
        sys.stdout.write(json.dumps({**constants, "rows": rows}, indent=2) + "\n")
    elif rows:
        Console(width=None if sys.stdout.isatty() else 160).print(_table(rows))


def _load(path: Path, max_requests: int | None) -> list[_Request]:
    requests = []
    with path.open(encoding="utf-8") as lines:
        for line in itertools.islice(lines, max_requests):
            values = json.loads(line)
            num_tokens = max(1, -(-values["input_length"] // SHRINK))
            requests.append(_Request(values["timestamp"] / 1000, num_tokens, values["hash_ids"]))
    return sorted(requests, key=lambda request: request.at_s)


def _compare(name: str, requests: Sequence[_Request], num_workers: int, load: float) -> list[dict[str, Any]]:
    work_s = sum(request.num_tokens for request in requests) * TOKEN_S
    time_factor = work_s / (load * num_workers * requests[-1].at_s)
    rows: list[dict[str, Any]] = []
    for policy, make in _POLICIES.items():
        row = _run(requests, make(), num_workers, time_factor)
        first = rows[0]["mean_ttft_s"] if rows else row["mean_ttft_s"]
        identity = {"trace": name, "load": load, "time_factor": time_factor, "placement": policy}
        rows.append({**identity, **row, "of_random": row["mean_ttft_s"] / first})
    return rows


def _run(
    requests: Iterable[_Request], choose: _Choice, num_workers: int, time_factor: float
) -> dict[str, float]:
    """All requests through one placement; times are in the simulation's seconds."""
    workers = [_Worker(f"prefill-{i}") for i in range(num_workers)]
    order = itertools.count()
    ends: list[tuple[float, int, _Worker]] = []
    arrived_s: dict[str, float] = {}
    ttfts_s: list[float] = []

    def start(worker: _Worker, now_s: float) -> None:
        if (duration_s := worker.start_step(now_s)) is not None:
            heapq.heappush(ends, (now_s + duration_s, next(order), worker))

    def run_until(limit_s: float) -> None:
        while ends and ends[0][0] <= limit_s:
            now_s, _, worker = heapq.heappop(ends)
            ttfts_s.extend(now_s - arrived_s[request_id] for request_id in worker.end_step())
            start(worker, now_s)

    num_tokens = 0
    for number, request in enumerate(requests):
        at_s = request.at_s * time_factor
        run_until(at_s)
        hashes = BlockHashes("simulated", "", BLOCK_SIZE)
        sequence = TokenSequence(str(number), request.tokens(), request.num_tokens, 0, at_s, hashes=hashes)
        arrived_s[sequence.request_id] = at_s
        num_tokens += request.num_tokens
        worker = choose(workers, sequence)
        worker.scheduler.add(sequence)
        start(worker, at_s)
    run_until(float("inf"))
    for worker in workers:
        worker.allocator.check()
    computed = [worker.num_computed for worker in workers]
    return {
        "num_requests": len(ttfts_s),
        "mean_ttft_s": statistics.fmean(ttfts_s),
        "p50_ttft_s": statistics.median(ttfts_s),
        "p99_ttft_s": statistics.quantiles(ttfts_s, n=100)[98],
        "cached_share": 1 - sum(computed) / num_tokens,
        "busiest_over_mean": max(computed) / statistics.fmean(computed),
    }


def _table(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table(title="Time to first token in simulated seconds")
    columns = {
        "trace": "{}",
        "load": "{:.2f}",
        "placement": "{}",
        "mean_ttft_s": "{:.3f}",
        "p50_ttft_s": "{:.3f}",
        "p99_ttft_s": "{:.3f}",
        "cached_share": "{:.3f}",
        "busiest_over_mean": "{:.2f}",
        "of_random": "{:.2f}",
    }
    for name in columns:
        table.add_column(name, justify="left" if name in ("trace", "placement") else "right")
    for row in rows:
        table.add_row(*(style.format(row[name]) for name, style in columns.items()))
    return table


if __name__ == "__main__":
    app()

"""One engine alone: decode and prefill against transformers and against what the machine allows.

    python -m benchmarks.engine [--threads 1] [--clock cpu] [--device cuda] [--model NAME] [--quick] [--json]

Decode: greedy steps of a batch whose sequences have `context` tokens in the cache, against the steps of
transformers' own `generate` with its own cache and attention. The floor is the time to read every weight of
the linear layers once, and every key and value, at the rate at which as many threads read memory; the
roofline also counts the linear layers' products. Prefill: one prompt in one step, against one forward of
transformers' model that fills its cache, and against the linear layers' products alone, by torch (oneDNN).

All take turns in one process, so that whatever else the machine does hits them alike; figures are medians
over the rounds. `--clock cpu` counts the process's CPU time instead of the time that passes: with one thread
the same on an idle machine, and more telling on a busy one.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks import engine_runs as runs
from engine.heap import keep_freed_memory
from engine.torch_engine import TorchEngine
from kvferry.config import DEMO_MODEL

_DECODE = [(1, 128), (8, 128), (8, 1024), (32, 512)]
_PREFILL = [128, 512, 2048]
_STEPS = 4  # of each side in a round
_RATE_TOKENS = 512
_MANY, _SHORT = 32, 128
_READ_BYTES = 256 * 2**20


class Comparison:
    """Both models, and what every point is measured with."""

    def __init__(
        self, engine: TorchEngine, theirs: PreTrainedModel, watch: runs.Stopwatch, rounds: int
    ) -> None:
        self._engine, self._theirs, self._watch, self._rounds = engine, theirs, watch, rounds
        self._products = runs.Products(theirs)
        self._memory = torch.ones(_READ_BYTES // 8, dtype=torch.int64, device=theirs.device)

    def decode(self, batch: int, context: int) -> dict[str, float]:
        """One batch that decodes."""
        ours = runs.OurDecode(self._engine, self._watch, batch, context)
        theirs = runs.TheirDecode(self._theirs, self._engine.cache.shape, self._watch, batch, context)
        ms = self._alternate(
            {
                "read": lambda: [self._watch.time(self._memory.sum)],
                "ours": lambda: ours.steps(_STEPS),
                "theirs": lambda: theirs.steps(_STEPS),
                "outside": lambda: ours.outside(_STEPS),
                "products": lambda: [self._watch.time(lambda: self._products.run(_RATE_TOKENS))],
            }
        )
        kv_bytes = batch * (context + 1) * self._engine.cache.shape.num_bytes / runs.BLOCK_SIZE
        weights_ms, kv_ms = (ms["read"] * size / _READ_BYTES for size in (self._products.num_bytes, kv_bytes))
        operations = self._products.num_operations(batch, batch) / self._products.num_operations(_RATE_TOKENS)
        return {
            "batch": batch,
            "context": context,
            "ms": ms["ours"],
            "transformers_ms": ms["theirs"],
            "ratio": ms["theirs"] / ms["ours"],
            "floor_ms": weights_ms + kv_ms,
            "over_floor": ms["ours"] / (weights_ms + kv_ms),
            "roofline_ms": max(weights_ms, ms["products"] * operations) + kv_ms,
            "outside_ms": ms["outside"],
            "outside_share": ms["outside"] / ms["ours"],
            "read_gb_s": _READ_BYTES / ms["read"] / 1e6,
        }

    def prefill(self, num_tokens: int) -> dict[str, float]:
        """One prompt."""
        ours = runs.OurPrefill(self._engine, self._watch, num_tokens)
        theirs = runs.TheirPrefill(self._theirs, self._watch, num_tokens)
        ms = self._alternate(
            {
                "ours": lambda: [ours.run()],
                "theirs": lambda: [theirs.run()],
                "products": lambda: [self._watch.time(lambda: self._products.run(num_tokens))],
            }
        )
        return {
            "tokens": num_tokens,
            "ms": ms["ours"],
            "transformers_ms": ms["theirs"],
            "ratio": ms["theirs"] / ms["ours"],
            "products_ms": ms["products"],
            "over_products": ms["ours"] / ms["products"],
            "products_gflop_s": self._products.num_operations(num_tokens) / ms["products"] / 1e6,
        }

    def sampling_ms(self) -> float:
        """Of a batch of 32 requests with all sorts of parameters."""
        run = runs.mixed_sampling(self._engine, _MANY)
        return 1e3 * statistics.median(self._watch.time(run) for _ in range(10 * self._rounds))

    def threads_gain(self, num_threads: int) -> float:
        """How many times as fast a batch of 32 decodes with all threads as with one."""
        decode = runs.OurDecode(self._engine, self._watch, _MANY, _SHORT)

        def steps_with(count: int) -> list[float]:
            torch.set_num_threads(count)
            return decode.steps(_STEPS)

        ms = self._alternate({"one": lambda: steps_with(1), "all": lambda: steps_with(num_threads)})
        return ms["one"] / ms["all"]

    def _alternate(self, subjects: dict[str, Callable[[], list[float]]]) -> dict[str, float]:
        """All subjects in turn, in rounds. Returns the median of each's seconds, in milliseconds."""
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(self._rounds):
            for name, measure in subjects.items():
                seconds[name] += measure()
        return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """All points; times in milliseconds, rates in GB/s and GFLOP/s."""
    decode, prefill = (_DECODE[:2], _PREFILL[:2]) if options.quick else (_DECODE, _PREFILL)
    torch.set_num_threads(options.threads)
    num_blocks = runs.num_blocks([*decode, (_MANY, _SHORT)], prefill)
    start = time.perf_counter()
    engine = runs.load_engine(options.model, options.device, options.threads, num_blocks)
    load_s = time.perf_counter() - start
    theirs = runs.load_transformers(options.model, options.device)
    watch = runs.Stopwatch(options.clock, options.device)
    comparison = Comparison(engine, theirs, watch, rounds=3 if options.quick else 7)
    result: dict[str, Any] = {
        "threads": options.threads,
        "clock": options.clock,
        "load_s": load_s,
        "decode": [comparison.decode(batch, context) for batch, context in decode],
        "prefill": [comparison.prefill(num_tokens) for num_tokens in prefill],
        "sampling_ms": comparison.sampling_ms(),
    }
    if options.threads > 1:
        result["threads_gain"] = comparison.threads_gain(options.threads)
    return result


def _print(result: dict[str, Any]) -> None:
    console = Console(width=max(Console().width, 110))
    for name in ("decode", "prefill"):
        table = Table(title=name)
        for column in result[name][0]:
            table.add_column(column.replace("_", "\n"), justify="right")
        for row in result[name]:
            table.add_row(*(f"{value:.4g}" for value in row.values()))
        console.print(table)
    others = {key: value for key, value in result.items() if not isinstance(value, list)}
    console.print("; ".join(f"{key}: {_shown(value)}" for key, value in others.items()))


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.clock == "cpu" and (options.threads > 1 or options.device != "cpu"):
        parser.error("--clock cpu tells nothing about several threads or another device")
    keep_freed_memory()
    result = run(options)
    if options.json:
        print(json.dumps(result))  # noqa: T201
    else:
        _print(result)


if __name__ == "__main__":
    main()

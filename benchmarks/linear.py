"""How fast the linear layers of one step are: packed weights against torch's own.

    python -m benchmarks.linear [--threads 1] [--quick] [--json]

All linear layers of the demo model, with random weights, one after the other at several numbers of rows. The
two take turns, so that whatever else the machine does hits both alike; figures are medians over the rounds.
The floor is the larger of two times, both measured in the same rounds: reading as many bytes as the weights
have, and the products at the rate of the packed layers with 512 rows.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from engine.kernels import load_kernels
from engine.linear import PackedLinear

_HIDDEN, _KV, _INNER, _VOCABULARY, _LAYERS = 576, 192, 1536, 49152, 30
# [outputs, inputs]
_ATTENTION = [(_HIDDEN, _HIDDEN), (_KV, _HIDDEN), (_KV, _HIDDEN), (_HIDDEN, _HIDDEN)]
_FEED_FORWARD = [(_INNER, _HIDDEN), (_INNER, _HIDDEN), (_HIDDEN, _INNER)]
_MANY_ROWS = 512


def run(rows: list[int], num_rounds: int) -> dict[str, Any]:
    """Times in milliseconds, rates in GB/s of weights and GFLOP/s."""
    shapes = [*[*_ATTENTION, *_FEED_FORWARD] * _LAYERS, (_VOCABULARY, _HIDDEN)]
    plain = [torch.nn.Linear(i, o, bias=False, dtype=torch.bfloat16) for o, i in shapes]
    packed = [PackedLinear(linear, keep_weight=False) for linear in plain]
    num_weights = sum(o * i for o, i in shapes)
    memory = torch.ones(num_weights // 4, dtype=torch.int64)
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    inputs = {r: {i: torch.randn(r, i).bfloat16() for i in (_HIDDEN, _INNER)} for r in {*rows, _MANY_ROWS}}
    with torch.inference_mode():
        for _ in range(num_rounds):
            times["read", 0].append(_time_ms(memory.sum))
            for r, by_size in inputs.items():
                for name, layers in (("torch", plain), ("packed", packed)):
                    times[name, r].append(_time_ms(lambda: [m(by_size[m.in_features]) for m in layers]))  # noqa: B023
    ms = {key: statistics.median(values) for key, values in times.items()}
    row_ms = ms["packed", _MANY_ROWS] / _MANY_ROWS
    results = [
        {
            "rows": r,
            "ms": ms["packed", r],
            "torch_ms": ms["torch", r],
            "ratio": ms["torch", r] / ms["packed", r],
            "floor_ms": max(ms["read", 0], row_ms * r),
            "over_floor": ms["packed", r] / max(ms["read", 0], row_ms * r),
            "weights_gb_s": num_weights * 2 / ms["packed", r] / 1e6,
            "gflop_s": num_weights * 2 * r / ms["packed", r] / 1e6,
        }
        for r in sorted(inputs)
    ]
    return {
        "threads": torch.get_num_threads(),
        "weight_bytes": num_weights * 2,
        "read_gb_s": num_weights * 2 / ms["read", 0] / 1e6,
        "rows": results,
    }


def _time_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _table(result: dict[str, Any]) -> str:
    columns = list(result["rows"][0])
    lines = [" ".join(f"{name:>12}" for name in columns)]
    lines += [" ".join(f"{row[name]:12.5g}" for name in columns) for row in result["rows"]]
    lines.append(f"{result['threads']} threads; memory is read at {result['read_gb_s']:.1f} GB/s")
    return "\n".join(lines)


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not load_kernels():
        raise SystemExit("the kernels could not be built")
    rows, num_rounds = ([1, 8], 5) if options.quick else ([1, 2, 4, 8, 16, 32, 64], 15)
    result = run(rows, num_rounds)
    print(json.dumps(result) if options.json else _table(result))  # noqa: T201


if __name__ == "__main__":
    main()

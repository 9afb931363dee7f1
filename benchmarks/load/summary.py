"""A load's outcomes in numbers: one row of JSON, or of a table."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.load import statistics
from benchmarks.load.driver import Run
from benchmarks.load.outcome import Slo

PERCENTILES = (50, 90, 99)
# Throughput's confidence comes from slices of a run that are about as long as a short request.
_SLICE_S = 1.0


def row(system: str, load: str, runs: Sequence[Run], slo: Slo | None = None) -> dict[str, Any]:
    """What the same load came to in one run or several (rounds), times in ms.

    Latencies are of requests without an error, `itl_ms` of all gaps between their events; `attainment` is
    of all. Each `…_range` is a 95 % confidence range.
    """
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    served = [outcome for outcome in outcomes if not outcome.error]
    rates = [rate for run in runs for rate in _rates(run)]
    low, high = statistics.bootstrap(rates)
    values: dict[str, Any] = {
        "system": system,
        "load": load,
        "output_tokens_per_s": _throughput(runs),
        "output_tokens_per_s_range": [low, high],
        "ttft_ms": _percentiles([o.ttft_s for o in served]),
        "ttft_ms_p50_range": _range_ms([o.ttft_s for o in served]),
        "itl_ms": _percentiles([gap for o in served for gap in o.gaps_s]),
        "tpot_ms": _percentiles([o.tpot_s for o in served]),
        "tpot_ms_p50_range": _range_ms([o.tpot_s for o in served]),
        "e2e_ms": _percentiles([o.e2e_s for o in served]),
        "tail_tbt_ms": _percentiles([o.tail_tbt_s for o in served]),
        "num_requests": len(outcomes),
        "num_errors": len(outcomes) - len(served),
        "errors": dict(Counter(o.error for o in outcomes if o.error).most_common(5)),
        "num_prompts_counted_otherwise": sum(o.num_prompt_tokens_off != 0 for o in served),
        "num_rounds": len(runs),
    }
    if slo is not None:
        num_met = sum(map(slo.is_met, outcomes))
        values["slo"] = {"ttft_ms": slo.ttft_s * 1000, "tpot_ms": slo.tpot_s * 1000}
        values["attainment"] = statistics.attainment(outcomes, slo)
        values["attainment_range"] = list(statistics.wilson(num_met, len(outcomes)))
    return values


def _throughput(runs: Sequence[Run]) -> float:
    num_tokens = sum(o.num_tokens_between(run.begin_s, run.end_s) for run in runs for o in run.outcomes)
    seconds = sum(run.end_s - run.begin_s for run in runs)
    return num_tokens / seconds if seconds > 0 else float("nan")


def _rates(run: Run) -> list[float]:
    """Output tokens a second in each slice of a run."""
    num_slices = max(1, int((run.end_s - run.begin_s) / _SLICE_S))
    width_s = (run.end_s - run.begin_s) / num_slices
    if width_s <= 0:
        return []
    edges = [run.begin_s + i * width_s for i in range(num_slices + 1)]
    return [
        sum(o.num_tokens_between(low, high) for o in run.outcomes) / width_s for low, high in pairwise(edges)
    ]


def _percentiles(values_s: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": statistics.percentile(values_s, q) * 1000 for q in PERCENTILES}


def _range_ms(values_s: Sequence[float]) -> list[float]:
    return [edge * 1000 for edge in statistics.bootstrap(values_s, statistics.median)]

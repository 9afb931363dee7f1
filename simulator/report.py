"""What a simulated run comes to, as data and as a table."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from simulator.simulation import Result


def summary(result: Result, max_ttft_s: float, max_tpot_s: float) -> dict[str, Any]:
    """Latencies in seconds. attainment: of all requests, rejected ones too, those that met both targets.

    goodput: those a second, over the run. waits_s: a request's mean time in each stage where it only waits.
    """
    done = result.requests
    num_requests = len(done) + result.num_rejected
    num_met = sum(r.ttft_s <= max_ttft_s and r.tpot_s <= max_tpot_s for r in done)
    decoded = [r for r in done if r.trace.num_output_tokens > 1]
    return {
        "num_requests": num_requests,
        "num_rejected": result.num_rejected,
        "span_s": result.span_s,
        "ttft_s": _distribution([r.ttft_s for r in done]),
        "tpot_s": _distribution([r.tpot_s for r in decoded]),
        "e2e_s": _distribution([r.e2e_s for r in done]),
        "attainment": num_met / num_requests if num_requests else 0.0,
        "goodput": num_met / result.span_s if result.span_s else 0.0,
        "utilisation": {"prefill": result.prefill_busy_share, "decode": result.decode_busy_share},
        "waits_s": {
            "router": _mean([r.reserved_s - r.trace.at_s for r in done]),
            "prefill": _mean([r.prefill_started_s - r.reserved_s for r in done]),
            "decode": _mean([r.decode_started_s - r.transfer_ended_s for r in decoded]),
        },
        "num_preempted": result.num_preempted,
        "num_computed_tokens": result.num_computed_tokens,
        "num_events": result.num_events,
    }


def table(values: Mapping[str, Any]) -> Table:
    """The latencies, and what else matters below them."""
    shown = Table(caption_justify="left")
    shown.add_column("seconds")
    for heading in ("mean", "P50", "P90", "P99"):
        shown.add_column(heading, justify="right")
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "end to end")):
        shown.add_row(label, *(f"{values[name][key]:.4f}" for key in ("mean", "p50", "p90", "p99")))
    waits = ", ".join(f"{stage} {seconds:.4f} s" for stage, seconds in values["waits_s"].items())
    busy = ", ".join(f"{pool} {share:.0%}" for pool, share in values["utilisation"].items())
    shown.caption = (
        f"{values['num_requests']} requests in {values['span_s']:.1f} s, {values['num_rejected']} rejected; "
        f"targets met by {values['attainment']:.1%}, goodput {values['goodput']:.3f}/s\n"
        f"busy: {busy}\nwaits in the mean: {waits}"
    )
    return shown


def _distribution(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        only = values[0] if values else 0.0
        return dict.fromkeys(("mean", "p50", "p90", "p99"), only)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"mean": _mean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0

"""Rows of results as a table for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.load.goodput import Goodput
from benchmarks.load.loads import Shape


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each system under each load; `kvferry_ratio`, where there, is shown too."""
    table = Table("load", "system")
    for heading in ("tokens/s (95 %)", "TTFT ms p50 / p99", "ITL ms p50 / p99", "TPOT", "tail TBT"):
        table.add_column(heading, justify="right")
    for heading in ("SLO met", "errors", "kvferry is"):
        table.add_column(heading, justify="right")
    for row in rows:
        low, high = row["output_tokens_per_s_range"]
        table.add_row(
            row["load"],
            row["system"],
            f"{row['output_tokens_per_s']:.0f} ({low:.0f}-{high:.0f})",
            _pair(row["ttft_ms"]),
            _pair(row["itl_ms"]),
            f"{row['tpot_ms']['p50']:.1f}",
            f"{row['tail_tbt_ms']['p50']:.1f}",
            f"{row['attainment']:.0%}" if "attainment" in row else "",
            _errors(row),
            _ratios(row.get("kvferry_ratio", {})),
        )
    return table


def goodput_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each system and shape."""
    table = Table("shape", "targets, both met by 90 %", "system")
    for heading in ("requests/s", "range", "kvferry is"):
        table.add_column(heading, justify="right")
    for row in rows:
        low, high = row["range"]
        more = "" if row["is_bounded"] else " or more"
        table.add_row(
            f"{row['shape']} {row['num_prompt_tokens']}/{row['num_output_tokens']}",
            f"TTFT {row['slo']['ttft_ms']:g} ms, TPOT {row['slo']['tpot_ms']:g} ms",
            row["system"],
            f"{row['requests_per_s']:.2f}{more}",
            f"{low:.2f}-{high:.2f}" if high else f"{low:.2f}-",
            _ratios(row.get("kvferry_ratio", {})),
        )
    return table


def goodput_row(system: str, shape: Shape, goodput: Goodput) -> dict[str, Any]:
    """A goodput for JSON."""
    return {
        "system": system,
        "shape": shape.name,
        "num_prompt_tokens": shape.num_prompt_tokens,
        "num_output_tokens": shape.num_output_tokens,
        "slo": {"ttft_ms": shape.slo.ttft_s * 1000, "tpot_ms": shape.slo.tpot_s * 1000},
        "requests_per_s": goodput.requests_per_s,
        "is_bounded": goodput.is_bounded,
        "range": list(goodput.range),
        "probes": [
            {"requests_per_s": p.rate, "num_requests": p.num_requests, "attainment": p.attainment}
            for p in goodput.probes
        ],
    }


def _pair(percentiles: Mapping[str, float]) -> str:
    return f"{percentiles['p50']:.1f} / {percentiles['p99']:.1f}"


def _errors(row: Mapping[str, Any]) -> str:
    text = f"{row['num_errors']} of {row['num_requests']}"
    return text + "".join(f"\n{number} x {error[:60]}" for error, number in row["errors"].items())


def _ratios(ratios: Mapping[str, float]) -> str:
    return "\n".join(f"{value:.2f}x {name}" for name, value in ratios.items())

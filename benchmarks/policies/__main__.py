"""What each feature of the scheduling brings, before and after, in one table.

python -m benchmarks.policies
python -m benchmarks.policies --quick --json --only S1,S8
"""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.policies import chunked_prefill, priorities
from benchmarks.policies.row import Measure, Row

# By the feature's id, in the order of the table.
ROWS: dict[str, Measure] = {"S1": chunked_prefill.measure, "S8": priorities.measure}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Ids of features, by commas; empty: all.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, under a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measures each feature with and without it, on the schedulers that serve."""
    wanted = [name.strip() for name in only.split(",")] if only else list(ROWS)
    if unknown := [name for name in wanted if name not in ROWS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(ROWS)}", param_hint="--only")
    rows: list[Row] = []
    for name in wanted:
        sys.stderr.write(f"{name} ...\n")
        rows += ROWS[name](quick)
    if as_json:
        sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(_table(rows))


def _table(rows: list[Row]) -> Table:
    table = Table(title="Each feature without and with it")
    for name in ("id", "mode", "measure", "without_it", "with_it"):
        table.add_column(name)
    for name in ("before", "after", "after/before"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = f"{row.after / row.before:.2f}" if row.before else "-"
        numbers = (f"{row.before:.4g}", f"{row.after:.4g}", ratio)
        table.add_row(row.id, row.mode, row.measure, row.without_it, row.with_it, *numbers)
    return table


if __name__ == "__main__":
    app()

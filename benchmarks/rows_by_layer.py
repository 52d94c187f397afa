"""How many misses rows by layer save, on the committed traces.

    python -m benchmarks.rows_by_layer

`best` may give a layer one selection alone; `fixed` leaves each layer the share that the option `rows_by_layer` needs.
The fixed division of one trace is also tried on the other traces with as many layers: `fixed_of_<trace>` has the misses
over those with equal shares.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import RESULTS, show, write_result
from vllm_hisparse.cli.replay import WARM_UP_STEPS
from vllm_hisparse.cli.replay_layers import LayerMisses, by_layer
from vllm_hisparse.trace import Trace

TRACES = Path(__file__).parent / "traces"

app = typer.Typer(add_completion=False)


def from_others(misses: dict[str, LayerMisses], name: str, size: float) -> dict[str, float]:
    """Return the misses of a trace, over those with equal shares, with the fixed divisions of other traces."""
    own = misses[name]
    others = [other for other in misses if other != name and misses[other].layers == own.layers]
    shares = {other: misses[other].rows_by_layer(size, WARM_UP_STEPS) for other in others}
    equal = max(own.equal(size, WARM_UP_STEPS), 1e-9)
    return {
        f"fixed_of_{other}": round(own.shared(each, size, WARM_UP_STEPS) / equal, 3) for other, each in shares.items()
    }


@app.command()
def main(
    ctx: typer.Context,
    trace: Annotated[list[str], typer.Option(help="name of a trace; repeatable")] = [  # noqa: B006
        "code-dsa",
        "code-dsa-4096",
        "code-dsa-8192",
        "code-dsa-shared",
    ],
    size: Annotated[list[float], typer.Option(help="hot rows per layer in top-k; repeatable")] = [  # noqa: B006
        *(2, 2.25, 3, 3.5, 4, 4.75, 6, 7, 8, 12, 16)
    ],
    output: Annotated[Path, typer.Option(help="result file")] = RESULTS / "rows_by_layer.json",
) -> None:
    """Divide the same memory among the layers in four ways."""
    misses = {name: LayerMisses.of(Trace.read(TRACES / f"{name}.trace")) for name in trace}
    rows = []
    for name, each in product(trace, size):
        rows.append({"trace": name} | by_layer(misses[name], each, WARM_UP_STEPS) | from_others(misses, name, each))
    write_result(output, ctx, "benchmarks.rows_by_layer", rows)
    columns = ("trace", "size", "missed", "controller", "best", "fixed")
    show("Rows by layer", [{key: row[key] for key in columns} for row in rows])


if __name__ == "__main__":
    app()

"""How many misses rows by layer save, on the committed traces.

python -m benchmarks.rows_by_layer
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import RESULTS, show, write_result
from vllm_hisparse.cli.replay import WARM_UP_STEPS
from vllm_hisparse.cli.replay_layers import LayerMisses, by_layer
from vllm_hisparse.trace import Trace

TRACES = Path(__file__).parent / "traces"

app = typer.Typer(add_completion=False)


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
        *(2, 2.25, 3, 4, 4.75, 6, 8, 12, 16)
    ],
    output: Annotated[Path, typer.Option(help="result file")] = RESULTS / "rows_by_layer.json",
) -> None:
    """Divide the same memory among the layers in three ways."""
    rows = []
    for name in trace:
        misses = LayerMisses.of(Trace.read(TRACES / f"{name}.trace"))
        rows += [{"trace": name} | by_layer(misses, each, WARM_UP_STEPS) for each in size]
    write_result(output, ctx, "benchmarks.rows_by_layer", rows)
    show(
        "Rows by layer", [{key: row[key] for key in ("trace", "size", "missed", "controller", "best")} for row in rows]
    )


if __name__ == "__main__":
    app()

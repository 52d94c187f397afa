"""Makes a trace of ranked selections that `benchmarks.selections` recorded.

    python -m benchmarks.traces --selections build/selections.npz --model benchmarks/models/code-dsa \
        --output benchmarks/traces/code-dsa.trace
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.selections import load_shape
from vllm_hisparse.layout import mla_row_bytes
from vllm_hisparse.trace import Trace

GROUP_SHARES = (1.0, 1.25, 1.5, 2.0)  # ends of the groups, in top-k
DRAFT = "draft"
app = typer.Typer(add_completion=False)


@app.command()
def main(
    selections: Annotated[Path, typer.Option(help="File of `benchmarks.selections` (.npz).")],
    model: Annotated[Path, typer.Option(help="Directory of the model.")],
    output: Annotated[Path, typer.Option(help="File to write (.trace).")],
    num_steps: Annotated[int, typer.Option(min=1, help="Last steps of each window to keep.")] = 400,
) -> None:
    """Make a trace."""
    recorded = np.load(selections)
    shape = load_shape(model)
    positions, top_k = recorded["positions"][:, :, -num_steps:].astype(np.int32), int(recorded["top_k"])
    num_tokens = recorded["tokens"].shape[1] - 1  # one more than was selected for
    names = (*(str(layer) for layer in range(shape.num_hidden_layers) if shape.has_indexer(layer)), DRAFT)
    row_bytes = mla_row_bytes(shape.kv_lora_rank, shape.qk_rope_head_dim, 2)
    ends = tuple(round(share * top_k) for share in GROUP_SHARES)
    ranked = [(num_tokens - positions.shape[2], window) for window in positions]
    Trace.from_ranked(model.name, top_k, row_bytes, names, ends, ranked).write(output)
    typer.echo(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    app()

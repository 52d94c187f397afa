"""What does write-back cost in a decode step on a GPU? Newest rows of all layers in one launch, in CUDA graphs.

`ours` is this plugin's `write_back`; `memcpy` moves the same number of bytes in one piece. Before it is timed, the rows
on the host are compared with the hot rows.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, track, write_result
from benchmarks.swap_in import DEVICE, time_replay
from vllm_hisparse.layout import BLOCK_SIZE, FP8_DS_MLA_ROW_BYTES
from vllm_hisparse.ops.base import DecodeMetadata, HotRows
from vllm_hisparse.ops.registry import swap_in_ops

app = typer.Typer(add_completion=False)

ROWS_PER_BLOCK, BLOCKS_PER_REQUEST = 16, 2  # hot rows: their places do not matter here


class Step:
    """The newest rows of one decode step, in the hot buffers of all layers."""

    def __init__(self, batch: int, num_layers: int, row_bytes: int, context: int):
        self.ops = swap_in_ops(DEVICE)
        num_blocks = batch * BLOCKS_PER_REQUEST
        size = (num_layers, num_blocks, ROWS_PER_BLOCK, row_bytes)
        self.hot = [HotRows.from_cache(rows) for rows in torch.randint(0, 255, size, dtype=torch.uint8, device=DEVICE)]
        host_rows = (batch + 1) * BLOCK_SIZE
        self.host = [torch.zeros(host_rows, row_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_layers)]
        hot_block_tables = torch.randperm(num_blocks, device=DEVICE).view(batch, -1).int()
        seq_indices = torch.full((num_blocks,), -1, dtype=torch.int32, device=DEVICE)
        seq_indices[hot_block_tables[:, 0].long()] = torch.arange(batch, dtype=torch.int32, device=DEVICE)
        seq_lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        last_block = (context - 1) // BLOCK_SIZE
        host_block_tables = torch.full((batch, last_block + 1), -1, dtype=torch.int32, device=DEVICE)
        host_block_tables[:, last_block] = torch.randperm(batch, device=DEVICE).int() + 1
        num_hot_rows = torch.full((batch,), ROWS_PER_BLOCK * BLOCKS_PER_REQUEST, dtype=torch.int32, device=DEVICE)
        by_seq = hot_block_tables, num_hot_rows, host_block_tables
        self.decode = DecodeMetadata(seq_indices, hot_block_tables[:, 0], seq_lens, *by_seq, BLOCK_SIZE)
        self.newest = torch.empty(batch, dtype=torch.int64, device=DEVICE)
        self.ops.newest_row_ids(self.decode, self.hot[0], self.newest)
        self.homes = host_block_tables[:, last_block].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        packed = batch * num_layers * row_bytes
        self.packed = torch.randint(0, 255, (packed,), dtype=torch.uint8, device=DEVICE)
        self.packed_host = torch.zeros(packed, dtype=torch.uint8, pin_memory=True)

    def ours(self) -> None:
        self.ops.write_back(self.hot, self.host, self.decode)

    def memcpy(self) -> None:
        self.packed_host.copy_(self.packed, non_blocking=True)

    def check(self) -> None:
        """Compare the host's rows with the hot ones.

        Raises:
            AssertionError: a row differs, or a wrong row was written.
        """
        self.ours()
        torch.cuda.synchronize()
        homes = self.homes.cpu()
        for hot, host in zip(self.hot, self.host, strict=True):
            expected = torch.zeros_like(host)
            expected[homes] = hot.rows[self.newest].cpu()
            assert torch.equal(host, expected), "wrong rows reached the host"


def time_graph(operation: Any, repeats: int, steps: int) -> list[float]:
    """Microseconds of one operation: mean over the steps of a CUDA graph, for each repetition."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            operation()
    return [time_replay(graph, steps) for _ in range(repeats + 1)][1:]


@app.command()
def run(
    ctx: typer.Context,
    batch: Annotated[list[int], typer.Option(min=1, help="Requests; repeatable.")] = [1, 16, 64, 128],  # noqa: B006
    row_bytes: Annotated[list[int], typer.Option(help="Bytes of a row; repeatable.")] = [1152, FP8_DS_MLA_ROW_BYTES],  # noqa: B006
    num_layers: Annotated[int, typer.Option(min=1, help="Layers; DeepSeek-V3.2 has 61.")] = 61,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a request.")] = 16384,
    steps: Annotated[int, typer.Option(min=1, help="Operations of a CUDA graph; a sample is their mean.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Samples.")] = 30,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "write_back.json",
) -> None:
    """Time the write-back of one decode step."""
    grid, rows = list(product(row_bytes, batch)), []
    for index in track(len(grid), "write-back"):
        one_row, one_batch = grid[index]
        step = Step(one_batch, num_layers, one_row, context)
        step.check()
        for system in ("ours", "memcpy"):
            p10, p50, p90 = np.percentile(time_graph(getattr(step, system), repeats, steps), (10, 50, 90))
            row = {"system": system, "batch": one_batch, "row_bytes": one_row, "num_layers": num_layers}
            times = {"us_p10": round(p10, 2), "us_p50": round(p50, 2), "us_p90": round(p90, 2)}
            rows.append(row | times | {"gb_per_s": round(one_batch * one_row * num_layers / p50 / 1000, 2)})
    write_result(output, ctx, "benchmarks.write_back run", rows, gpu_hardware())
    show("Write-back of a step, microseconds", rows)


@app.callback()
def main() -> None:
    """Write-back of the newest rows."""


if __name__ == "__main__":
    app()

"""Cost of recording selections (`selection_trace_dir`) for a decode step on the CPU, and the size of a trace.

    python -m benchmarks.trace_cost

The hot buffers of a few layers swap in the same selections with and without a recorder, step by step in turns; the rows
are narrow, which leaves out most of the copies. `recording` is CPU time of one step's layers spent on recording. When a
request ends, a thread writes its trace: `write_ms` for all steps of one request, `bytes_per_selection` of the file.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import RESULTS, Samples, show, track, write_result
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.selection_recorder import RecordingHotBuffer, SelectionRecorder
from vllm_hisparse.layout import BLOCK_SIZE, mla_row_bytes
from vllm_hisparse.ops.base import HotRows

CASES = ((8, 8, 256), (8, 61, 2048), (1, 61, 2048))  # requests, layers, top-k
KEPT = 0.9  # share of a selection that the next step repeats
app = typer.Typer(add_completion=False)


def make_buffer(shape: HotBufferShape, recorder: SelectionRecorder | None) -> MLAHotBuffer:
    """Hot buffers of narrow rows, with requests 1, 2, ... running."""
    device = torch.device("cpu")
    buffer = MLAHotBuffer(shape, device) if recorder is None else RecordingHotBuffer(shape, device, recorder)
    rows_per_block = shape.rows_per_hot_block
    hot = HotRows(torch.zeros(shape.num_device_blocks * rows_per_block, 1), rows_per_block, rows_per_block)
    host = torch.zeros(shape.max_blocks * shape.block_size, 1)
    for _ in range(shape.num_layers):
        buffer.add_layer(hot, host)
    for first_hot_block_id in range(1, shape.max_batch + 1):
        buffer.extend_host_block_tables({first_hot_block_id: (0, range(shape.max_blocks))})
        buffer.change_hot_block_tables({first_hot_block_id: (0, [first_hot_block_id])})
    return buffer


def next_selections(before: torch.Tensor, newest: int) -> torch.Tensor:
    """Selections of which most are those before: [layers, requests, top_k] int32."""
    top_k = before.shape[-1]
    new = torch.rand(*before.shape[:-1], newest).topk(top_k).indices.int()
    order = torch.rand(before.shape).argsort(-1)
    kept = before.gather(-1, order)[..., : round(KEPT * top_k)]
    is_kept = torch.zeros(*before.shape[:-1], newest, dtype=torch.bool).scatter_(-1, kept.long(), True)
    fresh = torch.where(is_kept.gather(-1, new.long()), -1, new)
    fresh = fresh.sort(-1, descending=True).values[..., : top_k - kept.shape[-1]]
    return torch.cat((kept, fresh), -1)


def step(buffer: MLAHotBuffer, selections: torch.Tensor, newest: int) -> None:
    """Swap in all layers of one step."""
    first_hot_block_ids = torch.arange(1, selections.shape[1] + 1, dtype=torch.int32)
    buffer.step.plan(first_hot_block_ids, torch.full((len(first_hot_block_ids),), newest + 1, dtype=torch.int32))
    for layer, selected in enumerate(selections):
        buffer.swap_in_of(layer)(selected)


def measure(num_requests: int, num_layers: int, top_k: int, context: int, num_steps: int) -> dict[str, Any]:
    """One case."""
    num_blocks = -(-(context + num_steps) // BLOCK_SIZE)
    sizes = (num_requests, num_requests, num_layers, top_k, num_blocks, BLOCK_SIZE, num_requests + 1)
    shape = HotBufferShape(*sizes, max_hot_blocks=1, rows_per_hot_block=2 * top_k + 1)
    times, write = (Samples(), Samples()), Samples()
    with tempfile.TemporaryDirectory() as directory:
        layers = [f"model.layers.{index}.attn" for index in range(num_layers)]
        recorder = SelectionRecorder(Path(directory), 0, "random", top_k, mla_row_bytes(512, 64, 2), layers)
        buffers = make_buffer(shape, None), make_buffer(shape, recorder)
        selections = torch.rand(num_layers, num_requests, context).topk(top_k).indices.int()
        for number in track(num_steps, f"{num_requests} requests, {num_layers} layers, top-k {top_k}"):
            selections = next_selections(selections, context + number)
            for turn in (number, number + 1):  # the second one finds the selections in the CPU's cache
                times[turn % 2].measure(partial(step, buffers[turn % 2], selections, context + number))
        recorder.end(0)
        write.measure(recorder.close)
        num_bytes = sum(path.stat().st_size for path in Path(directory).iterdir())
    without, with_recorder = (samples.summary() for samples in times)
    return {
        "requests": num_requests,
        "layers": num_layers,
        "top_k": top_k,
        "context": context,
        "steps": num_steps,
        "without": without,
        "with": with_recorder,
        "recording_ms": round(with_recorder["cpu_ms"]["median"] - without["cpu_ms"]["median"], 3),
        "write_ms": round(write.wall[0] / num_requests, 1),
        "bytes_per_selection": round(num_bytes / (num_requests * num_layers * num_steps * top_k), 3),
    }


@app.command()
def main(
    ctx: typer.Context,
    context: Annotated[int, typer.Option(min=4096, help="Tokens of a request.")] = 16384,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a case.")] = 100,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "cpu" / "trace_cost.json",
) -> None:
    """Measure, write, show."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = [measure(*case, context, steps) for case in CASES]
    write_result(output, ctx, "benchmarks.trace_cost", rows)
    columns = ("requests", "layers", "top_k", "recording_ms", "write_ms", "bytes_per_selection")
    show("Recording", [{name: row[name] for name in columns} for row in rows])


if __name__ == "__main__":
    app()

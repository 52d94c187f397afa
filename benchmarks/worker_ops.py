"""How long do operations of the worker take on a GPU, and how long does the host take to launch one?

* `page_scores`: Quest scores the pages of short sequences, with room for long ones; microseconds per launch.
* `save`, `restore`: device-resident KV of full blocks to the host and back; GB/s.
* `prefill_plan`: host time until a dense model's prefill chunk is planned, while the device is busy for
  `BUSY_MS`; milliseconds. Without a wait, it is far less than that.
* `move_tables`: host time and device time of a step in which the hot blocks of many requests change; milliseconds.
* `launch`: host time of one launch in an eager decode step of 61 layers, Python and the library's boundary included:
  swap-in of a layer, of a part of the requests, the newest rows' ids, write-back; microseconds.

The baseline, `worker_ops_before.json`, is of commit 7dff683, which is before these parts were revised.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, write_result
from vllm_hisparse.algorithms.base import AttentionShape
from vllm_hisparse.algorithms.quest import Quest
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolLayout
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer, view_units
from vllm_hisparse.kv_manager.rows.host_kv_store import HostKVStore
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.prefill_staging import PrefillGroup, PrefillRequest, WholeBlockStaging
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.ops import page_bounds
from vllm_hisparse.ops.base import HotRows

app = typer.Typer(add_completion=False)

DEVICE = torch.device("cuda")
DSA_LAYOUT = KVLayout(1152, 132, num_layers=61, num_resident_layers=61)
COPY_LAYOUT = KVLayout(1152, 132, num_layers=1, num_resident_layers=61)  # little main KV, which is not copied
BUSY_MS, CYCLES_PER_MS = 20, 1_500_000


def spread(samples: list[float]) -> dict[str, float]:
    return dict(zip(("p10", "p50", "p90"), np.percentile(samples, (10, 50, 90)).round(4).tolist(), strict=True))


def time_on_device(work: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds on the device of each repetition, which begin with all of it enqueued."""
    samples = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES_PER_MS * BUSY_MS)
        start.record()
        work()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return samples[1:]


def time_on_host(work: Callable[[], Any], repeats: int, is_busy: bool = False) -> list[float]:
    """Milliseconds that the host needs to enqueue each repetition.

    Args:
        work: function that is timed.
        repeats: samples.
        is_busy: the device has other work for `BUSY_MS`.
    """
    samples = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        if is_busy:
            torch.cuda._sleep(CYCLES_PER_MS * BUSY_MS)
        start = time.perf_counter()
        work()
        samples.append((time.perf_counter() - start) * 1000)
    torch.cuda.synchronize()
    return samples[1:]


def page_scores(max_model_len: int, num_tokens: int, repeats: int, batch: int = 64) -> dict[str, Any]:
    """Scores of all pages of 16 tokens, for 8 KV heads of 4 queries."""
    heads, group, size, page, per_block = 8, 4, 128, 16, 64
    max_pages = max_model_len // page
    used = -(-num_tokens // page // per_block)
    table = torch.zeros(batch, -(-max_pages // per_block), dtype=torch.int32, device=DEVICE)
    table[:, :used] = torch.arange(batch * used, device=DEVICE).view(batch, used).int()
    blocks = torch.randn(batch * used, per_block, 2, heads, size, device=DEVICE).bfloat16()
    query = torch.randn(batch, heads * group, size, device=DEVICE).bfloat16()
    indices = torch.arange(batch, device=DEVICE)
    lengths = torch.full((batch,), num_tokens, device=DEVICE)

    def work() -> None:
        for _ in range(10):
            page_bounds.scores(table, blocks, indices, query, lengths, page, max_pages)

    samples = [1000 * sample / 10 for sample in time_on_device(work, repeats)]
    sizes = {"batch": batch, "num_tokens": num_tokens, "max_model_len": max_model_len}
    return {"what": "page_scores", **sizes, "unit": "us", **spread(samples)}


def copies(num_blocks: int, repeats: int) -> list[dict[str, Any]]:
    """Indexer keys of full blocks in all layers; the first copy in either direction is checked."""
    num_host, dtype = 2 * num_blocks, torch.bfloat16
    memory = mmap.mmap(-1, num_host * COPY_LAYOUT.host_block_bytes)
    names = [str(index) for index in range(COPY_LAYOUT.num_layers)]
    store = HostKVStore(HostPoolLayout(COPY_LAYOUT, num_host), names, dtype, memory)
    store.attach(DEVICE)
    width = COPY_LAYOUT.resident_block_bytes
    blocks = torch.randint(0, 255, (num_host, COPY_LAYOUT.device_block_bytes), dtype=torch.uint8, device=DEVICE)
    cache = blocks[:, :width]
    order = torch.randperm(num_host)[:num_blocks].tolist()
    pairs = [(block, (7 * block + 3) % num_host) for block in order]
    back = [(host, device) for device, host in pairs]
    before = cache.clone()
    store.save_resident_kv(cache, pairs)
    cache.zero_()
    store.restore_resident_kv(cache, back)
    torch.cuda.synchronize()
    assert torch.equal(cache[order], before[order]), "blocks came back changed"
    rows = []
    for what, work in (
        ("save", lambda: store.save_resident_kv(cache, pairs)),
        ("restore", lambda: store.restore_resident_kv(cache, back)),
    ):
        samples = [num_blocks * width / sample / 1e6 for sample in time_on_device(work, repeats)]
        rows.append({"what": what, "batch": num_blocks, "unit": "GB/s", **spread(samples)})
    torch.cuda.synchronize()
    store.close()
    return rows


def prefill_plan(num_requests: int, repeats: int) -> dict[str, Any]:
    """Requests of different lengths, each with a chunk of its prompt in the same step."""
    heads, size, block_size, max_tokens, num_blocks = 2, 128, 256, 8192, 64
    algorithm = Quest(Quest.Options(), AttentionShape(8, heads, size, torch.bfloat16), 2048, max_tokens, 1)
    row_bytes = heads * 2 * size * 2
    layout = KVLayout(row_bytes, row_bytes, 1, 0, block_size, 16, heads, state_entries=algorithm.state_entries)
    shape = HotBufferShape(
        num_requests=num_requests,
        max_batch=num_requests,
        num_layers=1,
        top_k=2048,
        max_blocks=max_tokens // block_size,
        block_size=block_size,
        num_device_blocks=num_blocks,
        max_hot_blocks=32,
        rows_per_hot_block=layout.rows_per_hot_block,
        state_columns=layout.state.columns(max_tokens),
    )
    cache = torch.zeros(num_blocks, heads, layout.rows_per_hot_block, 2 * size, dtype=torch.bfloat16, device=DEVICE)
    memory = cache.view(num_blocks, -1).view(torch.uint8)
    buffer = GQAHotBuffer(algorithm, shape, heads, memory)
    host = torch.zeros(num_blocks * heads * block_size // 16, 16 * 2 * size, dtype=torch.bfloat16, pin_memory=True)
    buffer.add_layer(view_units(cache, buffer.heads), host)
    staging, requests, prefills = WholeBlockStaging(buffer), [], []
    for index in range(num_requests):
        first_hot_block_id, last = 1 + index, 300 + 100 * index
        buffer.extend_host_block_tables({first_hot_block_id: (0, [index])})
        buffer.change_hot_block_tables({first_hot_block_id: (0, [first_hot_block_id])})
        first_hot_block_ids = torch.tensor([first_hot_block_id], dtype=torch.int32, device=DEVICE)
        requests.append(PrefillRequest(0, last, index, first_hot_block_ids))
        prefills.append((first_hot_block_id, 0, last))
    group = PrefillGroup(slice(0, 1), tuple(requests), torch.zeros(1, device=DEVICE), None)

    def work() -> None:
        buffer.requests.expect_prefills(prefills)
        staging.plan(group)

    samples = time_on_host(work, repeats, is_busy=True)
    return {"what": "prefill_plan", "batch": num_requests, "unit": "ms", **spread(samples)}


def move_tables(num_requests: int, repeats: int) -> list[dict[str, Any]]:
    """Each request loses some of its hot blocks, and gets as many others in the next repetition."""
    rows, per_request, num_moved = DSA_LAYOUT.rows_per_hot_block, 600, 40
    num_blocks = 1 + num_requests * (per_request + num_moved)
    shape = HotBufferShape(
        num_requests=num_requests,
        max_batch=num_requests,
        num_layers=61,
        top_k=2048,
        max_blocks=512,
        block_size=64,
        num_device_blocks=num_blocks,
        max_hot_blocks=per_request,
        rows_per_hot_block=rows,
    )
    buffer = MLAHotBuffer(shape, DEVICE)
    num_ids = per_request + num_moved
    ids = [list(range(1 + i * num_ids, 1 + (i + 1) * num_ids)) for i in range(num_requests)]
    for blocks in ids:
        buffer.extend_host_block_tables({blocks[0]: (0, [0])})
        buffer.change_hot_block_tables({blocks[0]: (0, blocks[:per_request])})
    kept = per_request - num_moved
    changes = [
        {blocks[0]: (kept, blocks[kept + first : kept + first + num_moved]) for blocks in ids}
        for first in (num_moved, 0)
    ]
    turn = iter(range(1 << 30))

    def work() -> None:
        buffer.change_hot_block_tables(changes[next(turn) % 2])

    result = {"what": "move_tables", "batch": num_requests, "unit": "ms"}
    return [
        {**result, "what": f"move_tables ({where})", **spread(measure(work, repeats))}
        for where, measure in (("host", time_on_host), ("device", time_on_device))
    ]


def launches(num_requests: int, repeats: int) -> list[dict[str, Any]]:
    """An eager step of requests that are wholly hot: the device has little to do."""
    num_layers, top_k, context, rows = DSA_LAYOUT.num_layers, 512, 2048, DSA_LAYOUT.rows_per_hot_block
    per_request = -(-(context + 64) // rows)
    shape = HotBufferShape(
        num_requests=num_requests,
        max_batch=num_requests,
        num_layers=num_layers,
        top_k=top_k,
        max_blocks=context // 64 + 1,
        block_size=64,
        num_device_blocks=1 + num_requests * per_request,
        max_hot_blocks=per_request,
        rows_per_hot_block=rows,
    )
    buffer = MLAHotBuffer(shape, DEVICE)
    cache = torch.zeros(shape.num_device_blocks, rows, 1152, dtype=torch.uint8, device=DEVICE)
    host = torch.zeros(num_requests * shape.max_blocks * 64, 1152, dtype=torch.uint8, pin_memory=True)
    first_hot_block_ids = []
    for _ in range(num_layers):
        buffer.add_layer(HotRows.from_cache(cache), host)
    for index in range(num_requests):
        blocks = list(range(1 + index * per_request, 1 + (index + 1) * per_request))
        first_hot_block_ids.append(blocks[0])
        buffer.extend_host_block_tables(
            {blocks[0]: (0, range(index * shape.max_blocks, (index + 1) * shape.max_blocks))}
        )
        buffer.change_hot_block_tables({blocks[0]: (0, blocks)})
    by_request = torch.tensor(first_hot_block_ids, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((num_requests,), context, dtype=torch.int32, device=DEVICE)
    selected = torch.arange(top_k, dtype=torch.int32, device=DEVICE).repeat(num_requests, 1)
    swap_ins = [buffer.swap_in_of(layer) for layer in range(num_layers)]
    some = slice(0, num_requests // 2)

    def step(launch: Callable[[], None]) -> None:
        buffer.step.plan(by_request, lengths)  # whose tables are new objects
        launch()

    def swap_in() -> None:
        for each in swap_ins:
            each(selected)

    def swap_in_part() -> None:
        for each in swap_ins:
            each(selected[some], some)

    def begin() -> None:
        for _ in swap_ins:
            buffer.step.begin(0)

    def write_back() -> None:
        for _ in swap_ins:
            buffer.step.finish(num_layers - 1)

    result = []
    for name, work in (
        ("swap_in", swap_in),
        ("swap_in of a part", swap_in_part),
        ("newest_row_ids", begin),
        ("write_back of 61 layers", write_back),
    ):
        samples = [1000 * sample / num_layers for sample in time_on_host(partial(step, work), repeats)]
        result.append({"what": f"launch: {name}", "batch": num_requests, "unit": "us", **spread(samples)})
    return result


@app.command()
def run(
    ctx: typer.Context,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each.")] = 30,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "worker_ops.json",
) -> None:
    """Time operations and launches."""
    rows = [page_scores(131072, num_tokens, repeats) for num_tokens in (4096, 131072 - 16)]
    rows += [row for num_blocks in (4, 64, 512) for row in copies(num_blocks, repeats)]
    rows += [prefill_plan(num_requests, repeats) for num_requests in (1, 4)]
    rows += [row for num_requests in (8, 56) for row in move_tables(num_requests, repeats)]
    rows += launches(32, repeats)
    write_result(output, ctx, "benchmarks.worker_ops run", rows, gpu_hardware())
    columns = list(dict.fromkeys(name for row in rows for name in row))
    show("Operations of the worker", [{name: row.get(name, "") for name in columns} for row in rows])


@app.callback()
def main() -> None:
    """Operations of the worker."""


if __name__ == "__main__":
    app()

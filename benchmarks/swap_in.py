"""How long does one layer's swap-in take on a GPU, for this plugin and vLLM's native HiSparse? What is the PCIe limit?

All systems replay the same selections from CUDA graphs, with the same host rows and hot buffers of the same size. A
sample is the mean of a few consecutive steps, none of which repeats a selection. Before a system is timed, its hot rows
are compared with the host rows of the selection. In each step, `memcpy` moves as many bytes as this plugin does, and
`bare_gather` the same rows.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, gpu_hardware, show, track, write_result
from vllm_hisparse.layout import BLOCK_SIZE, FP8_DS_MLA_ROW_BYTES, INDEXER_QUANT_GROUP, indexer_row_bytes
from vllm_hisparse.ops.base import DecodeMetadata, HotRows, Residency, Resolved
from vllm_hisparse.ops.registry import swap_in_ops
from vllm_hisparse.trace import Trace as SelectionTrace

app = typer.Typer(add_completion=False)

SLEEP_CYCLES = 200_000  # so that a graph is launched before its start is recorded
POISON = 0xFF
DEVICE = torch.device("cuda")
SIZES = (4096, 6144, 8192)
NUM_WARMUP = 12  # steps after those that fill the buffers


@dataclass(frozen=True)
class Case:
    """One configuration: `context` tokens per request, `overlap` in shares of a selection."""

    batch: int
    row_bytes: int
    overlap: float
    device_buffer_size: int
    top_k: int
    context: int

    @property
    def num_host_blocks(self) -> int:
        """Host blocks of one request; block 0 is never used, as in vLLM."""
        return -(-self.context // BLOCK_SIZE)


class Trace:
    """Selections of consecutive steps. The first ones are entirely new and fill the buffers; the last ones are timed.

    Attributes:
        warmup, timed: [batch, top_k] int32 each.
    """

    def __init__(self, case: Case, num_warmup: int, num_timed: int):
        self.case = case
        self._generator = torch.Generator(DEVICE).manual_seed(0)
        num_fills = -(-case.device_buffer_size // case.top_k)
        steps = [self._draw(None, 0.0) for _ in range(num_fills)]
        for _ in range(num_warmup + num_timed):
            steps.append(self._draw(steps[-1], case.overlap))
        self.warmup, self.timed = steps[:-num_timed], steps[-num_timed:]

    def _draw(self, last: torch.Tensor | None, overlap: float) -> torch.Tensor:
        """Part of the last selection and random other positions, in random order; never the newest."""
        case = self.case
        num_kept = round(overlap * case.top_k)
        scores = self._random(case.context - 1)
        if last is None:
            return scores.argsort(1)[:, : case.top_k].int()
        kept = last.gather(1, self._random(case.top_k).argsort(1)[:, :num_kept])
        fresh = scores.scatter_(1, last.long(), 2.0).argsort(1)[:, : case.top_k - num_kept].int()
        selected = torch.cat((kept, fresh), 1)
        return selected.gather(1, self._random(case.top_k).argsort(1)).contiguous()

    def _random(self, width: int) -> torch.Tensor:
        return torch.rand(self.case.batch, width, device=DEVICE, generator=self._generator)


class RecordedTrace:
    """Recorded selections of one layer. At first, the rows before them fill the buffers, as a prompt's last rows do.

    Request `i` of the batch is recorded request `i % n`, of `n`, and each turn through them starts some steps later.

    Args:
        trace: trace of selections.
        layer: name of the layer.
        batch, device_buffer_size: as in `Case`.
        num_warmup, num_timed: steps.

    Attributes:
        case: sizes of the benchmark; `overlap` is the measured one. `row_bytes` are the trace's.
        warmup, timed: [batch, top_k] int32 each.
    """

    def __init__(
        self, trace: SelectionTrace, layer: str, batch: int, device_buffer_size: int, num_warmup: int, num_timed: int
    ):
        top_k, index, num_requests = trace.top_k, trace.layers.index(layer), len(trace.requests)
        num_fills, num_steps = -(-device_buffer_size // top_k), num_warmup + num_timed
        spare = min(request.num_steps for request in trace.requests) - num_steps
        turns = -(-batch // num_requests)
        if spare < turns - 1:
            raise typer.BadParameter(f"got {batch} requests, expected fewer: the trace has {spare + num_steps} steps")
        selected = []
        for number in range(batch):
            request, first = trace.requests[number % num_requests], number // num_requests * spare // max(turns - 1, 1)
            start = request.first_position + first
            fills = np.arange(start - num_fills * top_k, start).reshape(num_fills, top_k)
            steps = request.positions[index, first : first + num_steps, :top_k]
            assert min(fills.min(), steps.min()) >= 0, (
                "a selection has no position, or a prompt is shorter than the buffer"
            )
            selected.append(np.concatenate((fills, steps)))
        steps = torch.from_numpy(np.stack(selected, 1).astype(np.int32))  # [steps, batch, top_k]
        # One position more than the trace has, so that the newest one, which is hot in any case, is never selected.
        context = max(request.first_position + request.num_steps for request in trace.requests) + 1
        self.case = Case(batch, trace.row_bytes, mean_overlap(steps[-num_timed:]), device_buffer_size, top_k, context)
        steps = [selection.contiguous() for selection in steps.to(DEVICE)]
        self.warmup, self.timed = steps[:-num_timed], steps[-num_timed:]


def mean_overlap(steps: torch.Tensor) -> float:
    """Mean share of a selection that the next one repeats.

    Args:
        steps: [steps, batch, top_k] ints, at least two steps.
    """
    before, after = steps[:-1], steps[1:]
    repeats = [np.isin(*pair).mean() for pair in zip(after.flatten(0, 1), before.flatten(0, 1), strict=True)]
    return round(float(np.mean(repeats)), 4)


class HostPool:
    """Random rows in pinned host memory, and a copy on the device for comparison."""

    def __init__(self, num_bytes: int):
        self._device = torch.randint(0, POISON, (num_bytes,), dtype=torch.uint8, device=DEVICE)
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).copy_(self._device)

    def rows(self, row_bytes: int) -> torch.Tensor:
        return self._host[: len(self._host) // row_bytes * row_bytes].view(-1, row_bytes)

    def expected(self, row_bytes: int) -> torch.Tensor:
        return self._device[: len(self._device) // row_bytes * row_bytes].view(-1, row_bytes)


class Ours:
    """This plugin's operations on the hot buffers of one layer. Requests get a token per step, so that rows age."""

    name = "ours"

    def __init__(self, case: Case, host_rows: torch.Tensor, host_block_tables: torch.Tensor, num_outputs: int):
        self.case, self.host_rows, self.host_block_tables = case, host_rows, host_block_tables
        self.ops = swap_in_ops(DEVICE)
        index_bytes = BLOCK_SIZE * indexer_row_bytes(INDEXER_QUANT_GROUP)
        rows_per_block = index_bytes // case.row_bytes
        num_blocks = -(-(case.device_buffer_size + 1) // rows_per_block)
        size = (case.batch * num_blocks, rows_per_block, case.row_bytes)
        self.hot = HotRows.from_cache(torch.full(size, POISON, dtype=torch.uint8, device=DEVICE))
        hot_block_tables = torch.randperm(size[0], device=DEVICE).view(case.batch, -1).int()
        seq_indices = torch.full((size[0],), -1, dtype=torch.int32, device=DEVICE)
        seq_indices[hot_block_tables[:, 0].long()] = torch.arange(case.batch, dtype=torch.int32, device=DEVICE)
        num_hot_rows = torch.full((case.batch,), case.device_buffer_size + 1, dtype=torch.int32, device=DEVICE)
        by_seq = hot_block_tables, num_hot_rows, host_block_tables
        self.seq_lens = torch.arange(num_outputs, dtype=torch.int32, device=DEVICE)[:, None] + case.context
        self.seq_lens = self.seq_lens.repeat(1, case.batch)
        self.steps = [
            DecodeMetadata(seq_indices, hot_block_tables[:, 0], lens, *by_seq, BLOCK_SIZE) for lens in self.seq_lens
        ]
        self.residency = Residency.allocate(size[0] * rows_per_block, DEVICE)
        self.state = [self.hot.rows, self.residency.entries]
        self.counts = torch.zeros(case.batch, 2, dtype=torch.int64, device=DEVICE)
        self.outputs = [Resolved.allocate(case.batch, case.top_k, DEVICE) for _ in range(num_outputs)]

    def warm_up(self, top_k: torch.Tensor) -> None:
        """Swap in one more step before step 0."""
        self.swap_in(top_k, 0)
        self.seq_lens += 1

    def resolve(self, top_k: torch.Tensor, step: int) -> None:
        self.ops.resolve(self.residency, self.steps[step], top_k, self.hot, self.counts, self.outputs[step])

    def gather(self, top_k: torch.Tensor, step: int) -> None:
        self.ops.gather(self.host_rows, self.hot, self.outputs[step], self.case.batch)

    def swap_in(self, top_k: torch.Tensor, step: int) -> None:
        out = self.outputs[step]
        self.ops.swap_in(self.residency, self.steps[step], top_k, self.host_rows, self.hot, self.counts, out)

    def found_rows(self, step: int) -> torch.Tensor:
        """[batch, top_k, row_bytes]."""
        return self.hot.rows[self.outputs[step].hot_row_ids.long()]

    def num_misses(self, step: int) -> int:
        return int(self.outputs[step].num_misses.sum())

    def miss_rows(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and hot rows of all misses."""
        out = self.outputs[step]
        counted = torch.arange(self.case.top_k, device=DEVICE) < out.num_misses[:, None]
        return out.miss_host_row_ids[counted], out.miss_hot_row_ids[counted]


class VllmNative:
    """The operations of vLLM's native HiSparse, called as in its `HiSparseRuntime` without drafts."""

    name = "vllm_native"
    max_selections = 1  # of a request in a step, for which the operations have room

    def __init__(self, case: Case, host_rows: torch.Tensor, host_block_tables: torch.Tensor, num_outputs: int):
        self.case, self.host_rows, self.host_block_tables = case, host_rows, host_block_tables
        self.max_union_rows = min(self.max_selections * case.top_k, case.device_buffer_size)
        self.ops = torch.ops._C_cache_ops
        num_blocks = -(-case.device_buffer_size // BLOCK_SIZE)
        size = (case.batch * num_blocks + 1, BLOCK_SIZE, case.row_bytes)
        self.hot = torch.full(size, POISON, dtype=torch.uint8, device=DEVICE)
        self.hot_block_tables = torch.randperm(size[0] - 1, device=DEVICE).view(case.batch, -1).int() + 1
        self.indices = torch.full((case.batch, case.device_buffer_size), -1, dtype=torch.int32, device=DEVICE)
        order = torch.arange(case.device_buffer_size, dtype=torch.int16, device=DEVICE)
        self.slots = order.repeat(case.batch, 1)
        self.state = [self.hot, self.indices, self.slots]
        self.requests = torch.arange(case.batch, dtype=torch.int32, device=DEVICE)
        self.stats = torch.zeros(2, dtype=torch.uint64, device=DEVICE)
        self.outputs = [self._output() for _ in range(num_outputs)]

    def _output(self) -> dict[str, torch.Tensor]:
        matrices = ("device_rows", "physical", "swap_host", "swap_device")
        size = (self.case.batch, self.case.top_k)
        found = {name: torch.full(size, -1, dtype=torch.int32, device=DEVICE) for name in matrices}
        vectors = ("valid_counts", "swap_counts")
        return found | {name: torch.zeros(size[:1], dtype=torch.int32, device=DEVICE) for name in vectors}

    def warm_up(self, top_k: torch.Tensor) -> None:
        self.swap_in(top_k, 0)

    def resolve(self, top_k: torch.Tensor, step: int) -> None:
        out = self.outputs[step]
        self.ops.hisparse_resolve_residency(
            self.host_rows,
            self.hot,
            self.hot_block_tables,
            top_k,
            out["device_rows"],
            self.indices,
            self.slots,
            self.requests,
            self.case.device_buffer_size,
            self.max_union_rows,
            None,
            self.stats,
            out["physical"],
            BLOCK_SIZE,
            self.requests,
            self.host_block_tables,
            BLOCK_SIZE,
            None,
            out["valid_counts"],
            out["swap_host"],
            out["swap_device"],
            out["swap_counts"],
            None,
            0,
            0,
        )

    def gather(self, top_k: torch.Tensor, step: int) -> None:
        out = self.outputs[step]
        swaps = out["swap_host"], out["swap_device"], out["swap_counts"]
        self.ops.hisparse_gather_compact(self.host_rows, self.hot, *swaps)

    def swap_in(self, top_k: torch.Tensor, step: int) -> None:
        self.resolve(top_k, step)
        self.gather(top_k, step)

    def found_rows(self, step: int) -> torch.Tensor:
        return self.hot.view(-1, self.case.row_bytes)[self.outputs[step]["physical"].long()]

    def num_misses(self, step: int) -> int:
        return int(self.outputs[step]["swap_counts"].sum())


class VllmNativeRoomy(VllmNative):
    """The same with room for two selections, as with one draft.

    Its hash table has an entry more than it has room for rows, so that without drafts it is full.
    """

    name = "vllm_native_roomy"
    max_selections = 2


class Limits:
    """PCIe limits: one copy of the same number of bytes, and a gather of the same rows and nothing else."""

    def __init__(self, ours: Ours, num_steps: int):
        self.host_rows, self.hot_rows = ours.host_rows, torch.empty_like(ours.hot.rows)
        self.misses = [ours.miss_rows(step) for step in range(num_steps)]
        self.row_vectors = ours.case.row_bytes // 16

    def memcpy(self, top_k: torch.Tensor, step: int) -> None:
        num_rows = len(self.misses[step][0])
        self.hot_rows[:num_rows].copy_(self.host_rows[:num_rows], non_blocking=True)

    def bare_gather(self, top_k: torch.Tensor, step: int) -> None:
        host_ids, hot_ids = self.misses[step]
        pointers = (tensor.data_ptr() for tensor in (self.host_rows, self.hot_rows, host_ids, hot_ids))
        stream = torch.cuda.current_stream().cuda_stream
        error = bare_gather_launcher()(*pointers, len(host_ids), self.row_vectors, stream)
        assert error == 0, f"bare_gather failed: CUDA error {error}"


@cache
def bare_gather_launcher() -> Any:
    """Compile and load bare_gather.cu for the machine's GPU."""
    source, pointer, size = Path(__file__).with_suffix(".cu").with_stem("bare_gather"), ctypes.c_void_p, ctypes.c_int32
    with TemporaryDirectory() as directory:
        library = f"{directory}/bare_gather.so"
        flags = ["-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", "-arch=native", "-cudart=static"]
        subprocess.run(["nvcc", *flags, "-o", library, str(source)], check=True)
        launcher = ctypes.CDLL(library).bare_gather
    launcher.argtypes = (pointer, pointer, pointer, pointer, size, size, pointer)
    return launcher


class Snapshot:
    """A system's state, to restart from. Restoring it also evicts residency from caches, as in a real step."""

    def __init__(self, tensors: list[torch.Tensor]):
        self._pairs = [(tensor, tensor.clone()) for tensor in tensors]

    def restore(self) -> None:
        for tensor, value in self._pairs:
            tensor.copy_(value)


@dataclass(frozen=True)
class Plan:
    """Number of timed steps.

    Attributes:
        graph_steps: steps of one CUDA graph. num_graphs: graphs, each with different steps.
        repeats: measured runs through all graphs, after one that is not counted.
    """

    graph_steps: int
    num_graphs: int
    repeats: int

    @property
    def num_steps(self) -> int:
        return self.graph_steps * self.num_graphs

    def time(
        self, operation: Callable[[torch.Tensor, int], None], selections: list[torch.Tensor], snapshot: Snapshot
    ) -> list[float]:
        """Microseconds per step: the mean over the steps of a graph, for each graph and repetition.

        Args:
            operation: called with a selection and the number of its step.
            selections: selections of all steps.
            snapshot: restored before every run through all steps.
        """
        graphs = []
        for first in range(0, self.num_steps, self.graph_steps):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                for step in range(first, first + self.graph_steps):
                    operation(selections[step], step)
        samples = []
        for _ in range(self.repeats + 1):
            snapshot.restore()
            samples += [time_replay(graph, self.graph_steps) for graph in graphs]
        return samples[self.num_graphs :]


def time_replay(graph: torch.cuda.CUDAGraph, num_steps: int) -> float:
    """Microseconds per step of a graph with several steps: their mean in one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / num_steps


def check_rows(system: Ours | VllmNative, selected: torch.Tensor, step: int, expected: torch.Tensor) -> None:
    """Compare the hot rows of a selection with the host rows.

    Args:
        system: a system that has swapped the selection in.
        selected: [batch, top_k] int32 positions.
        step: number of the selection's step.
        expected: [num_host_rows, row_bytes].

    Raises:
        AssertionError: a row differs.
    """
    blocks = system.host_block_tables.gather(1, (selected // BLOCK_SIZE).long()).long()
    rows = expected[blocks * BLOCK_SIZE + selected % BLOCK_SIZE]
    assert torch.equal(system.found_rows(step), rows), f"{system.name} copied wrong rows"


def measure(trace: Trace | RecordedTrace, pool: HostPool, systems: list[type], plan: Plan) -> Iterator[dict[str, Any]]:
    """Rows of one case."""
    torch.manual_seed(0)
    case = trace.case
    num_blocks = case.batch * case.num_host_blocks
    host_block_tables = (torch.randperm(num_blocks, device=DEVICE) + 1).view(case.batch, -1).int()
    for kind in systems:
        system = kind(case, pool.rows(case.row_bytes), host_block_tables, plan.num_steps)
        for selected in trace.warmup:
            system.warm_up(selected)
        yield from measure_system(system, trace, pool.expected(case.row_bytes), plan)


def measure_system(
    system: Ours | VllmNative, trace: Trace | RecordedTrace, expected: torch.Tensor, plan: Plan
) -> Iterator[dict[str, Any]]:
    """Results of one system in one case; those of this plugin include the PCIe limits."""
    snapshot = Snapshot(system.state)
    for step, selected in enumerate(trace.timed):
        system.swap_in(selected, step)
        check_rows(system, selected, step, expected)
    misses = sum(map(system.num_misses, range(plan.num_steps))) / plan.num_steps
    operations = {(system.name, "gather"): system.gather}
    if isinstance(system, Ours):
        limits = Limits(system, plan.num_steps)
        operations |= {("memcpy", "gather"): limits.memcpy, ("bare_gather", "gather"): limits.bare_gather}
    operations |= {(system.name, "resolve"): system.resolve, (system.name, "swap_in"): system.swap_in}
    for (name, op), operation in operations.items():
        times = plan.time(operation, trace.timed, snapshot)
        yield describe(trace.case, name, op, misses, times)
    check_rows(system, trace.timed[-1], plan.num_steps - 1, expected)  # what the graphs of the last one left


def describe(case: Case, system: str, op: str, misses: float, times: list[float]) -> dict[str, Any]:
    p10, p50, p90 = np.percentile(times, (10, 50, 90)).round(2).tolist()
    return {
        "system": system,
        "op": op,
        "batch": case.batch,
        "row_bytes": case.row_bytes,
        "overlap": case.overlap,
        "top_k": case.top_k,
        "device_buffer_size": case.device_buffer_size,
        "misses_per_request": round(misses / case.batch, 1),
        "us_p10": p10,
        "us_p50": p50,
        "us_p90": p90,
        "gb_per_s": None if op == "resolve" else round(misses * case.row_bytes / p50 / 1000, 2),
    }


def available_systems() -> list[type]:
    """This plugin, and vLLM's native HiSparse if its operations are installed."""
    try:
        import vllm._custom_ops  # noqa: F401

        torch.ops._C_cache_ops.hisparse_resolve_residency  # noqa: B018
    except (ImportError, AttributeError) as error:
        typer.echo(f"vllm_native is skipped: vLLM's HiSparse operations are not installed ({error})", err=True)
        return [Ours]
    return [Ours, VllmNative, VllmNativeRoomy]


@app.command()
def run(
    ctx: typer.Context,
    batch: Annotated[list[int], typer.Option(min=1, help="Requests; repeatable.")] = [1, 16, 64, 128],  # noqa: B006
    row_bytes: Annotated[list[int], typer.Option(help="Bytes of a row; repeatable.")] = [1152, FP8_DS_MLA_ROW_BYTES],  # noqa: B006
    overlap: Annotated[
        list[float], typer.Option(min=0, max=1, help="Share of a selection kept in the next step; repeatable.")
    ] = [0.5, 0.85, 0.95],  # noqa: B006
    device_buffer_size: Annotated[list[int], typer.Option(help="Hot rows of a request; repeatable.")] = list(SIZES),  # noqa: B006
    top_k: Annotated[int, typer.Option(min=1, help="Selected rows.")] = 2048,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a request.")] = 16384,
    graph_steps: Annotated[int, typer.Option(min=1, help="Steps of one CUDA graph; a sample is their mean.")] = 5,
    num_graphs: Annotated[int, typer.Option(min=1, help="Graphs, each with different steps.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs through all graphs.")] = 10,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "swap_in.json",
) -> None:
    """Time swap-in of one layer."""
    grid = list(product(row_bytes, batch, device_buffer_size, overlap))
    systems, plan = available_systems(), Plan(graph_steps, num_graphs, repeats)
    rows: list[dict[str, Any]] = []
    pool = HostPool((max(batch) * -(-context // BLOCK_SIZE) + 1) * BLOCK_SIZE * max(row_bytes))
    for index in track(len(grid), "swap-in"):
        one_row, one_batch, one_size, one_overlap = grid[index]
        case = Case(one_batch, one_row, one_overlap, one_size, top_k, context)
        rows += measure(Trace(case, NUM_WARMUP, plan.num_steps), pool, systems, plan)
        write_result(output, ctx, "benchmarks.swap_in run", rows, gpu_hardware())
    columns = ("system", "op", "batch", "row_bytes", "overlap", "device_buffer_size", "us_p50", "gb_per_s")
    shown = overlap[len(overlap) // 2], device_buffer_size[0]
    chosen = [row for row in rows if (row["overlap"], row["device_buffer_size"]) == shown]
    show("Swap-in of one layer, microseconds", [{name: row[name] for name in columns} for row in chosen])


@app.command()
def replay(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Option(help="File of selections.")] = Path("benchmarks/traces/code-dsa.trace"),
    layer: Annotated[list[str] | None, typer.Option(help="Layer; repeatable; default: all.")] = None,
    batch: Annotated[list[int], typer.Option(min=1, help="Requests; repeatable.")] = [1, 16, 64],  # noqa: B006
    size: Annotated[list[int], typer.Option(min=1, help="Hot rows of a request, in top-k; repeatable.")] = [2, 4, 16],  # noqa: B006
    graph_steps: Annotated[int, typer.Option(min=1, help="Steps of one CUDA graph; a sample is their mean.")] = 5,
    num_graphs: Annotated[int, typer.Option(min=1, help="Graphs, each with different steps.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs through all graphs.")] = 10,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "h200" / "swap_in_trace.json",
) -> None:
    """Time swap-in of one layer over recorded selections."""
    recorded, systems, plan = SelectionTrace.read(trace), available_systems(), Plan(graph_steps, num_graphs, repeats)
    grid, rows = list(product(layer or recorded.layers, batch, size)), []
    context = max(request.first_position + request.num_steps for request in recorded.requests) + 1
    pool = HostPool((max(batch) * -(-context // BLOCK_SIZE) + 1) * BLOCK_SIZE * recorded.row_bytes)
    for index in track(len(grid), "swap-in"):
        name, one_batch, one_size = grid[index]
        hot_rows = one_size * recorded.top_k
        selections = RecordedTrace(recorded, name, one_batch, hot_rows, NUM_WARMUP, plan.num_steps)
        rows += [{"layer": name} | row for row in measure(selections, pool, systems, plan)]
        write_result(output, ctx, "benchmarks.swap_in replay", rows, gpu_hardware())
    columns = ("system", "op", "layer", "batch", "overlap", "device_buffer_size", "us_p50", "gb_per_s")
    show("Swap-in of one layer, microseconds", [{name: row[name] for name in columns} for row in rows])


@app.command()
def plot(
    result: Annotated[Path, typer.Option(help="Result file of `run`.")] = RESULTS / "h200" / "swap_in.json",
    output: Annotated[Path, typer.Option(help="Picture.")] = Path("docs/figures/swap_in.png"),
    overlap: Annotated[float, typer.Option(help="Share of a selection kept in the next step.")] = 0.85,
    device_buffer_size: Annotated[int, typer.Option(help="Hot rows per request.")] = 4096,
) -> None:
    """Plot a result: time of a swap-in by batch, for each row size."""
    import matplotlib.pyplot as plt

    rows = json.loads(result.read_text())["rows"]
    rows = [row for row in rows if (row["overlap"], row["device_buffer_size"]) == (overlap, device_buffer_size)]
    series = {"vllm_native": "swap_in", "ours": "swap_in", "bare_gather": "gather", "memcpy": "gather"}
    sizes = sorted({row["row_bytes"] for row in rows}, reverse=True)
    figure, axes = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), sharey=True, squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        for name, op in series.items():
            line = [row for row in rows if (row["system"], row["op"], row["row_bytes"]) == (name, op, size)]
            if line:
                axis.plot([row["batch"] for row in line], [row["us_p50"] for row in line], "o-", label=name)
        axis.set(title=f"{size}-byte rows", xlabel="requests", xscale="log", yscale="log")
        axis.set_xticks(sorted({row["batch"] for row in rows}), sorted({row["batch"] for row in rows}))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds per layer")
    axes[0][0].legend()
    figure.suptitle(f"Swap-in, {overlap:.0%} overlap, {device_buffer_size} hot rows of {rows[0]['top_k']} selected")
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    app()

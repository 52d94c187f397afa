"""What does a hot buffer cost a decode step of the CPU backend, against the same step over the full KV?

Runs one step's attention of a few layers over the hot buffers of a batch (admit, resolve, gather, attend, write back)
and over the paged cache of the full-KV reference. Rows, queries and selections are the same, and the outputs of every
step are compared. The goal is at most 1.5 times the full-KV step at batch 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from vllm.v1.attention.backend import CommonAttentionMetadata

from benchmarks.common import (
    KV_LORA_RANK,
    RESULTS,
    ROPE_DIM,
    Samples,
    device_groups,
    show,
    spread,
    track,
    write_result,
)
from vllm_hisparse.attention.mla.base import NewRows
from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.connector.worker import HiSparseWorkerConnector
from vllm_hisparse.cpu.full_kv_mla import SparseMLACpuImpl, SparseMLACpuMetadataBuilder
from vllm_hisparse.cpu.mla import HotMLACpuImpl, HotMLACpuMetadataBuilder
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
from vllm_hisparse.layout import BLOCK_SIZE

ROW = KV_LORA_RANK + ROPE_DIM
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Case:
    """One configuration: `context` tokens per request before the first step; `overlap` is a share of a selection."""

    batch: int
    top_k: int
    dtype: torch.dtype
    context: int
    overlap: float
    num_layers: int
    num_heads: int
    num_steps: int

    @property
    def num_blocks(self) -> int:
        """Full-KV blocks of one request."""
        return -(-(self.context + self.num_steps) // BLOCK_SIZE)


@dataclass
class StepInputs:
    """Inputs of all layers in one step.

    Attributes:
        newest: position of each request's token.
        queries: [layers, batch, heads, row elements]. new_rows: [layers, batch, row elements].
        top_k: [layers, batch, k] int32.
    """

    newest: int
    queries: torch.Tensor
    new_rows: torch.Tensor
    top_k: torch.Tensor


class Inputs:
    """Draws inputs: a selection keeps a share of the last one and adds the newest position; the rest is random."""

    def __init__(self, case: Case):
        self.case, self.newest = case, case.context - 1
        self.generator = torch.Generator().manual_seed(0)
        self._last: torch.Tensor | None = None

    def next_step(self) -> StepInputs:
        case = self.case
        self.newest += 1
        size = (case.num_layers, case.batch)
        return StepInputs(
            self.newest,
            self._normal(*size, case.num_heads, ROW),
            self._normal(*size, ROW),
            self._select(torch.rand(*size, self.newest + 1, generator=self.generator)),
        )

    def _select(self, scores: torch.Tensor) -> torch.Tensor:
        """Add 1 to the scores of kept positions, subtract 1 from those of dropped ones, and select the best."""
        case = self.case
        if self._last is not None:
            kept = torch.rand(self._last.shape, generator=self.generator).argsort(-1) < case.overlap * case.top_k
            scores.scatter_add_(-1, self._last, torch.where(kept, 1.0, -1.0))
        scores[..., -1] = 2.0
        self._last = scores.topk(case.top_k, sorted=False).indices
        return self._last.int()

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(self.case.dtype)


class FullKV:
    """The reference: all rows are in a paged cache.

    Args:
        case: sizes.
        rows: [layers, batch, blocks, block size, row elements], positions in order.
    """

    def __init__(self, case: Case, rows: torch.Tensor):
        self.case = case
        self.block_table = torch.randperm(case.batch * case.num_blocks).view(case.batch, -1).int()
        self.caches = [torch.empty_like(layer.flatten(0, 1)) for layer in rows]
        for cache, layer in zip(self.caches, rows, strict=True):
            cache[self.block_table.flatten().long()] = layer.flatten(0, 1)
        self.impls = [make_impl(SparseMLACpuImpl, case) for _ in rows]
        self.builder = SparseMLACpuMetadataBuilder(None, [], None, torch.device("cpu"))

    def step(self, inputs: StepInputs) -> list[torch.Tensor]:
        """One step's attention; returns the output of each layer."""
        common = common_metadata(self.block_table, inputs.newest)
        slots = self.block_table[:, inputs.newest // BLOCK_SIZE] * BLOCK_SIZE + inputs.newest % BLOCK_SIZE
        metadata = self.builder.build(0, common)
        outputs = []
        for impl, cache, query, new_rows, top_k in layer_inputs(self.impls, self.caches, inputs):
            impl.do_kv_cache_update(*split_rows(new_rows), cache, slots)
            outputs.append(attend(impl, cache, query, top_k, metadata))
        return outputs


class HotKV:
    """This plugin: rows are in the host pool, with hot buffers of 2x top_k rows on the device."""

    def __init__(self, case: Case, rows: torch.Tensor):
        self.groups = device_groups(case.num_layers, 2 * case.top_k, case.dtype)
        self.impls = [make_impl(HotMLACpuImpl, case) for _ in rows]
        layers = {
            name: SimpleNamespace(impl=impl, indexer=object())
            for name, impl in zip(self._names, self.impls, strict=True)
        }
        vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            scheduler_config=SimpleNamespace(max_num_seqs=case.batch),
            model_config=SimpleNamespace(max_model_len=case.num_blocks * BLOCK_SIZE, use_mla=True),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        )
        config = HiSparseConfig(top_k=case.top_k, device_buffer_size=2 * case.top_k, host_pool_gib=1.0)
        num_host_blocks = case.batch * case.num_blocks
        self.worker = HiSparseWorkerConnector(vllm_config, config, self.groups, num_host_blocks, None)
        num_device_blocks = case.batch * self.groups.hot_spec.num_blocks(case.context)
        self.hot_block_table = (
            (1 + torch.randperm(num_device_blocks)).view(case.batch, -1).int()
        )  # vLLM's null block is 0
        self.worker.register_kv_caches(self._device_caches(case))
        self._start_requests(case, rows)
        spec = self.groups.hot_spec
        self.builder = HotMLACpuMetadataBuilder(spec, self._names, vllm_config, torch.device("cpu"))

    @property
    def _names(self) -> list[str]:
        return self.groups.hot_group.layer_names

    def step(self, inputs: StepInputs) -> list[torch.Tensor]:
        """One step's attention with the write-back; returns the output of each layer."""
        metadata = self.builder.build(0, common_metadata(self.hot_block_table, inputs.newest))
        outputs = []
        for impl, _, query, new_rows, top_k in layer_inputs(self.impls, self.impls, inputs):
            with impl.writing(NewRows(*split_rows(new_rows))):
                outputs.append(attend(impl, None, query, top_k, metadata))
        self.worker.bind_metadata(HiSparseMetadata())
        self.worker.finish_step()
        return outputs

    def _device_caches(self, case: Case) -> dict[str, torch.Tensor]:
        """Hot rows and indexer keys in shared blocks, in vLLM's layout: all layers of a block next to each other."""
        layout, element_bytes = self.groups.layout, case.dtype.itemsize
        num_blocks, rows = 1 + self.hot_block_table.numel(), layout.rows_per_hot_block
        block_elements = layout.device_block_bytes // element_bytes  # wider than the hot rows where keys take more
        memory = torch.full((num_blocks, block_elements), torch.nan, dtype=case.dtype)
        layers = memory[:, : case.num_layers * rows * ROW].view(num_blocks, case.num_layers, rows, ROW)
        hot = dict(zip(self._names, layers.split(1, dim=1), strict=True))
        keys = memory.view(torch.uint8)[:, : layout.resident_block_bytes]
        keys = keys.view(num_blocks, case.num_layers, BLOCK_SIZE, layout.resident_row_bytes)
        return hot | dict(zip(self.groups.resident_group.layer_names, keys.split(1, dim=1), strict=True))

    def _start_requests(self, case: Case, rows: torch.Tensor) -> None:
        """Put all rows into the host pool, and tell the worker of the requests' blocks."""
        tables = torch.randperm(case.batch * case.num_blocks).view(case.batch, -1)
        for main_kv, layer in zip(self.worker.store.main_kv.values(), rows, strict=True):
            main_kv[tables.flatten()] = layer.flatten(0, 1)
        first_hot_block_ids = self.hot_block_table[:, 0].tolist()
        tables = [
            {
                first_hot_block_id: (0, table)
                for first_hot_block_id, table in zip(first_hot_block_ids, given.tolist(), strict=True)
            }
            for given in (tables, self.hot_block_table)
        ]
        self.worker.apply_changes(HiSparseMetadata(host_block_tables=tables[0], hot_block_tables=tables[1]))


def make_impl(kind: type[SparseMLACpuImpl], case: Case) -> SparseMLACpuImpl:
    """One layer's attention implementation, with its own selection buffer."""
    top_k = torch.empty(case.batch, case.top_k, dtype=torch.int32)
    args = (case.num_heads, ROW, ROW**-0.5, 1, None, None, "auto", None, "decoder", None)
    return kind(*args, topk_indices_buffer=top_k, kv_lora_rank=KV_LORA_RANK)


def common_metadata(block_table: torch.Tensor, newest: int) -> CommonAttentionMetadata:
    """One decode token per request."""
    batch = len(block_table)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((batch,), newest + 1, dtype=torch.int32),
        num_reqs=batch,
        num_actual_tokens=batch,
        max_query_len=1,
        max_seq_len=newest + 1,
        block_table_tensor=block_table,
        slot_mapping=torch.empty(0),
    )


def layer_inputs(impls: list[SparseMLACpuImpl], caches: list[Any], inputs: StepInputs) -> zip:
    return zip(impls, caches, inputs.queries, inputs.new_rows, inputs.top_k, strict=True)


def split_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows into latent and rotary part, as the model passes them: [num_rows, ...] each."""
    return rows[:, :KV_LORA_RANK], rows[:, None, KV_LORA_RANK:]


def attend(
    impl: SparseMLACpuImpl, cache: torch.Tensor | None, query: torch.Tensor, top_k: torch.Tensor, metadata: Any
) -> torch.Tensor:
    """One layer's attention over a given selection."""
    impl.topk_indices_buffer.copy_(top_k)
    return impl.forward_mqa(query, cache, metadata, None)[0]


def measure(case: Case, warmup: int) -> dict[str, Any]:
    """Run one case; returns its row."""
    torch.manual_seed(0)
    size = (case.num_layers, case.batch, case.num_blocks, BLOCK_SIZE, ROW)
    rows = torch.randn(size, dtype=case.dtype)
    hot, full, inputs = HotKV(case, rows), FullKV(case, rows), Inputs(case)
    del rows
    hot_samples, full_samples = Samples(), Samples()
    difference = 0.0
    name = f"batch {case.batch}, top_k {case.top_k}, {case.dtype}".replace("torch.", "")
    for step in track(case.num_steps, name):
        if step == warmup:
            hot_samples, full_samples = Samples(), Samples()
            hot.worker.take_stats()
        step_inputs = inputs.next_step()
        found = hot_samples.measure(lambda given=step_inputs: hot.step(given))
        expected = full_samples.measure(lambda given=step_inputs: full.step(given))
        difference = max(difference, compare(found, expected))
    hot.worker.hot_buffer.check_integrity()
    return describe(case) | costs(case, hot, hot_samples, full_samples) | {"max_abs_difference": difference}


def compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference of a step's outputs.

    Raises:
        AssertionError: the outputs do not agree.
    """
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


def describe(case: Case) -> dict[str, Any]:
    return {
        "batch": case.batch,
        "top_k": case.top_k,
        "device_buffer_size": 2 * case.top_k,
        "dtype": str(case.dtype).removeprefix("torch."),
        "context": case.context,
        "overlap": case.overlap,
        "num_layers": case.num_layers,
        "num_heads": case.num_heads,
        "num_threads": torch.get_num_threads(),
    }


def costs(case: Case, hot: HotKV, hot_samples: Samples, full_samples: Samples) -> dict[str, Any]:
    """Times, their ratios step by step, and bytes moved."""
    num_steps = len(hot_samples.wall)
    stats = hot.worker.take_stats()
    assert stats is not None, "no row was selected"
    counters = stats.data["counters"]
    return {
        "hot": hot_samples.summary(),
        "full": full_samples.summary(),
        "wall_ratio": spread(a / b for a, b in zip(hot_samples.wall, full_samples.wall, strict=True)),
        "cpu_ratio": spread(a / b for a, b in zip(hot_samples.cpu, full_samples.cpu, strict=True)),
        "misses_per_selection": round(counters["cache_misses"] / (num_steps * case.num_layers * case.batch), 1),
        "host_to_device_bytes_per_step": counters["host_to_device_bytes"] // num_steps,
    }


@app.command()
def cpu_decode(
    ctx: typer.Context,
    batch: Annotated[list[int], typer.Option(min=1, help="Requests; repeatable.")] = [8, 4, 1],  # noqa: B006
    top_k: Annotated[list[int], typer.Option(min=1, help="Selected rows; repeatable.")] = [256, 2048],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="float32 or bfloat16; repeatable.")] = ["float32", "bfloat16"],  # noqa: B006
    context: Annotated[int, typer.Option(min=1, help="Tokens of a request.")] = 16384,
    overlap: Annotated[float, typer.Option(min=0, max=1, help="Share of a selection kept in the next step.")] = 0.85,
    num_layers: Annotated[int, typer.Option(min=1, help="Attention layers.")] = 3,
    num_heads: Annotated[int, typer.Option(min=1, help="Query heads; the tiny models have 8.")] = 8,
    num_threads: Annotated[int, typer.Option(min=1, help="Threads; on one, CPU time is exact on a busy machine.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Measured decode steps.")] = 40,
    warmup: Annotated[int, typer.Option(min=0, help="Decode steps before them, which fill the buffers.")] = 12,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "cpu" / "cpu_decode.json",
) -> None:
    """Time a decode step's attention with hot buffers and with the full KV."""
    torch.set_num_threads(num_threads)
    rows = []
    for one_dtype, one_top_k, one_batch in product(dtype, top_k, batch):
        sizes = (one_batch, one_top_k, DTYPES[one_dtype], context, overlap, num_layers, num_heads, warmup + steps)
        rows.append(measure(Case(*sizes), warmup))
    write_result(output, ctx, "benchmarks.cpu_decode", rows)
    show(
        "Milliseconds per step: median (p10-p90), CPU time; ratios by CPU time and by wall clock",
        [printed(row) for row in rows],
    )


def printed(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the terminal."""

    def text(times: dict[str, float]) -> str:
        return f"{times['median']:.2f} ({times['p10']:.2f}-{times['p90']:.2f})"

    return {
        "batch": row["batch"],
        "top_k": row["top_k"],
        "dtype": row["dtype"],
        "hot": text(row["hot"]["cpu_ms"]),
        "full": text(row["full"]["cpu_ms"]),
        "ratio": text(row["cpu_ratio"]),
        "wall ratio": text(row["wall_ratio"]),
        "misses": row["misses_per_selection"],
    }


if __name__ == "__main__":
    app()

"""What does one decode step cost on the scheduler, and does it depend on the length of the requests?

Drives vLLM's block pool and this plugin's managers and scheduler connector without an engine; in every step, each
running request grows by one token. Contexts are measured in turns, step by step, so that other load on the machine
affects all of them equally. The goal is at most 1 ms per step for 256 requests of 128K tokens.
"""

from __future__ import annotations

import gc
import pickle
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from benchmarks.common import RESULTS, Samples, device_groups, show, spread, track, write_result
from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.connector.scheduler import HiSparseSchedulerConnector
from vllm_hisparse.kv_manager.blocks.hot_block_manager import HotBlockManager
from vllm_hisparse.layout import BLOCK_SIZE

NUM_LAYERS, TOP_K = 61, 2048  # DeepSeek-V3.2
MAX_NUM_BATCHED_TOKENS = 8192
PHASES = ("total", "allocate", "build_connector_meta", "take_stats", "pickle")

app = typer.Typer(add_completion=False)


@dataclass
class FakeRequest:
    """The part of vLLM's `Request` that the managers read; its hashes are those of the final sequence."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    block_hashes: list[bytes]
    status: RequestStatus = RequestStatus.RUNNING
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = True
    resumable: bool = False
    abort_immediately: bool = False
    kv_transfer_params: dict | None = None


class FakeIndexerManager:
    """Allocates device blocks for indexer keys, from the same pool as the hot blocks."""

    def __init__(self, block_pool: BlockPool):
        self.block_pool = block_pool
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = defaultdict(list)

    def allocate(self, request_id: str, num_tokens: int) -> None:
        blocks = self.req_to_blocks[request_id]
        num_new = -(-num_tokens // BLOCK_SIZE) - len(blocks)
        if num_new > 0:
            blocks.extend(self.block_pool.get_new_blocks(num_new))


class Scheduler:
    """Replaces vLLM's scheduler: admits requests, then decodes one token of each per step.

    Args:
        num_requests: running requests.
        num_tokens: tokens of a request at the first measured step; up to one block more.
        num_steps: decode steps that the pools have room for.
    """

    def __init__(self, num_requests: int, num_tokens: int, num_steps: int):
        groups = device_groups(NUM_LAYERS, 2 * TOP_K, torch.bfloat16)
        num_blocks = num_requests * (-(-(num_tokens + num_steps) // BLOCK_SIZE) + 2)
        num_hot_blocks = num_requests * groups.hot_spec.num_blocks(num_tokens)
        pool = BlockPool(num_blocks + num_hot_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)
        self.hot_manager = HotBlockManager(
            groups.hot_spec, block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=BLOCK_SIZE
        )
        self.indexer_manager = FakeIndexerManager(pool)
        config = HiSparseConfig(top_k=TOP_K, device_buffer_size=2 * TOP_K, host_pool_gib=1.0)
        self.connector = HiSparseSchedulerConnector(
            config,
            groups,
            SimpleNamespace(
                coordinator=SimpleNamespace(single_type_managers=(self.hot_manager, self.indexer_manager)),
                block_pool=pool,
                max_model_len=num_blocks * BLOCK_SIZE,
                watermark_blocks=0,
            ),
            num_blocks,
            enable_caching=True,
            transport=None,
            max_num_seqs=num_requests,
            max_num_running=num_requests,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        )
        self.forget_samples()
        self.requests = [self._admit(index, num_tokens, num_steps) for index in range(num_requests)]
        self.output = _scheduler_output({request.request_id: 1 for request in self.requests})
        self._prefill()

    def step(self) -> None:
        """Run one decode step and time each phase."""
        for request in self.requests:
            request.num_tokens += 1
            self.indexer_manager.allocate(request.request_id, request.num_tokens)
        metadata = self.samples["total"].measure(self._product_step)
        for request in self.requests:
            request.num_computed_tokens += 1
        pickled = self.samples["pickle"].measure(partial(pickle.dumps, metadata, pickle.HIGHEST_PROTOCOL))
        self.metadata_bytes.append(len(pickled))

    def _product_step(self) -> Any:
        self.samples["allocate"].measure(self._allocate)
        metadata = self.samples["build_connector_meta"].measure(
            partial(self.connector.build_connector_meta, self.output)
        )
        self.connector.update_connector_output(KVConnectorOutput())
        self.connector.step_processed()
        self.samples["take_stats"].measure(self.connector.take_due_stats)
        return metadata

    def _allocate(self) -> None:
        """Call the hot manager as `KVCacheManager.allocate_slots` does, in the same order."""
        manager, free = self.hot_manager, self.hot_manager.block_pool.get_num_free_blocks()
        manager.new_step_starts()
        for request in self.requests:
            request_id, num_tokens, num_computed = request.request_id, request.num_tokens, request.num_computed_tokens
            manager.remove_skipped_blocks(request_id, num_computed, request.num_prompt_tokens)
            needed = manager.get_num_blocks_to_allocate(
                request_id, num_tokens, (), num_computed, num_computed, num_tokens, apply_admission_cap=False
            )
            assert needed <= free
            manager.allocate_new_blocks(request_id, num_tokens, num_tokens)
            manager.cache_blocks(request, num_tokens, None, replay_boundaries=(request.num_prompt_tokens - 1,))

    def _admit(self, index: int, num_tokens: int, num_steps: int) -> FakeRequest:
        """Admit a request that ends within a block, so that a few requests start a block in each step."""
        num_tokens += index % BLOCK_SIZE
        num_hashes = (num_tokens + num_steps) // BLOCK_SIZE
        hashes = [(index << 32 | block).to_bytes(32, "little") for block in range(num_hashes)]
        request = FakeRequest(f"request-{index}", num_tokens, num_tokens, 0, hashes)
        self.connector.on_new_request(request)
        self.connector.get_num_new_matched_tokens(request, 0)
        return request

    def _prefill(self) -> None:
        """Compute all prompts in one step, whatever its size."""
        for request in self.requests:
            self.hot_manager.get_num_blocks_to_allocate(request.request_id, request.num_tokens, (), 0, 0, 0)
            self.hot_manager.allocate_new_blocks(request.request_id, request.num_tokens, request.num_tokens)
            self.indexer_manager.allocate(request.request_id, request.num_tokens)
        scheduled = {request.request_id: request.num_tokens for request in self.requests}
        self.connector.build_connector_meta(_scheduler_output(scheduled))
        for request in self.requests:
            request.num_computed_tokens = request.num_tokens

    def forget_samples(self) -> None:
        self.samples = {phase: Samples() for phase in PHASES}
        self.metadata_bytes: list[int] = []

    def row(self) -> dict[str, Any]:
        return {
            "num_requests": len(self.requests),
            **{phase: samples.summary() for phase, samples in self.samples.items()},
            "metadata_bytes": {name: int(value) for name, value in spread(self.metadata_bytes).items()},
        }


def _scheduler_output(num_scheduled: dict[str, int]) -> SimpleNamespace:
    """The part of vLLM's `SchedulerOutput` that `build_connector_meta` reads."""
    total = sum(num_scheduled.values())
    return SimpleNamespace(
        num_scheduled_tokens=num_scheduled, total_num_scheduled_tokens=total, new_block_ids_to_zero=None
    )


def measure(num_requests: int, num_tokens: list[int], steps: int, warmup: int) -> list[dict[str, Any]]:
    """One row per context length."""
    schedulers = [Scheduler(num_requests, context, warmup + steps) for context in num_tokens]
    gc.collect()
    gc.freeze()  # NOTE: vLLM's engine core does the same once its block pool exists.
    for step in track(warmup + steps, "scheduler"):
        for scheduler in schedulers:
            scheduler.step()
            if step < warmup:
                scheduler.forget_samples()
    gc.unfreeze()
    for scheduler in schedulers:
        scheduler.connector.host_pool.check_integrity()
    return [
        {"num_tokens": context, **scheduler.row()} for context, scheduler in zip(num_tokens, schedulers, strict=True)
    ]


@app.command()
def scheduler(
    ctx: typer.Context,
    num_requests: Annotated[int, typer.Option(min=1, help="Running requests.")] = 256,
    num_tokens: Annotated[list[int], typer.Option(min=1, help="Tokens of a request; repeatable.")] = [131072, 32768],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Measured decode steps.")] = 640,
    warmup: Annotated[int, typer.Option(min=0, help="Decode steps before them.")] = 64,
    output: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "cpu" / "scheduler.json",
) -> None:
    """Time this plugin's work on the scheduler in one decode step."""
    rows = measure(num_requests, num_tokens, steps, warmup)
    write_result(output, ctx, "benchmarks.scheduler", rows)
    show("Milliseconds per step: median (p10-p90), CPU time", [printed(row) for row in rows])


def printed(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the terminal."""
    times = {phase: row[phase]["cpu_ms"] for phase in PHASES}
    return {
        "tokens": row["num_tokens"],
        **{phase: f"{time['median']:.3f} ({time['p10']:.3f}-{time['p90']:.3f})" for phase, time in times.items()},
        "metadata bytes": row["metadata_bytes"]["median"],
    }


if __name__ == "__main__":
    app()

"""SGLang's scheduler process with forced selections and a clock, for `benchmarks.sglang_decode`.

SGLang 0.5.23 offers no hooks for either, so `run_patched_scheduler` replaces a few methods before the scheduler starts:

* `Indexer._get_topk_paged` also overwrites its result, inside the CUDA graph (`benchmarks.selection_kernel`);
* `Scheduler.process_batch_result` also notes the time of each step;
* `Scheduler.bench_*` are new, for `Engine.collective_rpc`;
* `host_memory_budget_bytes` does not refuse a host pool on a machine whose memory grows with its use.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.full_depth import Clock
from benchmarks.kernel_profile import device_times, times_by_kind
from benchmarks.selection_kernel import forced

PAGE_SIZE = 64  # tokens of a page of SGLang's DSA models
KEY_BYTES = 128  # of an index key in fp8; its scale is a float32
CLOCK_ROWS = 1 << 17
CLOCK_COLUMNS = 4  # time, requests, new tokens, waiting requests; row 0 has the number of rows
CLOCK_VARIABLE = "HISPARSE_BENCHMARK_CLOCK"  # names of environment variables, which the scheduler's process inherits
FORCES_VARIABLE = "HISPARSE_BENCHMARK_FORCES"
MISSES_VARIABLE = "HISPARSE_BENCHMARK_MISSES"


class StepFile:
    """The steps of the scheduler's process, in a file that this process and the benchmark's map.

    Args:
        path: the file.
        create: true for the process that makes it.
    """

    def __init__(self, path: Path, create: bool = False):
        if create:
            path.write_bytes(bytes(CLOCK_ROWS * CLOCK_COLUMNS * 8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._rows = np.frombuffer(self._map, np.float64).reshape(CLOCK_ROWS, CLOCK_COLUMNS)

    def __len__(self) -> int:
        return int(self._rows[0, 0])

    def add(self, seconds: float, num_requests: int, num_tokens: int, num_waiting: int) -> None:
        """Note the end of a step."""
        count = len(self) + 1
        if count < CLOCK_ROWS:
            self._rows[count] = seconds, num_requests, num_tokens, num_waiting
            self._rows[0, 0] = count

    def rows(self, first: int, last: int | None = None) -> np.ndarray:
        """[steps, columns] float64, a copy."""
        return self._rows[1 + first : 1 + (len(self) if last is None else last)].copy()

    def clock(self, last: int) -> Clock:
        """The steps before `last`."""
        return Clock([(seconds, int(size), int(tokens)) for seconds, size, tokens, _ in self.rows(0, last)])


def run_patched_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process`, patched; the target of the scheduler's process."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.plugins import load_plugins

    load_plugins()
    base.host_memory_budget_bytes = lambda requested_bytes=0, *, auto_size=False: 1 << 50
    if os.environ[FORCES_VARIABLE] == "1":
        _force_selections()
    if os.environ[MISSES_VARIABLE] == "1":
        _count_misses()
    _add_methods(StepFile(Path(os.environ[CLOCK_VARIABLE])))
    run_scheduler_process(*args, **kwargs)


def _force_selections() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.model_runner import ModelRunner

    indexer, init = Indexer._get_topk_paged, ModelRunner.maybe_init_hisparse_coordinator

    def select(self: Any, forward_batch: Any, layer_id: int, q_fp8: Any, weights: Any, metadata: Any) -> Any:
        out = indexer(self, forward_batch, layer_id, q_fp8, weights, metadata)
        # The fused top-k returns slots; with HiSparse, the top-k is not fused and returns positions.
        is_fused = bool(envs.SGLANG_DSA_FUSE_TOPK.get()) and not metadata.force_unfused_topk
        pages = metadata.get_page_table_64() if is_fused else None
        lengths, names = metadata.get_seqlens_expanded(), forward_batch.req_pool_indices
        forced().write(out, lengths, names, layer_id, pages, PAGE_SIZE)
        return out

    def init_and_allocate(self: Any) -> None:  # before graphs are captured
        init(self)
        with torch.inference_mode():
            forced()

    Indexer._get_topk_paged = select
    ModelRunner.maybe_init_hisparse_coordinator = init_and_allocate


def _count_misses() -> None:
    """Count what the swap-in kernel misses. It writes a plan for that, so that such a run is not to be timed."""
    from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator

    init, run = HiSparseCoordinator.__init__, HiSparseCoordinator._run_swap_in_kernel

    def init_and_allocate(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        rows = self.req_to_token_pool.req_to_token.shape[0]
        if not self.enable_prefetch:
            width = self.spec_swap.miss_plan_capacity
            self._miss_src = torch.zeros((rows, width), dtype=torch.int64, device=self.device)
            self._miss_dst = torch.zeros((rows, width), dtype=torch.int32, device=self.device)
            self._miss_count = torch.zeros((rows,), dtype=torch.int32, device=self.device)
        self.bench_counts = torch.zeros(2, dtype=torch.int64, device=self.device)  # looked up, missed

    def run_and_count(self: Any, req: Any, lens: Any, top_k: Any, layer_id: int, record_plan: bool = False) -> Any:
        out = run(self, req, lens, top_k, layer_id, record_plan=True)
        self.bench_counts[0] += (top_k >= 0).sum()
        self.bench_counts[1] += self._miss_count[: req.size(0)].sum()
        return out

    HiSparseCoordinator.__init__ = init_and_allocate
    HiSparseCoordinator._run_swap_in_kernel = run_and_count


def _add_methods(steps: StepFile) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    process = Scheduler.process_batch_result

    def timed(self: Any, batch: Any, result: Any) -> Any:
        is_step = batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify()
        size = batch.batch_size()
        answer = process(self, batch, result)  # waits for the step's tokens
        if is_step and size:
            waiting = len(self.waiting_queue) + len(self.disagg_decode_prealloc_queue.queue)
            waiting += len(self.disagg_decode_transfer_queue.queue)
            steps.add(time.perf_counter(), size, result.get_num_generated_tokens(size), waiting)
        return answer

    def bench_independent(self: Any, overlap: float) -> None:
        with torch.inference_mode():
            forced().use_independent(overlap)

    def bench_trace(self: Any, path: str, context: int) -> None:
        with torch.inference_mode():
            forced().use_trace(np.load(path), context)

    def bench_fill_keys(self: Any) -> None:
        """Random index keys: zeros would give all positions one score, which no top-k kernel is made for."""
        key_bytes = PAGE_SIZE * KEY_BYTES
        with torch.inference_mode():
            for buffer in self.tp_worker.model_runner.token_to_kv_pool.index_k_with_scale_buffer:
                for pages in buffer.split(1 << 14):
                    keys = torch.randn((len(pages), key_bytes), device=pages.device, dtype=torch.bfloat16)
                    pages[:, :key_bytes] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
                    scales = torch.full((len(pages), PAGE_SIZE), 0.05, device=pages.device)
                    pages[:, key_bytes:] = scales.view(torch.uint8)
        torch.cuda.synchronize()

    def bench_state(self: Any, path: str) -> None:
        """Write what the engine really has."""
        coordinator, allocator = self.hisparse_coordinator, self.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        tensors = [*pool.kv_buffer, *pool.index_k_with_scale_buffer]
        state = {
            "logical_tokens": getattr(allocator, "size_full", allocator.size),
            "kv_pool_gib": round(sum(each.numel() * each.element_size() for each in tensors) / 2**30, 3),
        }
        if coordinator is not None:
            state["host_tokens"] = coordinator.mem_pool_host.size
            if hasattr(coordinator, "bench_counts"):
                state["looked_up"], state["missed"] = coordinator.bench_counts.tolist()
        Path(path).write_text(json.dumps(state))

    def bench_profile_start(self: Any) -> None:
        torch.cuda.synchronize()
        self.bench_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.bench_profiler.start()
        self.bench_profiled_from = len(steps)

    def bench_profile_stop(self: Any, path: str) -> None:
        torch.cuda.synchronize()
        self.bench_profiler.stop()
        num_steps = max(len(steps) - self.bench_profiled_from, 1)
        Path(path).write_text(json.dumps(times_by_kind(device_times(self.bench_profiler), num_steps)))

    for method in (
        bench_independent, bench_trace, bench_fill_keys, bench_state, bench_profile_start, bench_profile_stop,
    ):  # fmt: skip
        setattr(Scheduler, method.__name__, method)
    Scheduler.process_batch_result = timed

"""Where the device time of an engine's decode steps goes, by kind of kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

NAME_LENGTH = 120  # of a kernel's name in a result

# Kind of work -> what the names of its kernels contain; the first that fits.
KINDS = {
    "copies": r"hisparse.*(gather_kernel|write_back|stage_rows|save_rows)|gather_rows|swap_in"
    r"|load_cache_to_device_buffer|hicache",
    "resolve": r"^(?!.*(select_positions|indexer_|_keys_kernel)).*hisparse",
    "communication": r"nccl|all_?reduce|all_?gather|reduce_scatter|cross_device",
    "forced selection": r"^_select$",
    "attention": r"mla.*sparse|sparse.*mla|flash::|flash_fwd|flash_mla|FlashAttn|combine_kernel|get_mla_metadata"
    r"|sched_meta",
    "indexer": r"select_positions|_keys_kernel|mqa_logits|topk_transform|fast_topk|hadamard"
    r"|cooperative_topk|persistent_topk|top_?k.*(radix|per_row)|_fused_q_kernel|indexer",
    "experts": r"moe|single_group_topk|grouped_topk|expert",
    "matrix products": r"nvjet|gemm|cublas|cutlass|splitK",
}


def times_by_kind(kernels: Iterable[tuple[str, float]], num_steps: int) -> dict[str, float]:
    """Milliseconds per step of each kind of kernel, longest first.

    NOTE: kernels that run beside each other count in full, so that the sum may exceed the step: a gather starts while
    resolve runs, and waits for it.

    Args:
        kernels: names and microseconds.
        num_steps: steps in which they were launched.
    """
    times = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, microseconds in kernels:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
        times[kind] += microseconds / 1e3 / num_steps
    return {kind: round(time, 3) for kind, time in sorted(times.items(), key=lambda item: -item[1]) if time}


def idle_time(spans: Iterable[tuple[float, float]], num_steps: int) -> float:
    """Milliseconds per step, between the first start and the last end, in which no kernel runs.

    Args:
        spans: start and end of each kernel in microseconds.
        num_steps: steps in which they were launched.
    """
    idle, busy_until = 0.0, float("inf")
    for start, end in sorted(spans):
        idle += max(start - busy_until, 0.0)
        busy_until = end if busy_until == float("inf") else max(busy_until, end)
    return round(idle / 1e3 / num_steps, 3)


def device_times(profiler: torch.profiler.profile) -> Iterator[tuple[str, float]]:
    """Names and microseconds of the kernels and copies that a stopped profiler has seen."""
    for event in _device_events(profiler):
        yield event.name, event.time_range.elapsed_us()


def _device_events(profiler: torch.profiler.profile) -> Iterator[Any]:
    return (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)


class KernelProfile:
    """Methods of vLLM's worker, for `collective_rpc`: profile the device between two calls."""

    _kernel_profiler: Any = None

    def start_kernel_profile(self) -> None:
        torch.cuda.synchronize()
        self._kernel_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._kernel_profiler.start()

    def stop_kernel_profile(self, num_steps: int) -> dict[str, float]:
        """`times_by_kind` of what ran since, and `idle_time` as the kind "idle"."""
        profiler = self._stop()
        spans = [(event.time_range.start, event.time_range.end) for event in _device_events(profiler)]
        return times_by_kind(device_times(profiler), num_steps) | {"idle": idle_time(spans, num_steps)}

    def stop_kernel_names(self, num_names: int) -> tuple[dict[str, float], dict[str, float]]:
        """Milliseconds of what ran since by kind, as `stop_kernel_profile` of one step, and those of the kernels that
        took longest, by the starts of their names."""
        profiler, times = self._stop(), Counter[str]()
        spans = [(event.time_range.start, event.time_range.end) for event in _device_events(profiler)]
        for name, microseconds in device_times(profiler):
            times[name[:NAME_LENGTH]] += microseconds / 1e3
        kinds = times_by_kind(device_times(profiler), 1) | {"idle": idle_time(spans, 1)}
        return kinds, {name: round(time, 3) for name, time in times.most_common(num_names)}

    def _stop(self) -> torch.profiler.profile:
        torch.cuda.synchronize()
        profiler, self._kernel_profiler = self._kernel_profiler, None
        profiler.stop()
        return profiler

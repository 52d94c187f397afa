"""Rates between host memory and the GPU, which decide how fast missed rows arrive."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_hisparse.cli.doctor.checks import in_one_line
from vllm_hisparse.cli.doctor.report import Report, Status

if TYPE_CHECKING:
    import torch

COPY_BYTES = 1 << 30
ROW_BYTES = 656  # a DSA model's fp8 row, the smallest row that is copied
NUM_ROWS = 1 << 17
SLOW_ROWS_GB_S = 20.0
GIB = 2**30


def measure_rates(report: Report, host_pool_gib: float) -> None:
    """Measure copies each way and scattered rows, with a pool of the intended size in each kind of memory."""
    import torch

    device = torch.device("cuda", 0)
    has_managed = measure_managed(report, host_pool_gib, device)
    measure_pinned(report, host_pool_gib, device, Status.warning if has_managed else Status.error)


def measure_managed(report: Report, host_pool_gib: float, device: torch.device) -> bool:
    """Measure scattered rows in managed memory; return False if there is none, or if the pool is too large for it."""
    import torch

    from vllm_hisparse.kv_manager.rows.managed_memory import (
        ManagedMemory,
        NoManagedMemoryError,
        allocate_managed,
        why_not_managed,
    )

    start = time.perf_counter()
    try:
        if (reason := why_not_managed(int(host_pool_gib * GIB))) is not None:
            report.add("managed memory", Status.note, f"not measured: {reason}")
            return False
        memory = torch.frombuffer(allocate_managed(int(host_pool_gib * GIB)), dtype=torch.uint8)
        report.rates["fill_s"] = time.perf_counter() - start
        measure_rows(report, ManagedMemory().device_view(memory), device, "managed")
    except NoManagedMemoryError as error:
        report.add("managed memory", Status.note, in_one_line(error), "Host pools are pinned here.")
        return False
    except (RuntimeError, OSError) as error:  # pinned memory is measured all the same
        report.add("managed memory", Status.warning, in_one_line(error))
        return False
    found = f"{report.rates['fill_s']:.1f} s for {host_pool_gib:g} GiB"
    report.add("managed memory", Status.ok, found, "A pool that does not fit beside the weights is pinned.")
    return True


def measure_pinned(report: Report, host_pool_gib: float, device: torch.device, if_refused: Status) -> None:
    """Measure copies each way and scattered rows in pinned memory.

    Args:
        report: gets rates and findings.
        host_pool_gib: size of the pool.
        device: the GPU.
        if_refused: severity of a failure to pin the pool.
    """
    import torch

    from vllm_hisparse.kv_manager.rows.pinned_memory import PinnedMemory

    memory = torch.frombuffer(mmap.mmap(-1, int(host_pool_gib * GIB)), dtype=torch.uint8)
    start = time.perf_counter()
    try:
        pinned = PinnedMemory(memory)
    except RuntimeError as error:
        report.add("pinning", if_refused, in_one_line(error))
        return
    report.rates["pin_s"] = time.perf_counter() - start
    try:
        view = pinned.device_view(memory)
        measure_copies(report, view, device)
        measure_rows(report, view, device, "pinned")
    finally:
        start = time.perf_counter()
        pinned.close()
        report.rates["unpin_s"] = time.perf_counter() - start
    slow = report.rates["pin_s"] > 10
    found = f"{report.rates['pin_s']:.1f} s for {host_pool_gib:g} GiB, {report.rates['unpin_s']:.1f} s to give it back"
    advice = "Let start-up probe and termination grace period of a server allow for it." if slow else ""
    report.add("pinning", Status.note if slow else Status.ok, found, advice)


def median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of some work on the GPU, after one run for warm-up."""
    import torch

    work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def measure_copies(report: Report, view: torch.Tensor, device: torch.device) -> None:
    """Measure copies of up to `COPY_BYTES` each way."""
    import torch

    host = torch.empty(min(COPY_BYTES, view.numel()), dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(host, device=device)
    to_device = median_seconds(lambda: on_device.copy_(host, non_blocking=True))
    to_host = median_seconds(lambda: host.copy_(on_device, non_blocking=True))
    report.rates["copy_to_device_gb_s"] = host.numel() / to_device / 1e9
    report.rates["copy_to_host_gb_s"] = host.numel() / to_host / 1e9
    there, back = report.rates["copy_to_device_gb_s"], report.rates["copy_to_host_gb_s"]
    found, slow = f"{there:.1f} GB/s to the GPU, {back:.1f} GB/s back", min(there, back) < 20
    advice = "PCIe 5 x16 reaches 55: look at the slot's width (nvidia-smi -q, Link Width) and the NUMA node."
    report.add("copies", Status.warning if slow else Status.ok, found, advice if slow else "")


def measure_rows(report: Report, view: torch.Tensor, device: torch.device, memory: str) -> None:
    """Measure how fast the kernel copies scattered rows.

    Args:
        report: gets the rate and a finding.
        view: [bytes] uint8 host pool, as the device sees it.
        device: the GPU.
        memory: kind of memory of the pool, as in option `host_pool_memory`.
    """
    import torch

    from vllm_hisparse.ops.cuda_ops import CudaSwapInOps

    ops, num_pool_rows = CudaSwapInOps(), min(view.numel() // ROW_BYTES, torch.iinfo(torch.int32).max)
    rows = view[: num_pool_rows * ROW_BYTES].view(num_pool_rows, ROW_BYTES)
    ids = torch.randint(num_pool_rows, (NUM_ROWS,), dtype=torch.int32, device=device)
    out = torch.empty(NUM_ROWS, ROW_BYTES, dtype=torch.uint8, device=device)
    seconds = median_seconds(lambda: ops.stage_rows(rows, ids, 1, out))
    rate = report.rates[f"{memory}_rows_gb_s"] = NUM_ROWS * ROW_BYTES / seconds / 1e9
    slow = rate < SLOW_ROWS_GB_S
    advice = "This rate decides the speed of decode steps that miss rows."
    if memory == "pinned":
        advice += " Plan with it: vllm-hisparse plan --gpu FILE."
    status = Status.warning if slow else Status.ok
    report.add(f"scattered rows of {ROW_BYTES} bytes, {memory}", status, f"{rate:.1f} GB/s", advice if slow else "")

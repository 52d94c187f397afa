"""`benchmarks.process_memory`: memory of every kind is found under its name."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.process_memory import PythonGrowth, kinds_mib, malloc_mib, memory, own_mib

NUM_BYTES = 64 << 20


def in_own_process(function: Callable[..., None], *args: Any) -> None:
    """Call a function in a new process, because looking at the heap of one that runs all tests takes many seconds."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(function, *args).result()


@pytest.mark.slow
def test_memory_of_its_own_is_in_no_file(tmp_path: Path) -> None:
    in_own_process(allocate_memory_of_its_own, tmp_path / "file")


def allocate_memory_of_its_own(path: Path) -> None:
    path.write_bytes(bytes(64 << 20))
    gc.collect()  # what other tests have left must not go in between
    before = memory()
    with path.open("r+b") as file, mmap(file.fileno(), 0) as mapped:
        assert sum(mapped[:: 1 << 12]) == 0  # every page is looked at
        with_file = memory()
    private = mmap(-1, NUM_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    private.write(bytes(NUM_BYTES))
    with_private, shared = memory(), mmap(-1, 64 << 20)
    shared.write(bytes(64 << 20))
    with_shared = memory()
    assert with_file["rss_mib"]["engine"] > before["rss_mib"]["engine"] + 50
    mib = [each["own_mib"]["engine"] for each in (before, with_file, with_private, with_shared)]
    assert np.diff(mib) == pytest.approx([0, 64, 64], abs=16), len(private)


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Kinds that grew by more than noise, in MiB."""
    sizes = {kind: after[kind] - before.get(kind, 0) for kind in after}
    return {kind: size for kind, size in sizes.items() if size > 16}


@pytest.mark.long
def test_kinds_of_memory_are_told_apart(tmp_path: Path) -> None:
    gc.collect()
    path = tmp_path / "file"
    path.write_bytes(bytes(NUM_BYTES))
    before = kinds_mib()
    private = mmap(-1, NUM_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    private.write(bytes(NUM_BYTES))
    shared = mmap(-1, NUM_BYTES)
    shared.write(bytes(NUM_BYTES))
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, NUM_BYTES)
    pool = mmap(descriptor, NUM_BYTES)
    pool.write(bytes(NUM_BYTES))
    with path.open("r+b") as file, mmap(file.fileno(), 0) as mapped:
        mapped.write(bytes(NUM_BYTES))  # in a file: not the process's own
        after, own = kinds_mib(), own_mib()
    os.close(descriptor)
    expected = {"anonymous": 64, "shared zero": 64, "shared memfd:pool": 64}
    assert growth(before, after) == pytest.approx(expected, abs=8), (len(private), len(shared), len(pool))
    assert sum(after.values()) == pytest.approx(own, abs=8)


def test_malloc_tells_large_blocks_from_small_ones() -> None:
    before = malloc_mib()
    small = [bytearray(32 << 10) for _ in range(1024)]
    with_small = malloc_mib()
    # Larger than all that is free in the arenas: malloc would take that, for a large block, too.
    num_large = NUM_BYTES + (int(with_small["free"]) + 1 << 20)
    large = bytearray(num_large)
    with_large = malloc_mib()
    # NOTE: small blocks may lie in what other tests have freed, so that the arenas do not grow.
    assert with_small["in_use"] - before["in_use"] == pytest.approx(32, abs=8), len(small)
    assert with_small["mapped"] == pytest.approx(before["mapped"], abs=8)
    assert with_large["mapped"] - with_small["mapped"] == pytest.approx(len(large) / 2**20, abs=8)
    assert with_large["in_use"] == pytest.approx(with_small["in_use"], abs=8)
    del small
    assert malloc_mib()["in_use"] < with_large["in_use"] - 16


@pytest.mark.slow
def test_pinned_memory_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.current": 3 << 20, "active_bytes.current": 1 << 20}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 << 20)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    found = memory()
    assert (found["device_mib"], found["pinned_mib"]) == (5.0, {"allocated": 3.0, "active": 1.0})
    stats.clear()  # nothing has been pinned
    assert memory()["pinned_mib"] == {"allocated": 0.0, "active": 0.0}


class Kept:
    """Objects that only this file makes."""

    def __init__(self) -> None:
        self.self = self


@pytest.mark.slow
def test_growth_in_python_is_found_by_its_place() -> None:
    in_own_process(grow)


def grow() -> None:
    growth = PythonGrowth()
    early = [bytearray(1 << 20) for _ in range(8)]
    growth.begin()
    early.clear()  # shrinks by more than anything grows
    late = [bytearray(1 << 20) for _ in range(4)]
    objects = [Kept() for _ in range(1000)]
    largest = growth.largest()
    growth.close()
    (place, kib), *_ = largest["python_kib"].items()
    assert place.startswith(__file__) and kib == pytest.approx(4096, abs=64), len(late)
    assert largest["python_objects"][f"{__name__}.Kept"] == len(objects)

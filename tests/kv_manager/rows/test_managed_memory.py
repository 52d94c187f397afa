"""Managed memory without a device: `Library` gives memory of the C library instead."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace
from unittest import TestCase

import psutil
import pytest
import torch

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.rows import host_memory, managed_memory
from vllm_hisparse.kv_manager.rows.free_memory import FreeMemory, host_pool_bytes
from vllm_hisparse.kv_manager.rows.host_memory import own_memory
from vllm_hisparse.kv_manager.rows.managed_memory import ManagedMemory, allocate_managed

LIBC = ctypes.CDLL(None)
LIBC.aligned_alloc.restype = ctypes.c_void_p
PAGE = 4096
NUM_BYTES = 5 * PAGE


class Library:
    """Three of the library's functions. Memory is not zero at first, and cannot be mapped before it is filled."""

    def __init__(self, error: str | None = None, error_of_map: str | None = None):
        self.error, self.error_of_map = error, error_of_map
        self.sizes: dict[int, int] = {}
        self.device: int | None = None  # current one
        self.mapped: dict[int, bytes] = {}

    def allocate_managed(self, num_bytes: int, device: int) -> int:
        if self.error is not None:
            raise RuntimeError(self.error)
        address = LIBC.aligned_alloc(PAGE, num_bytes)
        ctypes.memset(address, 0xFF, num_bytes)
        self.sizes[address] = num_bytes
        return address

    def map_managed(self, address: int, num_bytes: int, device: int) -> None:
        assert self.sizes[address] == num_bytes and device == 3
        if self.error_of_map is not None:
            raise RuntimeError(self.error_of_map)
        self.mapped[address] = ctypes.string_at(address, num_bytes)

    def free_managed(self, address: int) -> None:
        assert self.device == 3
        del self.sizes[address]
        LIBC.free(ctypes.c_void_p(address))


def use(monkeypatch: pytest.MonkeyPatch, library: Library) -> Library:
    monkeypatch.setattr(managed_memory, "kernels", lambda: library)
    monkeypatch.setattr(managed_memory, "CHUNK_BYTES", 2 * PAGE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (NUM_BYTES, 2 * NUM_BYTES))  # free, total

    def of_device(device: int) -> nullcontext[None]:
        library.device = device
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", of_device)
    return library


def test_memory_is_filled_before_the_device_maps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = use(monkeypatch, Library())
    memory = allocate_managed(NUM_BYTES)
    assert len(memory) == NUM_BYTES
    assert library.mapped == {ctypes.addressof(memory): bytes(NUM_BYTES)}


def test_a_forked_process_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    library = use(monkeypatch, Library())
    memory = allocate_managed(NUM_BYTES)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del memory
    gc.collect()
    assert library.sizes


def test_memory_that_cannot_be_freed_counts_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    library, here = use(monkeypatch, Library()), psutil.Process()
    before, memory = host_pool_bytes(here), allocate_managed(NUM_BYTES)

    def fail(address: int) -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(library, "free_managed", fail)
    del memory
    gc.collect()
    assert host_pool_bytes(here) - before == NUM_BYTES


def test_memory_is_freed_with_the_last_tensor_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = use(monkeypatch, Library())
    memory = allocate_managed(NUM_BYTES)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[PAGE:]
    tensor[:] = 7
    assert bytes(memory[PAGE : PAGE + 2]) == b"\7\7"
    del memory
    gc.collect()
    assert library.sizes
    del tensor
    gc.collect()
    assert not library.sizes


def test_memory_that_runs_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that other threads are filling counts. Nothing stays behind, and the pool is not pinned instead."""
    library = use(monkeypatch, Library())
    memset, all_have_looked, looks, num_filled = ctypes.memset, Event(), [], []

    def look() -> FreeMemory:
        looks.append(1)
        if len(looks) == 3:
            all_have_looked.set()
        return FreeMemory(4 * PAGE, "free host memory")

    def fill(address: int, value: int, size: int) -> None:
        if value == 0:
            assert all_have_looked.wait(30)
            num_filled.append(size)
        memset(address, value, size)

    monkeypatch.setattr(managed_memory, "free_memory", look)
    monkeypatch.setattr(ctypes, "memset", fill)
    with pytest.raises(RuntimeError, match=r"failed after 0\.0 GiB, because 0\.0 GiB are left \(free host memory\)"):
        own_memory(NUM_BYTES, False, "auto")
    gc.collect()
    assert num_filled == [2 * PAGE, 2 * PAGE] and not library.sizes and not library.mapped


def test_others_see_how_much_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process has the file, too; it counts once."""
    library, here = use(monkeypatch, Library()), psutil.Process()
    before, memset, seen = host_pool_bytes(here), ctypes.memset, []

    def watch(address: int, value: int, size: int) -> None:
        memset(address, value, size)
        if value == 0:
            seen.append(host_pool_bytes(here) - before)

    monkeypatch.setattr(managed_memory, "NUM_THREADS", 1)
    monkeypatch.setattr(ctypes, "memset", watch)
    memory = allocate_managed(NUM_BYTES)
    monkeypatch.setattr(ctypes, "memset", memset)
    assert seen == [0, 2 * PAGE, 4 * PAGE]
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert host_pool_bytes(here) - before == NUM_BYTES
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    del memory
    gc.collect()
    assert host_pool_bytes(here) == before and not library.sizes


@pytest.mark.parametrize("kind", ["auto", "managed"])
def test_a_pool_of_managed_memory_is_no_file(monkeypatch: pytest.MonkeyPatch, kind: host_memory.MemoryKind) -> None:
    use(monkeypatch, Library())
    pool = own_memory(NUM_BYTES, False, kind)
    assert isinstance(pool.memory, ctypes.Array) and pool.file is None


@pytest.mark.parametrize("kind", ["auto", "managed"])
def test_a_pool_that_is_larger_than_the_free_memory_of_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: host_memory.MemoryKind
) -> None:
    """The pool is pinned unless the user asked for managed memory, who is warned."""
    library = use(monkeypatch, Library())
    with TestCase().assertLogs(host_memory.logger, "INFO") as logs:
        pool = own_memory(NUM_BYTES + 1, False, kind)
    assert isinstance(pool.memory, mmap.mmap) is (kind == "auto")
    assert bool(library.sizes) is (kind == "managed")
    assert logs.records[0].levelname == ("INFO" if kind == "auto" else "WARNING")
    assert "could stall" in logs.output[0] and "host_pool_memory" in logs.output[0]


@pytest.mark.parametrize("library", [Library("not supported (801)"), Library(error_of_map="not supported (801)")])
def test_a_device_without_managed_memory(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    """The pool is pinned, with a warning. Who asked for managed memory gets an error."""
    use(monkeypatch, library)
    warnings: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr(host_memory, "logger", logger)
    assert not isinstance(own_memory(NUM_BYTES, False, "auto").memory, ctypes.Array)
    assert len(warnings) == 1 and "is pinned" in warnings[0] and "not supported" in warnings[0]
    with pytest.raises(HiSparseConfigError, match=r"^host_pool_memory: got 'managed', expected pinned.*not supported"):
        own_memory(NUM_BYTES, False, "managed")
    gc.collect()
    assert not library.sizes


@pytest.mark.parametrize("kind", ["auto", "managed"])
def test_kernels_that_were_not_built_are_no_reason_to_pin(
    monkeypatch: pytest.MonkeyPatch, kind: host_memory.MemoryKind
) -> None:
    use(monkeypatch, Library())

    def missing() -> None:
        raise RuntimeError("The CUDA kernels of vllm_hisparse are not built")

    monkeypatch.setattr(managed_memory, "kernels", missing)
    with pytest.raises(RuntimeError, match="not built"):
        own_memory(NUM_BYTES, False, kind)


def test_waits_for_the_device_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(synchronize=lambda: calls.append("synchronize")))
    ManagedMemory().close()
    assert calls == ["synchronize"]

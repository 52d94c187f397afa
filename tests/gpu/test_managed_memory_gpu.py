"""Managed memory of the host pool: the CPU and kernels read what the other one writes, also in CUDA graphs."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from vllm_hisparse.kv_manager.rows.managed_memory import (
    CHUNK_BYTES,
    ManagedMemory,
    NoManagedMemoryError,
    allocate_managed,
)
from vllm_hisparse.ops.registry import swap_in_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROW_BYTES, NUM_ROWS, LARGE = 656, 1000, 256 << 20


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.frombuffer(allocate_managed(LARGE), dtype=torch.uint8)


def test_memory_of_several_chunks_is_zero() -> None:
    memory = torch.frombuffer(allocate_managed(CHUNK_BYTES + 4096), dtype=torch.int64)
    assert not memory.any()
    assert not ManagedMemory().device_view(memory).any().item()


def test_kernels_read_what_the_cpu_writes(pool: torch.Tensor) -> None:
    """Also again in a graph, when the CPU has changed the rows."""
    rows = pool[: LARGE // ROW_BYTES * ROW_BYTES].view(-1, ROW_BYTES)
    ids = torch.randperm(len(rows))[:NUM_ROWS].int()
    on_device, out = ids.cuda(), torch.empty(NUM_ROWS, ROW_BYTES, dtype=torch.uint8, device="cuda")
    ops = swap_in_ops(torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.stage_rows(rows, on_device, 1, out)
    for seed in range(3):
        rows[ids.long()] = torch.randint(0, 256, (NUM_ROWS, ROW_BYTES), generator=torch.manual_seed(seed)).byte()
        graph.replay()
        assert torch.equal(out.cpu(), rows[ids.long()])


def test_the_cpu_reads_what_kernels_write(pool: torch.Tensor) -> None:
    view = ManagedMemory().device_view(pool[4096:])
    assert view.is_cuda and view.data_ptr() == pool[4096:].data_ptr()
    places = torch.randperm(len(view))[:NUM_ROWS]
    values = torch.randint(0, 256, (NUM_ROWS,)).byte()
    view.index_copy_(0, places.cuda(), values.cuda())
    torch.cuda.synchronize()
    assert torch.equal(pool[4096:][places], values)


def test_a_failure_does_not_reach_the_next_kernel(pool: torch.Tensor) -> None:
    with pytest.raises(NoManagedMemoryError, match="CUDA error"):
        allocate_managed(0)  # CUDA refuses this size
    rows, out = pool[: 4 * ROW_BYTES].view(4, ROW_BYTES), torch.empty(4, ROW_BYTES, dtype=torch.uint8, device="cuda")
    swap_in_ops(torch.device("cuda")).stage_rows(rows, torch.arange(4, dtype=torch.int32, device="cuda"), 1, out)
    assert torch.equal(out.cpu(), rows)


def test_memory_takes_no_room_on_the_device_and_is_given_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    memory = allocate_managed(4 << 30)
    view = ManagedMemory().device_view(torch.frombuffer(memory, dtype=torch.uint8))
    view.fill_(1)
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 256 << 20
    host_bytes = memory_of_process()
    address = ctypes.addressof(memory)
    del memory, view
    gc.collect()
    assert host_bytes - memory_of_process() > 3 << 30
    assert not any(mapped <= address < end for mapped, end in mappings())


def memory_of_process() -> int:
    """Return the bytes of all mappings of this process."""
    return sum(end - start for start, end in mappings())


def mappings() -> list[tuple[int, int]]:
    with open("/proc/self/maps") as file:
        ranges = [line.split(maxsplit=1)[0].split("-") for line in file]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]

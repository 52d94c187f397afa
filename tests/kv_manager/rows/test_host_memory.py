import mmap
import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hisparse.config import HiSparseConfigError, shares_host_pool
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile
from vllm_hisparse.kv_manager.rows import host_memory
from vllm_hisparse.kv_manager.rows.free_memory import FREE_MEMORY_SHARE, FreeMemory
from vllm_hisparse.kv_manager.rows.host_memory import (
    allocate_host_pool,
    check_free_memory,
    num_host_pools,
)

NUM_BYTES = 3 * 4096 + 16
OPTION = ("host_pool_gib", 1.0)


def config(num_ranks: int, use_mla: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        parallel_config=SimpleNamespace(tensor_parallel_size=num_ranks),
    )


class Ranks:
    """Tensor parallel ranks that are threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int, same_node: list[bool] | None = None):
        self.num_ranks, self.here, self.barrier = num_ranks, threading.local(), threading.Barrier(num_ranks)
        self.said: list[Any] = [None] * num_ranks
        monkeypatch.setattr(host_memory, "get_tp_group", self.group)
        monkeypatch.setattr(host_memory, "in_the_same_node_as", lambda _: same_node or [True] * num_ranks)
        monkeypatch.setattr(host_memory.torch.distributed, "all_gather_object", self.gather)

    def group(self) -> SimpleNamespace:
        return SimpleNamespace(world_size=self.num_ranks, cpu_group=None, rank_in_group=self.here.index)

    def gather(self, gathered: list[Any], given: Any, group: None) -> None:
        self.said[self.here.index] = given
        self.barrier.wait(10)
        gathered[:] = self.said
        self.barrier.wait(10)

    def allocate(self, use_mla: bool = True) -> list[Any]:
        """The memory that every rank gets, or its exception."""
        results: list[Any] = [None] * self.num_ranks

        def run(index: int) -> None:
            self.here.index = index
            try:
                results[index] = allocate_host_pool(NUM_BYTES, config(self.num_ranks, use_mla), OPTION).memory
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=(index,)) for index in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_one_rank_writes_all_of_them_read(monkeypatch: pytest.MonkeyPatch) -> None:
    open_files = num_open_files()
    memories = Ranks(monkeypatch, 3).allocate()
    for index, memory in enumerate(memories):
        assert len(memory) == NUM_BYTES
        memory[4096 * index] = 7 + index
    for memory in memories:
        assert [memory[4096 * index] for index in range(3)] == [7, 8, 9]
    assert num_open_files() - open_files <= 3, "a mapping holds one file, and nothing else stays open"


def test_ranks_of_a_dense_model_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Ranks(monkeypatch, 2).allocate(use_mla=False)
    first[0] = 1
    assert second[0] == 0
    assert len(first) == len(second) == NUM_BYTES


def test_ranks_that_do_not_share_have_memory_of_the_kind_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    monkeypatch.setattr(host_memory, "own_memory", lambda num_bytes, has_file, kind: kinds.append(kind))
    allocate_host_pool(NUM_BYTES, config(1), OPTION, kind="managed")
    monkeypatch.setattr(host_memory, "get_tp_group", lambda: SimpleNamespace(world_size=2, cpu_group=None))
    monkeypatch.setattr(host_memory, "in_the_same_node_as", lambda _: [True, True])
    monkeypatch.setattr(host_memory.torch.distributed, "all_gather_object", lambda *_, **__: None)
    allocate_host_pool(NUM_BYTES, config(2, use_mla=False), OPTION, kind="auto")
    assert kinds == ["managed", "auto"]


def test_one_rank_asks_nobody() -> None:
    assert len(allocate_host_pool(NUM_BYTES, config(1), OPTION).memory) == NUM_BYTES


def test_refuses_to_share_over_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    results = Ranks(monkeypatch, 4, same_node=[True, True, False, False]).allocate()
    for result in results:
        assert isinstance(result, HiSparseConfigError)
        assert str(result).startswith("--tensor-parallel-size: got 4, expected GPUs of one host")


@pytest.mark.parametrize(
    ("use_mla", "same_node", "num_free_pools", "refuses"),
    [
        (True, [True, True], 1, False),
        (True, [True, True], 0, True),
        (False, [True, True], 2, False),
        (False, [True, True], 1, True),
        (False, [True, False], 1, False),
    ],
)
def test_the_pools_of_all_ranks_must_fit(
    monkeypatch: pytest.MonkeyPatch, use_mla: bool, same_node: list[bool], num_free_pools: int, refuses: bool
) -> None:
    available = int((num_free_pools + 0.5) * NUM_BYTES / FREE_MEMORY_SHARE)
    monkeypatch.setattr(host_memory, "free_memory", lambda: FreeMemory(available, "free host memory"))
    results = Ranks(monkeypatch, 2, same_node).allocate(use_mla)
    assert [isinstance(result, (HiSparseConfigError, RuntimeError)) for result in results] == [refuses] * 2
    if refuses:
        assert "host_pool_gib: got 1.0, expected a host pool of at most" in str(results[1])


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_on_one_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    ranks, map_file = Ranks(monkeypatch, 3), HostPoolFile.map

    def map_another_file(file: HostPoolFile) -> mmap.mmap:
        return map_file(replace(file, inode=-1) if ranks.here.index == failing else file)

    monkeypatch.setattr(HostPoolFile, "map", map_another_file)
    results = ranks.allocate()
    assert isinstance(results[failing], HiSparseConfigError)
    assert "is another file" in str(results[failing])
    for index in {0, 1, 2} - {failing}:
        assert isinstance(results[index], RuntimeError)
        assert str(results[index]).startswith(f"tensor parallel rank {failing} has no host pool: --tensor-parallel")


@pytest.mark.parametrize(
    ("use_mla", "num_ranks", "shares", "num_pools"),
    [(True, 1, False, 1), (True, 8, True, 1), (False, 1, False, 1), (False, 8, False, 8)],
)
def test_ranks_of_an_mla_model_share(use_mla: bool, num_ranks: int, shares: bool, num_pools: int) -> None:
    vllm_config = config(num_ranks, use_mla)
    assert shares_host_pool(vllm_config) == shares
    assert num_host_pools(vllm_config) == num_pools


def test_names_the_option_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory", lambda: FreeMemory(2**30, "free host memory"))
    check_free_memory(2**29, ("host_to_device_ratio", 2.5))
    with pytest.raises(HiSparseConfigError, match=r"^host_to_device_ratio: got 2\.5, .* not 8\.0 GiB"):
        check_free_memory(2**33, ("host_to_device_ratio", 2.5))


@pytest.mark.parametrize(
    ("free", "taken", "refuses"),
    [
        (1.1, [], False),
        (1.1, [0], True),
        (2.2, [0], False),
        (2.2, [1, 0, 1], False),
        (1.1, [1, 1, 1], False),
        (1.1, [1, 1, 0], True),
        (1.1, [5], False),
        (1.1, [5, 0], True),  # what else another one has taken is of no use to this pool
    ],
)
def test_the_pools_of_data_parallel_ranks_must_fit(
    monkeypatch: pytest.MonkeyPatch, free: float, taken: list[int], refuses: bool
) -> None:
    """Whichever of them looks first; what is free and what the others have taken is in pools."""
    pool = 2**30
    monkeypatch.setattr(host_memory, "free_memory", lambda: FreeMemory(int(free * pool), "free host memory"))
    monkeypatch.setattr(host_memory, "engines_beside", lambda: list(range(len(taken))))
    monkeypatch.setattr(host_memory, "host_pool_bytes", lambda engine: taken[engine] * pool)
    if not refuses:
        return check_free_memory(pool, OPTION)
    with pytest.raises(HiSparseConfigError, match=f"for each of {1 + len(taken)} data parallel ranks"):
        check_free_memory(pool, OPTION)

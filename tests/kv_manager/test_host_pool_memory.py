import os
import threading
from types import SimpleNamespace

import pytest

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager import host_memory
from vllm_hisparse.kv_manager.host_memory import num_host_pools, private_memory, shared_memory, shares_host_pool

NUM_BYTES = 3 * 4096 + 16


class Group:
    """Tensor parallel ranks that are threads."""

    def __init__(self, world_size: int):
        self.world_size, self.cpu_group = world_size, None
        self.barrier_, self.said = threading.Barrier(world_size), []

    def rank(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(
            world_size=self.world_size,
            cpu_group=None,
            rank_in_group=index,
            broadcast_object=lambda value: self.broadcast(index, value),
            barrier=self.barrier_.wait,
        )

    def broadcast(self, index: int, value: str | None) -> str:
        if index == 0:
            self.said.append(value)
        self.barrier_.wait()
        return self.said[0]


def map_on_all_ranks(monkeypatch: pytest.MonkeyPatch, world_size: int) -> list:
    group, here, memories = Group(world_size), threading.local(), [None] * world_size
    monkeypatch.setattr(host_memory, "get_tp_group", lambda: group.rank(here.index))
    monkeypatch.setattr(host_memory, "in_the_same_node_as", lambda _: [True] * world_size)

    def run(index: int) -> None:
        here.index = index
        memories[index] = shared_memory(NUM_BYTES)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return memories


def test_what_one_rank_writes_all_of_them_read(monkeypatch: pytest.MonkeyPatch) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    memories = map_on_all_ranks(monkeypatch, 3)
    for index, memory in enumerate(memories):
        assert len(memory) == NUM_BYTES
        memory[4096 * index] = 7 + index
    for memory in memories:
        assert [memory[4096 * index] for index in range(3)] == [7, 8, 9]
    assert len(os.listdir("/proc/self/fd")) - open_files <= 3, "a mapping holds one file, and nothing else stays open"


def test_private_memory_is_nobody_elses() -> None:
    first, second = private_memory(NUM_BYTES), private_memory(NUM_BYTES)
    first[0] = 1
    assert second[0] == 0


def test_refuses_ranks_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "get_tp_group", lambda: Group(16).rank(0))
    monkeypatch.setattr(host_memory, "in_the_same_node_as", lambda _: [True] * 8 + [False] * 8)
    with pytest.raises(HiSparseConfigError, match="--tensor-parallel-size: got 16, expected GPUs of one host"):
        shared_memory(NUM_BYTES)


@pytest.mark.parametrize(
    ("use_mla", "num_ranks", "shares", "num_pools"),
    [(True, 1, False, 1), (True, 8, True, 1), (False, 1, False, 1), (False, 8, False, 8)],
)
def test_ranks_of_an_mla_model_share(use_mla: bool, num_ranks: int, shares: bool, num_pools: int) -> None:
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        parallel_config=SimpleNamespace(tensor_parallel_size=num_ranks),
    )
    assert shares_host_pool(vllm_config) == shares
    assert num_host_pools(vllm_config) == num_pools

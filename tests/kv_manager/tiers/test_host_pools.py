import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile, HostPoolLayout
from vllm_hisparse.kv_manager.rows.host_kv_store import HostKVStore
from vllm_hisparse.kv_manager.rows.host_memory import HostPoolMemory, own_memory
from vllm_hisparse.kv_manager.tiers.host_pools import HostPools
from vllm_hisparse.layout import KVLayout

NUM_BLOCKS = 5
LAYOUTS = {
    "dsa": KVLayout(row_bytes=16, resident_row_bytes=6, num_layers=3, num_resident_layers=3, block_size=4),
    "dense": KVLayout(row_bytes=16, resident_row_bytes=0, num_layers=2, num_resident_layers=0, block_size=4),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return LAYOUTS[request.param]


def make_pool(layout: KVLayout, seed: int) -> tuple[HostKVStore, HostPoolMemory]:
    """A worker's pool with random rows."""
    pool = HostPoolLayout(layout, NUM_BLOCKS)
    memory = own_memory(pool.num_bytes, has_file=True)
    names = [f"layer{index}" for index in range(layout.num_layers)]
    store = HostKVStore(pool, names, torch.float32, memory.memory)
    torch.manual_seed(seed)
    for rows in store.main_kv.values():
        rows.copy_(torch.randn_like(rows))
    store.resident_kv.random_(0, 255)
    return store, memory


def block_of(store: HostKVStore, block_id: int) -> bytes:
    """Main KV layer by layer, then device-resident KV."""
    parts = [rows[block_id] for rows in store.main_kv.values()] + [store.resident_kv[block_id]]
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


@pytest.mark.parametrize("num_pools", [1, 2])
def test_blocks_are_what_the_workers_see(layout: KVLayout, num_pools: int) -> None:
    stores, memories = zip(*(make_pool(layout, seed) for seed in range(num_pools)), strict=True)
    pools = HostPools([memory.file for memory in memories], HostPoolLayout(layout, NUM_BLOCKS))
    block = np.zeros(pools.block_bytes, np.uint8)
    pools.read(3, block)
    expected = b"".join(block_of(store, 3) for store in stores)
    assert block.tobytes() == expected

    others = [[block_of(store, block_id) for block_id in (0, 2, 3, 4)] for store in stores]
    pools.write(1, block)
    assert b"".join(block_of(store, 1) for store in stores) == expected
    assert [[block_of(store, block_id) for block_id in (0, 2, 3, 4)] for store in stores] == others
    pools.close()


def test_a_file_that_is_gone_or_another_is_refused() -> None:
    memory = own_memory(4096, has_file=True)
    file = memory.file
    layout = HostPoolLayout(KVLayout(16, 0, 1, 0, block_size=4), 64)
    with pytest.raises(HiSparseConfigError, match="is another file"):
        HostPools([replace(file, inode=file.inode + 1)], layout)
    memory.close_file()
    assert memory.file is None
    with pytest.raises(HiSparseConfigError, match="one container"):
        HostPools([file], layout)


def test_a_mapping_outlives_the_file() -> None:
    memory = own_memory(4096, has_file=True)
    num_open = len(os.listdir("/proc/self/fd"))
    mapped = HostPoolFile.of(memory.descriptor, 4096).map()
    memory.close_file()
    memory.memory[7] = 42
    assert mapped[7] == 42
    mapped.close()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1

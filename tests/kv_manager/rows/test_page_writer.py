"""Pages land in the rows that they are for; tests/gpu has the copies on a stream."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from vllm_hisparse.kv_manager.host_pool_memory import HostPoolLayout
from vllm_hisparse.kv_manager.rows.host_kv_store import HostKVStore
from vllm_hisparse.kv_manager.rows.page_writer import make_page_writer
from vllm_hisparse.layout import KVLayout


@pytest.mark.parametrize("row_bytes", [656, 6, 1])
def test_pages_land_in_their_layers_and_blocks(row_bytes: int) -> None:
    layout = HostPoolLayout(KVLayout(row_bytes, 5, 3, 3, block_size=3), num_blocks=7)
    memory = mmap.mmap(-1, layout.num_bytes)
    store = HostKVStore(layout, ["a", "b", "c"], torch.uint8, memory)
    store.attach(torch.device("cpu"))
    rest = store.resident_kv.fill_(9).clone()
    pages = torch.arange(4 * 3 * row_bytes).remainder(251).to(torch.uint8).view(4, -1)
    places = [("c", 6), ("a", 0), ("b", 3), ("a", 6)]
    first_bytes = np.array(["abc".index(layer) * 7 + block for layer, block in places]) * pages.shape[1]
    writer = make_page_writer(store.device_pool())
    assert writer.write(pages, first_bytes).is_done()
    writer.close()
    for name, blocks in store.main_kv.items():
        for block in range(7):
            found = blocks[block].reshape(-1)
            expected = pages[places.index((name, block))] if (name, block) in places else torch.zeros_like(found)
            assert torch.equal(found, expected)
    assert torch.equal(store.resident_kv, rest)


@pytest.mark.parametrize(("page_bytes", "unit"), [(132, 4), (24, 8), (7, 1), (6, 2)])
def test_pages_land_at_any_bytes(page_bytes: int, unit: int) -> None:
    """Their places have a smaller common divisor than a page: pages of copies of device-resident KV begin anywhere."""
    pool = torch.full((100 * page_bytes,), 255, dtype=torch.uint8)
    expected, places = pool.clone(), unit + page_bytes * np.array([0, 5, 98, 12])
    pages = torch.arange(4 * page_bytes).remainder(251).to(torch.uint8).view(4, page_bytes)
    for page, place in zip(pages, places.tolist(), strict=True):
        expected[place : place + page_bytes] = page
    make_page_writer(pool).write(pages, places)
    assert torch.equal(pool, expected)

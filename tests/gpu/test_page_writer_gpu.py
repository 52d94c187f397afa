"""Pages go from a buffer on the device into host memory, on a stream of their own."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hisparse.kv_manager.host_pool_memory import HostPoolLayout
from vllm_hisparse.kv_manager.rows.host_kv_store import HostKVStore
from vllm_hisparse.kv_manager.rows.managed_memory import allocate_managed
from vllm_hisparse.kv_manager.rows.page_writer import make_page_writer
from vllm_hisparse.layout import KVLayout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_LAYERS, NUM_BLOCKS, CYCLES = 4, 40, 200_000_000


@pytest.fixture(params=["pinned", "managed"])
def allocate(request: pytest.FixtureRequest) -> Callable[[int], Any]:
    return allocate_managed if request.param == "managed" else lambda num_bytes: mmap.mmap(-1, num_bytes)


def test_imported_pages_of_a_buffer_land_beside_other_work(allocate: Callable[[int], Any]) -> None:
    """The copy waits for nothing that the device computes, and is over when it says so."""
    layout = HostPoolLayout(KVLayout(656, 132, NUM_LAYERS, NUM_LAYERS), NUM_BLOCKS)
    names = [str(layer) for layer in range(NUM_LAYERS)]
    store = HostKVStore(layout, names, torch.uint8, allocate(layout.num_bytes))
    store.attach(torch.device("cuda"))
    writer = make_page_writer(store.device_pool())
    rows = np.random.default_rng(0).permutation(NUM_LAYERS * NUM_BLOCKS)[:100]
    places = rows * 64 * 656
    pages = torch.randint(0, 256, (100, 64 * 656), dtype=torch.uint8, device="cuda")
    writer.write(pages, places)
    writer.close()
    torch.cuda.synchronize()
    pages = torch.randint(0, 256, (100, 64 * 656), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)  # a tenth of a second
    forward = torch.cuda.current_stream().record_event()
    writing = writer.write(pages, places)
    while not writing.is_done():
        assert not forward.query(), "the copy waited for the forward"
    found = torch.stack(
        [store.main_kv[names[row // NUM_BLOCKS]][row % NUM_BLOCKS].reshape(-1) for row in rows.tolist()]
    )
    assert torch.equal(found, pages.cpu())
    torch.cuda.synchronize()
    writer.close()
    store.close()


def test_imported_keys_of_a_buffer_land_in_their_layers_and_blocks(allocate: Callable[[int], Any]) -> None:
    """Their places are no multiples of a page, because all layers of a block lie side by side behind main KV."""
    layout = HostPoolLayout(KVLayout(656, 132, NUM_LAYERS, NUM_LAYERS), NUM_BLOCKS)
    names = [str(layer) for layer in range(NUM_LAYERS)]
    store = HostKVStore(layout, names, torch.uint8, allocate(layout.num_bytes))
    store.attach(torch.device("cuda"))
    writer, page_bytes = make_page_writer(store.device_pool()), 64 * 132
    rows = np.random.default_rng(0).permutation(NUM_LAYERS * NUM_BLOCKS)[:100]
    pages = torch.randint(0, 256, (100, page_bytes), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    writer.write(pages, layout.resident_kv.start + rows * page_bytes)
    writer.close()
    expected = torch.zeros(NUM_LAYERS * NUM_BLOCKS, page_bytes, dtype=torch.uint8)
    expected[torch.from_numpy(rows)] = pages.cpu()
    assert torch.equal(store.resident_kv.view(-1, page_bytes), expected)
    assert not store.pool[layout.main_kv].any()
    store.close()

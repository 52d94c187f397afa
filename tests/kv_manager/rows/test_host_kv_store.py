import mmap
from itertools import pairwise

import pytest
import torch

from vllm_hisparse.kv_manager.host_pool_memory import HostPoolLayout
from vllm_hisparse.kv_manager.rows import host_kv_store
from vllm_hisparse.kv_manager.rows.host_kv_store import HostKVStore, widest_word
from vllm_hisparse.layout import KVLayout

NUM_BLOCKS = 7
MAIN = ["m0", "m1", "m2"]
LAYOUT = KVLayout(row_bytes=24, resident_row_bytes=20, num_layers=3, num_resident_layers=2, block_size=3)
POOL = HostPoolLayout(LAYOUT, NUM_BLOCKS)


def make_store(dtype: torch.dtype = torch.bfloat16) -> HostKVStore:
    return HostKVStore(POOL, MAIN, dtype, mmap.mmap(-1, POOL.num_bytes))


def views(store: HostKVStore) -> list[torch.Tensor]:
    return [*store.main_kv.values(), store.resident_kv]


@pytest.mark.parametrize(("dtype", "elements"), [(torch.bfloat16, 12), (torch.float32, 6), (torch.uint8, 24)])
def test_shapes(dtype: torch.dtype, elements: int) -> None:
    store = make_store(dtype)
    assert {name: tuple(tensor.shape) for name, tensor in store.main_kv.items()} == dict.fromkeys(
        MAIN, (NUM_BLOCKS, 3, elements)
    )
    assert store.resident_kv.shape == (NUM_BLOCKS, 120)
    assert all(tensor.dtype == dtype for tensor in store.main_kv.values())
    assert all(tensor.is_contiguous() for tensor in views(store))


def test_one_page_aligned_allocation_without_gaps_or_overlaps() -> None:
    store = make_store()
    ranges = sorted((tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in views(store))
    assert ranges[0][0] % mmap.PAGESIZE == 0
    for (start, size), (next_start, _) in pairwise(ranges):
        assert start + size == next_start
    assert sum(size for _, size in ranges) == NUM_BLOCKS * LAYOUT.host_block_bytes


def test_layers_do_not_share_a_storage() -> None:
    """NIXL takes layers of one storage for parts of the same blocks."""
    storages = [tensor.untyped_storage() for tensor in make_store().main_kv.values()]
    assert len({storage.data_ptr() for storage in storages}) == len(MAIN)
    assert all(storage.nbytes() == NUM_BLOCKS * LAYOUT.block_size * LAYOUT.row_bytes for storage in storages)


def test_views_do_not_overlap() -> None:
    store = make_store()
    patterns = []
    for index, tensor in enumerate(views(store)):
        raw = tensor.view(torch.uint8)
        pattern = (torch.arange(raw.numel()) * 7 + 31 * index).remainder(251).to(torch.uint8).view(raw.shape)
        raw.copy_(pattern)
        patterns.append(pattern)
    for tensor, pattern in zip(views(store), patterns, strict=True):
        assert torch.equal(tensor.view(torch.uint8), pattern)


def device_cache(num_blocks: int = 5) -> torch.Tensor:
    """Blocks of two layers' keys, with something else between them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num_blocks, 130), dtype=torch.uint8, generator=generator)[:, :120]


def test_saved_keys_come_back_in_other_device_blocks() -> None:
    store, cache = make_store(), device_cache()
    host_before = store.resident_kv.clone()
    store.save_resident_kv(cache, [(4, 1), (2, 6)])
    restored = torch.zeros_like(cache)
    store.restore_resident_kv(restored, [(6, 0), (1, 3)])
    assert torch.equal(restored[[0, 3]], cache[[2, 4]])
    assert not restored[[1, 2, 4]].any()
    untouched = [0, 2, 3, 4, 5]
    assert torch.equal(store.resident_kv[untouched], host_before[untouched])


def test_nothing_to_copy() -> None:
    store, cache = make_store(), device_cache()
    host_before, device_before = store.resident_kv.clone(), cache.clone()
    store.save_resident_kv(cache, [])
    store.restore_resident_kv(cache, [])
    assert torch.equal(store.resident_kv, host_before) and torch.equal(cache, device_before)


@pytest.mark.parametrize("limit", [1, 240, 1 << 20])
def test_many_blocks_travel_through_memory_of_bounded_size(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Copies are right in both directions, and in words if the layout allows it."""
    monkeypatch.setattr(host_kv_store, "CHUNK_BYTES", limit)
    store, cache, sizes = make_store(), device_cache(NUM_BLOCKS), []
    select = torch.Tensor.index_select
    monkeypatch.setattr(
        torch.Tensor,
        "index_select",
        lambda source, *args: sizes.append((found := select(source, *args)).nbytes) or found,
    )
    order = [(3, 6), (0, 2), (5, 1), (2, 0), (6, 3)]
    store.save_resident_kv(cache, order)
    restored = torch.zeros_like(cache)
    store.restore_resident_kv(restored, [(host, device) for device, host in order])
    kept = [device for device, _ in order]
    assert torch.equal(restored[kept], cache[kept]) and not restored[[1, 4]].any()
    assert max(sizes) <= max(limit, cache.shape[1]) and sum(sizes) == 2 * 5 * cache.shape[1]


@pytest.mark.parametrize(
    ("offset", "width", "expected"),
    [
        (0, 128, torch.int64),
        (64, 128, torch.int64),
        (4, 128, torch.int32),
        (0, 124, torch.int32),
        (0, 127, torch.uint8),
    ],
)
def test_words_of_blocks(offset: int, width: int, expected: torch.dtype) -> None:
    blocks = torch.zeros(3, 256, dtype=torch.uint8)
    assert widest_word(blocks[:, :128], blocks[:, offset : offset + width]) == expected
    odd = torch.zeros(3, 130, dtype=torch.uint8)[:, :128]
    assert widest_word(odd, blocks[:, :128]) == torch.int16

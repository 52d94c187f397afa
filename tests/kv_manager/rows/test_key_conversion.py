"""Blocks of device-resident KV with keys in 4 bits: what becomes of each layer on the way to the host and back."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_hisparse.kv_manager.host_pool_memory import HostPoolLayout
from vllm_hisparse.kv_manager.rows import host_kv_store, key_conversion
from vllm_hisparse.kv_manager.rows.host_kv_store import HostKVStore
from vllm_hisparse.kv_manager.rows.key_conversion import NARROW_BYTES, WIDE_BYTES, KeyConversion
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.ops import indexer_keys

NARROW, PLAIN = (NARROW_BYTES, True), (128, False)


def random_blocks(layers: list[tuple[int, bool]], num_blocks: int) -> torch.Tensor:
    """Device blocks with keys of random numbers and other bytes of all values."""
    generator, parts = torch.Generator().manual_seed(len(layers)), []
    for size, is_narrow in layers:
        part = torch.randint(0, 256, (num_blocks, size), generator=generator, dtype=torch.uint8)
        if is_narrow:
            keys = torch.randn(num_blocks, indexer_keys.TILE, indexer_keys.HEAD_DIM, generator=generator)
            elements, words = indexer_keys.quantize(keys)
            part = torch.cat((elements.flatten(1), words.view(torch.uint8)), 1)
        parts.append(part)
    return torch.cat(parts, 1)


def keys_of(narrow: torch.Tensor) -> torch.Tensor:
    views = indexer_keys.key_views(narrow.contiguous().unflatten(1, (indexer_keys.TILE, -1)))
    values, scales = indexer_keys.dequantize(*views)
    return values.float() * scales[..., None]


@pytest.mark.parametrize("layers", [[NARROW], [NARROW] * 3, [PLAIN, NARROW, NARROW, PLAIN, PLAIN, NARROW], [PLAIN]])
def test_there_and_back(layers: list[tuple[int, bool]]) -> None:
    conversion, blocks = KeyConversion(layers), random_blocks(layers, 5)
    on_host = conversion.to_host(blocks)
    sizes = [WIDE_BYTES if is_narrow else size for size, is_narrow in layers]
    assert on_host.shape == (5, conversion.host_bytes) and conversion.host_bytes == sum(sizes)
    back = conversion.to_device(on_host)
    assert back.shape == blocks.shape == (5, conversion.device_bytes)
    first = first_on_host = 0
    for (size, is_narrow), host_size in zip(layers, sizes, strict=True):
        before, after = (part[:, first : first + size] for part in (blocks, back))
        if is_narrow:
            expected = torch.empty(5, WIDE_BYTES, dtype=torch.uint8)
            indexer_keys.widen_blocks(before.contiguous(), expected)
            assert torch.equal(on_host[:, first_on_host : first_on_host + host_size], expected)
            assert torch.equal(keys_of(after), keys_of(before))
        else:
            assert torch.equal(after, before)
            assert torch.equal(on_host[:, first_on_host : first_on_host + host_size], before)
        first, first_on_host = first + size, first_on_host + host_size


class NewMemory(TorchDispatchMode):
    """Adds up the bytes that torch's operators allocate, of results that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.num_bytes += result.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("layers", [[NARROW] * 3, [PLAIN, NARROW, NARROW, PLAIN, NARROW]])
@pytest.mark.parametrize("limit_in_blocks", [1, 2, 100])
def test_many_blocks_are_converted_in_memory_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch, layers: list[tuple[int, bool]], limit_in_blocks: int
) -> None:
    """Copies of the blocks count as well as the two forms that they have."""
    monkeypatch.setattr(key_conversion, "widen_blocks", lambda narrow, wide: wide.zero_())
    monkeypatch.setattr(key_conversion, "narrow_blocks", lambda wide, narrow: narrow.zero_())
    conversion, taken = KeyConversion(layers), []

    def measured(convert: Any) -> Any:
        def measure(blocks: torch.Tensor) -> torch.Tensor:
            with NewMemory() as memory:
                result = convert(blocks)
            taken.append(blocks.nbytes + memory.num_bytes)
            return result

        return measure

    for name in ("to_host", "to_device"):
        monkeypatch.setattr(conversion, name, measured(getattr(conversion, name)))
    num_narrow = sum(is_narrow for _, is_narrow in layers)
    layout = KVLayout(
        row_bytes=24,
        resident_row_bytes=indexer_keys.WIDE_KEY_BYTES,
        num_layers=1,
        num_resident_layers=num_narrow,
        block_size=indexer_keys.TILE,
        full_kv_row_bytes=sum(size for size, is_narrow in layers if not is_narrow) // indexer_keys.TILE,
        narrow_key_bytes=indexer_keys.KEY_BYTES,
    )
    pool = HostPoolLayout(layout, 7)
    store = HostKVStore(pool, ["m"], torch.bfloat16, mmap.mmap(-1, pool.num_bytes))
    store.attach(torch.device("cpu"), conversion)
    limit = limit_in_blocks * 2 * (layout.resident_block_bytes + layout.saved_block_bytes)
    monkeypatch.setattr(host_kv_store, "CHUNK_BYTES", limit)
    cache, pairs = torch.zeros(7, conversion.device_bytes, dtype=torch.uint8), [(index, index) for index in range(7)]
    store.save_resident_kv(cache, pairs)
    store.restore_resident_kv(cache, pairs)
    assert max(taken) <= limit
    assert len(taken) == 2 * -(-7 // limit_in_blocks), "fewer blocks at a time than fit"

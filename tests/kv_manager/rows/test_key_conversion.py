"""Blocks of device-resident KV with keys in 4 bits: what becomes of each layer on the way to the host and back."""

from __future__ import annotations

import pytest
import torch

from vllm_hisparse.kv_manager.rows.key_conversion import NARROW_BYTES, WIDE_BYTES, KeyConversion
from vllm_hisparse.ops import indexer_keys

NARROW, PLAIN = (NARROW_BYTES, True), (48, False)


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

"""Indexer keys in 4 bits: the torch reference against plain arithmetic."""

from __future__ import annotations

import pytest
import torch

from vllm_hisparse.ops import indexer_keys
from vllm_hisparse.ops.indexer_keys import FP8, GROUP, HEAD_DIM, KEY_BYTES, MAGNITUDES, TILE, WIDE_KEY_BYTES

NUM_BLOCKS, BLOCK_SIZE = 7, 64


def random_keys(*shape: int, seed: int = 0) -> torch.Tensor:
    """Keys whose groups differ in size by up to 2 ** 20."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-18, 3, (*shape, HEAD_DIM // GROUP), generator=generator).float())
    keys = torch.randn(*shape, HEAD_DIM, generator=generator) * sizes.repeat_interleave(GROUP, -1)
    return keys.bfloat16().float()


def restored(keys: torch.Tensor) -> torch.Tensor:
    values, scales = indexer_keys.dequantize(*indexer_keys.quantize(keys))
    return values.float() * scales[..., None]


def poisoned_cache(extra_bytes: int = 0) -> torch.Tensor:
    """A cache inside wider blocks, full of bytes that are NaN as numbers of any kind."""
    blocks = torch.full((NUM_BLOCKS, BLOCK_SIZE * KEY_BYTES + extra_bytes), 0xFF, dtype=torch.uint8)
    return blocks[:, : BLOCK_SIZE * KEY_BYTES].unflatten(1, (BLOCK_SIZE, KEY_BYTES))


def test_a_key_takes_68_bytes() -> None:
    elements, words = indexer_keys.quantize(random_keys(3))
    assert elements[0].nbytes + words[0].nbytes == KEY_BYTES == 68
    assert elements.shape == (3, 64) and words.shape == (3,)


def test_every_element_becomes_the_nearest_number_of_its_group() -> None:
    keys = random_keys(500)
    groups, found = (part.double().unflatten(-1, (-1, GROUP)) for part in (keys, restored(keys)))
    largest = groups.abs().amax(-1)
    exponent = torch.ceil(torch.log2(largest / MAGNITUDES[-1]))  # the least with which no element saturates
    exponent = torch.maximum(exponent, exponent.amax(-1, keepdim=True) - 11)  # what fp8 can tell apart
    grid = torch.tensor(MAGNITUDES, dtype=torch.float64) * torch.exp2(exponent)[..., None, None]
    nearest = (groups.abs()[..., None] - grid).abs().amin(-1)
    assert torch.equal((found - groups).abs(), nearest)
    assert (exponent.amax(-1) - exponent.amin(-1) == 11).any(), "no key has groups that far apart"


def test_a_tie_goes_to_the_even_code() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    key = torch.cat((middles, -middles)).repeat(8)[None]
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(restored(key), torch.cat((expected, -expected)).repeat(8)[None])


def test_keys_in_8_bits_are_exact_copies() -> None:
    """So that a key may go to the host and come back any number of times."""
    once = restored(random_keys(300))
    assert torch.equal(restored(once), once)
    assert not torch.equal(restored(random_keys(300)), random_keys(300))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 3e38, torch.inf, torch.nan])
def test_strange_keys_become_numbers(value: float) -> None:
    key = torch.full((1, HEAD_DIM), value)
    assert restored(key).isfinite().all()
    if abs(value) < 1e-30:
        assert (restored(key) == 0).all()


def test_insert_writes_its_slots_alone() -> None:
    cache, keys = poisoned_cache(extra_bytes=48), random_keys(5)
    slots = torch.tensor([3, 64, -1, 6 * 64 + 63, 130])
    indexer_keys.insert(cache, keys, slots)
    values, scales = indexer_keys.dequantize(*(part.flatten(0, 1)[slots] for part in indexer_keys.key_views(cache)))
    is_written = slots >= 0
    assert torch.equal((values.float() * scales[:, None])[is_written], restored(keys)[is_written])
    poison = [(part.flatten(0, 1) == -1) | (part.flatten(0, 1) == 0xFF) for part in indexer_keys.key_views(cache)]
    others = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    others[slots[is_written]] = False
    assert poison[0][others].all() and poison[1][others].all()


def test_gather_takes_whole_requests() -> None:
    cache, keys = poisoned_cache(), random_keys(3 * 64)
    table = torch.tensor([[5, 1], [2, -1]], dtype=torch.int32)
    slots = torch.cat([torch.arange(64) + block * 64 for block in (5, 1, 2)])
    indexer_keys.insert(cache, keys, slots)
    starts = torch.tensor([0, 100, 117], dtype=torch.int32)
    values, scales = torch.zeros(120, HEAD_DIM, dtype=FP8), torch.zeros(120, 4, dtype=torch.uint8)
    indexer_keys.gather(cache, table, starts, values, scales)
    found = values.float() * scales.view(torch.float32)
    expected = torch.cat((restored(keys[:100]), restored(keys[128:145]), torch.zeros(3, HEAD_DIM)))
    assert torch.equal(found, expected)


def test_logits_are_the_weighted_scores_of_restored_keys() -> None:
    generator, cache, keys = torch.Generator().manual_seed(1), poisoned_cache(), random_keys(5 * 64, seed=2)
    order = torch.randperm(NUM_BLOCKS, generator=generator)[:5]
    indexer_keys.insert(cache, keys, (order[:, None] * 64 + torch.arange(64)).flatten())
    table = torch.full((2, 4), -1, dtype=torch.int32)
    table[0, :3], table[1, :2] = order[:3], order[3:]
    seq_lens = torch.tensor([[149, 150], [64, 65]], dtype=torch.int32)
    query = torch.randn(2, 2, 3, HEAD_DIM, generator=generator).to(FP8)
    weights = torch.randn(4, 3, generator=generator)
    logits = indexer_keys.paged_logits(cache, query, weights, seq_lens, table, 200)
    for request, own in enumerate((keys[:150], keys[192:257])):
        for token in range(2):
            scores = (query[request, token].float() @ restored(own).T).relu()
            expected = (weights[2 * request + token, :, None] * scores).sum(0)
            found = logits[2 * request + token, : len(own)]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_blocks_go_from_8_to_4_bits_and_back() -> None:
    keys = random_keys(3, TILE)
    scale = keys.abs().amax(-1).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(scale / 448)))
    wide_values = (keys / scale[..., None]).to(FP8)
    wide = torch.cat((wide_values.view(torch.uint8).flatten(1), scale.view(torch.uint8)), 1)
    narrow = torch.full((3, TILE * KEY_BYTES), 0xFF, dtype=torch.uint8)
    indexer_keys.narrow_blocks(wide, narrow)
    expected = restored(wide_values.float() * scale[..., None])
    for _ in range(2):  # the second time from an exact copy, whose scale may be another one
        back = torch.full_like(wide, 0xFF)
        indexer_keys.widen_blocks(narrow, back)
        values, scales = back[:, : TILE * HEAD_DIM].view(FP8), back[:, TILE * HEAD_DIM :].view(torch.float32)
        assert torch.equal(values.float().unflatten(1, (TILE, -1)) * scales[..., None], expected)
        indexer_keys.narrow_blocks(back, narrow)
    assert wide.shape[1] == TILE * WIDE_KEY_BYTES

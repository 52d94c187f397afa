import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.cpu import indexer_scores as indexer

FP8_MAX = 448.0
FP8_NAN = 0x7F


def fp8_values() -> np.ndarray:
    """Value of each byte as e4m3fn: sign, 4 bits of exponent (bias 7), 3 bits of mantissa; no infinities."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[byte & 0x7F == FP8_NAN] = np.nan
    return np.where(byte >> 7, -value, value)


def fp8_bytes(values: np.ndarray) -> np.ndarray:
    """Nearest e4m3fn bytes, ties to even mantissas."""
    table = fp8_values()[:FP8_NAN]
    magnitude = np.abs(values)
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    pick_high = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (above % 2 == 0))
    return (np.where(pick_high, above, above - 1) | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def power_of_two_scale(amax: np.ndarray, floor: float) -> np.ndarray:
    return 2.0 ** np.ceil(np.log2(np.maximum(amax, floor) / FP8_MAX))


def poisoned_cache(num_blocks: int, block_size: int, head_dim: int, gap: int = 0) -> torch.Tensor:
    """Every byte 0x7F: NaN as fp8 and a huge number as fp32; `gap` bytes lie between blocks."""
    storage = torch.full((num_blocks, block_size * (head_dim + 4) + gap), FP8_NAN, dtype=torch.uint8)
    size = (num_blocks, block_size, head_dim + 4)
    return storage.as_strided(size, (storage.stride(0), head_dim + 4, 1))


def test_torch_and_this_file_agree_on_fp8() -> None:
    decoded = torch.arange(256).to(torch.uint8).view(indexer.FP8).float().numpy()
    np.testing.assert_array_equal(decoded, fp8_values())
    values = np.random.default_rng(0).uniform(-FP8_MAX, FP8_MAX, 4000).astype(np.float32)
    halfway = (fp8_values()[:126] + fp8_values()[1:127]).astype(np.float32) / 2
    for exact in (values, halfway, -halfway):
        np.testing.assert_array_equal(torch.tensor(exact).to(indexer.FP8).view(torch.uint8).numpy(), fp8_bytes(exact))


@pytest.mark.long
@given(block_size=st.sampled_from([3, 4, 64]), head_dim=st.sampled_from([4, 128]), seed=st.integers(0, 2**32))
def test_inserted_bytes_are_elements_then_scales_per_block(block_size: int, head_dim: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    gap = 4 * int(random.integers(0, 3))
    cache = poisoned_cache(3, block_size, head_dim, gap)
    expected = np.full((3, block_size * (head_dim + 4)), FP8_NAN, np.uint8)
    num_tokens = int(random.integers(1, 2 * block_size))
    slots = random.permutation(3 * block_size)[:num_tokens]
    slots[random.random(num_tokens) < 0.2] = -1
    keys = random.normal(size=(num_tokens, head_dim)) * 10.0 ** random.uniform(-7, 4, (num_tokens, 1))
    keys = torch.tensor(keys).bfloat16()
    indexer.insert_keys(cache, keys, torch.tensor(slots))
    for key, slot in zip(keys.float().numpy().astype(np.float64), slots, strict=True):
        if slot < 0:
            continue
        block, row = divmod(slot, block_size)
        scale = power_of_two_scale(np.abs(key).max(), 1e-4)
        element_bytes = fp8_bytes(np.clip(key / scale, -FP8_MAX, FP8_MAX))
        expected[block, row * head_dim : (row + 1) * head_dim] = element_bytes
        start = block_size * head_dim + 4 * row
        expected[block, start : start + 4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    flat = cache.as_strided((3, block_size * (head_dim + 4)), (cache.stride(0), 1))
    np.testing.assert_array_equal(flat.numpy(), expected)
    between = cache.as_strided((2, gap), (cache.stride(0), 1), block_size * (head_dim + 4))
    assert (between == FP8_NAN).all(), "wrote between blocks"


@pytest.mark.parametrize("amax", [0.0, 1e-6, 1e-4, 1.0, 447.9, 448.0, 448.1, 1e5])
def test_scale_is_the_smallest_power_of_two_that_fits(amax: float) -> None:
    scale = indexer.ue8m0_scale(torch.tensor([amax]), 1e-4).item()
    assert np.log2(scale) == int(np.log2(scale))
    assert scale == power_of_two_scale(np.float32(amax), 1e-4)
    assert amax / scale <= FP8_MAX
    assert scale / 2 < max(amax, 1e-4) / FP8_MAX


def test_quantize_saturates() -> None:
    quantized = indexer.quantize(torch.tensor([1e9, -1e9, 0.0, 448.0]), torch.tensor([1.0]))
    assert quantized.float().tolist() == [448.0, -448.0, 0.0, 448.0]


def test_views_write_through_and_do_not_overlap() -> None:
    cache = poisoned_cache(2, 3, 8, gap=4)
    elements, scales = indexer.key_views(cache, 8)
    assert (elements.shape, scales.shape) == ((2, 3, 8), (2, 3))
    elements.view(torch.uint8).fill_(1)
    scales.fill_(2.0)
    assert (elements.view(torch.uint8) == 1).all()
    elements, scales = indexer.key_views(cache[1:], 8)
    assert (elements.view(torch.uint8) == 1).all() and (scales == 2.0).all()


def test_loaded_keys_come_in_table_order() -> None:
    cache = poisoned_cache(4, 3, 4)
    keys = torch.arange(36, dtype=torch.float32).view(9, 4)
    indexer.insert_keys(cache, keys, torch.tensor([9, 10, 11, 0, 1, 2, 6, 7, 8]))
    scale = indexer.ue8m0_scale(keys.amax(-1), 1e-4)[:, None]
    stored = indexer.quantize(keys, scale).float() * scale
    loaded = indexer.load_keys(cache, 4, torch.tensor([[3, 0], [2, 3]]))
    assert torch.equal(loaded[0], stored[:6])
    assert torch.equal(loaded[1], torch.cat((stored[6:], stored[:3])))


def scores(query: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """I[t, s] = sum over heads j of w[t, j] * relu(q[t, j] . k[s])."""
    result = np.zeros((query.shape[0], keys.shape[0]))
    for token in range(query.shape[0]):
        for position in range(keys.shape[0]):
            for head in range(query.shape[1]):
                product = float(query[token, head] @ keys[position])
                result[token, position] += weights[token, head] * max(product, 0.0)
    return result


def check_selection(selected: np.ndarray, all_scores: np.ndarray, position: int, top_k: int) -> None:
    """The best `top_k` positions up to `position`, once each; rounding may swap equals."""
    valid = selected[selected >= 0]
    if position < top_k:
        assert valid.tolist() == list(range(position + 1)), "all of them, in order"
    assert len(valid) == len(set(valid)) == min(top_k, position + 1)
    assert (selected[len(valid) :] == -1).all()
    assert valid.max(initial=-1) <= position
    rest = np.setdiff1d(np.arange(position + 1), valid)
    if len(rest):
        assert all_scores[valid].min() >= all_scores[rest].max() - 1e-4 * max(np.abs(all_scores).max(), 1)


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 3),
    num_queries=st.integers(1, 5),
    num_keys=st.integers(1, 12),
    top_k=st.integers(1, 15),
)
def test_selects_the_best_scored_positions(seed: int, batch: int, num_queries: int, num_keys: int, top_k: int) -> None:
    random = np.random.default_rng(seed)
    query = random.normal(size=(batch, num_queries, 3, 8)).astype(np.float32)
    keys = random.normal(size=(batch, num_keys, 8)).astype(np.float32)
    weights = random.normal(size=(batch, num_queries, 3)).astype(np.float32)
    positions = random.integers(0, num_keys, (batch, num_queries))
    poisoned = keys.copy()
    for row in range(batch):
        poisoned[row, positions[row].max() + 1 :] = np.nan
    args = [torch.tensor(part) for part in (query, poisoned, weights, positions)]
    selected = indexer.select_top_k(*args, top_k)
    assert (selected.shape, selected.dtype) == ((batch, num_queries, top_k), torch.int32)
    for row in range(batch):
        expected = scores(query[row], keys[row], weights[row])
        for token in range(num_queries):
            check_selection(selected[row, token].numpy(), expected[token], positions[row, token], top_k)


def test_negative_products_count_nothing_and_negative_weights_count_against() -> None:
    keys = torch.tensor([[[1.0], [-1.0], [2.0]]])
    query, positions = torch.tensor([[[[1.0]]]]), torch.tensor([[2]])
    assert indexer.select_top_k(query, keys, torch.tensor([[[1.0]]]), positions, 1).flatten().tolist() == [2]
    assert indexer.select_top_k(query, keys, torch.tensor([[[-1.0]]]), positions, 1).flatten().tolist() == [1]


@pytest.mark.parametrize("max_elements", [1, 40, 100])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 7, 3, 8, generator=generator), torch.randn(2, 9, 8, generator=generator)
    weights, positions = torch.randn(2, 7, 3, generator=generator), torch.arange(2, 9).expand(2, 7)
    whole = indexer.select_top_k(query, keys, weights, positions, 4)
    monkeypatch.setattr(indexer, "MAX_SCORE_ELEMENTS", max_elements)
    assert torch.equal(indexer.select_top_k(query, keys, weights, positions, 4), whole)

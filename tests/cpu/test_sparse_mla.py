from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.cpu import sparse_mla as ops
from vllm_hisparse.cpu.full_kv_mla import SparseMLACpuImpl

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def reference(
    query: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    rank: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token and head at a time, float64."""
    out = torch.zeros(*query.shape[:2], rank, dtype=torch.float64)
    for token in range(query.shape[0]):
        own = rows[token][valid[token]].double()
        for head in range(query.shape[1]):
            logits = own @ query[token, head].double() * scale
            sink = torch.full((1,), float("-inf")) if sinks is None else sinks[head, None]
            weights = torch.cat((logits, sink.double())).softmax(0)[:-1]
            out[token, head] = weights @ own[:, :rank] if len(own) else 0.0
    return out


def some_sinks(seed: int, heads: int) -> torch.Tensor | None:
    """Sinks of every other case: of some weight, of nearly all, of none."""
    logits = torch.tensor([0.5, 30.0, float("-inf")]).roll(seed)
    return logits[:heads] if seed % 2 else None


def inputs(seed: int, tokens: int, heads: int, k: int, rank: int, rope: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, heads, rank + rope, generator=generator).to(dtype)
    rows = torch.randn(tokens, k, rank + rope, generator=generator).to(dtype)
    valid = torch.rand(tokens, k, generator=generator) < torch.rand(tokens, 1, generator=generator) * 1.3
    rows[~valid] = 100.0
    rows[~valid.any(1)] = float("nan")
    return query, rows, valid


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 4),
    heads=st.integers(1, 3),
    k=st.integers(1, 9),
    rank=st.sampled_from([1, 8, 32]),
    rope=st.sampled_from([0, 4]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_agrees_with_float64_and_ignores_invalid_rows(
    seed: int, tokens: int, heads: int, k: int, rank: int, rope: int, dtype: torch.dtype
) -> None:
    query, rows, valid = inputs(seed, tokens, heads, k, rank, rope, dtype)
    out, sinks = torch.full((tokens, heads, rank), float("nan"), dtype=dtype), some_sinks(seed, heads)
    ops.sparse_mla(query, rows, valid, 0.3, rank, out, sinks)
    expected = reference(query, rows, valid, 0.3, rank, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not out[~valid.any(1)].any(), "a token without rows must give zeros"


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 6),
    history=st.integers(0, 5),
    k=st.integers(1, 9),
    chunk=st.integers(1, 4),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_masked_rows_count_nothing(
    seed: int, tokens: int, history: int, k: int, chunk: int, dtype: torch.dtype
) -> None:
    """The last tokens of a sequence, in any chunks, each with a selection of its own or with none."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(history + tokens, 12, generator=generator).to(dtype)
    query = torch.randn(tokens, 2, 12, generator=generator).to(dtype)
    selected = torch.full((tokens, k), -1)
    for token in range(tokens):
        num_valid = int(torch.randint(0, min(k, history + token + 1) + 1, (), generator=generator))
        places = torch.randperm(k, generator=generator)[:num_valid]
        selected[token, places] = torch.randperm(history + token + 1, generator=generator)[:num_valid]
    out, sinks = torch.full((tokens, 2, 8), float("nan"), dtype=dtype), some_sinks(seed, 2)
    with mock.patch.object(ops, "QUERIES_PER_CHUNK", chunk):
        ops.masked_mla(query, rows, selected, 0.3, 8, out, sinks)
    expected = reference(query, rows[selected], selected >= 0, 0.3, 8, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("first", "num_tokens", "expected"), [(0, 15, 0), (0, 16, 16), (0, 99, 40), (30, 20, 10), (40, 20, 0), (99, 20, 0)]
)
def test_tokens_with_few_rows_before_them_attend_over_all(first: int, num_tokens: int, expected: int) -> None:
    assert ops.num_masked(10, first, num_tokens) == expected


def test_tokens_without_valid_rows_give_zeros_beside_others() -> None:
    query, rows, _ = inputs(0, 3, 2, 4, 8, 4, torch.float32)
    rows = rows.nan_to_num(1.0)
    valid = torch.ones(3, 4, dtype=torch.bool)
    valid[1] = False
    rows[1] = float("nan")
    out = torch.full((3, 2, 8), float("nan"))
    ops.sparse_mla(query, rows, valid, 0.3, 8, out)
    assert not out[1].any()
    torch.testing.assert_close(out.double(), reference(query, rows, valid, 0.3, 8), rtol=1e-5, atol=1e-5)


def test_does_not_change_its_inputs() -> None:
    query, rows, valid = inputs(1, 2, 2, 5, 8, 4, torch.float32)
    before = query.clone(), rows.clone(), valid.clone()
    ops.sparse_mla(query, rows, valid, 0.3, 8, torch.empty(2, 2, 8))
    assert torch.equal(query, before[0]) and torch.equal(valid, before[2])
    torch.testing.assert_close(rows, before[1], rtol=0, atol=0, equal_nan=True)


def test_large_logits_do_not_overflow() -> None:
    query, rows, valid = inputs(2, 2, 2, 5, 8, 4, torch.float32)
    valid[:, 0] = True
    rows = rows.nan_to_num(0.5) * 1e3
    out = torch.empty(2, 2, 8)
    ops.sparse_mla(query * 1e3, rows, valid, 1.0, 8, out)
    torch.testing.assert_close(out.double(), reference(query * 1e3, rows, valid, 1.0, 8), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("top_k", "row_elements"), [(1, 1), (2048, 576), (1 << 20, 576)])
def test_chunks_bound_the_gathered_rows(top_k: int, row_elements: int) -> None:
    tokens = ops.tokens_per_chunk(top_k, row_elements)
    assert tokens == 1 or tokens * top_k * row_elements <= ops.MAX_GATHERED_ELEMENTS
    assert tokens >= 1


def test_what_a_model_adds_to_its_attention_is_not_dropped() -> None:
    sizes = (2, 12, 0.3, 1, None, None, "auto", None, "decoder", None)
    sinks = torch.ones(2)
    assert SparseMLACpuImpl(*sizes, sinks=sinks, kv_lora_rank=8).sinks is sinks
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        SparseMLACpuImpl(*sizes, kv_lora_rank=8, temperature=0.5)

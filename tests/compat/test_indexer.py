"""vLLM's indexer functions on CUDA: caches of keys in 4 bits go to ours, all others to vLLM's with all arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers import sparse_attn_indexer

from vllm_hisparse.compat import indexer
from vllm_hisparse.ops import indexer_keys

NUM_BLOCKS = 3


class Stock:
    """A function of vLLM that notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "stock"


def cache(key_bytes: int) -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, 64, key_bytes, dtype=torch.uint8)


def keys(count: int) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(count)).bfloat16()


def expected_cache(inserted: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    expected = cache(68)
    indexer_keys.insert(expected, inserted, slots)
    return expected


def test_insert() -> None:
    stock, narrow, slots = Stock(), cache(68), torch.tensor([3, -1, 70])
    function = indexer.wrap_insert(stock)
    function(keys(3), narrow, slots, 128, "ue8m0")
    assert torch.equal(narrow, expected_cache(keys(3), slots)) and not stock.calls
    wide = cache(132)
    function(keys(3), wide, slots, 128, "ue8m0")
    assert stock.calls[0][0][1] is wide and stock.calls[0][0][3:] == (128, "ue8m0")


def test_gather() -> None:
    stock, narrow = Stock(), expected_cache(keys(70), torch.arange(70))
    function, table = indexer.wrap_gather(stock), torch.tensor([[0, 1]], dtype=torch.int32)
    values, scales = torch.zeros(70, 128).to(indexer_keys.FP8), torch.zeros(70, 4, dtype=torch.uint8)
    function(narrow, values, scales, table, torch.tensor([0, 70], dtype=torch.int32))
    found = values.float() * scales.view(torch.float32)
    assert (found - keys(70).float()).norm() < 0.2 * keys(70).float().norm() and not stock.calls
    function(cache(132), values, scales, table, torch.tensor([0, 70], dtype=torch.int32))
    assert len(stock.calls) == 1


@pytest.mark.parametrize("queries", [1, 2])
def test_logits(queries: int) -> None:
    stock, narrow = Stock(), expected_cache(keys(70), torch.arange(70))
    function, table = indexer.wrap_paged_logits(stock), torch.tensor([[0, 1]], dtype=torch.int32)
    query = torch.randn(1, queries, 4, 128).to(indexer_keys.FP8)
    weights, lengths = torch.rand(queries, 4), torch.full((1, queries), 70, dtype=torch.int32)
    args = (weights, lengths, table, torch.zeros(2, 2), 90)
    logits = function((query, None), narrow.unsqueeze(-2), *args, clean_logits=False, indices=None)
    expected = indexer_keys.paged_logits(narrow, query, weights, lengths, table, 90)
    assert torch.equal(logits[:, :70], expected[:, :70]) and not stock.calls
    assert function((query, None), cache(132).unsqueeze(-2), *args, clean_logits=False) == "stock"
    assert stock.calls[0][1] == {"clean_logits": False}


class FusedKernel(Stock):
    """Gives out the keys that it is to write, and ten tokens' rows of padding beyond them."""

    def __call__(self, *args: Any, index_k_out: torch.Tensor | None = None, **kwargs: Any) -> str:
        if index_k_out is not None:
            index_k_out.copy_(2 * args[9])
        return super().__call__(*args, index_k_out=index_k_out, **kwargs)


@pytest.mark.parametrize("num_slots", [3, 5])
def test_the_fused_kernel_writes_no_keys(num_slots: int) -> None:
    stock, narrow, slots = FusedKernel(), cache(68), torch.tensor([3, -1, 70, 9, 8])[:num_slots]
    args = (*range(9), torch.cat((keys(5), keys(5)), 1)[:, :128], "norm")
    function = indexer.wrap_fused_norm_rope(stock)
    assert function(*args, indexer_slot_mapping=slots, indexer_k_cache=narrow, has_indexer=True) == "stock"
    assert torch.equal(narrow, expected_cache(2 * keys(5)[:num_slots], slots))
    assert stock.calls[0][1]["indexer_k_cache"] is None and stock.calls[0][1]["has_indexer"]
    wide = cache(132)
    function(*args, indexer_slot_mapping=slots, indexer_k_cache=wide)
    assert stock.calls[1][1]["indexer_k_cache"] is wide and stock.calls[1][1]["index_k_out"] is None
    function(*args, indexer_slot_mapping=None, indexer_k_cache=None)
    assert stock.calls[2][1]["indexer_k_cache"] is None and stock.calls[2][1]["index_k_out"] is None


def test_positions_are_selected_by_our_kernel_where_it_can() -> None:
    stock = Stock()
    get_indexer_topk = indexer.wrap_get_indexer_topk(lambda backend: stock)
    scores, lengths = torch.tensor([[1.0, 4.0, 4.0, 9.0]]), torch.tensor([[3]], dtype=torch.int32)
    positions = torch.zeros(1, 2, dtype=torch.int32)
    get_indexer_topk("auto")(scores, lengths, 1, positions, 2, 4)
    assert positions.tolist() == [[1, 2]] and not stock.calls
    many = torch.rand(200, 4), lengths.expand(200, 1)
    for args in ((scores.double(), lengths), (scores, lengths.expand(2, 1)), many):
        get_indexer_topk("auto")(*args, 1, positions, 2, 4)
        assert stock.calls.pop()[0] == (*args, 1, positions, 2, 4)
    assert get_indexer_topk("persistent") is stock, "what the user chooses runs"


def test_the_kernel_is_put_in_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Stock()
    monkeypatch.setattr(sparse_attn_indexer, "get_indexer_topk", lambda backend: stock)
    indexer.select_with_own_kernel()
    placed = sparse_attn_indexer.get_indexer_topk
    indexer.select_with_own_kernel()
    assert sparse_attn_indexer.get_indexer_topk is placed and placed("per_row") is stock
    scores, positions = torch.rand(2, 8), torch.empty(2, 3, dtype=torch.int32)
    placed("auto")(scores, torch.tensor([[2, 7]], dtype=torch.int32), 2, positions, 3, 8)
    assert positions[0].tolist() == [0, 1, -1] and not stock.calls, "each draft has a length of its own"
    shared = torch.tensor([[7]], dtype=torch.int32)
    placed("auto")(scores, shared, 2, positions, 3, 8)
    assert len(stock.calls) == 1, "lengths of a request that has drafts are vLLM's to expand"

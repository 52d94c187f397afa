"""The requests of a microbatch, and the metadata that vLLM's layers get. tests/gpu compares results on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backends.mla.indexer import DeepSeekV32IndexerDecodeMetadata, DeepseekV32IndexerMetadata

from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape

PAGE_SIZE, NUM_UNITS, BLOCKS_PER_REQUEST = 64, 7, 2
BOUNDS = [(0, 1), (1, 3), (3, 6)]  # of three microbatches' requests


class Metadata(SimpleNamespace):
    """Metadata of attention layers, of some requests."""


@pytest.fixture
def microbatches(cuda_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, where the kernel's schedule is its arguments: a CPU has no such kernel."""
    module = cuda_modules["microbatches"]
    monkeypatch.setattr(module, "num_compute_units", lambda _: NUM_UNITS)
    monkeypatch.setattr(
        module,
        "get_paged_mqa_logits_metadata",
        lambda lens, page_size, num_units, indices: (lens, page_size, num_units, indices),
    )
    return module


def indexer_metadata(
    num_requests: int, query_len: int, by_token: bool, with_indices: bool
) -> DeepseekV32IndexerMetadata:
    """Metadata of a step in which every request decodes.

    Args:
        query_len: new tokens of each request.
        by_token: whether it has a row per token, otherwise one per request.
        with_indices: whether it says which request a row is of, as on Blackwell.
    """
    num_tokens = num_requests * query_len
    num_rows, num_columns = (num_tokens, 1) if by_token else (num_requests, query_len)
    decode = DeepSeekV32IndexerDecodeMetadata(
        block_table=torch.arange(num_rows * BLOCKS_PER_REQUEST).view(num_rows, BLOCKS_PER_REQUEST),
        seq_lens=torch.arange(100, 100 + num_tokens).view(num_rows, num_columns),
        decode_lens=torch.arange(200, 200 + num_rows),
        requires_padding=False,
        schedule_metadata=torch.empty(0),
    )
    if with_indices:
        decode.indices = torch.arange(num_requests).repeat_interleave(query_len)
        decode.per_req_decode_lens = torch.arange(300, 300 + num_requests)
    slots = torch.arange(num_tokens)
    return DeepseekV32IndexerMetadata(decode.seq_lens, 100, slots, num_requests, num_tokens, 0, 0, decode)


@contextmanager
def forward_context(attn_metadata: dict[str, Any]) -> Iterator[None]:
    """vLLM's forward context of a step; layers of the indexer are named *.indexer."""
    indexer = SimpleNamespace(kv_cache=torch.zeros(9, PAGE_SIZE, 132))
    layers = {name: indexer for name in attn_metadata if name.endswith("indexer")}
    with override_forward_context(ForwardContext(layers, attn_metadata, {})):
        yield


def all_microbatches(microbatches: ModuleType, query_len: int) -> list[Any]:
    return [
        microbatches.DecodeMicrobatch(slice(*bounds), query_len, lambda part: Metadata(requests=part))
        for bounds in BOUNDS
    ]


@pytest.mark.parametrize(
    ("query_len", "by_token", "with_indices"),
    [(1, True, False), (2, False, False), (2, True, False), (1, True, True), (3, True, True)],
)
def test_the_indexer_of_a_microbatch_sees_the_rows_of_its_requests_alone(
    microbatches: ModuleType, query_len: int, by_token: bool, with_indices: bool
) -> None:
    whole = indexer_metadata(BOUNDS[-1][1], query_len, by_token, with_indices)
    width = query_len if by_token else 1
    for (first, last), microbatch in zip(BOUNDS, all_microbatches(microbatches, query_len), strict=True):
        with forward_context({"indexer": whole}):
            found = microbatch.attn_metadata["indexer"]
        num_requests, rows, decode = last - first, slice(first * width, last * width), found.decode
        assert (found.num_decodes, found.num_decode_tokens) == (num_requests, num_requests * query_len)
        for name in ("block_table", "seq_lens", "decode_lens"):
            assert torch.equal(getattr(decode, name), getattr(whole.decode, name)[rows]), name
        lens, page_size, num_units, indices = decode.schedule_metadata
        assert torch.equal(lens, decode.seq_lens) and (page_size, num_units) == (PAGE_SIZE, NUM_UNITS)
        assert indices is decode.indices
        if with_indices:
            assert indices.tolist() == [request for request in range(num_requests) for _ in range(query_len)]
            assert torch.equal(decode.per_req_decode_lens, whole.decode.per_req_decode_lens[first:last])
        else:
            assert indices is decode.per_req_decode_lens is None


def test_microbatches_have_every_token_once(microbatches: ModuleType) -> None:
    found = [microbatch.tokens for microbatch in all_microbatches(microbatches, 3)]
    assert found == [slice(0, 3), slice(3, 9), slice(9, 18)]


def test_layers_of_a_microbatch_share_its_metadata(microbatches: ModuleType) -> None:
    """Metadata is made once for all layers; a draft model's layers keep the step's metadata."""
    indexer, attention, draft = indexer_metadata(6, 1, True, False), Metadata(requests=slice(0, 6)), SimpleNamespace()
    step = {"0": attention, "1": attention, "0.indexer": indexer, "1.indexer": indexer, "draft": draft}
    for (first, last), microbatch in zip(BOUNDS, all_microbatches(microbatches, 1), strict=True):
        with forward_context(step):
            found = microbatch.attn_metadata
        assert found["0"] is found["1"] and found["0"].requests == slice(first, last)
        assert found["0.indexer"] is found["1.indexer"] is not indexer
        assert found["draft"] is draft
    assert step["0"] is attention and step["0.indexer"] is indexer


def test_which_steps_have_microbatches(microbatches: ModuleType) -> None:
    """Steps of many requests that may miss rows, where every layer selects."""
    shape = HotBufferShape(99, 99, 2, 8, 10, 64, 500, max_hot_blocks=20, rows_per_hot_block=40)

    def requests_of(num_requests: int, **changes: Any) -> list[slice]:
        buffer = SimpleNamespace(**{"shape": shape, "selects": [True, True], "host_is_managed": False, **changes})
        return [
            microbatch.requests for microbatch in microbatches.make_microbatches(buffer, num_requests, lambda _: None)
        ]

    assert requests_of(35) == [slice(0, 17), slice(17, 35)]
    assert requests_of(36) == [slice(0, 12), slice(12, 24), slice(24, 36)]
    managed, pinned_numbers = {"host_is_managed": True}, (2, 3, 3, 4, 4)
    with_drafts = {"shape": replace(shape, max_query_len=2)}
    for changes, numbers in (
        ({}, pinned_numbers),
        (managed, (2, 2, 2, 2, 3)),
        (with_drafts, pinned_numbers),
        (managed | with_drafts, pinned_numbers),
    ):
        assert [len(requests_of(number, **changes)) for number in (35, 36, 47, 48, 54)] == list(numbers)
        assert len(requests_of(100, **changes)) == 4, "as many as there are streams"
    decision = Path(__file__).parents[3] / "docs" / "decisions" / "microbatches.md"
    text = " ".join(decision.read_text().split())
    assert [len(requests_of(number, **managed)) for number in (53, 54, 71, 72)] == [2, 3, 3, 4]
    assert "there: two up to 53 requests, three from 54, and four from 72" in text
    assert "as it can: two up to 35 requests, three from 36, and four from 48" in text
    assert requests_of(53, host_is_managed=True) == [slice(0, 26), slice(26, 53)]
    assert requests_of(72, host_is_managed=True) == [slice(0, 18), slice(18, 36), slice(36, 54), slice(54, 72)]
    assert requests_of(microbatches.MAX_REQUESTS) and not requests_of(microbatches.MAX_REQUESTS + 1)
    assert requests_of(31) == [], "as many of the longest sequences fit into 20,000 hot rows"
    few = replace(shape, num_device_blocks=1)
    assert requests_of(24, shape=few) and not requests_of(23, shape=few)
    assert requests_of(33, selects=[True, False]) == []
    assert requests_of(33, shape=replace(shape, num_device_blocks=600)) == []

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import bare
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_hisparse.attention.gqa.base import (
    HotGQAAttention,
    check_state_blocks,
    is_full_kv_layer,
    preferred_block_size,
)
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError


def full_spec(num_kv_heads: int, block_size: int = 128) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=32, dtype=torch.float32)


class DraftAttention(Attention):
    def __init__(self, num_kv_heads: int, block_size: int):
        self.spec = full_spec(num_kv_heads, block_size)

    def get_kv_cache_spec(self, _: Any) -> FullAttentionSpec:
        return self.spec


def model_of(num_layers: int, num_kv_heads: int = 2) -> SimpleNamespace:
    hf_config = SimpleNamespace(num_hidden_layers=num_layers)
    return SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=hf_config,
        get_num_kv_heads=lambda _: num_kv_heads,
        get_num_attention_heads=lambda _: 4,
        max_model_len=1024,
        get_head_size=lambda: 32,
    )


def drafts_of(heads: Sequence[int]) -> SimpleNamespace:
    draft = model_of(len(heads), heads[0])
    return SimpleNamespace(method="eagle", num_speculative_tokens=1, draft_model_config=draft)


def spec_of(
    monkeypatch: pytest.MonkeyPatch,
    num_full_kv: int,
    page_size: int = 16,
    block_size: int = 128,
    draft_heads: Sequence[int] = (),
):
    """The spec of a hot layer of a model with 4 layers of 2 KV heads, and layers that draft."""
    options = {"page_size": page_size}
    config = HiSparseConfig(
        algorithm="quest", algorithm_options=options, host_pool_gib=1.0, top_k=96, device_buffer_size=192
    ).model_copy(update={"full_kv_layers": list(range(num_full_kv))})
    monkeypatch.setattr(Attention, "get_kv_cache_spec", lambda *_: full_spec(2, block_size))
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: config))
    model = model_of(4)
    drafting = {f"layers.{4 + i}.attn": DraftAttention(heads, block_size) for i, heads in enumerate(draft_heads)}
    layers = {"layers.3.attn": bare(HotGQAAttention), **drafting}
    engine = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=model,
        speculative_config=drafts_of(draft_heads) if draft_heads else None,
        parallel_config=None,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    return HotGQAAttention.get_kv_cache_spec(bare(HotGQAAttention), engine)


@pytest.mark.parametrize(("num_full_kv", "rows", "blocks"), [(0, 128, 2), (1, 32, 7), (2, 128, 2), (3, 384, 1)])
def test_hot_blocks_fill_the_blocks_of_full_kv_layers(
    monkeypatch: pytest.MonkeyPatch, num_full_kv: int, rows: int, blocks: int
) -> None:
    spec = spec_of(monkeypatch, num_full_kv)
    assert (spec.num_states, spec.max_blocks_per_request(1)) == (rows, blocks)
    assert spec.page_size_bytes == 2 * rows * 2 * 32 * 4 and spec.layout.row_bytes == 2 * 2 * 32 * 4


def test_blocks_smaller_than_an_entry_of_state_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = spec_of(monkeypatch, 0).layout
    assert layout.state_entries == ((16, 2 * 2 * 32 * 4),) and layout.device_block_bytes == 128 * 4 * 512
    check_state_blocks(replace(layout, state_entries=((16, 128 * 512),)), "own")
    with pytest.raises(HiSparseConfigError, match=r"^--block-size: got 128, expected one with blocks of 262148"):
        check_state_blocks(replace(layout, state_entries=((16, 512), (1, 128 * 512 + 1))), "own")


def test_pages_that_do_not_divide_a_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HiSparseConfigError, match=r"page_size: got 48, expected a divisor of --block-size \(128\)"):
        spec_of(monkeypatch, 0, page_size=48)


def test_blocks_of_one_page_are_refused_beside_full_kv_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HiSparseConfigError, match=r"^--block-size: got 16, expected at least 64:"):
        spec_of(monkeypatch, 1, block_size=16)
    assert spec_of(monkeypatch, 1, block_size=64).num_states == 16
    assert spec_of(monkeypatch, 0, block_size=16).num_states == 16


@pytest.mark.parametrize(
    ("num_full_kv", "draft_heads", "draft_bytes", "rows"),
    [(0, [8], 2048, 112), (0, [2], 512, 32), (2, [8], 2048, 384), (2, [2], 512, 192), (2, [4, 4, 8], 4096, 640)],
)
def test_layers_that_draft_are_device_resident(
    monkeypatch: pytest.MonkeyPatch, num_full_kv: int, draft_heads: list[int], draft_bytes: int, rows: int
) -> None:
    layout = spec_of(monkeypatch, num_full_kv, draft_heads=draft_heads).layout
    assert (layout.draft_row_bytes, layout.num_resident_layers) == (draft_bytes, num_full_kv)
    assert (layout.row_bytes, layout.rows_per_hot_block, layout.max_query_len) == (512, rows, 2)


def test_as_many_full_kv_layers_as_draft_layers_of_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would split the hot layers, too."""
    with pytest.raises(
        HiSparseConfigError, match=r"^full_kv_layers: got \[0\], expected more or fewer than 1: the draft"
    ):
        spec_of(monkeypatch, 1, draft_heads=[8])
    assert spec_of(monkeypatch, 1, draft_heads=[2]).layout.resident_token_bytes == 2 * 512


def test_blocks_of_one_page_are_refused_beside_layers_that_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HiSparseConfigError, match=r"^--block-size: got 16, expected at least 32:"):
        spec_of(monkeypatch, 2, block_size=16, draft_heads=[2])
    assert spec_of(monkeypatch, 2, block_size=32, draft_heads=[2]).num_states == 48


def test_layers_that_draft_keep_full_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(full_kv_layers=[0])
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: config))
    engine = SimpleNamespace(model_config=model_of(4))
    layers = [SimpleNamespace(layer_name=f"model.layers.{index}.attn") for index in range(6)]
    assert [is_full_kv_layer(layer, engine) for layer in layers] == [True, False, False, False, True, True]


@pytest.mark.parametrize(
    ("num_layers", "num_full_kv", "unit", "draft_heads", "size"),
    [
        (32, 2, 16, [], 256),
        (8, 2, 16, [], 64),
        (32, 0, 16, [], 16),
        (32, 2, 1, [], 16),
        (32, 0, 16, [2], 256),
        (8, 2, 16, [2], 32),
        (8, 2, 16, [8], 16),
        (4, 2, 16, [2], 32),
    ],
)
def test_preferred_block_size(
    monkeypatch: pytest.MonkeyPatch, num_layers: int, num_full_kv: int, unit: int, draft_heads: list[int], size: int
):
    config = SimpleNamespace(full_kv_layers=list(range(num_full_kv)), tokens_per_unit=unit)
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: config))
    drafts = drafts_of(draft_heads) if draft_heads else None
    engine = SimpleNamespace(model_config=model_of(num_layers), speculative_config=drafts, parallel_config=None)
    assert preferred_block_size(engine) == size

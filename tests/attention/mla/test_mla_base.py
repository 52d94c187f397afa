"""The KV cache spec that an MLA layer with a hot buffer asks vLLM for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import bare
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vllm_hisparse.attention.mla import base as mla_base
from vllm_hisparse.attention.mla.base import HotMLAAttention
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError


def options(has_narrow_keys: bool = False, **others: Any) -> HiSparseConfig:
    dtype = "fp4" if has_narrow_keys else "auto"
    sizes = {"top_k": 2048, "device_buffer_size": 4096, "host_pool_gib": 1.0}
    return HiSparseConfig(**{**sizes, **others}, indexer_key_dtype=dtype)


@pytest.mark.parametrize(
    ("num_layers", "num_indexers", "has_narrow_keys", "rows"),
    [(61, 61, False, 7), (61, 61, True, 4), (78, 20, False, 2), (78, 20, True, 1), (4, 2, False, 3)],
)
def test_hot_blocks_are_as_wide_as_the_keys_of_the_indexers_there_are(
    monkeypatch: pytest.MonkeyPatch, num_layers: int, num_indexers: int, has_narrow_keys: bool, rows: int
) -> None:
    full = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    monkeypatch.setattr(MLAAttention, "get_kv_cache_spec", lambda *_: full)
    monkeypatch.setattr(mla_base.HiSparseConfig, "from_vllm_config", lambda _: options(has_narrow_keys))
    layers = [bare(HotMLAAttention, indexer=object() if i < num_indexers else None) for i in range(num_layers)]
    others = {"indexer.k_cache": object()}
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_head_dim=128)),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={**dict(enumerate(layers)), **others}),
    )
    spec = layers[0].get_kv_cache_spec(config)
    assert spec.page_size_bytes == rows * 1152
    assert (spec.layout.num_layers, spec.layout.num_resident_layers) == (num_layers, num_indexers)
    assert spec.max_blocks_per_request(1) == -(-4097 // rows)
    assert spec.layout.draft_row_bytes == 0
    assert spec.layout.resident_token_bytes == num_indexers * (68 if has_narrow_keys else 132)
    assert spec.layout.saved_block_bytes == 64 * num_indexers * 132


def layers_with(monkeypatch: pytest.MonkeyPatch, selects: str, **others: Any) -> tuple[list[Any], Any]:
    """Layers, of which those with an S select, and the engine's configuration."""
    full = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    monkeypatch.setattr(MLAAttention, "get_kv_cache_spec", lambda *_: full)
    monkeypatch.setattr(mla_base.HiSparseConfig, "from_vllm_config", lambda _: options(**others))
    layers = [bare(HotMLAAttention, indexer=object() if each == "S" else None) for each in selects]
    return layers, engine(layers, len(layers))


def test_layers_that_share_a_selection_have_the_rows_of_the_layer_that_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, config = layers_with(monkeypatch, "SSffSf", rows_by_layer=[1, 2, 0.9], device_buffer_size=6000)
    layout = layers[0].get_kv_cache_spec(config).layout
    rows = layout.layer_rows
    assert rows[1] == rows[2] == rows[3] > rows[0] >= rows[4] == rows[5]
    assert sum(rows) <= layout.device_block_bytes // layout.row_bytes


@pytest.mark.parametrize(("shares", "expected"), [([1, 1], "3 numbers, not 2"), ([1, 0.1, 1], "every layer has 2048")])
def test_shares_that_do_not_fit_the_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], expected: str
) -> None:
    layers, config = layers_with(monkeypatch, "SSSf", rows_by_layer=shares)
    with pytest.raises(HiSparseConfigError, match=f"rows_by_layer.*{expected}"):
        layers[0].get_kv_cache_spec(config)


def engine(layers: list[Any], num_layers: int) -> Any:
    """A configuration with layers that vLLM has numbered from 0; those from `num_layers` on draft."""
    named = {f"model.layers.{index}.self_attn.attn": layer for index, layer in enumerate(layers)}
    text_config = SimpleNamespace(index_head_dim=128, num_hidden_layers=num_layers)
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(hf_text_config=text_config),
        speculative_config=SimpleNamespace(num_speculative_tokens=2) if len(layers) > num_layers else None,
        compilation_config=SimpleNamespace(static_forward_context=named),
    )


def test_layers_that_draft_keep_their_kv_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows and keys count where the widths of device blocks are chosen."""
    full = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    monkeypatch.setattr(MLAAttention, "get_kv_cache_spec", lambda *_: full)
    monkeypatch.setattr(mla_base.HiSparseConfig, "from_vllm_config", lambda _: options())
    layers = [bare(each, indexer=object()) for each in [HotMLAAttention] * 61 + [MLAAttention]]
    layout = layers[0].get_kv_cache_spec(engine(layers, num_layers=61)).layout
    assert (layout.num_layers, layout.num_resident_layers, layout.max_query_len) == (61, 61, 3)
    assert layout.draft_row_bytes == 1152 + 132
    assert layout.resident_block_bytes == 64 * (62 * 132 + 1152)
    assert layout.rows_per_hot_block == 8  # 7 without a draft layer


@pytest.mark.parametrize("num_drafting", [0, 1])
def test_layers_that_do_not_select_keep_their_kv_on_the_device(
    monkeypatch: pytest.MonkeyPatch, num_drafting: int
) -> None:
    """HY-V4 with two layers of full attention among 34, in which nine of the others have an indexer."""
    full = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    monkeypatch.setattr(MLAAttention, "get_kv_cache_spec", lambda *_: full)
    monkeypatch.setattr(mla_base.HiSparseConfig, "from_vllm_config", lambda _: options())
    classes = [MLAAttention if index in (0, 18) else HotMLAAttention for index in range(34)] + [
        MLAAttention
    ] * num_drafting
    has_indexer = [index % 4 == 1 or index == 34 for index in range(len(classes))]
    layers = [bare(each, indexer=object() if has else None) for each, has in zip(classes, has_indexer, strict=True)]
    layout = layers[1].get_kv_cache_spec(engine(layers, num_layers=34)).layout
    assert (layout.num_layers, layout.num_resident_layers) == (32, 9)
    assert layout.full_kv_row_bytes == 2 * 1152 and layout.draft_row_bytes == num_drafting * (1152 + 132)
    assert layout.resident_token_bytes == (9 + num_drafting) * 132 + (2 + num_drafting) * 1152
    assert layout.main_block_bytes == 64 * 32 * 1152

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_hisparse.attention.gqa.base import HotGQAAttention, check_layer, preferred_block_size
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError

PLAIN = {
    "alibi_slopes": None,
    "sliding_window": None,
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "shares_kv_of": None,
    "sinks": None,
}


def test_plain_causal_attention_is_accepted() -> None:
    check_layer(**PLAIN)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sliding_window": 512}, "sliding_window"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"shares_kv_of": "model.layers.0"}, "kv_sharing_target_layer_name"),
        ({"attn_type": "encoder_only"}, "attn_type"),
    ],
)
def test_other_attention_is_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(HiSparseConfigError, match=rf"^{name} of an attention layer: got .*causal full attention only"):
        check_layer(**{**PLAIN, **change})


def spec_of(monkeypatch: pytest.MonkeyPatch, num_full_kv: int, page_size: int = 16, block_size: int = 128):
    """The spec of a hot layer of a model with 4 layers."""
    options = {"page_size": page_size}
    config = HiSparseConfig(
        algorithm="quest", algorithm_options=options, host_pool_gib=1.0, top_k=96, device_buffer_size=192
    ).model_copy(update={"full_kv_layers": list(range(num_full_kv))})
    full = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)
    monkeypatch.setattr(Attention, "get_kv_cache_spec", lambda *_: full)
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: config))
    model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=4))
    engine = SimpleNamespace(model_config=model, speculative_config=None)
    return HotGQAAttention.get_kv_cache_spec(object.__new__(HotGQAAttention), engine)


@pytest.mark.parametrize(("num_full_kv", "rows", "blocks"), [(0, 128, 2), (1, 32, 7), (2, 128, 2), (3, 384, 1)])
def test_hot_blocks_fill_the_blocks_of_full_kv_layers(
    monkeypatch: pytest.MonkeyPatch, num_full_kv: int, rows: int, blocks: int
) -> None:
    spec = spec_of(monkeypatch, num_full_kv)
    assert (spec.num_states, spec.max_blocks_per_request(1)) == (rows, blocks)
    assert spec.page_size_bytes == 2 * rows * 2 * 32 * 4 and spec.row_bytes == 2 * 2 * 32 * 4


def test_pages_that_do_not_divide_a_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HiSparseConfigError, match=r"page_size: got 48, expected a divisor of --block-size \(128\)"):
        spec_of(monkeypatch, 0, page_size=48)


def test_blocks_of_one_page_are_refused_beside_full_kv_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HiSparseConfigError, match=r"^--block-size: got 16, expected at least 64:"):
        spec_of(monkeypatch, 1, block_size=16)
    assert spec_of(monkeypatch, 1, block_size=64).num_states == 16
    assert spec_of(monkeypatch, 0, block_size=16).num_states == 16


@pytest.mark.parametrize(
    ("num_layers", "num_full_kv", "unit", "size"), [(32, 2, 16, 256), (8, 2, 16, 64), (32, 0, 16, 16), (32, 2, 1, 16)]
)
def test_preferred_block_size(monkeypatch: pytest.MonkeyPatch, num_layers: int, num_full_kv: int, unit: int, size: int):
    config = SimpleNamespace(full_kv_layers=list(range(num_full_kv)), tokens_per_unit=unit)
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: config))
    model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=num_layers))
    assert preferred_block_size(SimpleNamespace(model_config=model)) == size

"""Refusals of layers and their messages. The layers decide, not the name of the model."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import bare
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

from vllm_hisparse.attention.check_layers import check_dense_layers, check_mla_layers, check_resident_layers
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError

NAME = "language_model.model.layers.{}.self_attn.attn"


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(kv_cache_dtypes=lambda device: ("auto",) if device == "cpu" else ())
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: config))


def engine(num_layers: int) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=num_layers)),
    )


def plain(cls: type = Attention, impl: dict[str, Any] | None = None, **changes: Any) -> Any:
    attributes = {
        "attn_type": "decoder",
        "sliding_window": None,
        "has_sink": False,
        "kv_sharing_target_layer_name": None,
        "use_mm_prefix": False,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
        "kv_cache_dtype": "auto",
        "k_scale": torch.tensor(1.0),
        "impl": SimpleNamespace(**{"alibi_slopes": None, "logits_soft_cap": 0.0, **(impl or {})}),
    }
    return bare(cls, **attributes | changes)


def dense(*layers: Any) -> dict[str, Any]:
    return {NAME.format(index): layer for index, layer in enumerate(layers)}


def test_one_plain_layer_each_is_accepted() -> None:
    check_dense_layers(dense(plain(), plain(), plain()), engine(3))


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (plain(sliding_window=512), r"Attention \(.*layers.1.self_attn.attn\) with sliding_window=512"),
        (plain(has_sink=True), "with sinks"),
        (plain(attn_type="encoder_only"), "with attn_type='encoder_only'"),
        (plain(kv_sharing_target_layer_name="layers.0"), "with kv_sharing_target_layer_name='layers.0'"),
        (plain(use_mm_prefix=True), "with use_mm_prefix"),
        (plain(head_size_v=32), "with head_size_v=32"),
        (plain(kv_cache_dtype="fp8"), "with kv_cache_dtype='fp8'"),
        (plain(k_scale=torch.ones(2)), "with k_scale='one for each KV head'"),
        (plain(impl={"alibi_slopes": [0.5]}), r"with alibi_slopes=\[0.5\]"),
        (plain(impl={"logits_soft_cap": 30.0}), "with logits_soft_cap=30.0"),
        (plain(impl={"chunk_lookback": 4}), "with chunk_lookback=4"),
        (plain(ChunkedLocalAttention), r"ChunkedLocalAttention \(.*its own way to attend"),
        (bare(MambaMixer), r"MambaMixer \(.*its own way to attend"),
        (bare(MLAAttention), r"MLAAttention \(.*its own way to attend"),
        (plain(num_kv_heads=4), r"with \(KV heads, head size, dtype\) \(4, 64, 'auto'\)"),
    ],
)
def test_other_layers_are_refused(layer: Any, what: str) -> None:
    with pytest.raises(HiSparseConfigError, match=f"^--model: got [\"'].*{what}.*, expected causal attention over"):
        check_dense_layers(dense(plain(), layer), engine(2))


@pytest.mark.parametrize(
    ("names", "num_layers"), [(["layers.0.attn", "layers.0.cross"], 2), (["layers.0.attn"], 2), ([], 1)]
)
def test_layers_are_one_each(names: list[str], num_layers: int) -> None:
    with pytest.raises(HiSparseConfigError, match=f"{len(names)} attention layers, of num_hidden_layers {num_layers}"):
        check_dense_layers({name: plain() for name in names}, engine(num_layers))


def test_names_without_one_number_are_refused() -> None:
    with pytest.raises(HiSparseConfigError, match="a name without one layer number"):
        check_dense_layers({"layers.0.experts.1.attn": plain()}, engine(1))


class Sparse(MLAAttention):
    pass


class Padded(Sparse):
    pass


def sparse(indexer: Any = None) -> Any:
    return bare(Sparse, use_sparse=True, indexer=indexer)


def full(head_size: int = 576) -> Any:
    return bare(MLAAttention, use_sparse=False, head_size=head_size, kv_cache_dtype="auto")


def test_full_mla_layers_and_indexer_keys_beside_sparse_layers_are_accepted() -> None:
    layers = [sparse("one"), full(), full(), bare(DeepseekV32IndexerCache), sparse()]
    check_mla_layers(dense(*layers), {Sparse: Sparse}, DeepseekV32IndexerCache)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([full()], r"MLAAttention \(.*layers.0.*full attention, as all others"),
        ([full(), sparse(), sparse("one")], r"Sparse \(.*layers.1.*no indexer, and"),
        ([], "NoneType .no layer"),
    ],
)
def test_a_dsa_model_without_a_selection_is_refused(layers: list[Any], message: str) -> None:
    """vLLM builds layers of full attention if HY-V4's configuration has no layer_types."""
    with pytest.raises(HiSparseConfigError, match=f"^--model: got '{message}.*over selected rows in some"):
        check_mla_layers(dense(*layers), {Sparse: Sparse}, DeepseekV32IndexerCache)


@pytest.mark.parametrize(
    "layer", [bare(Padded, use_sparse=True), bare(Padded, use_sparse=False), plain(), bare(MambaMixer)]
)
def test_other_layers_of_a_dsa_model_are_refused(layer: Any) -> None:
    with pytest.raises(HiSparseConfigError, match=rf"^--model: got '{type(layer).__name__} \(.*its own way"):
        check_mla_layers(dense(layer), {Sparse: Sparse}, DeepseekV32IndexerCache)


@pytest.mark.parametrize("sizes", [(576,), (576, 512)])
def test_as_many_indexers_as_full_layers_are_refused_before_weights_are_loaded(sizes: tuple[int, ...]) -> None:
    layers = [sparse("one"), *map(full, sizes), bare(DeepseekV32IndexerCache), sparse()]
    with pytest.raises(HiSparseConfigError, match=r"^--model: got '1 layers with an indexer, .*layers\.1\.self_attn"):
        check_mla_layers(dense(*layers), {Sparse: Sparse}, DeepseekV32IndexerCache)


@pytest.mark.parametrize(
    ("num_hot", "num_indexers", "rows", "is_refused"),
    [
        (3, 1, [1152], True),
        (3, 2, [1152], False),
        (1, 1, [1152], False),
        (30, 2, [1152, 1152], True),
        (30, 1, [1152, 576], True),
        (30, 2, [1152, 576], False),
        (61, 61, [], False),
    ],
)
def test_groups_that_vllm_would_split_are_refused(
    num_hot: int, num_indexers: int, rows: list[int], is_refused: bool
) -> None:
    sizes = {f"layers.{index}": width for index, width in enumerate(rows)}
    with pytest.raises(HiSparseConfigError, match=r"^--model: got .*layers\.0") if is_refused else nullcontext():
        check_resident_layers(num_hot, num_indexers, sizes)

"""Recognition of vLLM's KV cache groups, and the check that vLLM planned them as the layout expects."""

from __future__ import annotations

import re

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.groups import DeviceGroups, check_hot_layers
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout

MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
KEYS = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
MLA_LAYOUT = KVLayout(1152, 132, 3, 2, block_size=64)
HOT_MLA = HotBufferSpec.from_mla_spec(MLA, MLA_LAYOUT, 4096, elastic=True)
FULL_GQA = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32)
GQA_LAYOUT = KVLayout(512, 512, 3, 1, block_size=128, tokens_per_unit=16, num_kv_heads=2)
HOT_GQA = HotBufferSpec.from_full_spec(FULL_GQA, GQA_LAYOUT, device_buffer_size=2048, elastic=True)


def plan(*groups: tuple[list[str], KVCacheSpec]) -> KVCacheConfig:
    """vLLM's plan: groups of layers, and two tensors of which the larger is the pool."""
    tensors = [KVCacheTensor(size=size, layers=[], layer_stride=0, block_stride=0) for size in (3 << 20, 5 << 20)]
    kv_cache_groups = [KVCacheGroupSpec(names, spec) for names, spec in groups]
    return KVCacheConfig(num_blocks=9, kv_cache_tensors=tensors, kv_cache_groups=kv_cache_groups)


@pytest.mark.parametrize("hot_id", [0, 1])
def test_a_dsa_model_in_either_order(hot_id: int) -> None:
    both = [(["m0", "m1", "m2"], HOT_MLA), (["k0", "k2"], KEYS)]
    groups = DeviceGroups.from_config(plan(*(both if hot_id == 0 else reversed(both))))
    assert (groups.hot_group_id, groups.resident_group_id) == (hot_id, 1 - hot_id)
    assert groups.hot_spec == HOT_MLA
    assert groups.hot_group.layer_names == ["m0", "m1", "m2"]
    assert groups.resident_layers == ["k0", "k2"]
    assert groups.device_kv_bytes == 5 << 20
    assert groups.layout == MLA_LAYOUT


DRAFT_LAYOUT = KVLayout(1152, 132, 3, 2, block_size=64, draft_row_bytes=1152 + 132)
HOT_BESIDE_DRAFTS = HotBufferSpec.from_mla_spec(MLA, DRAFT_LAYOUT, 4096, elastic=True)


def test_a_dsa_model_whose_draft_layer_is_device_resident() -> None:
    """vLLM puts its rows beside the indexer keys; in the scheduler's process it names one layer's spec for all."""
    names = ["k0", "k2", "m3", "k3"]
    specs = UniformTypeKVCacheSpecs(
        block_size=64, kv_cache_specs={name: MLA if name == "m3" else KEYS for name in names}
    )
    for resident in (specs, KEYS):
        groups = DeviceGroups.from_config(plan((["m0", "m1", "m2"], HOT_BESIDE_DRAFTS), (names, resident)))
        assert groups.layout.resident_token_bytes == 3 * 132 + 1152
    short = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"k0": KEYS, "m3": MLA})
    with pytest.raises(ValueError, match="resident_token_bytes of the KV cache: vLLM planned 1284, the layers 1548"):
        DeviceGroups.from_config(plan((["m0", "m1", "m2"], HOT_BESIDE_DRAFTS), (["k0", "m3"], short)))


def test_a_dense_model_beside_its_full_kv_layers() -> None:
    groups = DeviceGroups.from_config(plan((["f0"], FULL_GQA), (["h1", "h2", "h3"], HOT_GQA)))
    assert (groups.hot_group_id, groups.resident_group_id) == (1, 0)
    assert groups.layout == GQA_LAYOUT


def test_a_dense_model_without_full_kv_layers() -> None:
    layout = KVLayout(512, 512, 2, 0, block_size=128, tokens_per_unit=16, num_kv_heads=2)
    hot = HotBufferSpec.from_full_spec(FULL_GQA, layout, device_buffer_size=2048, elastic=True)
    groups = DeviceGroups.from_config(plan((["h0", "h1"], hot)))
    assert (groups.hot_group_id, groups.resident_group_id) == (0, None)
    assert groups.resident_layers == [] and groups.layout.resident_block_bytes == 0


@pytest.mark.parametrize(
    "groups",
    [
        [(["k0"], KEYS)],
        [(["k0"], KEYS), (["f0"], FULL_GQA)],
        [(["m0"], HOT_MLA), (["m1"], HOT_MLA)],
        [(["m0"], HOT_MLA), (["k0"], KEYS), (["f0"], FULL_GQA)],
    ],
)
def test_other_groups_are_refused(groups: list[tuple[list[str], KVCacheSpec]]) -> None:
    kinds = [type(spec).__name__ for _, spec in groups]
    with pytest.raises(
        ValueError, match=re.escape(f"one KV cache group of hot rows and at most one other, got {kinds}")
    ):
        DeviceGroups.from_config(plan(*groups))


def test_a_loader_that_built_the_model_by_itself_is_named() -> None:
    check_hot_layers(plan((["k0"], KEYS), (["m0"], HOT_MLA)), "of_others")
    with pytest.raises(HiSparseConfigError) as refused:
        check_hot_layers(plan((["k0"], KEYS), (["f0"], FULL_GQA)), "of_others")
    for part in ("--load-format: got 'of_others'", "create_model", "FullAttentionSpec, MLAAttentionSpec", "Remove it"):
        assert part in str(refused.value)


WIDE_KEYS = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=264, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("hot_layers", "resident_layers", "keys", "message"),
    [
        (["m0", "m1"], ["k0", "k2"], KEYS, "num_layers of the KV cache: vLLM planned 2, the layers 3"),
        (["m0", "m1", "m2"], ["k0"], KEYS, "resident_token_bytes of the KV cache: vLLM planned 132, the layers 264"),
        (
            ["m0", "m1", "m2"],
            ["k0", "k2"],
            WIDE_KEYS,
            "resident_token_bytes of the KV cache: vLLM planned 528, the layers 264",
        ),
    ],
)
def test_a_plan_that_differs_from_the_layers_layout_is_refused(
    hot_layers: list[str], resident_layers: list[str], keys: KVCacheSpec, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceGroups.from_config(plan((hot_layers, HOT_MLA), (resident_layers, keys)))

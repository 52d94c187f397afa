from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from tests.moved_names import is_kv_cache_spec_uniform
from vllm_hisparse.kv_manager.blocks.hot_block_manager import HotBlockManager, register_hot_block_manager
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import KVLayout, StateLayout


def mla_spec(head_size: int = 576, dtype: torch.dtype = torch.bfloat16) -> MLAAttentionSpec:
    content_bytes = head_size * dtype.itemsize
    return MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=head_size, dtype=dtype, state_content_bytes=content_bytes
    )


def hot_spec(rows_per_block: int = 7, elastic: bool = True) -> HotBufferSpec:
    layout = SimpleNamespace(
        rows_per_hot_block=rows_per_block,
        block_alignment_bytes=1152,
        block_size=64,
        num_hot_blocks=lambda size, num_tokens=None: size if num_tokens is None else min(size, num_tokens),
        num_whole_blocks=lambda num_tokens: num_tokens,
        state=StateLayout((), 1, 0),
    )
    return HotBufferSpec.from_mla_spec(mla_spec(), layout, device_buffer_size=5, elastic=elastic)


@pytest.mark.parametrize("rows_per_block", [1, 3, 7, 64, 100])
def test_a_block_holds_rows_of_the_replaced_layer(rows_per_block: int) -> None:
    spec = hot_spec(rows_per_block)
    assert spec.block_size == 64
    assert spec.num_states == rows_per_block
    assert spec.state_content_size_bytes == 1152
    assert spec.page_size_bytes == rows_per_block * 1152
    for max_model_len, num_blocks in ((3, 3), (100, 5)):
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
        assert spec.max_memory_usage_bytes(config) == num_blocks * spec.page_size_bytes
    assert (spec.dtype, spec.head_size, spec.num_kv_heads) == (torch.bfloat16, 576, 1)
    assert not spec.uses_slot_mapping and not spec.dcp_sharded


@pytest.mark.parametrize(("elastic", "sizes"), [(True, [1, 4, 5]), (False, [5, 5, 5])])
def test_blocks_grow_with_the_sequence_if_they_are_elastic(elastic: bool, sizes: list[int]) -> None:
    spec = hot_spec(elastic=elastic)
    assert [spec.num_blocks(num_tokens) for num_tokens in (1, 4, 1000)] == sizes
    assert spec.max_blocks_per_request(1) == 5
    assert spec.max_blocks_per_request(1000) == (1000 if elastic else 5)


@pytest.mark.parametrize(("max_len", "width"), [(1, 5), (320, 5), (321, 6), (6400, 100)])
def test_block_table_is_wide_enough_for_positions(max_len: int, width: int) -> None:
    spec = hot_spec()
    assert spec.max_num_blocks_per_req(SimpleNamespace(), max_len) == width


@pytest.mark.parametrize(("num_resident", "draft_bytes", "num_blocks"), [(0, 0, 1), (0, 512, 2), (2, 0, 2)])
def test_a_request_has_blocks_of_device_resident_kv_where_there_is_any(
    num_resident: int, draft_bytes: int, num_blocks: int
) -> None:
    layout = KVLayout(512, 512, 2, num_resident, 64, draft_row_bytes=draft_bytes)
    spec = HotBufferSpec.from_mla_spec(mla_spec(256), layout, 16, True)
    assert spec.num_request_blocks(1) == num_blocks
    assert spec.request_bytes(1) == num_blocks * layout.device_block_bytes


def dense_spec(num_resident: int, state_entries: tuple = ((16, 512),)) -> HotBufferSpec:
    """Two layers with hot pages of 16 tokens; a block has bounds of as many pages as tokens."""
    layout = KVLayout(512, 512, 2, num_resident, 64, 16, 2, state_entries=state_entries)
    full = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return HotBufferSpec.from_full_spec(full, layout, 128, elastic=True)


def test_the_longest_request_has_blocks_for_an_algorithms_state() -> None:
    """vLLM refuses a cache that does not hold it."""
    spec, plain = dense_spec(0), dense_spec(0, ())
    assert spec.layout.state.tokens_per_block == (64 * 16,)
    for max_model_len, num_blocks in ((1, 1), (1024, 1), (1025, 2), (100_000, 98)):
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
        assert spec.num_request_blocks(max_model_len) - plain.num_request_blocks(max_model_len) == num_blocks
        more_bytes = spec.max_memory_usage_bytes(config) - plain.max_memory_usage_bytes(config)
        assert more_bytes == num_blocks * spec.page_size_bytes


@pytest.mark.parametrize(("num_resident", "state_entries"), [(2, ((16, 512),)), (2, ()), (0, ((16, 512),))])
def test_vllm_zeroes_blocks_that_may_have_held_state(num_resident: int, state_entries: tuple) -> None:
    """vLLM zeroes blocks if full-KV layers share them."""
    full = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["hot"], dense_spec(num_resident, state_entries))]
    groups += [KVCacheGroupSpec(["full"], full)] if num_resident else []
    config = KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=groups)
    assert config.needs_kv_cache_zeroing == bool(num_resident and state_entries)


def test_stays_apart_from_the_resident_group() -> None:
    specs = {"attn": hot_spec(), "indexer": mla_spec(132, torch.uint8)}
    assert not isinstance(specs["attn"], FullAttentionSpec)
    assert not is_kv_cache_spec_uniform(specs)
    assert UniformTypeKVCacheSpecs.from_specs(specs) is None


def test_vllm_finds_the_manager_and_keeps_its_own() -> None:
    register_hot_block_manager()
    register_hot_block_manager()
    hot = hot_spec()
    assert KVCacheSpecRegistry.get_manager_class(hot) is HotBlockManager
    assert issubclass(KVCacheSpecRegistry.get_manager_class(mla_spec()), FullAttentionManager)
    assert KVCacheSpecRegistry.get_manager_class(mla_spec()) is not HotBlockManager

"""Sizes of MiniMax-M3's hot buffers, and the KV cache groups that vLLM makes of its layers."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import bare
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MLAAttentionSpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.kv_manager.blocks.hot_block_manager import register_hot_block_manager
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.layout import MSA_UNIT, KVLayout

try:
    from vllm.v1.core import kv_cache_planning
except ImportError:  # vLLM 0.32
    from vllm.v1.core import kv_cache_utils as kv_cache_planning

BLOCK = 128


def layout_of(num_sparse: int, num_full: int, num_kv_heads: int = 4, key_bytes: int = 256) -> KVLayout:
    row = num_kv_heads * 512
    sizes = num_sparse, num_sparse, BLOCK, MSA_UNIT, num_kv_heads
    return KVLayout(row, key_bytes, *sizes, full_kv_row_bytes=num_full * row)


@pytest.mark.parametrize("key_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize(("num_sparse", "num_full"), [(57, 3), (4, 2), (3, 3), (4, 0), (1, 3)])
def test_vllm_makes_one_group_of_hot_rows_and_one_of_the_rest(
    msa_cuda: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    num_sparse: int,
    num_full: int,
    num_kv_heads: int,
    key_dtype: torch.dtype,
) -> None:
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=num_kv_heads, head_size=128, dtype=torch.bfloat16)
    keys = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=key_dtype, cache_role=SparseCacheRole.INDEXER
    )
    layers: dict[str, Any] = {f"layers.{i}.attn": bare(Attention) for i in range(num_full)}
    for i in range(num_full, num_full + num_sparse):
        layers[f"layers.{i}.attn"] = bare(msa_cuda.HotMSAAttention)
        layers[f"layers.{i}.attn.index_cache"] = bare(msa_cuda.MiniMaxM3IndexerCache)
    for cls, spec in (
        (Attention, full),
        (msa_cuda.MiniMaxM3SparseAttention, full),
        (msa_cuda.MiniMaxM3IndexerCache, keys),
    ):
        monkeypatch.setattr(cls, "get_kv_cache_spec", lambda *_, spec=spec: spec)
    config = HiSparseConfig(algorithm="msa", host_pool_gib=1.0, top_k=2048, device_buffer_size=4096)
    monkeypatch.setattr(HiSparseConfig, "from_vllm_config", classmethod(lambda *_: config))
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC, mamba_num_pages=None, hisparse_config=None
    )
    engine = SimpleNamespace(
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=cache_config,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(max_model_len=1 << 17),
    )
    specs = {name: layer.get_kv_cache_spec(engine) for name, layer in layers.items()}
    layout = next(spec.layout for spec in specs.values() if isinstance(spec, HotBufferSpec))
    assert layout == layout_of(num_sparse, num_full, num_kv_heads, 128 * key_dtype.itemsize)
    register_hot_block_manager()
    monkeypatch.setattr(kv_cache_planning, "get_hisparse_kv_cache_groups", lambda *_: None)
    groups = kv_cache_planning.get_kv_cache_groups(engine, specs)
    tensors = [KVCacheTensor(size=1 << 20, layers=[], layer_stride=0, block_stride=0)]
    found = DeviceGroups.from_config(KVCacheConfig(num_blocks=9, kv_cache_tensors=tensors, kv_cache_groups=groups))
    assert len(found.hot_group.layer_names) == num_sparse
    assert len(found.resident_layers) == num_sparse + num_full
    assert found.layout == layout


def test_blocks_of_another_size_are_refused(msa_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would divide them for its kernels, which hot buffers cannot."""
    spec = FullAttentionSpec(block_size=256, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
    monkeypatch.setattr(msa_cuda.MiniMaxM3SparseAttention, "get_kv_cache_spec", lambda *_: spec)
    with pytest.raises(HiSparseConfigError, match=r"^--block-size: got 256, expected 128, the block that the indexer"):
        bare(msa_cuda.HotMSAAttention).get_kv_cache_spec(None)


@pytest.mark.parametrize(
    ("key_bytes", "rows", "gigabytes"),
    [(256, 16, 3.40), (128, 16, 2.40)],
)
def test_a_request_of_128k_tokens(key_bytes: int, rows: int, gigabytes: float) -> None:
    """18.0 GB of full KV with index keys in bf16."""
    layout = layout_of(57, 3, key_bytes=key_bytes)
    assert layout.full_request_bytes(1 << 17) / 1e9 == pytest.approx(18.02 if key_bytes == 256 else 17.06, abs=0.01)
    assert layout.rows_per_hot_block == rows
    assert layout.hot_request_bytes(1 << 17, 4096) / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert layout.unit_bytes == 16 * 512

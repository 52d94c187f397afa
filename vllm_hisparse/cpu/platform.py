"""CPU platform: vLLM's CPU platform with sparse MLA for DSA models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from vllm_hisparse.compat.engine import is_dsa_model, uses_host_connector
from vllm_hisparse.compat.registries import register_quantization
from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.cpu.indexer_scores import quantize_groups
from vllm_hisparse.cpu.rejection import expand, recover, reject
from vllm_hisparse.layout import BLOCK_SIZE
from vllm_hisparse.vllm_patches.rejection_sampler import mend_rejection_sampler
from vllm_hisparse.vllm_patches.rotary_kernel import avoid_rotary_kernel
from vllm_hisparse.vllm_patches.triton_stand_in import complete_stand_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

FULL_KV_BACKEND = "vllm_hisparse.cpu.full_kv_mla.SparseMLACpuBackend"
FULL_ATTENTION_MLA_BACKEND = "vllm_hisparse.cpu.full_attention_mla.FullAttentionMLACpuBackend"
DENSE_MODEL_BACKEND = "vllm_hisparse.cpu.full_kv_gqa.FullKVGQACpuBackend"


class HiSparseCpuPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        from vllm.config import get_current_vllm_config

        vllm_config, use_mla = get_current_vllm_config(), attn_selector_config.use_mla
        if attn_selector_config.use_sparse and use_mla:
            return FULL_KV_BACKEND  # `attach.py` gives layers with hot buffers another one
        if use_mla and is_dsa_model(vllm_config):
            return FULL_ATTENTION_MLA_BACKEND
        if uses_host_connector(vllm_config) and not use_mla:
            return DENSE_MODEL_BACKEND
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if uses_host_connector(vllm_config) and vllm_config.model_config is not None:
            HiSparseConfig.parse(vllm_config)  # NOTE: nothing is kept, because vLLM may change it yet.
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        saved = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        super().check_and_update_config(vllm_config)
        if not is_dsa_model(vllm_config):
            return
        # NOTE: for its own dense kernels, vLLM sets block size 16 for MLA models on the CPU, and switches chunked
        # prefill and prefix caching off.
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = saved
        cache.block_size = BLOCK_SIZE  # `update_block_size_for_backend` keeps it
        avoid_rotary_kernel(vllm_config)

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        if not is_dsa_model(vllm_config):
            super().update_block_size_for_backend(vllm_config)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        mend_rejection_sampler(expand, reject, recover)
        super().register_triton_kernel_overrides()
        complete_stand_in()
        register_quantization(quantize_groups)

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        # NOTE: vLLM's NIXL worker moves its main thread to the last core of a node listed here, even if the process may
        # use other cores only. With few cores, all engines would compute on the same one.
        return []

"""Entry points that vLLM calls. The module imports vLLM only inside them."""

from __future__ import annotations

from typing import Any


def cpu_platform() -> str | None:
    """Entry point `vllm.platform_plugins`: return our platform if vLLM would choose its CPU platform; else None."""
    from vllm.platforms import cpu_platform_plugin

    from vllm_hisparse.compat.moved_modules import MovedModules
    from vllm_hisparse.vllm_patches.orphaned_engines import end_with_parent

    MovedModules.install()
    end_with_parent()  # here for every platform, because vLLM calls this function first
    return "vllm_hisparse.cpu.platform.HiSparseCpuPlatform" if cpu_platform_plugin() else None


def register() -> None:
    """Entry point `vllm.general_plugins`, called in every process of every engine. A second call is harmless."""
    from vllm_hisparse.releases import check_release

    check_release()
    from vllm.platforms import current_platform

    from vllm_hisparse.compat.compiled_models import separate_compiled_models
    from vllm_hisparse.compat.model_loading import when_built
    from vllm_hisparse.compat.registries import register_connector
    from vllm_hisparse.config import CONNECTOR_NAME, GRAPH_OPTIONS
    from vllm_hisparse.kv_manager.blocks.hot_block_manager import register_hot_block_manager
    from vllm_hisparse.vllm_patches.orphaned_engines import end_with_parent
    from vllm_hisparse.vllm_patches.unstated_leases import state_leases

    end_with_parent()
    register_connector(CONNECTOR_NAME, "vllm_hisparse.connector.connector", "HiSparseHostConnector")
    register_hot_block_manager()
    state_leases()
    if current_platform.is_cpu():
        _register_cpu_layers()
    separate_compiled_models(CONNECTOR_NAME, GRAPH_OPTIONS)
    when_built(check_options, _attach_hot_buffers)


def _register_cpu_layers() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_hisparse.cpu import full_kv_mla, indexer, mla_wrapper  # noqa: F401 (two register on import)
    from vllm_hisparse.cpu.platform import FULL_KV_BACKEND

    if full_kv_mla.BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(full_kv_mla.BACKEND_NAME, FULL_KV_BACKEND)


def check_options(vllm_config: Any) -> None:
    """Refuse options that are wrong, before the model is built."""
    from vllm_hisparse.compat.engine import uses_host_connector
    from vllm_hisparse.config import HiSparseConfig, check_connector

    check_connector(vllm_config)
    if uses_host_connector(vllm_config):
        HiSparseConfig.from_vllm_config(vllm_config)


def _attach_hot_buffers(model: Any, vllm_config: Any) -> None:
    """Give the model's layers hot buffers. NOTE: the import is here, because not every process needs vLLM's layers."""
    from vllm_hisparse.attention.attach import attach_hot_buffers

    attach_hot_buffers(model, vllm_config)

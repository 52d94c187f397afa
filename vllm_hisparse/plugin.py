"""Entry points. Nothing here imports vLLM before vLLM asks."""

from __future__ import annotations


def cpu_platform() -> str | None:
    """`vllm.platform_plugins`: our platform where vLLM would pick its CPU platform, None elsewhere."""
    from vllm.platforms import cpu_platform_plugin

    from vllm_hisparse.compat.moved_modules import MovedModules
    from vllm_hisparse.vllm_patches.orphaned_engines import end_with_parent

    MovedModules.install()
    end_with_parent()  # on every platform: it is what vLLM calls first
    return "vllm_hisparse.cpu.platform.HiSparseCpuPlatform" if cpu_platform_plugin() else None


def register() -> None:
    """`vllm.general_plugins`: called in every process of every engine; registering twice is harmless."""
    from vllm_hisparse.releases import check_release

    check_release()
    from vllm.platforms import current_platform

    from vllm_hisparse.compat.registries import register_connector
    from vllm_hisparse.config import CONNECTOR_NAME
    from vllm_hisparse.kv_manager.blocks.hot_block_manager import register_hot_block_manager
    from vllm_hisparse.vllm_patches.orphaned_engines import end_with_parent
    from vllm_hisparse.vllm_patches.unstated_leases import state_leases

    end_with_parent()
    register_connector(CONNECTOR_NAME, "vllm_hisparse.connector.connector", "HiSparseHostConnector")
    register_hot_block_manager()
    state_leases()
    if current_platform.is_cpu():
        _register_cpu_layers()
    elif current_platform.is_cuda():
        _register_cuda_models()


def _register_cpu_layers() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_hisparse.cpu import full_kv_mla, indexer, mla_wrapper  # noqa: F401 (two register on import)
    from vllm_hisparse.cpu.platform import FULL_KV_BACKEND

    if full_kv_mla.BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(full_kv_mla.BACKEND_NAME, FULL_KV_BACKEND)


def _register_cuda_models() -> None:
    from vllm import ModelRegistry

    from vllm_hisparse.config import CUDA_MODELS, REFUSED_MODELS

    known = ModelRegistry.get_supported_archs()
    for name in (*CUDA_MODELS, *(name for name in REFUSED_MODELS if name in known)):
        ModelRegistry.register_model(name, f"vllm_hisparse.attention.models_cuda:{name}")

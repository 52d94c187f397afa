"""Registries of vLLM, which refuse a second registration in a process."""

from __future__ import annotations

from collections.abc import Callable

RELEASES = ">=0.32"
VLLM = (
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory._registry",
    "vllm.v1.kv_offload.tiering.factory.SecondaryTierFactory._registry",
    "vllm.model_executor.layers.quantization.utils.fp8_utils._per_token_group_quant_fp8",
)


def register_connector(name: str, module: str, class_name: str) -> None:
    """Register a KV connector, unless it is registered."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, class_name)


def register_tier(name: str, module: str, class_name: str) -> None:
    """Register a tier of vLLM's tiering, unless it is registered."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if name not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(name, module, class_name)


def register_quantization(kernel: Callable[..., None]) -> None:
    """Have a function run in place of the Triton kernel that quantises groups of elements, where there is no Triton."""
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels

    if not HAS_TRITON:
        register_kernels({VLLM[-1]: kernel})

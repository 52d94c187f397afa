"""Registries of vLLM, which refuse a second registration in a process."""

from __future__ import annotations

RELEASES = ">=0.32"
VLLM = (
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory._registry",
    "vllm.v1.kv_offload.tiering.factory.SecondaryTierFactory._registry",
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

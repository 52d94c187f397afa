"""`HiSparseHostConnector` as a KV-transfer backend of `ray.serve.llm`."""

from __future__ import annotations

from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.engines.vllm.kv_transfer.nixl import NixlConnectorBackend

from vllm_hisparse.config import CONNECTOR_NAME


class HiSparseConnectorBackend(NixlConnectorBackend):
    """Pulls KV over NIXL like stock decode replicas, with the same hand-over from prefill replicas.

    NOTE: Ray gives the engine a port for NIXL's side channel, too. A decode engine does not listen on it.
    """


def register() -> None:
    """Register the backend in all processes of the cluster; idempotent."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR_NAME):
        path = f"{HiSparseConnectorBackend.__module__}:{HiSparseConnectorBackend.__qualname__}"
        KVConnectorBackendFactory.register_backend(CONNECTOR_NAME, path)

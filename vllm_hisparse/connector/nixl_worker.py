"""Worker half of the P/D transport: vLLM's NIXL pull connector over host and device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from vllm_hisparse.compat.nixl import copy_blocks_whole
from vllm_hisparse.connector.nixl_config import host_resident_config
from vllm_hisparse.kv_manager.groups import DeviceGroups

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NixlWorkerTransport:
    """Registers host and device memory and moves the blocks."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: DeviceGroups, num_host_blocks: int
    ):
        config = host_resident_config(vllm_config, kv_cache_config, groups, num_host_blocks)
        self.connector = NixlPullConnector(vllm_config, KVConnectorRole.WORKER, config)
        copy_blocks_whole(self.connector)

    def register(self, main_kv: dict[str, torch.Tensor], resident_kv: dict[str, torch.Tensor]) -> None:
        """Register memory.

        Args:
            main_kv: layer -> host pool, [num_host_blocks, block_size, row elements].
            resident_kv: layer -> device cache as vLLM allocated it, [num_blocks, 1, block_size, row bytes].
        """
        host = {name: tensor.unsqueeze(1) for name, tensor in main_kv.items()}
        self.connector.register_kv_caches({**host, **resident_kv})

    def bind_metadata(self, metadata: KVConnectorMetadata) -> None:
        self.connector.bind_connector_metadata(metadata)

    def clear_metadata(self) -> None:
        self.connector.clear_connector_metadata()

    def start_load(self, forward_context: ForwardContext) -> None:
        self.connector.start_load_kv(forward_context)

    def transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose pull finished or failed."""
        results = self.connector.get_transfer_results(finished_req_ids)
        # NOTE: the connector names the first group's blocks of a failed request too; vLLM accepts block ids from models
        # with one group only, and `failed_recving` says it all.
        self.connector.get_block_ids_with_load_errors()
        return results

    def take_stats(self) -> NixlKVConnectorStats | None:
        return self.connector.get_kv_connector_stats()

    def handshake_metadata(self) -> Any:
        return self.connector.get_handshake_metadata()

    def shutdown(self) -> None:
        self.connector.shutdown()

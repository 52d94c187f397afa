"""Worker half of the connector: host memory, hot buffers and the copies between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.utils.math_utils import cdiv

from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.connector.metadata import HiSparseMetadata, HiSparseWorkerMetadata
from vllm_hisparse.connector.metrics import HiSparseStats
from vllm_hisparse.connector.nixl_transport import NixlWorkerTransport
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.host_kv_store import HostKVStore
from vllm_hisparse.kv_manager.hot_buffer import HotBuffer
from vllm_hisparse.ops import swap_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext


class HiSparseWorkerConnector:
    """Owns the host store and the hot buffers, and carries out the scheduler half's metadata.

    Args:
        vllm_config: the engine's configuration.
        config: checked options.
        groups: the device KV cache groups.
        num_host_blocks: size of the host pool.
        transport: P/D transport, or None for a single instance.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: HiSparseConfig,
        groups: DeviceGroups,
        num_host_blocks: int,
        transport: NixlWorkerTransport | None,
    ):
        self.groups, self.layout, self.transport = groups, groups.layout, transport
        self.attention_layers = vllm_config.compilation_config.static_forward_context
        self.store = HostKVStore(
            self.layout,
            num_host_blocks,
            groups.hot_group.layer_names,
            groups.indexer_group.layer_names,
            groups.hot_spec.dtype,
            config.size_option,
        )
        self.hot_buffer = HotBuffer(
            vllm_config.scheduler_config.max_num_seqs,
            config.rows,
            self.layout.num_layers,
            cdiv(vllm_config.model_config.max_model_len, self.layout.block_size),
            refresh_hits=config.eviction_policy == "lru",
        )
        self.stats = HiSparseStats()
        self._released: list[tuple[int, int, int]] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Attach storage to the attention layers.

        Args:
            kv_caches: layer -> [num_blocks, 1, rows, row elements], as vLLM allocated them.
        """
        self.hot_rows = {name: kv_caches[name].squeeze(1) for name in self.groups.hot_group.layer_names}
        indexer_caches = {name: kv_caches[name] for name in self.groups.indexer_group.layer_names}
        self.indexer_keys = {name: cache.squeeze(1).flatten(1) for name, cache in indexer_caches.items()}
        for index, name in enumerate(self.hot_rows):
            self.attention_layers[name].impl.bind(self.hot_buffer, index, self.store.main_kv[name])
        if self.transport:
            self.transport.register(self.store.main_kv, indexer_caches)

    def apply_changes(self, metadata: HiSparseMetadata) -> None:
        """Apply the scheduler's changes, before the step's attention metadata is built.

        NOTE: not in `start_load_kv`, which may run after the forward.
        """
        saved_bytes = self.store.save_indexer_keys(self.indexer_keys, metadata.tail_saves)
        for handle in metadata.released:
            self._released.append((handle, *self.hot_buffer.release(handle)))
        for handle, (first, host_ids) in metadata.tables.items():
            self.hot_buffer.extend_table(handle, first, host_ids)
        restored_bytes = self.store.restore_indexer_keys(self.indexer_keys, metadata.restores)
        self.stats.add(device_to_host_bytes=saved_bytes, host_to_device_bytes=restored_bytes)

    def bind_metadata(self, metadata: HiSparseMetadata) -> None:
        self.metadata = metadata
        if self.transport:
            self.transport.bind_metadata(metadata.transport)

    def clear_metadata(self) -> None:
        self.metadata = None
        if self.transport:
            self.transport.clear_metadata()

    def start_load(self, forward_context: ForwardContext) -> None:
        if self.transport:
            self.transport.start_load(forward_context)

    def finish_step(self) -> None:
        """Bring what the forward produced to the host: newest rows and full indexer blocks."""
        saved_bytes = self.store.save_indexer_keys(self.indexer_keys, self.metadata.saves)
        batch = self.hot_buffer.decode_batch
        if batch is not None:
            for name, hot_rows in self.hot_rows.items():
                swap_in.write_back(
                    hot_rows,
                    batch.hot_tables,
                    self.store.main_kv[name],
                    batch.host_tables,
                    batch.newest,
                    self.hot_buffer.num_slots,
                )
            saved_bytes += len(batch.requests) * self.layout.num_layers * self.layout.row_bytes
            self.hot_buffer.decode_batch = None
        self.stats.add(device_to_host_bytes=saved_bytes)

    def transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.transport.transfer_results(finished_req_ids) if self.transport else KVConnectorTransferResults()

    def take_worker_metadata(self) -> HiSparseWorkerMetadata | None:
        released, self._released = self._released, []
        return HiSparseWorkerMetadata(released) if released else None

    def take_stats(self) -> HiSparseStats:
        """Counters since the last call."""
        stats, self.stats = self.stats, HiSparseStats()
        hits, misses = self.hot_buffer.take_counts()
        stats.add(cache_hits=hits, cache_misses=misses, host_to_device_bytes=misses * self.layout.row_bytes)
        nixl_stats = self.transport.take_stats() if self.transport else None
        if nixl_stats is not None:
            stats.add_nixl(nixl_stats)
        return stats

    def shutdown(self) -> None:
        if self.transport:
            self.transport.shutdown()

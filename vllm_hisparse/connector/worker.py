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
from vllm_hisparse.kv_manager.hot_buffer import HotBuffer, HotBufferShape

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
        self.config, self.vllm_config = config, vllm_config
        self.groups, self.layout, self.transport = groups, groups.layout, transport
        self.store = HostKVStore(
            self.layout, num_host_blocks, groups.hot_group.layer_names, groups.hot_spec.dtype, config.size_option
        )
        self.stats = HiSparseStats()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Attach storage to the attention layers.

        Args:
            kv_caches: layer -> [num_blocks, 1, rows, row elements], as vLLM allocated them.
        """
        hot_caches = {name: kv_caches[name].squeeze(1) for name in self.groups.hot_group.layer_names}
        indexer_caches = {name: kv_caches[name] for name in self.groups.indexer_group.layer_names}
        self.indexer_keys = _block_view(list(indexer_caches.values()))
        device = self.indexer_keys.device
        self.store.attach(device)
        shape = self._shape(num_device_blocks=len(self.indexer_keys))
        self.hot_buffer = HotBuffer(shape, device, refresh_hits=self.config.eviction_policy == "lru")
        layers = self.vllm_config.compilation_config.static_forward_context
        self.impls = [layers[name].impl for name in hot_caches]
        for index, (impl, name) in enumerate(zip(self.impls, hot_caches, strict=True)):
            impl.bind(self.hot_buffer, index, self.store.main_kv[name], hot_caches[name])
        if self.transport:
            self.transport.register(self.store.main_kv, indexer_caches)

    def apply_changes(self, metadata: HiSparseMetadata) -> None:
        """Apply the scheduler's changes, before the step's attention metadata is built.

        NOTE: not in `start_load_kv`, which may run after the forward.
        """
        saved_bytes = self.store.save_indexer_keys(self.indexer_keys, metadata.tail_saves)
        for handle in metadata.released:
            self.hot_buffer.release(handle)
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
        hot_buffer = self.hot_buffer
        if hot_buffer.decode_tables is not None:
            hot_buffer.ops.write_back(
                [impl.hot for impl in self.impls],
                [impl.host_rows for impl in self.impls],
                hot_buffer.decode_tables,
                hot_buffer.num_slots,
            )
            saved_bytes += hot_buffer.num_decodes * self.layout.num_layers * self.layout.row_bytes
            hot_buffer.decode_tables = None
        self.stats.add(device_to_host_bytes=saved_bytes)

    def transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.transport.transfer_results(finished_req_ids) if self.transport else KVConnectorTransferResults()

    def take_worker_metadata(self) -> HiSparseWorkerMetadata | None:
        released = self.hot_buffer.take_released()
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
        """NOTE: in this order: nobody reads or writes the host memory any more when it is unpinned."""
        if self.transport:
            self.transport.shutdown()
        self.store.close()

    def _shape(self, num_device_blocks: int) -> HotBufferShape:
        assert self.config.top_k is not None
        return HotBufferShape(
            num_requests=self.vllm_config.scheduler_config.max_num_seqs,
            num_slots=self.config.rows,
            num_layers=self.layout.num_layers,
            top_k=self.config.top_k,
            max_blocks=cdiv(self.vllm_config.model_config.max_model_len, self.layout.block_size),
            block_size=self.layout.block_size,
            num_device_blocks=num_device_blocks,
        )


def _block_view(caches: list[torch.Tensor]) -> torch.Tensor:
    """The caches of all layers as whole blocks: [num_blocks, bytes of a block in all layers] uint8.

    Args:
        caches: one per layer, [num_blocks, 1, block_size, row bytes] uint8; side by side inside each block.
    """
    first, layer_bytes = caches[0], caches[0][0].numel()
    for index, cache in enumerate(caches):
        assert cache.data_ptr() == first.data_ptr() + index * layer_bytes, "layers do not lie side by side in a block"
    size = (len(first), len(caches) * layer_bytes)
    return first.as_strided(size, (first.stride(0), 1))

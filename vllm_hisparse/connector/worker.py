"""Worker half of the connector: host memory, hot buffers and the copies between them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

from vllm_hisparse.algorithms.base import SparseAlgorithm
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError
from vllm_hisparse.connector.metadata import (
    HiSparseHandshakeMetadata,
    HiSparseWorkerMetadata,
)
from vllm_hisparse.connector.metrics import HiSparseStats
from vllm_hisparse.connector.nixl_worker import NixlWorkerTransport
from vllm_hisparse.cpu.unit_ops import CpuUnitOps
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolLayout
from vllm_hisparse.kv_manager.metadata import BlockPairs, HiSparseMetadata
from vllm_hisparse.kv_manager.rows.algorithm_state import check_fixed_state_fits, make_algorithm
from vllm_hisparse.kv_manager.rows.gqa_hot_buffer import GQAHotBuffer
from vllm_hisparse.kv_manager.rows.host_kv_store import HostKVStore
from vllm_hisparse.kv_manager.rows.host_memory import allocate_host_pool, num_host_pools
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.kv_manager.rows.key_conversion import KeyConversion
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.reserved_memory import (
    check_import_buffer_fits,
    check_residency_fits,
    release_memory,
)
from vllm_hisparse.kv_manager.rows.selection_recorder import RecordingHotBuffer, SelectionRecorder
from vllm_hisparse.kv_manager.rows.usage_sampler import UsageSampler
from vllm_hisparse.layout import KVLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext

FREE_DEVICE_SHARE = 0.9  # share that an algorithm's state may take; the rest is left for tensors that grow with a batch

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


class HiSparseWorkerConnector:
    """Owns the host store and the hot buffers, and carries out the scheduler half's metadata.

    Args:
        vllm_config: the engine's configuration.
        config: checked options.
        groups: the device KV cache groups.
        num_host_blocks: number of blocks of this worker's host pool.
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
        pool_layout = HostPoolLayout(self.layout, num_host_blocks)
        self.host_memory = allocate_host_pool(
            pool_layout.num_bytes,
            vllm_config,
            config.size_option,
            bool(config.tiers),
            config.tier_buffer_bytes(pool_layout.num_bytes * num_host_pools(vllm_config)),
            config.host_pool_memory,
        )
        if transport is not None and config.host_pool_memory == "managed":
            logger.warning(
                "HiSparse: host_pool_memory is 'managed'. With it, NIXL has been tried only between engines that share "
                "a GPU. A network card may be unable to write there. If transfers fail, remove the option."
            )
        hot_layers, dtype = groups.hot_group.layer_names, groups.hot_spec.dtype
        self.store = HostKVStore(pool_layout, hot_layers, dtype, self.host_memory.memory)
        self._saves: BlockPairs = []
        self._recorder: SelectionRecorder | None = None
        self._sampler: UsageSampler | None = None  # none before `register_kv_caches`
        self._step = 0  # number of the present step
        self._rank = vllm_config.parallel_config.rank
        self.reports_requests = self._rank == 0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Attach storage to the attention layers.

        Args:
            kv_caches: layer -> [num_blocks, KV heads, rows, row elements], as vLLM allocated them.
        """
        hot_caches = {name: kv_caches[name] for name in self.groups.hot_group.layer_names}
        resident_caches = {name: kv_caches[name] for name in self.groups.resident_layers}
        any_cache = next(iter(hot_caches.values()))
        if self.config.algorithm_class.model_family == "mla":
            hot_caches = dict(zip(hot_caches, layer_views(list(hot_caches.values()), self.layout), strict=True))
        self.resident_kv = _block_view(list(resident_caches.values()), any_cache)
        in_memory = dict(sorted(resident_caches.items(), key=lambda item: item[1].data_ptr()))
        conversion = self._key_conversion(list(in_memory.values()))
        self.store.attach(any_cache.device, conversion)
        self.hot_buffer = self._make_hot_buffer(list(hot_caches.values()))
        layers = self.vllm_config.compilation_config.static_forward_context
        self.impls = [layers[name].impl for name in hot_caches]
        for index, (impl, name) in enumerate(zip(self.impls, hot_caches, strict=True)):
            impl.bind(self.hot_buffer, index, self.store.main_kv[name], hot_caches[name])
        controls_admission = self.config.controls_admission(self.layout.max_query_len)
        selects = isinstance(self.hot_buffer, MLAHotBuffer) and all(self.hot_buffer.selects)
        divides_steps = selects and self.impls[0].divides_steps
        looks_at_rows = controls_admission or self.config.log_rows_by_layer
        if self.reports_requests and (looks_at_rows or divides_steps):
            self._sampler = UsageSampler(self.hot_buffer, looks_at_rows)
        if self.transport:
            received = resident_caches
            if conversion is not None:
                received = self.store.saved_layers(dict(zip(in_memory, conversion.layer_bytes, strict=True)))
            self._register_with(self.transport, received, any_cache.device)
            if self.config.import_buffer_bytes:
                self._read_through_buffer(self.transport, any_cache.device)

    def apply_changes(self, metadata: HiSparseMetadata) -> None:
        """Apply the scheduler's changes, before the forward.

        NOTE: this cannot be done in `start_load_kv`, which may run after the forward. Model Runner V2 has built the
        step's attention metadata before this call, Model Runner V1 builds it afterwards.
        """
        self.store.save_resident_kv(self.resident_kv, metadata.preemption_saves)
        if metadata.waits_for_preemption_saves:
            self.store.wait()
        for first_hot_block_id in metadata.released:
            self.hot_buffer.release(first_hot_block_id)
        self.hot_buffer.extend_host_block_tables(metadata.host_block_tables)
        self.hot_buffer.change_hot_block_tables(metadata.hot_block_tables, metadata.equal_rows)
        self.hot_buffer.requests.extend_state(metadata.state_block_tables)
        for first_hot_block_id, position in metadata.first_decodes:
            for span in self.hot_buffer.begin_decoding(first_hot_block_id, position):
                for impl in self.impls:
                    impl.represent(span)
        self.hot_buffer.requests.expect_prefills(metadata.prefills)
        self.hot_buffer.step.runs_whole = metadata.runs_whole
        self.store.restore_resident_kv(self.resident_kv, metadata.restores)

    def bind_metadata(self, metadata: HiSparseMetadata) -> None:
        self._saves, self._step = metadata.saves, metadata.step
        if self.transport:
            self.transport.bind_metadata(metadata.transport, metadata.leases)

    def clear_metadata(self) -> None:
        self.hot_buffer.requests.expect_prefills([])
        if self.transport:
            self.transport.clear_metadata()

    def start_load(self, forward_context: ForwardContext) -> None:
        if self.transport:
            self.transport.start_load(forward_context)

    def finish_step(self) -> None:
        """Save the blocks of device-resident KV that the forward filled; called once per step, after write-back."""
        self.store.save_resident_kv(self.resident_kv, self._saves)
        self._saves = []

    def transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.transport.transfer_results(finished_req_ids) if self.transport else KVConnectorTransferResults()

    def take_worker_metadata(self) -> HiSparseWorkerMetadata | None:
        """Return the message to the scheduler half; None if there is nothing to report.

        Called once per step, after the step's kernels have been enqueued.
        """
        released = self.hot_buffer.counts.take_released()
        requests = released if self.reports_requests else []
        expired = self.transport.take_expired() if self.transport else set()
        seconds = self.transport.take_pull_seconds() if self.transport else {}
        num_waiting = self.transport.take_num_waiting() if self.transport else None
        waiting = {} if num_waiting is None else {self._rank: num_waiting}
        usage = None
        if self._sampler:
            self._sampler.step_ends(self._step)
            usage = self._sampler.take()
        if not (requests or expired or seconds or waiting or usage):
            return None
        return HiSparseWorkerMetadata(requests, expired, seconds, usage, waiting)

    def take_stats(self) -> HiSparseStats | None:
        """Return the worker's counters since the last call; None in most steps."""
        hits, misses = self.hot_buffer.counts.take()
        staged_bytes = self.hot_buffer.take_staged_bytes()
        nixl_stats = self.transport.take_stats() if self.transport else None
        imported_bytes = self.transport.take_imported_bytes() if self.transport else 0
        if not (hits or misses or staged_bytes or nixl_stats or imported_bytes):
            return None
        stats = HiSparseStats()
        if imported_bytes:
            stats.add(transfer_bytes_through_buffer=imported_bytes)
        missed_bytes = misses * self.layout.unit_bytes
        stats.add(
            cache_hits=hits, cache_misses=misses, host_to_device_bytes=missed_bytes, prefill_staged_bytes=staged_bytes
        )
        if nixl_stats is not None:
            stats.add_nixl(nixl_stats)
        return stats

    def handshake_metadata(self) -> HiSparseHandshakeMetadata | None:
        """Return this worker's memory for the scheduler half; None if the scheduler's process does not map it."""
        file = self.host_memory.file
        return None if file is None else HiSparseHandshakeMetadata(file)

    def shutdown(self) -> None:
        """Shut down.

        NOTE: the order matters, because host memory must not be read or written any more when the store is closed.
        """
        if self._recorder:
            self._recorder.close()
        if self.transport:
            self.transport.shutdown()
        self.store.close()
        self.host_memory.close_file()

    def _register_with(
        self, transport: NixlWorkerTransport, resident_kv: dict[str, torch.Tensor], device: torch.device
    ) -> None:
        """Register memory for transfers.

        Args:
            transport: P/D transport.
            resident_kv: as in `NixlWorkerTransport.register`.
            device: device of this rank.

        Raises:
            HiSparseConfigError: the host pool is managed memory, and it cannot be registered.
        """
        try:
            transport.register(self.store.main_kv, resident_kv, device)
        except Exception as error:
            if not self.store.is_managed:
                raise
            raise HiSparseConfigError(
                "host_pool_memory",
                "managed",
                f"pinned, because memory could not be registered for transfers ({error!r})",
                "Remove it. If the error stays, it has another reason.",
            ) from error

    def _read_through_buffer(self, transport: NixlWorkerTransport, device: torch.device) -> None:
        """Read KV for the host pool through an import buffer from now on.

        Raises:
            HiSparseConfigError: the device has no room for the buffer.
        """
        num_bytes = self.config.import_buffer_bytes
        if device.type != "cpu":
            check_import_buffer_fits(num_bytes, _free_bytes(device))
        transport.read_through_buffer(self.store.pool, self.store.device_pool(), num_bytes)

    def _key_conversion(self, caches: list[torch.Tensor]) -> KeyConversion | None:
        """Return the conversion of device-resident KV between device and host; None if both keep the same bytes.

        Args:
            caches: one per layer in the order of memory, [num_blocks, KV heads, block_size, row elements].
        """
        narrow_bytes = self.layout.narrow_key_bytes
        if narrow_bytes is None:
            return None
        return KeyConversion([(cache[0].nbytes, cache.shape[-1] == narrow_bytes) for cache in caches])

    def _make_hot_buffer(self, caches: list[torch.Tensor]) -> HotBuffer:
        """Make the hot buffer for the model's family.

        Args:
            caches: one per layer with hot rows, [num_blocks, KV heads, rows, row elements].

        Raises:
            HiSparseConfigError: the device has no room for the tensors that are kept beside the KV cache.
        """
        cache = caches[0]
        shape = hot_buffer_shape(self.vllm_config, self.config, self.groups, len(cache))
        release_memory()
        if cache.device.type != "cpu":
            check_residency_fits(self.layout, shape.num_device_blocks, _free_bytes(cache.device))
        if self.config.algorithm_class.model_family == "mla":
            return self._make_mla_hot_buffer(shape, cache.device)
        head_stride, rest = divmod(cache.stride(0), cache.stride(1))
        assert rest == 0, "the block stride is not a whole number of KV heads"
        algorithm, memory = self._make_checked_algorithm(shape, cache.device), _block_memory(caches, self.layout)
        # vLLM's CPU attention has its own order of a host block's bytes.
        ops = CpuUnitOps(algorithm, shape.block_size) if cache.device.type == "cpu" else None
        return GQAHotBuffer(algorithm, shape, head_stride, memory, ops)

    def _make_mla_hot_buffer(self, shape: HotBufferShape, device: torch.device) -> MLAHotBuffer:
        """Make a hot buffer that records selections if `selection_trace_dir` is set.

        One rank records, because all tensor parallel ranks select the same positions.
        """
        directory, model = self.config.selection_trace_dir, self.vllm_config.model_config
        names, layers = self.groups.hot_group.layer_names, self.vllm_config.compilation_config.static_forward_context
        selects = [layers[name].indexer is not None for name in names]
        if directory is None or not self.reports_requests:
            return MLAHotBuffer(shape, device, selects, host_is_managed=self.store.is_managed)
        rank, model_name = self.vllm_config.parallel_config.data_parallel_index, Path(model.model).name
        self._recorder = SelectionRecorder(Path(directory), rank, model_name, shape.top_k, self.layout.row_bytes, names)
        return RecordingHotBuffer(shape, device, self._recorder, selects)

    def _make_checked_algorithm(self, shape: HotBufferShape, device: torch.device) -> SparseAlgorithm:
        """Make the dense model's algorithm and check that the device has room for its state of fixed size.

        Raises:
            HiSparseConfigError: the device has too little memory for the state.
        """
        max_model_len, layout = self.vllm_config.model_config.max_model_len, self.layout
        algorithm = make_algorithm(self.config, self.groups.hot_spec, self.vllm_config)
        request_bytes = sum(field.num_bytes for field in algorithm.fixed_fields.values()) * layout.num_layers
        logger.info(
            "HiSparse: the state of %s takes %d device blocks for a request of %d tokens, and %.1f MiB beside the KV "
            "cache for %d requests.",
            self.config.algorithm,
            layout.state.num_blocks(max_model_len),
            max_model_len,
            request_bytes * (shape.num_requests + 1) / 2**20,
            shape.num_requests,
        )
        if device.type != "cpu":
            staging_bytes = shape.max_blocks * layout.block_size * layout.row_bytes
            beside_bytes = staging_bytes + shape.num_device_blocks * layout.residency_block_bytes
            beside_bytes += self.config.import_buffer_bytes
            free_bytes = int(FREE_DEVICE_SHARE * _free_bytes(device)) - beside_bytes
            check_fixed_state_fits(
                self.config.algorithm, shape.num_requests, shape.max_batch, request_bytes, free_bytes
            )
        return algorithm


def hot_buffer_shape(
    vllm_config: VllmConfig, config: HiSparseConfig, groups: DeviceGroups, num_device_blocks: int
) -> HotBufferShape:
    """Return the sizes of a rank's hot buffers, with room for every request that may run.

    Args:
        vllm_config: vLLM's configuration.
        config: checked options.
        groups: the device KV cache groups.
        num_device_blocks: number of blocks of a KV cache tensor.
    """
    max_batch, spec = vllm_config.scheduler_config.max_num_seqs, groups.hot_spec
    blocks_per_request = spec.num_blocks(1) + groups.layout.state.num_blocks(1)
    return HotBufferShape(
        num_requests=min(max_batch, (num_device_blocks - 1) // blocks_per_request),
        max_batch=max_batch,
        num_layers=groups.layout.num_layers,
        top_k=config.selection_size,
        max_blocks=cdiv(vllm_config.model_config.max_model_len, groups.layout.block_size),
        block_size=groups.layout.block_size,
        num_device_blocks=num_device_blocks,
        max_hot_blocks=spec.max_blocks_per_request(vllm_config.model_config.max_model_len),
        rows_per_hot_block=groups.layout.rows_per_hot_block,
        max_query_len=groups.layout.max_query_len,
        state_columns=groups.layout.state.columns(vllm_config.model_config.max_model_len),
        layer_rows=groups.layout.layer_rows,
        places=groups.layout.row_places,
        equal_rows=groups.layout.equal_rows,
    )


def layer_views(caches: list[torch.Tensor], layout: KVLayout) -> list[torch.Tensor]:
    """Return views of vLLM's device blocks: the hot rows of each layer of a DSA model, by `KVLayout.layer_rows`.

    Args:
        caches: one per layer, [num_blocks, 1, rows per hot block, row elements], as vLLM divides the blocks.
        layout: sizes of the blocks.

    Returns:
        One per layer, [num_blocks, 1, rows of the layer, row elements].
    """
    first, width = min(caches, key=torch.Tensor.data_ptr), caches[0].shape[-1]
    # NOTE: blocks may be larger than the layout's, because backends of draft layers may ask for pages of several rows.
    assert first.stride(0) * first.element_size() >= layout.device_block_bytes, "blocks are too small"
    return [
        first.as_strided(
            (len(first), 1, num_rows, width),
            (first.stride(0), num_rows * place.pitch * width, place.pitch * width, 1),
            first.storage_offset() + place.first * width,
        )
        for num_rows, place in zip(layout.layer_rows, layout.row_places, strict=True)
    ]


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of device memory that torch can still allocate: free memory, and unused memory in its cache."""
    accelerator = torch.accelerator
    cached = accelerator.memory_reserved(device) - accelerator.memory_allocated(device)
    return accelerator.get_memory_info(device)[0] + cached


def _block_memory(caches: list[torch.Tensor], layout: KVLayout) -> torch.Tensor:
    """Return a view of all bytes of vLLM's device blocks: [num_blocks, bytes of a block] uint8.

    Args:
        caches: one per layer with hot rows, [num_blocks, KV heads, rows, row elements]; a block begins with the rows of
            the layer that is first in memory.
        layout: sizes of the blocks.
    """
    first = min((cache.view(torch.uint8) for cache in caches), key=torch.Tensor.data_ptr)
    assert first.stride(0) == layout.device_block_bytes, "blocks are of another size"
    return first.as_strided((len(first), layout.device_block_bytes), (first.stride(0), 1))


def _block_view(caches: list[torch.Tensor], any_cache: torch.Tensor) -> torch.Tensor:
    """Return a view of the caches of all layers as whole blocks: [num_blocks, bytes of a block in all layers] uint8.

    Args:
        caches: one per layer, [num_blocks, KV heads, block_size, row elements]; side by side inside each block.
        any_cache: any cache of the model; gives the number of blocks and the device if `caches` is empty.
    """
    if not caches:
        return torch.empty(len(any_cache), 0, dtype=torch.uint8, device=any_cache.device)
    caches = sorted((cache.view(torch.uint8) for cache in caches), key=torch.Tensor.data_ptr)
    first, num_bytes = caches[0], 0
    for cache in caches:
        assert cache.data_ptr() == first.data_ptr() + num_bytes, "layers do not lie side by side in a block"
        assert cache.stride(0) == first.stride(0), "layers are in different blocks"
        num_bytes += cache[0].numel()
    return first.as_strided((len(first), num_bytes), (first.stride(0), 1))

"""`HiSparseHostConnector`: vLLM's connector interface over the two halves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError, max_num_running
from vllm_hisparse.connector.import_buffer import check_buffer_size
from vllm_hisparse.connector.metadata import HiSparseHandshakeMetadata
from vllm_hisparse.connector.metrics import HiSparsePromMetrics, HiSparseStats
from vllm_hisparse.connector.nixl_scheduler import NixlSchedulerTransport
from vllm_hisparse.connector.nixl_worker import NixlWorkerTransport
from vllm_hisparse.connector.scheduler import HiSparseSchedulerConnector
from vllm_hisparse.connector.worker import HiSparseWorkerConnector
from vllm_hisparse.kv_manager.groups import DeviceGroups, check_hot_layers
from vllm_hisparse.kv_manager.rows.host_memory import num_host_pools
from vllm_hisparse.kv_manager.tiers.make_tiers import make_tiers
from vllm_hisparse.vllm_patches.failed_loads import release_failed_loads
from vllm_hisparse.vllm_patches.orphaned_engines import end_with_parent
from vllm_hisparse.vllm_patches.resets_in_flight import reset_between_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


class HiSparseHostConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps full KV in a host block pool, and a hot buffer per request on the device.

    With `kv_role` "kv_consumer", an instance receives the KV of prompts from stock vLLM prefill instances that run
    `NixlConnector`; with "kv_both", one instance prefills and decodes.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        end_with_parent()
        config = HiSparseConfig.from_vllm_config(vllm_config)
        check_hot_layers(kv_cache_config, str(vllm_config.load_config.load_format))
        groups = DeviceGroups.from_config(kv_cache_config)
        num_host_blocks = _num_host_blocks(vllm_config, config, groups)
        check_buffer_size(config.import_buffer_gib, groups.layout.received_block_bytes)
        is_pd = vllm_config.kv_transfer_config.kv_role == "kv_consumer"
        args = (vllm_config, kv_cache_config, groups, num_host_blocks)
        if role == KVConnectorRole.SCHEDULER:
            release_failed_loads()
            reset_between_steps()
            _log_summary(vllm_config, kv_cache_config, config, groups, num_host_blocks)
            limits = vllm_config.scheduler_config
            # NOTE: the scheduler half needs vLLM's KV cache manager, which vLLM makes after this object.
            self._make_scheduler = partial(
                HiSparseSchedulerConnector,
                config,
                groups,
                num_host_blocks=num_host_blocks,
                enable_caching=vllm_config.cache_config.enable_prefix_caching,
                transport=NixlSchedulerTransport(*args, config.prefill_tp_size) if is_pd else None,
                max_num_seqs=limits.max_num_seqs,
                max_num_running=max_num_running(vllm_config),
                max_num_batched_tokens=limits.max_num_batched_tokens,
                num_ranks=vllm_config.parallel_config.tensor_parallel_size,
                num_host_pools=num_host_pools(vllm_config),
                make_tiers=partial(make_tiers, vllm_config, config, groups.layout),
                publishes_events=publishes_events(vllm_config),
            )
        else:
            transport = NixlWorkerTransport(*args) if is_pd else None
            self.worker = HiSparseWorkerConnector(vllm_config, config, groups, num_host_blocks, transport)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return False  # after a sleep, the addresses that the worker and other instances know would be wrong

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False, and refuse options that are wrong for every model: vLLM asks before it loads anything."""
        HiSparseConfig.from_extra_config(extra_config)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # this side never hands KV off

    # Scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler = self._make_scheduler(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        group_id = self.scheduler.groups.resident_group_id
        return () if group_id is None else (group_id,)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return self.scheduler.cache_hit_sources(num_external_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.request_finished(request)
        return False, None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], HiSparseHandshakeMetadata]) -> None:
        self.scheduler.connect_workers(metadata)

    def has_pending_push_work(self) -> bool:
        # NOTE: as long as this returns True, vLLM runs steps even without requests, for any kind of work.
        return self.scheduler.has_pending_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        # NOTE: this is the only hook that vLLM calls once for every step's output, even for an empty one.
        self.scheduler.step_processed()
        return self.scheduler.take_events()

    def reset_cache(self) -> bool:
        self.scheduler.reset_cache()
        return True

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.worker.apply_changes(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.bind_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.worker.clear_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.start_load(forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: restores are ordered before the forward, and remote loads end before admission."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: the attention backend writes rows itself."""

    def finish_forward(self) -> None:
        # NOTE: Model Runner V2 calls this hook before it samples, so device-resident KV is on the host before a request
        # can finish and its blocks become free. Model Runner V1 calls `wait_for_save` before it samples instead.
        self.worker.finish_step()

    def wait_for_save(self) -> None:
        self.worker.finish_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.transfer_results(finished_req_ids)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake_metadata()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_worker_metadata()

    # Both halves

    def get_kv_connector_stats(self) -> HiSparseStats | None:
        is_scheduler = self.role == KVConnectorRole.SCHEDULER
        return self.scheduler.take_due_stats() if is_scheduler else self.worker.take_stats()

    def shutdown(self) -> None:
        half = self.scheduler if self.role == KVConnectorRole.SCHEDULER else self.worker
        half.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HiSparseStats:
        return HiSparseStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HiSparsePromMetrics:
        return HiSparsePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _num_host_blocks(vllm_config: VllmConfig, config: HiSparseConfig, groups: DeviceGroups) -> int:
    """Return the number of blocks of the host pool.

    Raises:
        HiSparseConfigError: the pool cannot hold one request of `max_model_len`.
    """
    layout, max_model_len = groups.layout, vllm_config.model_config.max_model_len
    num_pools = num_host_pools(vllm_config)
    num_blocks = config.num_host_blocks(layout.host_block_bytes, groups.device_kv_bytes, num_pools)
    needed_bytes = layout.host_request_bytes(max_model_len) * num_pools
    if num_blocks < layout.num_blocks(max_model_len):
        raise HiSparseConfigError(
            *config.size_option,
            f"a host pool of at least {needed_bytes / 2**30:.3f} GiB, one request of max_model_len {max_model_len}; "
            f"this is {num_blocks * layout.host_block_bytes * num_pools / 2**30:.3f} GiB",
            "Raise it, or lower --max-model-len.",
        )
    return num_blocks


def _log_summary(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: HiSparseConfig,
    groups: DeviceGroups,
    num_host_blocks: int,
) -> None:
    layout, max_model_len = groups.layout, vllm_config.model_config.max_model_len
    num_pools = num_host_pools(vllm_config)
    hot_bytes = groups.hot_spec.request_bytes(max_model_len)
    full_bytes = layout.full_request_bytes(max_model_len)
    host_bytes = layout.host_request_bytes(max_model_len) * num_pools
    by_device = kv_cache_config.num_blocks * layout.device_block_bytes / hot_bytes
    by_host = num_host_blocks / layout.num_blocks(max_model_len)
    logger.info(
        "HiSparse: %s, top_k %d, %d hot rows per request. A request of %d tokens takes %.1f MiB on a "
        "device (full KV: %.1f MiB) and %.1f MiB on the host. Host pool: %d blocks of %d tokens, %.2f GiB. Concurrency "
        "at max_model_len: %.2fx (device %.2fx, host %.2fx); with full KV on the device: %.2fx.",
        config.algorithm,
        config.top_k,
        config.rows,
        max_model_len,
        hot_bytes / 2**20,
        full_bytes / 2**20,
        host_bytes / 2**20,
        num_host_blocks,
        layout.block_size,
        num_host_blocks * layout.host_block_bytes * num_pools / 2**30,
        min(by_device, by_host),
        by_device,
        by_host,
        groups.device_kv_bytes / full_bytes,
    )
    role, is_dense = vllm_config.kv_transfer_config.kv_role, config.algorithm_class.model_family == "gqa"
    if role == "kv_consumer" and is_dense and not vllm_config.cache_config.user_specified_block_size:
        logger.info(
            "HiSparse: --block-size is not set; blocks have %d tokens. Prefill instances need blocks of the same size: "
            "set --block-size on both sides.",
            layout.block_size,
        )
    if groups.hot_spec.elastic:
        logger.info(
            "HiSparse: hot buffers grow with their sequences up to that size, and beyond while device memory is free; "
            "%.2f requests of max_model_len can be hot as a whole.",
            kv_cache_config.num_blocks * layout.device_block_bytes / groups.hot_spec.request_bytes(max_model_len, True),
        )
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    if config.rows > max_model_len and "device_buffer_size" in given:
        logger.warning(
            "HiSparse: device_buffer_size is %d, more than the %d tokens of the longest request. Lower it, or raise "
            "--max-model-len.",
            config.rows,
            max_model_len,
        )


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Return True if vLLM publishes KV cache events (`--kv-events-config`)."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events

"""Scheduler half of the connector: prefix matches, host block tables, saves and restores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.connector.copy_counts import CopyCounts
from vllm_hisparse.connector.metadata import HiSparseHandshakeMetadata, HiSparseWorkerMetadata
from vllm_hisparse.connector.metrics import HiSparseStats
from vllm_hisparse.connector.nixl_scheduler import NixlSchedulerTransport
from vllm_hisparse.connector.request_log import RequestLog
from vllm_hisparse.connector.transfer_params import asks_for_transfer
from vllm_hisparse.kv_manager.blocks.admission import AdmissionControl
from vllm_hisparse.kv_manager.blocks.deferred import Deferred
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.blocks.hot_block_manager import serve_managers
from vllm_hisparse.kv_manager.blocks.kv_events import HostPoolEvents
from vllm_hisparse.kv_manager.blocks.request_tracker import Obstacle, RequestTracker
from vllm_hisparse.kv_manager.blocks.rows_by_layer import RowsByLayer
from vllm_hisparse.kv_manager.blocks.step_form import StepForm
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
from vllm_hisparse.kv_manager.tiers.tiers import Tiers

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

CALLS_PER_REPORT = 16  # vLLM asks for statistics in every step, and each report costs host time


class HiSparseSchedulerConnector:
    """Finds the KV that the host pool already holds, and turns changes of the pools into messages to the workers.

    Args:
        config: checked options.
        groups: the device KV cache groups.
        kv_cache_manager: vLLM's manager; its manager of hot blocks asks this object for them.
        num_host_blocks: number of blocks of each host pool.
        enable_caching: True if later requests may use blocks of finished ones.
        transport: P/D transport, or None for a single instance.
        max_num_seqs: requests that the worker has room for.
        max_num_running: requests that vLLM lets run at once, at most `max_num_seqs`.
        max_num_batched_tokens: tokens that a step may compute.
        num_ranks: tensor parallel ranks, each with a device of its own.
        num_host_pools: number of host pools. If there are several, each has the same blocks, with the KV heads of its
            rank.
        make_tiers: makes the tiers below the host pool, once the workers have reported its memory.
        publishes_events: True if vLLM publishes events about cached blocks.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        groups: DeviceGroups,
        kv_cache_manager: KVCacheManager,
        num_host_blocks: int,
        enable_caching: bool,
        transport: NixlSchedulerTransport | None,
        max_num_seqs: int,
        max_num_running: int,
        max_num_batched_tokens: int,
        num_ranks: int = 1,
        num_host_pools: int = 1,
        make_tiers: Callable[[HostBlockPool, list[HostPoolFile]], Tiers] | None = None,
        publishes_events: bool = False,
    ):
        self.groups, self.layout, self.transport = groups, groups.layout, transport
        self.events: HostPoolEvents | None = None
        if publishes_events:
            is_mla = self.layout.num_kv_heads is None
            block_pool = kv_cache_manager.block_pool
            self.events = HostPoolEvents(self.layout.block_size, is_mla, block_pool)
        self.host_pool = HostBlockPool(
            num_host_blocks,
            self.layout.block_size,
            reports_cached=bool(config.tiers),
            on_removed=self.events.removed if self.events else None,
        )
        self.deferred = Deferred()
        self.admission: AdmissionControl | None = None
        if config.controls_admission(self.layout.max_query_len):
            sizes = config.selection_size, self.layout.unit_bytes, max_num_running, self.layout.max_query_len
            self.admission = AdmissionControl(*sizes)
        elif config.admission == "auto":
            logger.warning(
                "HiSparse: admission is 'auto', which has no effect if elastic is false, with drafts, or with pages: "
                "requests start as soon as there is memory for them. Remove the option, or limit --max-num-seqs."
            )
        self.rows_by_layer: RowsByLayer | None = None
        if config.log_rows_by_layer:
            self.rows_by_layer = RowsByLayer(self.layout, config.selection_size, config.rows, config.elastic)
        self.step_form = StepForm(config.selection_size * self.layout.unit_bytes)
        self.tracker = RequestTracker(
            self.host_pool,
            self.deferred,
            kv_cache_manager,
            groups,
            enable_caching,
            max_num_seqs,
            max_num_running,
            max_num_batched_tokens,
            self.admission,
            self.events,
        )
        serve_managers(self.tracker)
        self.counts = CopyCounts(self.layout, num_ranks, num_host_pools)
        self.tiers: Tiers | None = None  # none before `connect_workers`
        self._make_tiers, self._calls_to_report = make_tiers, 0
        self._waiting: dict[int, int] = {}  # rank -> number of pulls that wait for its import buffer
        # Source -> tokens that the last admitted request got from a tier or a prefill instance
        self._hit_tokens: dict[CacheHitSource, int] = {}
        self.request_log = RequestLog() if config.log_request_stats else None
        self._has_warned_of_transfers = False

    def connect_workers(self, metadata: Mapping[tuple[int, int], HiSparseHandshakeMetadata]) -> None:
        """Take the workers' reports, by rank; called before the first step, unless there are no reports.

        NOTE: vLLM 0.33 calls it again when it wakes up, with the same host pools.
        """
        self.connect_host_pools([metadata[rank].host_pool for rank in sorted(metadata)])

    def connect_host_pools(self, files: list[HostPoolFile]) -> None:
        """Make the tiers over the memory of the workers' host pools, unless they are made, or there is no memory."""
        if files and self._make_tiers and self.tiers is None:
            self.tiers = self._make_tiers(self.host_pool, files)

    def on_new_request(self, request: Request) -> None:
        self.tracker.add(request)
        accepts = self.transport.accept if self.transport else self._accept_alone
        if not accepts(request):
            self.counts.add(transfers_refused=1)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Count the tokens that the remote prefill or the host pool holds beyond the device's prefix hit.

        Returns:
            Their number, and whether they load asynchronously. The number is None while a tier still loads some of them
            into the host pool.
        """
        match = self.tracker.find_match(request)
        if self.transport:
            num_remote = self.transport.num_matched_tokens(request, num_computed_tokens)
            if num_remote:
                return num_remote, True
        if self.tiers and not request.skip_reading_prefix_cache:
            is_loading = self.tiers.is_loading(request, match)
            self.tracker.set_obstacle(request.request_id, Obstacle.LOADS_FROM_TIER if is_loading else None)
            if is_loading:
                return None, False
            match = self.tracker.find_match(request)
        return max(match.num_tokens - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Start a remote load, or plan the copies that bring device-resident KV from the host back to the device."""
        num_blocks = self.tiers.forget(request.request_id) if self.tiers else {}
        self._hit_tokens = {source: num * self.layout.block_size for source, num in num_blocks.items()}
        if self.transport and self.transport.is_remote(request):
            self._hit_tokens = {CacheHitSource.P2P: num_external_tokens}
            self._start_transfer(request, blocks, num_external_tokens)
            return
        if num_external_tokens:
            self.tracker.restore(request.request_id, num_external_tokens)
            self.counts.add(host_prefix_tokens=num_external_tokens)
        if request.num_preemptions and request.status == RequestStatus.PREEMPTED:
            num_matched = self.tracker.admitted[request.request_id].num_matched_tokens
            self.counts.add(resumed_requests=1, recomputed_tokens=request.num_tokens - 1 - num_matched)

    def cache_hit_sources(self, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return the sources, by vLLM's names, of the external tokens of the request that was admitted last.

        Tokens that were in the host pool when the request arrived count as the host's, even if they came from a tier
        before.
        """
        sources, num_left = Counter["CacheHitSource"](), num_external_tokens
        for source, num_tokens in self._hit_tokens.items():
            sources[source] = min(num_tokens, num_left)
            num_left -= sources[source]
        sources[CacheHitSource.HOST] = num_left
        return dict(+sources)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HiSparseMetadata:
        num_scheduled = scheduler_output.num_scheduled_tokens
        metadata = self.tracker.diff(num_scheduled)
        metadata.step = self.deferred.num_scheduled + 1
        metadata.runs_whole = self.step_form.runs_whole(scheduler_output.total_num_scheduled_tokens)
        if self.admission:
            self.admission.step_scheduled(num_scheduled)
        if self.request_log:
            self._log_started(metadata, num_scheduled)
        if self.transport:
            metadata.transport, metadata.leases = self.transport.build_connector_meta(scheduler_output)
        _keep_restored_blocks(scheduler_output, metadata)
        self.counts.step_scheduled(metadata, scheduler_output.total_num_scheduled_tokens)
        self.deferred.step_scheduled()
        if self.tiers:
            self.tiers.step_scheduled(self.deferred)
        return metadata

    def step_processed(self) -> None:
        """Record that vLLM has the output of a step; called once per step, in the order of the steps."""
        self.deferred.step_processed()
        if self.admission:
            self.admission.step_processed()

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events about the host prefix cache since the last call."""
        return self.events.take() if self.events else []

    def has_pending_work(self) -> bool:
        """Return True if steps are needed even if there is no request: for tiers, or to publish events."""
        has_events = self.events is not None and bool(self.events.pending)
        return has_events or self._has_tier_work()

    def _has_tier_work(self) -> bool:
        return self.tiers is not None and self.tiers.has_pending_work()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Account for finished transfers and log finished requests."""
        failed, worker_meta = output.failed_recving or set(), output.kv_connector_worker_meta
        if isinstance(worker_meta, HiSparseWorkerMetadata):
            self._forget_expired(worker_meta.expired)
            self._waiting |= worker_meta.waiting
            for request_id, seconds in worker_meta.pull_seconds.items():
                self.counts.transfer_took(request_id, seconds)
            if worker_meta.usage:
                self.step_form.measured(worker_meta.usage)
            for learner in (self.admission, self.rows_by_layer) if worker_meta.usage else ():
                if learner:
                    learner.measured(worker_meta.usage, self.tracker.demand())
        for request_id in output.finished_recving or ():
            self.tracker.pull_ended(request_id)
            if request_id not in failed and request_id not in self.tracker.requests:
                self.counts.transfer_given_up(request_id)
            received = self.counts.transfer_ended(request_id, request_id in failed)
            if received:
                if self.layout.receives_on_host:
                    self.tracker.receive(request_id)
                if self.request_log:
                    self.request_log.received(request_id, *received)
        if self.transport:
            self.transport.update_connector_output(output)
        if self.request_log and isinstance(worker_meta, HiSparseWorkerMetadata):
            for first_hot_block_id, hits, misses in worker_meta.requests:
                self.request_log.released(first_hot_block_id, hits, misses)

    def request_finished(self, request: Request) -> None:
        """Forget a request; its blocks come back through the managers."""
        if self.request_log:
            self.request_log.ended(request.request_id, request.num_prompt_tokens)
        self.tracker.remove(request)
        if self.tiers:
            self.tiers.forget(request.request_id)
        if self.transport:
            self.transport.request_finished(request)

    def reset_cache(self) -> None:
        """Drop the host prefix cache."""
        if self.tiers:
            self.tiers.reset_cache()
        self.tracker.reset_cache()

    def take_stats(self) -> HiSparseStats:
        """Return the counters since the last call, and the pool's present state."""
        stats = self.counts.take()
        stats.set_gauges(**self.host_pool.block_counts())
        stats.set_gauges(requests_waiting_for_host_memory=self.tracker.num_waiting_for_host())
        if self._waiting:
            # NOTE: a prompt may wait on several ranks.
            stats.set_gauges(transfers_waiting_for_buffer=max(self._waiting.values()))
        if self.admission:
            missing = self.admission.num_missing_predictions
            limit = 0 if missing else self.admission.limit or 0
            stats.set_gauges(admission_limit=limit, admission_missing_predictions=missing)
            stats.set_gauges(requests_held_back=self.tracker.num_held_back())
        if self.groups.hot_spec.elastic:
            stats.set_gauges(**self.tracker.lent_row_counts())
            stats.add(hot_rows_taken_back=self.tracker.take_rows_taken_back())
        if self.tiers:
            stats.add(**self.tiers.take_counters())
            stats.add_tiers(self.tiers.take_stats())
        return stats

    def take_due_stats(self) -> HiSparseStats | None:
        """Take the statistics every `CALLS_PER_REPORT` calls, and when neither a request nor work for a tier is left;
        None at all other calls.
        """
        self._calls_to_report -= 1
        if self._calls_to_report > 0 and (self.tracker.requests or self._has_tier_work()):
            return None
        self._calls_to_report = CALLS_PER_REPORT
        return self.take_stats()

    def shutdown(self) -> None:
        for part in filter(None, (self.tiers, self.transport)):
            part.shutdown()

    def _forget_expired(self, request_ids: set[str]) -> None:
        """Let prompts be computed here if their KV may have been read after its lease.

        NOTE: vLLM reads `num_computed_tokens` of such a request only when its pull has ended on all ranks. If it is 0,
        vLLM takes the blocks back (`vllm_patches/failed_loads.py`) before any is published.
        """
        for request_id in request_ids & self.tracker.requests.keys():
            request = self.tracker.requests[request_id]
            if request.num_computed_tokens:
                request.num_computed_tokens = 0
                self.counts.transfer_expired(request_id)
                self.transport.warn_expired(request_id)

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when there is no request, but is not; an empty dict if all is well."""
        left = self.tracker.leftovers()
        if self.tiers is not None:
            left |= self.tiers.leftovers()
        if self.request_log is not None:
            left |= self.request_log.leftovers()
        if self.transport is not None:
            left |= self.transport.leftovers()
        if self.counts.transfers:
            left["transfers"] = self.counts.transfers
        return left

    def _accept_alone(self, request: Request) -> bool:
        """Return False for a request that asks a single instance for a transfer; warn of the first one.

        NOTE: vLLM's own NIXL connector transfers KV with `kv_role` kv_both, too, so a pair may be set up like that.
        """
        if request.abort_immediately or not asks_for_transfer(request.kv_transfer_params):
            return True
        if not self._has_warned_of_transfers:
            self._has_warned_of_transfers = True
            logger.warning(
                "Request %s asks for a transfer in its kv_transfer_params, but kv_role is kv_both: nothing is "
                "transferred. Its prompt is computed here, and so will be others like it, without a warning: see "
                "vllm:hisparse_transfers_refused. Set kv_role to kv_consumer on a decode instance, and start prefill "
                "instances with NixlConnector.",
                request.request_id,
            )
        return False

    def _log_started(self, metadata: HiSparseMetadata, num_scheduled: Mapping[str, int]) -> None:
        """Tell the log which requests the workers start in this step, for the first time or again."""
        started = {block_id for block_id, (first, _) in metadata.host_block_tables.items() if first == 0}
        for request_id in num_scheduled if started else ():
            if (block_id := self.tracker.admitted[request_id].first_hot_block_id) in started:
                self.request_log.started(block_id, request_id)

    def _start_transfer(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        request_id = request.request_id
        host_ids = self.host_pool.block_ids(request_id)[: self.layout.num_blocks(request.num_prompt_tokens)]
        resident_id = self.groups.resident_group_id
        device_blocks = None
        if resident_id is not None and not self.layout.receives_on_host:
            device_blocks = blocks.blocks[resident_id]
        num_shared = self.tracker.admitted[request_id].num_matched_tokens // self.layout.block_size
        instance = self.transport.start(request, host_ids, num_shared, device_blocks, num_external_tokens)
        if num_external_tokens:
            self.tracker.pull_begins(request_id, instance)
            num_device = sum(block.block_hash is None for block in device_blocks or ())
            self.counts.transfer_started(request_id, len(host_ids) - num_shared, num_device)


def _keep_restored_blocks(scheduler_output: SchedulerOutput, metadata: HiSparseMetadata) -> None:
    """Keep vLLM from zeroing the device blocks that are restored before the forward.

    NOTE: Model Runner V1 zeroes blocks after the connector's copies. vLLM allows blocks to be left out if they are
    overwritten as a whole.
    """
    restored = {device_id for _, device_id in metadata.restores}
    if restored and scheduler_output.new_block_ids_to_zero:
        new_block_ids = scheduler_output.new_block_ids_to_zero
        scheduler_output.new_block_ids_to_zero = [block_id for block_id in new_block_ids if block_id not in restored]

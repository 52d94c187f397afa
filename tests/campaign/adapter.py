"""Everything that the campaign knows of the insides of vLLM and of the product."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output import StructuredOutputManager

from vllm_hisparse.config import CONNECTOR_NAME, HiSparseConfig
from vllm_hisparse.connector import connector, scheduler
from vllm_hisparse.connector.metadata import HiSparseWorkerMetadata
from vllm_hisparse.connector.worker import hot_buffer_shape
from vllm_hisparse.kv_manager.blocks.admission import AdmissionControl
from vllm_hisparse.kv_manager.blocks.hot_block_manager import register_hot_block_manager
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.usage import SIZES, Usage
from vllm_hisparse.layout import KVLayout

from .checks import check
from .configuration import BLOCK_SIZE, MAX_MODEL_LEN, Configuration
from .rank import BatchEntry
from .router import Router
from .texts import Text

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
    from vllm_hisparse.kv_manager.tiers.tiers import Tiers

MODEL = (
    Path(__file__).resolve().parents[2] / "build" / "models" / "dsv32"
)  # its configuration only; no weights are read
CODE_MODEL = Path(__file__).resolve().parents[2] / "benchmarks" / "models" / "code-dsa"  # with a draft layer
NUM_LAYERS = 2
NARROW_KEY_BYTES = 10  # of keys that have 20 bytes on the host
Drafter = Callable[[list[int], int], list[int]]  # known tokens, placeholders -> drafts, perhaps fewer
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)

init_none_hash(sha256)
register_hot_block_manager()


@dataclass(frozen=True)
class Sizes:
    """Options that are drawn for a world.

    Attributes:
        num_device_blocks, num_host_blocks: the pools.
        max_num_seqs, token_budget: largest numbers of requests and tokens of a step.
        policy: "fcfs" or "priority".
        recomputes_failures: whether a failed transfer is computed here, or ends its request with an error.
        is_hot_first: whether the group of hot blocks comes before the group of resident blocks.
    """

    num_device_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    token_budget: int
    policy: str
    recomputes_failures: bool
    is_hot_first: bool = False


class Product:
    """vLLM's scheduler with the product's scheduler half in it.

    Args:
        configuration: options of a world.
        sizes: options that were drawn for it.
        make_tiers: makes the tiers below the host pool once `connect_host_pools` is called; None: there is none.
        options: more options of the product.
        clock: the seconds by which running requests are limited, if the options ask for that.
    """

    def __init__(
        self,
        configuration: Configuration,
        sizes: Sizes,
        make_tiers: Callable[[HostBlockPool], Tiers] | None = None,
        options: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.num_device_blocks, self.is_async = sizes.num_device_blocks, configuration.is_async
        kv_cache_config = _kv_cache_config(sizes, configuration)
        self.vllm_config = _vllm_config(configuration, sizes, kv_cache_config, dict(options or {}))
        scheduler_class = AsyncScheduler if configuration.is_async else Scheduler

        def make_control(top_k: int, *sizes: int) -> AdmissionControl:
            return AdmissionControl(BLOCK_SIZE, *sizes, clock)  # no sequence is as long as the model's top-k

        with (
            patch.object(connector, "make_tiers", lambda config, parsed, layout, pool, files: make_tiers(pool)),
            patch.object(scheduler, "AdmissionControl", make_control),
        ):
            self.scheduler = scheduler_class(
                vllm_config=self.vllm_config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(self.vllm_config),
                block_size=BLOCK_SIZE,
                log_stats=True,
            )
        self.half, self.has_tier = self.scheduler.connector.scheduler, make_tiers is not None
        self.router = Router(partial(hash_block_tokens, sha256))
        self.scheduler.kv_event_publisher.publish = self.router.publish
        assert self.half.host_pool.num_blocks == sizes.num_host_blocks
        self.max_in_flight = self.vllm_config.max_concurrent_batches

    def connect_host_pools(self) -> None:
        """Report a host pool, as workers do before the first step; the tiers are made from it."""
        self.half.connect_host_pools([HostPoolFile("", 0, 0, 0)])

    def preempt(self, request: Request) -> None:
        """Take a request's blocks as a step does that finds none for another request."""
        self.scheduler.kv_cache_manager.new_step_starts()
        self.scheduler.running.remove(request)
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self.scheduler._preempt_request(request, 0.0)

    @staticmethod
    def usage(step: int, rng: random.Random) -> HiSparseWorkerMetadata:
        """A report of a worker, with any numbers."""
        curves = {0: tuple(sorted((rng.random() for _ in SIZES), reverse=True))} if rng.random() < 0.8 else None
        return HiSparseWorkerMetadata(usage=Usage(step, rng.randint(0, 500), rng.randint(0, 500), curves))

    @property
    def layout(self) -> KVLayout:
        return self.half.layout

    def num_tables(self) -> int:
        """Requests whose state the worker half has room for."""
        config = HiSparseConfig.from_vllm_config(self.vllm_config)
        return hot_buffer_shape(self.vllm_config, config, self.half.groups, self.num_device_blocks).num_requests

    def batch(self, output: SchedulerOutput, before: Sequence[BatchEntry], drafter: Drafter) -> list[BatchEntry]:
        """The tokens that a step computes, read right after it was scheduled.

        Args:
            output: the step.
            before: tokens that the step in flight computes.
            drafter: drafts for this step, if the scheduler leaves that to the worker.
        """
        restarted = {request.req_id for request in output.scheduled_new_reqs}
        restarted |= output.scheduled_cached_reqs.resumed_req_ids
        in_flight = {entry.request_id: entry for entry in before if entry.request_id not in restarted}
        drafts = output.scheduled_spec_decode_tokens
        return [
            self._entry(name, num, drafts.get(name, []), in_flight.get(name), drafter)
            for name, num in output.num_scheduled_tokens.items()
        ]

    def take_drafts(self, drafts: dict[str, list[int]]) -> None:
        """Tokens that requests verify in their next steps."""
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def check_pools(self) -> None:
        self.half.tracker.check_integrity()
        pool = self.scheduler.kv_cache_manager.block_pool
        num_refs = [0] * pool.num_gpu_blocks
        for block in self._owned_device_blocks():
            num_refs[block.block_id] += 1
        assert [block.ref_cnt for block in pool.blocks[1:]] == num_refs[1:], "device blocks are lost or owned twice"
        self._check_events()

    def _check_events(self) -> None:
        """Routers know the host prefix cache. They are told of blocks from a tier once a request uses them."""
        host_pool, events = self.half.host_pool, self.half.events
        told = self.router.told(events.pending if events else ())
        hashes = map(host_pool.hash_of, range(host_pool.num_blocks))
        published = {maybe_convert_block_hash(block_hash) for block_hash in hashes if block_hash is not None}
        is_known = told <= published if self.has_tier else told == published
        assert is_known, "routers know another host prefix cache"

    def num_used_host_blocks(self) -> int:
        return self.half.host_pool.num_used

    def num_free_device_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def leftovers(self) -> dict[str, Any]:
        """State that must be empty when no request is left."""
        return self.half.leftovers()

    def progress(self) -> str:
        """Return the progress of every request, for the report of a deadlock."""
        requests = [
            (request.request_id, request.status.name, request.num_computed_tokens, request.num_tokens)
            for request in self.scheduler.requests.values()
        ]
        pool = self.half.host_pool
        return f"{requests}, host blocks: {pool.num_free} free, {pool.num_cached} cached, {pool.num_used} used"

    def _entry(
        self, request_id: str, num_tokens: int, drafts: list[int], in_flight: BatchEntry | None, drafter: Drafter
    ) -> BatchEntry:
        """NOTE: the scheduler counts the drafts of a step in flight as accepted; the device knows better."""
        request, groups = self.scheduler.requests[request_id], self.half.groups
        block_ids = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        resident_id = groups.resident_group_id
        num_corrected = in_flight.num_rejected if in_flight else 0
        last = request.num_computed_tokens - num_corrected
        num_placeholders, num_known = len(drafts), last - len(drafts)
        text, samples = Text(request.all_token_ids, num_known), not request.is_prefill_chunk
        num_pending = len(in_flight.sampled()) if in_flight else 0
        num_tokens_known = request.num_tokens + num_pending
        is_right = not samples or num_known == num_tokens_known
        check(is_right, f"{request_id}: {num_known} tokens without drafts are computed, {num_tokens_known} are known")
        if self.is_async and drafts:
            drafts = drafter(text.token_ids[:num_known], num_placeholders)
        return BatchEntry(
            request_id,
            last - num_tokens,
            num_known + len(drafts),
            block_ids[groups.hot_group_id][0],
            [] if resident_id is None else list(block_ids[resident_id]),
            Text([*text.token_ids, *drafts] if drafts else text.token_ids),
            samples,
            len(drafts),
            num_placeholders - len(drafts),
            num_corrected,
        )

    def _owned_device_blocks(self) -> Iterator[Any]:
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                yield from blocks
        for _, blocks in self.scheduler.deferred_frees:
            yield from blocks
        yield from self.half.tracker.other_blocks()


def block_pairs(meta: ReqMeta) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """The blocks that a pull reads, by vLLM's own code.

    For main KV and for what the device keeps: pairs of a local and a remote block, and the local blocks left over.

    Args:
        meta: a pull as vLLM's scheduler half asks for it.
    """
    worker = object.__new__(_BareWorker)
    worker.dcp_size, worker.dcp_rank, worker._has_mamba = 1, 0, False
    local_groups, remote = [list(group) for group in meta.local_block_ids], list(meta.remote.block_ids[0])
    if len(local_groups) == 1:
        matched = worker._apply_prefix_caching(local_groups, [remote], 1, 1)
    else:
        matched = worker._apply_prefix_caching_by_region(
            local_groups,
            [remote] * len(local_groups),
            num_computed_blocks=list(meta.local_num_computed_blocks),
            num_remote_blocks=cdiv(meta.remote.num_tokens, BLOCK_SIZE),
        )
    for group, local_ids, remote_ids in zip(local_groups, *matched, strict=True):
        yield list(zip(local_ids, remote_ids, strict=True)), group[len(local_ids) :]


class _BareWorker(NixlPullConnectorWorker):
    def __del__(self) -> None:
        """Nothing was registered."""


def mla_spec(head_size: int, dtype: torch.dtype = torch.bfloat16) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=head_size,
        dtype=dtype,
        state_content_bytes=head_size * dtype.itemsize,
    )


def _kv_cache_config(sizes: Sizes, configuration: Configuration) -> KVCacheConfig:
    num_resident, query_len = NUM_LAYERS * configuration.has_resident_group, 1 + configuration.num_drafts
    draft_bytes = 24 if configuration.has_draft_layer else 0
    layout = KVLayout(
        *(24, 20, NUM_LAYERS, num_resident, BLOCK_SIZE),
        tokens_per_unit=configuration.tokens_per_unit,
        num_kv_heads=2 if configuration.tokens_per_unit > 1 else None,
        max_query_len=query_len,
        draft_row_bytes=draft_bytes,
        state_entries=configuration.state_entries,
        full_kv_row_bytes=24 if configuration.tokens_per_unit > 1 else 0,
        narrow_key_bytes=NARROW_KEY_BYTES if configuration.has_narrow_keys else None,
        row_shares=configuration.row_shares,
    )
    buffer = configuration.device_buffer_size, configuration.is_elastic
    hot = HotBufferSpec.from_mla_spec(mla_spec(12, torch.bfloat16), layout, *buffer)
    groups = [KVCacheGroupSpec(_layers("attn"), hot)]
    if configuration.has_resident_group:
        keys = mla_spec(layout.device_key_bytes, torch.uint8)
        drafts = configuration.has_draft_layer and not configuration.is_draft_model
        index = int(sizes.is_hot_first)
        groups.insert(index, KVCacheGroupSpec(_layers("indexer"), keys, is_eagle_group=drafts))
    num_blocks, pages = sizes.num_device_blocks, [group.kv_cache_spec.page_size_bytes for group in groups]
    block_bytes = NUM_LAYERS * max(pages)
    tensors = [
        KVCacheTensor(num_blocks * block_bytes, group.layer_names, page, block_bytes)
        for group, page in zip(groups, pages, strict=True)
    ]
    return KVCacheConfig(num_blocks, tensors, groups)


def _layers(kind: str) -> Sequence[str]:
    return [f"layers.{index}.{kind}" for index in range(NUM_LAYERS)]


def _vllm_config(
    configuration: Configuration, sizes: Sizes, kv_cache_config: KVCacheConfig, options: dict[str, Any]
) -> VllmConfig:
    config = copy.copy(_base_config(configuration.role, configuration.num_drafts, configuration.has_draft_layer))
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.enable_prefix_caching = configuration.enable_caching
    config.cache_config.num_gpu_blocks = sizes.num_device_blocks
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = configuration.max_model_len
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = configuration.is_async
    config.scheduler_config.enable_chunked_prefill = True  # whatever the platform prefers
    config.scheduler_config.policy = SchedulingPolicy(sizes.policy).value
    config.scheduler_config.max_num_seqs = sizes.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = sizes.token_budget
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_load_failure_policy = "recompute" if sizes.recomputes_failures else "fail"
    block_bytes = DeviceGroups.from_config(kv_cache_config).layout.host_block_bytes
    num_bytes = (sizes.num_host_blocks + 0.5) * block_bytes
    admission = "auto" if configuration.limits_running else "off"
    options = {"host_pool_gib": num_bytes / 2**30, "admission": admission, **options}
    if configuration.has_tier and "tiers" not in options:
        options["tiers"] = [{"type": "fs", "path": "unused", "quota_gib": 1.0}]  # the simulated one takes its place
    config.kv_transfer_config.kv_connector_extra_config = options
    return config


@lru_cache
def _base_config(role: str, num_drafts: int, has_draft_layer: bool) -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector=CONNECTOR_NAME, kv_role=role, kv_connector_extra_config={"host_pool_gib": 1.0}
    )
    method = "mtp" if has_draft_layer else "ngram"
    drafts = {"method": method, "num_speculative_tokens": num_drafts} if num_drafts else None
    args = EngineArgs(
        model=str(CODE_MODEL if has_draft_layer else MODEL),
        max_model_len=MAX_MODEL_LEN,
        kv_transfer_config=transfer,
        speculative_config=drafts,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    config = args.create_engine_config()
    config.cache_config.block_size = BLOCK_SIZE
    return config

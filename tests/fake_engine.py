"""vLLM's scheduling steps in small: real `KVCacheManager` and requests, our scheduler half, a worker made of dicts.

Every KV row is represented by the prefix it belongs to, so that a row in the wrong place is noticed.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.connector.metrics import HiSparseStats
from vllm_hisparse.connector.scheduler import HiSparseSchedulerConnector
from vllm_hisparse.kv_manager.blocks.hot_block_manager import register_hot_block_manager
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
from vllm_hisparse.layout import KVLayout

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
MAX_BUDGET = 24  # tokens of a step
STATE_ENTRIES = ((1, 10), (3, 24))  # an algorithm's: tokens and bytes of an entry in a layer
NUM_HOT_BLOCKS = 2  # of a request, if they do not grow

register_hot_block_manager()
init_none_hash(sha256)


def mla_spec(head_size: int, dtype: torch.dtype = torch.bfloat16) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=head_size,
        dtype=dtype,
        state_content_bytes=head_size * dtype.itemsize,
    )


def make_kv_cache_config(
    num_blocks: int,
    hot_first: bool = False,
    num_layers: int = 2,
    has_resident_kv: bool = True,
    max_query_len: int = 1,
    draft_row_bytes: int = 0,
    device_buffer_size: int = 5,
    elastic: bool = False,
    has_state: bool = False,
) -> KVCacheConfig:
    num_resident = num_layers if has_resident_kv else 0
    layout = KVLayout(
        *(24, 20, num_layers, num_resident, BLOCK_SIZE),
        max_query_len=max_query_len,
        draft_row_bytes=draft_row_bytes,
        state_entries=STATE_ENTRIES if has_state else (),
    )
    hot = HotBufferSpec.from_mla_spec(mla_spec(12), layout, device_buffer_size, elastic)
    indexer = KVCacheGroupSpec([f"layers.{i}.indexer" for i in range(num_layers)], mla_spec(20, torch.uint8))
    groups = [
        *([indexer] if has_resident_kv else []),
        KVCacheGroupSpec([f"layers.{i}.attn" for i in range(num_layers)], hot),
    ]
    pages = {group.layer_names[0]: group.kv_cache_spec.page_size_bytes for group in groups}
    block_bytes = num_layers * max(pages.values())
    tensors = [
        KVCacheTensor(num_blocks * block_bytes, group.layer_names, pages[group.layer_names[0]], block_bytes)
        for group in groups
    ]
    return KVCacheConfig(num_blocks, tensors, groups[::-1] if hot_first else groups)


def make_request(
    request_id: str, prompt: list[int], max_tokens: int = 8, resumable: bool = False, **sampling
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(request_id, list(prompt), params, None, block_hasher=hasher, resumable=resumable)


class FakeWorker:
    """Does with dicts what the worker half does with tensors; a row is the tuple of tokens up to its own."""

    def __init__(self, layout: KVLayout):
        self.layout = layout
        self.main_rows: dict[tuple[int, int], tuple] = {}  # (host block, offset)
        self.host_keys: dict[tuple[int, int], tuple] = {}
        self.device_keys: dict[tuple[int, int], tuple] = {}  # (device block, offset)
        self.tables: dict[int, list[int]] = {}
        self.hot_block_tables: dict[int, list[int]] = {}
        self.state_block_tables: dict[int, list[int]] = {}

    def copy_block(self, source: dict, source_id: int, target: dict, target_id: int) -> None:
        for offset in range(BLOCK_SIZE):
            target[target_id, offset] = source.get((source_id, offset), ("never written",))

    def apply(self, metadata: HiSparseMetadata) -> None:
        for device_id, host_id in metadata.preemption_saves:
            self.copy_block(self.device_keys, device_id, self.host_keys, host_id)
        for first_hot_block_id in metadata.released:
            del self.tables[first_hot_block_id], self.hot_block_tables[first_hot_block_id]
            self.state_block_tables.pop(first_hot_block_id, None)
        for first_hot_block_id, (first, host_ids) in metadata.host_block_tables.items():
            assert (first_hot_block_id in self.tables) == (first > 0), "a table starts at 0, once"
            table = self.tables.setdefault(first_hot_block_id, [])
            assert len(table) == first, "a delta must continue the table"
            assert host_ids, "an empty delta need not travel"
            table.extend(host_ids)
        for first_hot_block_id, (first, block_ids) in metadata.hot_block_tables.items():
            hot_block_table = self.hot_block_tables.setdefault(first_hot_block_id, [])
            assert first_hot_block_id in self.tables and first <= len(hot_block_table), (
                "hot blocks of no request, or a gap"
            )
            hot_block_table[first:] = block_ids
            assert hot_block_table[0] == first_hot_block_id and len(set(hot_block_table)) == len(hot_block_table)
        for first_hot_block_id, (first, block_ids) in metadata.state_block_tables.items():
            assert first_hot_block_id in self.tables, "state blocks of no request"
            assert len(self.state_block_tables.setdefault(first_hot_block_id, [])) == first, (
                "a delta must continue the table"
            )
            self.state_block_tables[first_hot_block_id] += block_ids
        owned = [
            i for tables in (self.hot_block_tables, self.state_block_tables) for table in tables.values() for i in table
        ]
        assert len(set(owned)) == len(owned) and 0 not in owned, "a block has two uses"
        for host_id, device_id in metadata.restores:
            self.copy_block(self.host_keys, host_id, self.device_keys, device_id)

    def forward(self, first_hot_block_id: int, device_ids: list[int], tokens: list[int], first: int, last: int) -> None:
        """Compute positions [first, last): reads every earlier row, on the host and in the indexer cache."""
        table = self.tables[first_hot_block_id]
        num_state_blocks = self.layout.state.num_blocks(last)
        assert len(self.state_block_tables.get(first_hot_block_id, [])) >= num_state_blocks, (
            "tokens without state blocks"
        )
        for position in range(last):
            block, offset = divmod(position, BLOCK_SIZE)
            row = tuple(tokens[: position + 1])
            if position >= first:
                self.main_rows[table[block], offset] = row
                self.device_keys.update({(device_id, offset): row for device_id in device_ids[block : block + 1]})
            assert self.main_rows.get((table[block], offset)) == row, f"host row {position} holds another prefix"
            if not device_ids:
                continue
            assert self.device_keys.get((device_ids[block], offset)) == row, f"indexer key {position} is wrong"

    def zero(self, device_ids: list[int] | None) -> None:
        """Zero new blocks, like vLLM."""
        for device_id in device_ids or ():
            self.device_keys.update({(device_id, offset): ("zeroed",) for offset in range(BLOCK_SIZE)})

    def finish(self, metadata: HiSparseMetadata) -> None:
        for device_id, host_id in metadata.saves:
            self.copy_block(self.device_keys, device_id, self.host_keys, host_id)


class FakeTransport:
    """Pulls the prompts of `remote` requests."""

    def __init__(self):
        self.remote: set[str] = set()
        self.started: list[tuple] = []
        self.finished: list[str] = []

    def accept(self, request: Request) -> bool:
        if request.request_id.startswith("remote"):
            self.remote.add(request.request_id)
        return not request.request_id.startswith("refused")

    def is_remote(self, request: Request) -> bool:
        return request.request_id in self.remote

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return request.num_prompt_tokens - num_computed_tokens if self.is_remote(request) else 0

    def start(self, request, host_ids, num_shared, device_blocks, num_external_tokens) -> None:
        device_ids = None if device_blocks is None else [block.block_id for block in device_blocks]
        self.started.append((request.request_id, list(host_ids), num_shared, device_ids, num_external_tokens))
        self.remote.discard(request.request_id)

    def build_connector_meta(self, scheduler_output) -> tuple[str, dict]:
        return "transport metadata", {}

    def warn_expired(self, request_id: str) -> None:
        """Nobody listens."""

    def update_connector_output(self, output) -> None:
        self.last_output = output

    def request_finished(self, request: Request) -> None:
        self.finished.append(request.request_id)


def scheduler_output(num_scheduled: dict[str, int], new_block_ids: list[int] | None = None) -> SimpleNamespace:
    """The part of vLLM's `SchedulerOutput` that `build_connector_meta` reads and changes."""
    return SimpleNamespace(
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        new_block_ids_to_zero=new_block_ids or None,
    )


class FakeEngine:
    """First come, first served; the newest running request is preempted first.

    Args:
        hot_buffers: `device_buffer_size`, `elastic` and `has_state` of `make_kv_cache_config`.
        zeroes_first: whether new blocks are zeroed before the worker half gets its metadata, as by Model Runner V2, or
            after it, as by V1.
    """

    def __init__(
        self,
        num_device_blocks: int = 33,
        num_host_blocks: int = 24,
        hot_first: bool = False,
        enable_caching: bool = True,
        log_request_stats: bool = False,
        transport=None,
        has_resident_kv: bool = True,
        zeroes_first: bool = True,
        max_num_running: int = 1000,
        tiers: Sequence[dict] = (),
        max_query_len: int = 1,
        draft_row_bytes: int = 0,
        make_tiers=None,
        **hot_buffers,
    ):
        self.zeroes_first = zeroes_first
        kv_cache_config = make_kv_cache_config(
            num_device_blocks,
            hot_first,
            has_resident_kv=has_resident_kv,
            max_query_len=max_query_len,
            draft_row_bytes=draft_row_bytes,
            **hot_buffers,
        )
        self.kv = KVCacheManager(kv_cache_config, MAX_MODEL_LEN, BLOCK_SIZE, BLOCK_SIZE, enable_caching=enable_caching)
        config = HiSparseConfig(host_pool_gib=1.0, log_request_stats=log_request_stats, tiers=list(tiers))
        self.groups = DeviceGroups.from_config(kv_cache_config)
        self.connector = HiSparseSchedulerConnector(
            config,
            self.groups,
            self.kv,
            num_host_blocks,
            enable_caching,
            transport,
            max_num_running,
            MAX_BUDGET,
            make_tiers=make_tiers,
        )
        self.tracker = self.connector.tracker
        self.host_pool = self.connector.host_pool
        self.worker = FakeWorker(self.groups.layout)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: list[Request] = []
        self.received: set[str] = set()  # waiting, but they hold blocks
        # (request, device blocks, host blocks) that a step in flight may write
        self.deferred: list[tuple[str, list, list[int]]] = []
        self.defer_frees, self.num_in_flight = False, 0
        self.ended: set[str] = set()
        self.log: list[HiSparseMetadata] = []
        self.stats = HiSparseStats()

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 8, **sampling) -> Request:
        request = make_request(request_id, prompt, max_tokens, **sampling)
        self.connector.on_new_request(request)
        self.waiting.append(request)
        return request

    def step(self, budget: int = 8) -> HiSparseMetadata:
        """Schedule, run and update; returns what the worker was told.

        The step stays in flight until the next one begins, or until `drain` if blocks wait for it.
        """
        if not self.deferred:
            self.process_steps()
        scheduled = self.schedule(budget)
        output = scheduler_output(scheduled, self.kv.take_new_block_ids())
        metadata = self.connector.build_connector_meta(output)
        self.log.append(metadata)
        if self.zeroes_first:
            self.worker.zero(output.new_block_ids_to_zero)
        self.worker.apply(metadata)
        if not self.zeroes_first:
            self.worker.zero(output.new_block_ids_to_zero)
        batch = [request for request in self.running if request.request_id in scheduled]
        for request in batch:
            first, last = request.num_computed_tokens, request.num_computed_tokens + scheduled[request.request_id]
            self.worker.forward(*self.tables_of(request), request.all_token_ids[:], first, last)
            request.num_computed_tokens = last
        self.worker.finish(metadata)
        for request in batch:
            self.update(request)
        self.num_in_flight += 1
        self.stats.aggregate(self.connector.take_stats())
        return metadata

    def process_steps(self) -> None:
        """All steps in flight are over."""
        for _ in range(self.num_in_flight):
            self.connector.step_processed()
        self.num_in_flight = 0

    def schedule_one(self, request: Request, num_tokens: int) -> tuple[HiSparseMetadata, int, int]:
        """Schedule a step of one request alone; returns its metadata and the positions to compute, half-open."""
        self.kv.new_step_starts()
        if request in self.waiting:
            self.waiting.remove(request)
            request.status = RequestStatus.RUNNING
        assert self.kv.allocate_slots(request, num_tokens) is not None
        metadata = self.connector.build_connector_meta(scheduler_output({request.request_id: num_tokens}))
        first, request.num_computed_tokens = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        return metadata, first, request.num_computed_tokens

    def tables_of(self, request: Request) -> tuple[int, list[int]]:
        device = self.kv.get_block_ids(request.request_id)
        resident_id = self.groups.resident_group_id
        return device[self.groups.hot_group_id][0], [] if resident_id is None else device[resident_id]

    def schedule(self, budget: int) -> dict[str, int]:
        self.kv.new_step_starts()
        scheduled: dict[str, int] = {}
        num_running = len(self.running)
        for request in list(self.running):
            num_tokens = min(budget, request.num_tokens - request.num_computed_tokens)
            if request not in self.running or not num_tokens:
                continue
            while request in self.running and self.kv.allocate_slots(request, num_tokens) is None:
                self.preempt(self.running[-1])
            if request in self.running:
                scheduled[request.request_id] = num_tokens
                budget -= num_tokens
        self.waiting.sort(key=lambda request: request.request_id not in self.received)
        for request in list(self.waiting):
            if not budget or len(self.running) < num_running:
                break
            num_tokens = self.admit(request, budget)
            if num_tokens is None:
                continue
            if not num_tokens:
                break
            scheduled[request.request_id] = num_tokens
            budget -= num_tokens
            self.waiting.remove(request)
            self.running.append(request)
        return scheduled

    def admit(self, request: Request, budget: int) -> int | None:
        """Try to admit a request.

        Returns:
            Its tokens of this step; 0 if it has to wait or to receive its KV first, and those behind it with it; None
            if it waits for a tier.
        """
        blocks, num_local, num_external, is_async = self.kv.empty_kv_cache_blocks, 0, 0, False
        if request.request_id not in self.received:
            blocks, num_local, _ = self.kv.get_computed_blocks(request)
            num_external, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
            if num_external is None:
                return None
        num_computed = request.num_computed_tokens + num_local + num_external
        num_tokens = 0 if is_async else min(budget, request.num_tokens - num_computed)
        allocated = self.kv.allocate_slots(
            request,
            num_tokens,
            num_new_computed_tokens=num_local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=is_async,
            has_scheduled_reqs=bool(self.running),
        )
        if allocated is None:
            return 0
        self.connector.update_state_after_alloc(request, self.kv.get_blocks(request.request_id), num_external)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS if is_async else RequestStatus.RUNNING
        request.num_computed_tokens = num_computed
        self.received.discard(request.request_id)
        if is_async:
            self.waiting.remove(request)
            self.loading.append(request)
        return num_tokens

    def receive(self, request: Request) -> None:
        """A remote load ends: the prompt's rows are in the host pool, its keys in the indexer cache."""
        if request.is_finished():
            self.loading.remove(request)
            self.kv.free(request)
            self.ended.add(request.request_id)
            return
        device_ids = self.tables_of(request)[1]
        for position in range(request.num_computed_tokens):
            block, offset = divmod(position, BLOCK_SIZE)
            row = tuple(request.all_token_ids[: position + 1])
            self.worker.main_rows[self.host_pool.block_ids(request.request_id)[block], offset] = row
            self.worker.device_keys.update({(device_id, offset): row for device_id in device_ids[block : block + 1]})
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self.kv.cache_blocks(request, request.num_computed_tokens)
        request.status = RequestStatus.WAITING
        self.received.add(request.request_id)
        self.loading.remove(request)
        self.waiting.insert(0, request)

    def update(self, request: Request) -> None:
        if request.num_computed_tokens < request.num_tokens:
            return
        request.append_output_token_ids(sum(request.all_token_ids) % 2)
        if request.num_output_tokens >= request.max_tokens or request.num_tokens >= MAX_MODEL_LEN:
            self.running.remove(request)
            self.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    def preempt(self, request: Request, forced: bool = False) -> None:
        """Take a request's blocks: while a step is scheduled, or `forced` between steps, by `reset_prefix_cache`."""
        if not forced:
            self.kv.new_step_starts()
        self.running.remove(request)
        self.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def abort(self, request: Request) -> None:
        if request in self.loading:  # its blocks come back when the load has ended
            request.status = RequestStatus.FINISHED_ABORTED
            self.connector.request_finished(request)
            return
        (self.running if request in self.running else self.waiting).remove(request)
        self.received.discard(request.request_id)
        self.finish(request, RequestStatus.FINISHED_ABORTED)

    def finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.connector.request_finished(request)
        self.free(request)

    def free(self, request: Request) -> None:
        if self.defer_frees and self.num_in_flight:
            request_id = request.request_id
            host_ids = list(self.host_pool.block_ids(request_id)) if request_id in self.tracker.admitted else []
            self.deferred.append((request_id, self.kv.pop_blocks_for_free(request), host_ids))
            return
        self.kv.free(request)
        if request.is_finished():
            self.ended.add(request.request_id)

    def drain(self) -> None:
        """The steps in flight are over: return the blocks that they might have written."""
        self.process_steps()
        for request_id, blocks, _ in self.deferred:
            self.kv.block_pool.free_blocks(reversed(blocks))
            self.ended.add(request_id)
        self.deferred.clear()

    def run_to_end(self, max_steps: int = 400) -> None:
        while self.running or self.waiting or self.loading:
            assert max_steps, "no progress"
            for request in list(self.loading):
                self.receive(request)
            self.step()
            max_steps -= 1

    def check_integrity(self) -> None:
        """Check both pools: nothing lost, nothing owned twice."""
        self.tracker.check_integrity()
        pool = self.kv.block_pool
        num_refs = [0] * pool.num_gpu_blocks
        tables = [blocks for m in self.kv.coordinator.single_type_managers for blocks in m.req_to_blocks.values()]
        held = [block for _, blocks, _ in self.deferred for block in blocks]
        for block in [*(block for table in tables for block in table), *held, *self.tracker.other_blocks()]:
            num_refs[block.block_id] += 1
        owned = {i for i, refs in enumerate(num_refs) if refs}
        assert [block.ref_cnt for block in pool.blocks[1:]] == num_refs[1:], "device blocks are lost or owned twice"
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(owned)
        admitted = {request.request_id for request in self.running + self.loading} | self.received
        assert set(self.tracker.admitted) == admitted
        for _, _, host_ids in self.deferred:
            assert all(self.host_pool._num_pins[block_id] for block_id in host_ids), "a late write meets a free block"

    def check_idle(self) -> None:
        """Check that nothing is left behind once every request has ended."""
        self.drain()
        self.step()
        self.process_steps()
        self.check_integrity()
        assert self.host_pool.num_used == 0, "host blocks without an owner"
        assert self.kv.block_pool.get_num_free_blocks() == self.kv.block_pool.num_gpu_blocks - 1
        assert self.tracker.leftovers() == {}
        worker = self.worker
        assert not worker.tables and not worker.hot_block_tables and not worker.state_block_tables, (
            "the worker was not told"
        )

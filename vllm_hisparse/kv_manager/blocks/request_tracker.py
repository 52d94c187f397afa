"""`RequestTracker`: the one owner of requests' blocks, and the source of the messages about them to the workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.kv_manager.blocks.admission import AdmissionControl, Demand
from vllm_hisparse.kv_manager.blocks.deferred import Deferred
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool, HostMatch
from vllm_hisparse.kv_manager.blocks.kv_events import HostPoolEvents
from vllm_hisparse.kv_manager.blocks.lending import BlockNeeds, Borrower, blocks_wanted, plan
from vllm_hisparse.kv_manager.blocks.pulls import Pulls
from vllm_hisparse.kv_manager.blocks.sessions import cut_long_sessions
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.metadata import BlockPairs, HiSparseMetadata
from vllm_hisparse.vllm_patches.drafting_sessions import count_kept_tokens
from vllm_hisparse.vllm_patches.scheduled_blocks import forget_uncomputed

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

STEPS_PER_BALANCE = 16  # steps between two divisions of free blocks, if no blocks are needed earlier
STEPS_IN_FLIGHT = 2  # steps whose tokens the scheduler does not know yet, at most
MAX_STEPS_OF_REFUSAL = 8  # consecutive steps in which a request lacks device blocks, before all lent blocks come back
SLACK_SHARE = 1 / 4  # share of the blocks for growing requests that stays free in addition, until the next balance


class Obstacle(Enum):
    """Reason why a request could not start when vLLM last asked for it, other than a lack of device blocks."""

    HOST_POOL_FULL = auto()
    HELD_BACK = auto()  # more running requests would decode fewer tokens per second
    LOADS_FROM_TIER = auto()


@dataclass
class AdmittedRequest:
    """A request that holds blocks. Its own hot blocks are in vLLM's table, its host blocks in the host pool.

    Attributes:
        first_hot_block_id: id of the request's first hot block, which names the request on the worker.
        num_matched_tokens: tokens that the host pool held when the request was admitted.
        lent: hot blocks beyond its own.
        state: blocks of an algorithm's state, in the order of `StateLayout.columns`.
        num_tokens: tokens that will have been computed after its next step, drafts included.
        next_event: number of tokens at which the next block becomes full or begins.
        num_sent_blocks: host blocks that the worker knows; 0 while the worker does not know the request.
        sent_hot_ids, sent_state_ids: ids of the hot blocks and state blocks that the worker knows.
        sent_equal_rows: True if the worker divides its hot blocks equally among layers.
        num_saved_blocks: leading blocks whose device-resident KV is on the host.
        num_published_blocks: leading blocks that were offered to the host prefix cache since the admission. Matched
            blocks are offered, too, because some of those that a preempted request left may not be published.
        unsaved_blocks: index -> device block id, for later blocks that hold device-resident KV.
        is_decoding: True if its last step computed no more tokens than a decoding step does; dense models only.
        last_start: tokens that were computed when its last step was scheduled, drafts included; sessions only.
        restored_in: number of the step that copies to the device the KV that a prefill instance has sent to the host;
            0: none does.
    """

    first_hot_block_id: int
    num_matched_tokens: int
    lent: list[KVCacheBlock] = field(default_factory=list)
    state: list[KVCacheBlock] = field(default_factory=list)
    num_tokens: int = 0
    next_event: int = 0
    num_sent_blocks: int = 0
    sent_hot_ids: list[int] = field(default_factory=list)
    sent_state_ids: list[int] = field(default_factory=list)
    sent_equal_rows: bool = False
    num_saved_blocks: int = 0
    num_published_blocks: int = 0
    unsaved_blocks: dict[int, int] = field(default_factory=dict)
    is_decoding: bool = False
    last_start: int = 0
    restored_in: int = 0

    def record_step_start(self, num_computed_tokens: int) -> bool:
        """Record where a step starts; True if it starts before the start of the last step that the worker knows."""
        goes_back = num_computed_tokens < self.last_start and self.num_sent_blocks > 0
        self.last_start = num_computed_tokens
        return goes_back

    def record_step_kind(self, decodes: bool) -> bool:
        """Record whether a step decodes; True if it does and the step before did not."""
        was_decoding, self.is_decoding = self.is_decoding, decodes
        return self.is_decoding and not was_decoding

    def truncate_saved(self, num_blocks: int) -> None:
        """Forget saves beyond `num_blocks`, because a session's next turn may begin before the last computed token."""
        self.num_saved_blocks = min(self.num_saved_blocks, num_blocks)

    def forget_sent(self) -> None:
        """Record that the worker forgets the request."""
        self.num_sent_blocks, self.sent_hot_ids, self.sent_state_ids = 0, [], []
        self.sent_equal_rows = self.is_decoding = False


class RequestTracker:
    """Knows all requests and the blocks that they hold, and is the only writer of both.

    vLLM admits a request, grows it and takes its blocks through `HotBlockManager`, which calls `num_missing_blocks`,
    `give_blocks`, `set_num_tokens` and `release`. Admission takes hot blocks, state blocks and host blocks in one
    transaction. If the host pool cannot hold a request, the tracker asks vLLM for more device blocks than there are, so
    that vLLM lets the request wait, or preempts, by its own rules. The whole sequence is reserved on the host at
    admission, so that a load or a chunked prefill never stops half way.

    In every step, vLLM calls `step_starts`, then admits and grows requests; `diff` ends the scheduling of the step.

    Free device blocks are lent to running requests as hot blocks beyond their own (`lending.py`), and come back before
    vLLM runs out of blocks. Blocks that running requests may need in their next steps stay free. If vLLM has refused a
    request because device blocks were missing, the blocks that this request and the requests behind it need to start
    stay free as well. A request that waits for anything else takes no blocks away from running requests.

    Args:
        host_pool: the host pool.
        deferred: runs actions after a step has been processed.
        kv_cache_manager: vLLM's manager.
        groups: the device KV cache groups.
        enable_caching: True if full blocks are published in the host prefix cache.
        max_num_seqs: requests that the worker has room for.
        max_num_running: requests that vLLM lets run at once, at most `max_num_seqs`.
        max_num_batched_tokens: tokens that a step may compute.
        admission: limits the running requests; None: all that have room may run.
        events: reports published blocks to routers; None: vLLM publishes no events.

    Attributes:
        requests: request id -> request, from its arrival to its end.
        sessions: ids of the requests whose prompt arrives in turns.
        admitted: request id -> blocks of a request, if it holds any.
        obstacles: request id -> reason why the request could not start when vLLM last asked for it. vLLM asks for the
            first request of its queue, so most requests behind it have no entry.
        kept: device blocks of preempted requests that are being copied to the host.
        pulls: requests whose KV is being pulled from prefill instances.
    """

    def __init__(
        self,
        host_pool: HostBlockPool,
        deferred: Deferred,
        kv_cache_manager: KVCacheManager,
        groups: DeviceGroups,
        enable_caching: bool,
        max_num_seqs: int,
        max_num_running: int,
        max_num_batched_tokens: int,
        admission: AdmissionControl | None = None,
        events: HostPoolEvents | None = None,
    ):
        managers, resident_id = kv_cache_manager.coordinator.single_type_managers, groups.resident_group_id
        self.host_pool, self.deferred, self.block_pool = host_pool, deferred, kv_cache_manager.block_pool
        self.spec, self.layout, self.resident_group_id = groups.hot_spec, groups.layout, resident_id
        self.enable_caching, self.admission = enable_caching, admission
        self.max_num_seqs, self.max_num_running = max_num_seqs, max_num_running
        self.events = events
        self.max_model_len, self.block_size = kv_cache_manager.max_model_len, groups.layout.block_size
        self.has_drafts, self.has_draft_layers = self.layout.max_query_len > 1, self.layout.draft_row_bytes > 0
        self.is_dense = self.layout.num_kv_heads is not None
        self._own_hot_blocks: Mapping[str, list[KVCacheBlock]] = managers[groups.hot_group_id].req_to_blocks
        self._resident_blocks = None if resident_id is None else managers[resident_id].req_to_blocks
        self.requests: dict[str, Request] = {}
        self.sessions: set[str] = set()
        self.admitted: dict[str, AdmittedRequest] = {}
        self.obstacles: dict[str, Obstacle] = {}
        self.kept: list[KVCacheBlock] = []
        self.pulls = Pulls()
        self._were_admitted: set[str] = set()  # requests that hold or held blocks
        self._matches: dict[str, HostMatch] = {}
        self._ran_during_reset: set[str] = set()  # requests that held blocks when the host prefix cache was emptied
        # Contents of the next metadata
        self._changed: dict[str, None] = {}  # requests with new host blocks, or with blocks that became full
        self._tables_changed: dict[str, None] = {}  # requests whose hot blocks or state blocks changed
        self._released: list[int] = []
        self._preemption_saves: BlockPairs = []
        self._restores: BlockPairs = []
        self._received: dict[str, BlockPairs] = {}  # request id -> restores of KV that a prefill instance has sent
        # State of the step that vLLM is scheduling
        self._is_scheduling = False
        # The request that vLLM last asked for, if only device blocks can be missing; None once it has its blocks
        self._asked: str | None = None
        # Lending
        sizes = self.max_model_len, max_num_batched_tokens, kv_cache_manager.watermark_blocks
        self._needs = BlockNeeds(self.spec, *sizes)
        self._balanced: set[str] = set()  # requests that held blocks at the last balance
        self._num_complete_requests = 0
        self._steps_to_balance = self._steps_of_refusal = 0
        self._num_wanted = self._num_taken_back = 0
        self._num_whole_blocks = 0  # about the device blocks with which all requests would be hot as a whole

    # Arrival and end

    def add(self, request: Request) -> None:
        """Record a request that has arrived."""
        self.requests[request.request_id] = request
        if request.resumable:
            self.sessions.add(request.request_id)
            if self.has_drafts:
                count_kept_tokens(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, and publish its full blocks; vLLM takes its blocks through `release`."""
        request_id = request.request_id
        if admitted := self.admitted.get(request_id):
            admitted.truncate_saved(request.num_computed_tokens // self.block_size)
            self._publish(request, admitted)
        self.requests.pop(request_id, None)
        self.sessions.discard(request_id)
        self._ran_during_reset.discard(request_id)
        self._were_admitted.discard(request_id)
        self.pulls.forget(request_id)
        self._matches.pop(request_id, None)
        self.obstacles.pop(request_id, None)
        self.host_pool.forget(request_id)

    def reset_cache(self) -> None:
        """Empty the host prefix cache. Requests that hold blocks publish nothing more, because all that they compute
        depends on KV that was to be forgotten, such as KV of replaced weights.
        """
        self.host_pool.reset_cache()
        # NOTE: the other requests start from their first token again, because the pool has forgotten their blocks.
        self._ran_during_reset = self.admitted.keys() & self.requests.keys()

    # Pulls

    def pull_begins(self, request_id: str, instance: str) -> None:
        """Record that a request's KV is being pulled from a prefill instance."""
        self.pulls.begin(request_id, instance)

    def pull_ended(self, request_id: str) -> None:
        """Record that a request's KV has come, or cannot come. If it starts in the next step, it may be lent blocks."""
        if self.pulls.came(request_id):
            self._steps_to_balance = 0

    # Waiting

    def find_match(self, request: Request) -> HostMatch:
        """Look up the prefix that the host pool holds of a waiting request, and remember it for `match`."""
        match = self._matches[request.request_id] = self.host_pool.find_match(request, self.enable_caching)
        return match

    def match(self, request_id: str) -> HostMatch:
        """The prefix that the host pool held of a request at the last `find_match`."""
        return self._matches.get(request_id, HostMatch())

    def set_obstacle(self, request_id: str, obstacle: Obstacle | None) -> None:
        """Record why a request cannot start. None: nothing is in its way, except perhaps a lack of device blocks."""
        if obstacle is not None:
            self.obstacles[request_id] = obstacle
        elif self.obstacles:
            self.obstacles.pop(request_id, None)

    def waiting(self) -> Iterator[Request]:
        """Requests without blocks that could start if there were blocks for them, in the order of their arrival.

        A request that vLLM would skip, because it loads from a tier or waits for a grammar, is not among them.
        """
        for name, request in self.requests.items():
            is_ready = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            if is_ready and name not in self.admitted and self.obstacles.get(name) is not Obstacle.LOADS_FROM_TIER:
                yield request

    def num_waiting_for_host(self) -> int:
        """Number of requests that wait for host blocks: a request that the host pool cannot hold, and all behind it."""
        refused = [name for name, obstacle in self.obstacles.items() if obstacle is Obstacle.HOST_POOL_FULL]
        refused = [name for name in refused if not self._host_fits(name, self.requests[name].num_tokens)]
        return len({*refused, *(request.request_id for request in self.waiting())}) if refused else 0

    def num_held_back(self) -> int:
        """Number of requests that wait because more running ones would not pay: the first one, and all behind it."""
        is_held = Obstacle.HELD_BACK in self.obstacles.values()
        return sum(1 for _ in self.waiting()) if is_held else 0

    def demand(self) -> Demand | None:
        """Describe the running requests for `AdmissionControl`; None: there is none."""
        running = (admitted for name, admitted in self.admitted.items() if name in self.requests)
        lengths = [admitted.num_tokens for admitted in running if admitted.num_tokens]
        return Demand.of(self.spec, lengths, self.block_pool.num_gpu_blocks - 1) if lengths else None

    def _is_held_back(self, request_id: str) -> bool:
        """Return True if a request that holds no blocks has to wait, although there may be room for it.

        A request that has held blocks does not wait: it was preempted, or its KV could not be pulled. In the latter
        case, requests whose KV has come are behind it in vLLM's queue.
        """
        if self.admission is None or request_id in self._were_admitted:
            return False
        num_blocks = self.block_pool.num_gpu_blocks - 1 - self._num_whole_blocks
        needed = self.spec.num_request_blocks(self.requests[request_id].num_tokens, is_whole=True)
        return self.admission.holds_back(self._num_running(), lambda: needed <= num_blocks)

    def _num_running(self) -> int:
        """Return the number of requests that hold blocks, and run or will soon.

        Sessions between two turns do not count, nor requests that ended while their KV was pulled, nor requests whose
        prefill instance hangs.
        """
        admitted = self.admitted.keys() & self.requests.keys()
        held = self.sessions & admitted if self.sessions else ()
        busy = RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS
        num_idle = sum(self.requests[name].status not in busy for name in held)
        return len(admitted) - num_idle - self.pulls.num_hung()

    # Blocks

    def step_starts(self) -> None:
        """Prepare for a step that vLLM begins to schedule."""
        self._is_scheduling, self._asked = True, None
        sessions = [self.requests[name] for name in self.sessions]
        cut_long_sessions(sessions, self.max_model_len, self.block_pool.hash_block_size)

    def num_missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """Hot blocks and state blocks that a request of `num_tokens` has yet to get.

        If the host pool cannot hold the request, or the request is held back, this is more than the device has, so that
        vLLM does not admit it.
        """
        admitted = self.admitted.get(request_id)
        has_room = admitted is not None and num_tokens <= self.host_pool.capacity(request_id)
        if not has_room and not self._host_fits(request_id, num_tokens):
            self.set_obstacle(request_id, Obstacle.HOST_POOL_FULL)
            self._asked = None
            # NOTE: its prefix is evicted last, because its admission will evict all other cached blocks.
            self.host_pool.touch(self.match(request_id).block_ids)
            return self.block_pool.num_gpu_blocks + 1
        if admitted is None and self._is_held_back(request_id):
            self.set_obstacle(request_id, Obstacle.HELD_BACK)
            self._asked = None
            return self.block_pool.num_gpu_blocks + 1
        self.set_obstacle(request_id, None)
        self._asked = request_id
        return self._num_missing_hot(request_id, num_tokens) + self._num_missing_state(admitted, num_tokens)

    def give_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Give a request the blocks that it is missing, the first time also host blocks; return the new hot blocks."""
        new_blocks = self.block_pool.get_new_blocks(self._num_missing_hot(request_id, num_tokens))
        self._own_hot_blocks[request_id].extend(new_blocks)
        if (admitted := self.admitted.get(request_id)) is None:
            admitted = self._admit(request_id, new_blocks[0].block_id)
        new_state = self.block_pool.get_new_blocks(self._num_missing_state(admitted, num_tokens))
        admitted.state.extend(new_state)
        if (new_blocks or new_state) and admitted.num_sent_blocks:
            self._tables_changed[request_id] = None
        return new_blocks

    def set_num_tokens(self, request_id: str, num_tokens: int) -> None:
        """Make room on the host for a request whose next step ends after `num_tokens` tokens, drafts included."""
        if num_tokens > self.host_pool.capacity(request_id):
            self.host_pool.grow(request_id, num_tokens)
        admitted = self.admitted[request_id]
        # NOTE: the number does not rise if drafts were rejected, or if a session's turn drops computed tokens.
        if num_tokens >= admitted.next_event or num_tokens <= admitted.num_tokens:
            self._changed[request_id] = None
            admitted.next_event = num_tokens + (-num_tokens % self.block_size or 1)
        admitted.num_tokens = num_tokens
        self._asked = None

    def release(self, request_id: str, last_step: int) -> list[KVCacheBlock]:
        """Take a request's blocks, because it has ended or is preempted.

        Args:
            request_id: id of the request.
            last_step: the last step that may write its blocks. Its host blocks are kept until that step is over; if a
                later step copies KV from them that a prefill instance has sent, until the later step is over.

        Returns:
            The request's state blocks and lent blocks, for the caller to free.
        """
        self._changed.pop(request_id, None)
        self._tables_changed.pop(request_id, None)
        self._received.pop(request_id, None)
        admitted = self.admitted.pop(request_id, None)
        if admitted is None:
            return []
        if admitted.num_sent_blocks:
            self._released.append(admitted.first_hot_block_id)
        host_ids = list(self.host_pool.block_ids(request_id))
        self.host_pool.pin(host_ids)
        # NOTE: a running request is being preempted, because vLLM changes the status only after this call.
        request = self.requests.get(request_id)
        if request is not None and request.status == RequestStatus.RUNNING:
            self._preempt(request, admitted)
        else:
            self.host_pool.free(request_id)
        # NOTE: vLLM does not know that the restoring step reads blocks, because the request may not run in it.
        last_step = max(last_step, admitted.restored_in)
        self.deferred.after_step(last_step, partial(self.host_pool.unpin, host_ids))
        return admitted.state + admitted.lent

    def hot_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """All hot blocks of a request that holds blocks, lent ones last."""
        return self._own_hot_blocks[request_id] + self.admitted[request_id].lent

    def resident_blocks(self, request_id: str, first: int, last: int) -> Iterator[tuple[int, KVCacheBlock]]:
        """Indices and blocks [first, last) of a request's device-resident KV; nothing if the model has no such KV."""
        if self._resident_blocks is not None:
            blocks = self._resident_blocks[request_id]
            yield from ((index, blocks[index]) for index in range(first, last))

    def restore(self, request_id: str, num_tokens: int) -> None:
        """Plan to copy device-resident KV back to the device, for the last `num_tokens` of the matched tokens."""
        num_matched = self.admitted[request_id].num_matched_tokens
        first, host_ids = (num_matched - num_tokens) // self.block_size, self.host_pool.block_ids(request_id)
        for index, block in self.resident_blocks(request_id, first, self.layout.num_blocks(num_matched)):
            self._restores.append((host_ids[index], block.block_id))

    def receive(self, request_id: str) -> None:
        """Plan to copy the device-resident KV of a prompt to the device, because a prefill instance has sent it to the
        host."""
        num_tokens, host_ids = self.requests[request_id].num_prompt_tokens, self.host_pool.block_ids(request_id)
        blocks = self.resident_blocks(request_id, 0, self.layout.num_blocks(num_tokens))
        self._received[request_id] = [
            (host_ids[index], block.block_id) for index, block in blocks if block.block_hash is None
        ]
        admitted = self.admitted[request_id]
        admitted.num_saved_blocks = max(admitted.num_saved_blocks, num_tokens // self.block_size)

    def _host_fits(self, request_id: str, num_tokens: int) -> bool:
        if request_id in self.admitted:
            return self.host_pool.can_grow(request_id, num_tokens)
        return self.host_pool.can_allocate(max(num_tokens, self._num_reserved(request_id)), self.match(request_id))

    def _num_reserved(self, request_id: str) -> int:
        """Tokens to reserve at admission: the request's own, and its first drafts, because drafts preempt nothing."""
        num_drafts = self.layout.max_query_len - 1
        if self.has_draft_layers:
            num_drafts *= 2  # vLLM also asks for room for the tokens that the draft layer proposes next
        return min(self.requests[request_id].num_tokens + num_drafts, self.max_model_len)

    def _num_missing_hot(self, request_id: str, num_tokens: int) -> int:
        return max(self.spec.num_blocks(max(num_tokens, 1)) - len(self._own_hot_blocks.get(request_id, ())), 0)

    def _num_missing_state(self, admitted: AdmittedRequest | None, num_tokens: int) -> int:
        return max(self.layout.state.num_blocks(num_tokens) - (len(admitted.state) if admitted else 0), 0)

    def _admit(self, request_id: str, first_hot_block_id: int) -> AdmittedRequest:
        match = self._matches.pop(request_id, HostMatch())
        self.host_pool.allocate(request_id, self._num_reserved(request_id), match)
        self._num_whole_blocks += self.spec.num_request_blocks(self.requests[request_id].num_tokens, is_whole=True)
        num_full = match.num_tokens // self.block_size
        self.admitted[request_id] = AdmittedRequest(
            first_hot_block_id,
            match.num_tokens,
            num_saved_blocks=num_full,
        )
        self._were_admitted.add(request_id)
        return self.admitted[request_id]

    def _preempt(self, request: Request, admitted: AdmittedRequest) -> None:
        """Keep a preempted request's KV on the host, where it can be found until the blocks are needed."""
        if self.resident_group_id is not None:
            forget_uncomputed(self.block_pool, self.resident_group_id, request, admitted.num_tokens)
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        num_blocks, host_ids = -(-num_tokens // self.block_size), self.host_pool.block_ids(request.request_id)
        unsaved = {index: block_id for index, block_id in admitted.unsaved_blocks.items() if index < num_blocks}
        if self._is_scheduling:
            for index, block_id in unsaved.items():
                self._save_preempted(self.block_pool.blocks[block_id], host_ids[index])
        elif unsaved:
            # NOTE: nothing is copied: vLLM resets its prefix cache next, which fails while a block is in use.
            num_tokens = min(unsaved) * self.block_size
        self.host_pool.preempt(request.request_id, num_tokens)

    def _save_preempted(self, block: KVCacheBlock, host_id: int) -> None:
        """Plan to copy a device block to the host in the step that is being scheduled, and keep both blocks until then.

        NOTE: they must be kept, because transfers and loads from tiers do not wait for the device: they could write to
        a free block before the copy has run.
        """
        self._preemption_saves.append((block.block_id, host_id))
        self.block_pool.touch([block])
        self.host_pool.pin([host_id])
        self.kept.append(block)
        self.deferred.after_step(self.deferred.num_scheduled + 1, partial(self._free_kept, block, host_id))

    def _free_kept(self, block: KVCacheBlock, host_id: int) -> None:
        self.kept.remove(block)
        self.block_pool.free_blocks([block])
        self.host_pool.unpin([host_id])

    # Lending

    def lent_row_counts(self) -> dict[str, int]:
        """Gauges: hot rows that are lent, and hot rows that requests wanted to borrow when blocks were last divided."""
        num_lent = sum(len(admitted.lent) for admitted in self.admitted.values())
        return {"hot_rows_lent": self._rows_of(num_lent), "hot_rows_wanted": self._rows_of(self._num_wanted)}

    def take_rows_taken_back(self) -> int:
        """Hot rows taken back since the last call."""
        num_blocks, self._num_taken_back = self._num_taken_back, 0
        return self._rows_of(num_blocks)

    def _rows_of(self, num_blocks: int) -> int:
        """Number of hot rows that a mean layer has in `num_blocks` device blocks."""
        return round(num_blocks * self.layout.mean_rows)

    def _balance(self, num_scheduled: Mapping[str, int]) -> None:
        """Lend blocks or take them back, if a balance is due or blocks are needed.

        A balance is due every `STEPS_PER_BALANCE` steps, when other requests hold blocks than at the last one, and when
        a request's KV has come.
        """
        self._steps_of_refusal = self._steps_of_refusal + 1 if self._asked is not None else 0
        self._steps_to_balance -= 1
        is_due = self._steps_to_balance <= 0 or self.admitted.keys() != self._balanced
        if is_due:
            if self.admission:
                lengths = [admitted.num_tokens for admitted in self.admitted.values()]
                self._num_whole_blocks = sum(self.spec.num_request_blocks(each, is_whole=True) for each in lengths)
            num_complete = self._needs.num_complete
            self._num_complete_requests = sum(len(self._own_hot_blocks[name]) >= num_complete for name in self.admitted)
        num_growing = self._needs.growing(len(self.admitted) - self._num_complete_requests, self._num_complete_requests)
        num_available = self.block_pool.get_num_free_blocks() - self._num_to_keep_free(num_growing, num_scheduled)
        if not is_due and (num_available >= 0 or not any(admitted.lent for admitted in self.admitted.values())):
            return
        self._balanced, self._steps_to_balance = set(self.admitted), STEPS_PER_BALANCE
        borrowers = {name: self._borrower(name, admitted) for name, admitted in self.admitted.items()}
        num_blocks = num_available + sum(borrower.num_lent for borrower in borrowers.values())
        num_blocks = max(num_blocks - int(SLACK_SHARE * num_growing), 0)
        self._num_wanted = sum(blocks_wanted(borrowers, num_blocks).values())
        target = plan(borrowers, num_blocks, num_available)
        for name, borrower in borrowers.items():
            if target[name] < borrower.num_lent:
                self._take_back(name, borrower.num_lent - target[name])
        for name, borrower in borrowers.items():
            if target[name] > borrower.num_lent:
                self._lend(name, target[name] - borrower.num_lent)

    def _num_to_keep_free(self, num_growing: int, num_scheduled: Mapping[str, int]) -> int:
        """Blocks that running requests may need in their next steps, and waiting ones if one of them was refused.

        After more than `MAX_STEPS_OF_REFUSAL` steps of refusal, these are all device blocks.

        NOTE: a step that has no tokens left for a waiting request computes a chunk of some prompt. Blocks for one more
        chunk stay free in that case, with which the waiting request can start in the next step. They also stay free
        while a prompt pauses.

        Args:
            num_growing: blocks that running requests need at most for their next block of tokens (`BlockNeeds`).
            num_scheduled: request id -> tokens that the step computes.
        """
        if self._steps_of_refusal > MAX_STEPS_OF_REFUSAL:
            return self.block_pool.num_gpu_blocks
        has_chunk = max(num_scheduled.values(), default=0) > self.layout.max_query_len
        has_chunk = has_chunk or self._has_paused_prompt(num_scheduled)
        num_kept = num_growing + (self._needs.chunk if has_chunk else 0)
        if not self._steps_of_refusal:
            return num_kept
        starts = [self._needs.start(request.num_tokens) for request in self._could_start()]
        turns = self._waiting_turns()
        starts += [self._needs.turn(self.admitted[name].num_tokens, self.requests[name].num_tokens) for name in turns]
        return num_kept + sum(starts) + (self._needs.watermark if starts else 0)

    def _has_paused_prompt(self, num_scheduled: Mapping[str, int]) -> bool:
        """Return True if a running request has more of its prompt to compute, but nothing in this step, as with
        `--prefill-schedule-interval`.
        """
        idle = (self.requests.get(name) for name in self.admitted.keys() - num_scheduled.keys())
        running = (request for request in idle if request and request.status == RequestStatus.RUNNING)
        most = self.layout.max_query_len
        return any(request.num_tokens - request.num_computed_tokens > most for request in running)

    def _could_start(self) -> list[Request]:
        """Requests without blocks that could start if there were device blocks."""
        num_seats = max(self.max_num_running - len(self.admitted), 0)
        could_start = (request for request in self.waiting() if request.request_id not in self.obstacles)
        return list(islice(could_start, num_seats))

    def _waiting_turns(self) -> list[str]:
        """Ids of sessions that wait for the first step of their next turn; they keep the blocks of earlier turns."""
        if not self.sessions:
            return []
        # NOTE: a request that has ended may still be admitted.
        statuses = {name: request.status for name, request in self.requests.items() if name in self.admitted}
        if sum(status == RequestStatus.RUNNING for status in statuses.values()) >= self.max_num_running:
            return []
        return [name for name in sorted(self.sessions) if statuses.get(name) == RequestStatus.WAITING]

    def _borrower(self, request_id: str, admitted: AdmittedRequest) -> Borrower:
        """Describe a request for `plan`.

        NOTE: a request is lent nothing before it has all of its own hot blocks, while its KV is pulled, because it
        computes nothing then, or after it has ended.
        """
        num_own, num_lent = len(self._own_hot_blocks[request_id]), len(admitted.lent)
        request = self.requests.get(request_id)
        if request is None or num_own < self._needs.num_complete:
            return Borrower(num_lent, 0, 0)
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return Borrower(num_lent, 0, 0)
        num_soon = (STEPS_PER_BALANCE + STEPS_IN_FLIGHT + 1) * self.layout.max_query_len
        least, most = (
            max(self.spec.num_whole_blocks(min(request.num_tokens + num_new, self.max_model_len)) - num_own, 0)
            for num_new in (num_soon, num_soon + self.block_size)
        )
        return Borrower(num_lent, least, most)

    def _lend(self, request_id: str, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.block_pool.get_num_free_blocks())
        if num_blocks > 0:
            self.admitted[request_id].lent.extend(self.block_pool.get_new_blocks(num_blocks))
            self._tables_changed[request_id] = None

    def _take_back(self, request_id: str, num_blocks: int) -> None:
        """Take the last lent blocks if the sequence fits into the blocks that are left; else the first lent ones, which
        hold its oldest rows.

        NOTE: blocks can be freed at once. The step that is being scheduled does not use them any more. Another request
        can get them in the next step at the earliest, and all earlier steps have been processed by then, because vLLM
        has at most two batches in flight.
        """
        admitted = self.admitted[request_id]
        num_left = len(self._own_hot_blocks[request_id]) + len(admitted.lent) - num_blocks
        fits = num_left >= self.spec.num_whole_blocks(admitted.num_tokens)
        part = slice(len(admitted.lent) - num_blocks, None) if fits else slice(0, num_blocks)
        taken = admitted.lent[part]
        del admitted.lent[part]
        self._num_taken_back += len(taken)
        self.block_pool.free_blocks(taken)
        self._tables_changed[request_id] = None

    # Steps

    def diff(self, num_scheduled: Mapping[str, int]) -> HiSparseMetadata:
        """Make the message to the workers for the step that has been scheduled; called once per step.

        Args:
            num_scheduled: request id -> tokens that the step computes.
        """
        if self.spec.elastic:
            self._balance(num_scheduled)
        self._is_scheduling = False
        for request_id in self._received:
            self.admitted[request_id].restored_in = self.deferred.num_scheduled + 1
        restores = [*self._restores, *chain.from_iterable(self._received.values())]
        metadata = HiSparseMetadata(restores=restores, preemption_saves=self._preemption_saves)
        self._restores, self._received, self._preemption_saves = [], {}, []
        metadata.waits_for_preemption_saves = bool(metadata.preemption_saves) and not num_scheduled
        self._drop_turns_that_go_back(num_scheduled)
        for request_id in [request_id for request_id in self._changed if request_id in num_scheduled]:
            del self._changed[request_id]
            self._add_changes(metadata, self.requests[request_id], num_scheduled[request_id])
        for request_id in self._idle(num_scheduled):
            self._drop_worker_state(request_id)
        for request_id in num_scheduled if self.layout.equal_rows else ():
            admitted = self.admitted[request_id]
            if self._divides_equally(request_id, admitted) != admitted.sent_equal_rows:
                self._tables_changed[request_id] = None
        self._add_table_changes(metadata)
        for request_id, num_tokens in num_scheduled.items() if self.is_dense else ():
            admitted, first = self.admitted[request_id], self.requests[request_id].num_computed_tokens
            if admitted.record_step_kind(num_tokens <= self.layout.max_query_len):
                metadata.first_decodes.append((admitted.first_hot_block_id, first))
            if num_tokens > self.layout.max_query_len:
                metadata.prefills.append((admitted.first_hot_block_id, first, first + num_tokens))
        metadata.released, self._released = self._released, []
        return metadata

    def _drop_turns_that_go_back(self, num_scheduled: Mapping[str, int]) -> None:
        """Let the worker forget a session whose new turn begins before the start of the session's last step.

        NOTE: a turn that ends at an accepted draft drops the drafts after it. A step in flight may have treated these
        drafts as accepted. Then their rows are on the device, and the algorithm's state includes them.
        """
        for request_id in sorted(self.sessions & num_scheduled.keys()) if self.has_drafts else ():
            if self.admitted[request_id].record_step_start(self.requests[request_id].num_computed_tokens):
                self._drop_worker_state(request_id)

    def _add_changes(self, metadata: HiSparseMetadata, request: Request, num_new_tokens: int) -> None:
        """Add a request's new host blocks and the device blocks that it fills in this step."""
        request_id, admitted = request.request_id, self.admitted[request.request_id]
        host_ids = self.host_pool.block_ids(request_id)
        if len(host_ids) > admitted.num_sent_blocks:
            first, admitted.num_sent_blocks = admitted.num_sent_blocks, len(host_ids)
            metadata.host_block_tables[admitted.first_hot_block_id] = (first, host_ids[first:])
        self._tables_changed[request_id] = None
        num_written = request.num_computed_tokens + (0 if self.has_draft_layers else num_new_tokens)
        # NOTE: with drafts, only tokens that are known count, because the others may be rejected.
        num_full = (min(num_written, request.num_tokens) if self.has_drafts else num_written) // self.block_size
        admitted.truncate_saved(request.num_computed_tokens // self.block_size)
        for index, block in self.resident_blocks(request_id, admitted.num_saved_blocks, num_full):
            metadata.saves.append((block.block_id, host_ids[index]))
        admitted.num_saved_blocks = max(admitted.num_saved_blocks, num_full)
        later = self.resident_blocks(request_id, num_full, -(-admitted.num_tokens // self.block_size))
        admitted.unsaved_blocks = {index: block.block_id for index, block in later}
        if num_full < admitted.num_tokens // self.block_size:
            self._changed[request_id] = None  # drafts fill a block, which is saved once its tokens are certain
        self._publish(request, admitted)

    def _add_table_changes(self, metadata: HiSparseMetadata) -> None:
        """Add hot blocks and state blocks, for each request from the first block on that the worker does not know.

        NOTE: requests that do not run in this step are included, because another request may get a block they lost.
        """
        changed, self._tables_changed = self._tables_changed, {}
        for request_id in changed:
            admitted = self.admitted[request_id]
            if not admitted.num_sent_blocks:
                continue
            hot_ids = [block.block_id for block in self.hot_blocks(request_id)]
            has_equal_rows = self._divides_equally(request_id, admitted)
            if has_equal_rows != admitted.sent_equal_rows:
                metadata.equal_rows[admitted.first_hot_block_id] = admitted.sent_equal_rows = has_equal_rows
                admitted.sent_hot_ids = []
            state_ids = [block.block_id for block in admitted.state]
            for table, new, old in (
                (metadata.hot_block_tables, hot_ids, admitted.sent_hot_ids),
                (metadata.state_block_tables, state_ids, admitted.sent_state_ids),
            ):
                if new != old:
                    first = _first_difference(new, old)
                    table[admitted.first_hot_block_id] = first, new[first:]
            admitted.sent_hot_ids, admitted.sent_state_ids = hot_ids, state_ids

    def _divides_equally(self, request_id: str, admitted: AdmittedRequest) -> bool:
        """Decide whether a request's hot blocks are divided equally among layers: whether it is nearly hot as a whole.

        NOTE: a request that does not have all of its own hot blocks yet always fits, and in the other division layers
        would lack rows.
        """
        if not self.layout.equal_rows:
            return False
        num_blocks = len(self._own_hot_blocks[request_id]) + len(admitted.lent)
        return self.layout.suits_equal_rows(num_blocks, admitted.num_tokens, admitted.sent_equal_rows)

    def _idle(self, num_scheduled: Mapping[str, int]) -> list[str]:
        """Choose the requests that the worker forgets, so that it has room for every request of this step.

        NOTE: the worker can know too many requests, because vLLM does not count a session whose next turn waits as
        running, although it keeps its blocks: a request whose transfer has ended may get the last place before it.
        """
        known = [name for name, admitted in self.admitted.items() if admitted.num_sent_blocks]
        idle = [request_id for request_id in known if request_id not in num_scheduled]
        idle.sort(key=lambda request_id: self.requests[request_id].status == RequestStatus.RUNNING)
        return idle[: max(len(known) - self.max_num_seqs, 0)]

    def _drop_worker_state(self, request_id: str) -> None:
        """Let the worker forget a request; its tables are sent again when it runs."""
        admitted = self.admitted[request_id]
        self._released.append(admitted.first_hot_block_id)
        self._changed[request_id] = None
        self._tables_changed.pop(request_id, None)
        admitted.forget_sent()

    def _publish(self, request: Request, admitted: AdmittedRequest) -> None:
        """Publish saved blocks in the prefix cache. A hit is restored in a later step, and so after this step's save.

        NOTE: with async scheduling, a block's last token, and therefore its hash, is known one step after the block was
        filled.
        """
        if not self.enable_caching or request.request_id in self._ran_during_reset:
            return
        last = min(admitted.num_saved_blocks, len(request.block_hashes))
        for index in range(admitted.num_published_blocks, last):
            self.host_pool.register(request.request_id, index, request.block_hashes[index])
        if self.events is not None:
            self.events.stored(request, range(admitted.num_published_blocks, last))
        admitted.num_published_blocks = max(admitted.num_published_blocks, last)

    # Checks

    def other_blocks(self) -> Iterator[KVCacheBlock]:
        """Device blocks in use that are in no table of vLLM: lent blocks, state blocks and blocks in `kept`."""
        for admitted in self.admitted.values():
            yield from admitted.lent
            yield from admitted.state
        yield from self.kept

    def check_integrity(self) -> None:
        """Raise an AssertionError if a block is lost, owned twice, or in use without an owner."""
        self.host_pool.check_integrity()
        holders = {name for name, blocks in self._own_hot_blocks.items() if blocks}
        assert holders == self.admitted.keys() == self.host_pool.holders(), "hot and host blocks do not come together"
        own = [block for name in holders for block in self._own_hot_blocks[name]]
        exclusive = own + [block for admitted in self.admitted.values() for block in admitted.lent + admitted.state]
        assert len({block.block_id for block in exclusive}) == len(exclusive), "a hot or state block has two owners"
        assert not any(block.is_null for block in exclusive), "the null block is in use"
        assert all(block.ref_cnt == 1 for block in exclusive), "a hot or state block is shared"
        assert all(block.ref_cnt > 0 for block in self.kept), "a block that is being copied is free"
        for name, admitted in self.admitted.items():
            assert admitted.first_hot_block_id == self._own_hot_blocks[name][0].block_id, "another first hot block"

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when there is no request, but is not; an empty dict if all is well."""
        kinds: Iterable[tuple[str, object]] = (
            ("requests", self.requests),
            ("sessions", self.sessions),
            ("admitted", self.admitted),
            ("obstacles", self.obstacles),
            ("matches", self._matches),
            ("ran during a reset", self._ran_during_reset),
            ("were admitted", self._were_admitted),
            ("pulls", self.pulls),
            ("changed", self._changed),
            ("changed tables", self._tables_changed),
            ("released", self._released),
            ("preemption saves", self._preemption_saves),
            ("restores", self._restores),
            ("received", self._received),
            ("kept blocks", self.kept),
            ("deferred", self.deferred),
            ("preempted", self.host_pool.preempted()),
        )
        return {name: left for name, left in kinds if left}


def _first_difference(new: list[int], old: list[int]) -> int:
    pairs = enumerate(zip(new, old, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(new), len(old)))

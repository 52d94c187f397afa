"""What the scheduler's side knows of every request, and what of it the worker has to be told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool, HostMatch
from vllm_hisparse.kv_manager.blocks.hot_tables import HotTables
from vllm_hisparse.kv_manager.blocks.sessions import turns_that_go_back
from vllm_hisparse.vllm_patches.drafting_sessions import count_kept_tokens

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Obstacle(Enum):
    """Why a request could not start when vLLM last asked for it, other than a lack of device blocks."""

    HOST_POOL_FULL = auto()
    LOADS_FROM_TIER = auto()


@dataclass
class AdmittedRequest:
    """A request that holds hot blocks and host blocks.

    Attributes:
        handle: its first hot block, which names the request on the worker.
        num_matched_tokens: tokens the host held when it was admitted.
        num_tokens: tokens it was last given room for.
        next_event: number of tokens at which a block becomes full or a new one is begun.
        num_sent_blocks: host blocks the worker knows; 0 while the worker has no state of the request.
        num_saved_blocks: leading blocks whose device-resident KV is on the host.
        num_published_blocks: leading blocks that the host prefix cache knows.
        unsaved_blocks: index -> device block of the later ones that hold device-resident KV.
        is_decoding: whether its last step computed no more tokens than one that decodes; kept for dense models only.
        last_start: tokens it had computed when its last step was scheduled, drafts included; kept for sessions only.
    """

    handle: int
    num_matched_tokens: int = 0
    num_tokens: int = 0
    next_event: int = 0
    num_sent_blocks: int = 0
    num_saved_blocks: int = 0
    num_published_blocks: int = 0
    unsaved_blocks: dict[int, int] = field(default_factory=dict)
    is_decoding: bool = False
    last_start: int = 0

    def note_start(self, num_computed_tokens: int) -> bool:
        """Note where a step starts. Returns whether that is before the start of the last one that the worker knows."""
        goes_back = num_computed_tokens < self.last_start and self.num_sent_blocks > 0
        self.last_start = num_computed_tokens
        return goes_back

    def note_step(self, decodes: bool) -> bool:
        """Note a step. Returns whether it is the first to decode: all keys are represented by then."""
        was_decoding, self.is_decoding = self.is_decoding, decodes
        return self.is_decoding and not was_decoding

    def keep_saved(self, num_blocks: int) -> None:
        """A streaming session's next turn may begin before the last token that was computed; its block is not saved."""
        self.num_saved_blocks = min(self.num_saved_blocks, num_blocks)


@dataclass
class RequestChanges:
    """What the worker has to be told before a step.

    Attributes:
        started: (handle, request id) of requests that the worker has no state of yet.
        released, tail_saves, tables, hot_tables, state_tables, saves, first_decodes, prefills: as in
            `HiSparseMetadata`.
    """

    started: list[tuple[int, str]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    tail_saves: list[tuple[int, int]] = field(default_factory=list)
    tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    hot_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    state_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    saves: list[tuple[int, int]] = field(default_factory=list)
    first_decodes: list[tuple[int, int]] = field(default_factory=list)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)


class RequestLedger:
    """The only writer of what is known of requests; everyone may read it.

    The connector's scheduler half reports arrivals, matches and ends, the hot blocks' manager what it gives and takes.

    Args:
        host_pool: the host pool.
        max_num_running: requests that may run in one step, for which the worker has room.
        enable_caching: whether full blocks are published in the host prefix cache.
        tracks_decodes: whether the worker is told when a request begins to decode.
        max_query_len: tokens that a decoding request computes in a step: one, and those drafted.
        has_draft_layers: whether layers draft, which write the KV of a step's tokens after the step's saves.

    Attributes:
        requests: request id -> request, from its arrival to its end.
        sessions: ids of those that get their prompt in turns.
        admitted: request id -> what is known of a request that holds blocks.
        obstacles: request id -> why it could not start when vLLM last asked for it. vLLM asks for the first request
            of its queue; most of those behind it are not here.
        hot_tables: told by whoever gives or takes hot blocks or state blocks.
    """

    def __init__(
        self,
        host_pool: HostBlockPool,
        max_num_running: int,
        enable_caching: bool,
        tracks_decodes: bool,
        max_query_len: int = 1,
        has_draft_layers: bool = False,
    ):
        self.host_pool, self.block_size = host_pool, host_pool.block_size
        self.max_num_running, self.enable_caching, self.has_drafts = max_num_running, enable_caching, max_query_len > 1
        self.tracks_decodes, self.max_query_len, self.has_draft_layers = tracks_decodes, max_query_len, has_draft_layers
        self.requests: dict[str, Request] = {}
        self.sessions: set[str] = set()
        self.admitted: dict[str, AdmittedRequest] = {}
        self.obstacles: dict[str, Obstacle] = {}
        self._matches: dict[str, HostMatch] = {}
        self._changed: dict[str, None] = {}
        self._released: list[int] = []
        self._tail_saves: list[tuple[int, int]] = []
        self._device_blocks: Mapping[str, list[KVCacheBlock]] | None = None
        self.hot_tables = HotTables(lambda _: [], lambda _: [])

    def bind(self, device_blocks: Mapping[str, list[KVCacheBlock]] | None, hot_tables: HotTables) -> None:
        """Attach vLLM's lists of blocks of device-resident KV (None: there is none), and what is known of others."""
        self._device_blocks, self.hot_tables = device_blocks, hot_tables

    # Arrival and end

    def add(self, request: Request) -> None:
        """A request has arrived."""
        self.requests[request.request_id] = request
        if request.resumable:
            self.sessions.add(request.request_id)
            if self.has_drafts:
                count_kept_tokens(request)

    def remove(self, request: Request) -> None:
        """A request has ended; what it computed is published. Its blocks follow through `release`."""
        if admitted := self.admitted.get(request.request_id):
            admitted.keep_saved(request.num_computed_tokens // self.block_size)
            self._publish(request, admitted)
        self.requests.pop(request.request_id, None)
        self.sessions.discard(request.request_id)
        self._matches.pop(request.request_id, None)
        self.obstacles.pop(request.request_id, None)

    # Blocks

    def match(self, request_id: str) -> HostMatch:
        """What the host pool held of a request when vLLM last asked."""
        return self._matches.get(request_id, HostMatch())

    def find_match(self, request: Request) -> HostMatch:
        """Look up what the host pool holds of a request that waits."""
        match = self._matches[request.request_id] = self.host_pool.find_match(request, self.enable_caching)
        return match

    def set_obstacle(self, request_id: str, obstacle: Obstacle | None) -> None:
        """vLLM has asked for a request. None: only device blocks may be missing."""
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

    def admit(self, request_id: str, handle: int) -> None:
        """A request has got its hot blocks, and host blocks that begin with its match."""
        match = self._matches.pop(request_id, HostMatch())
        num_full = match.num_tokens // self.block_size
        self.admitted[request_id] = AdmittedRequest(
            handle,
            num_matched_tokens=match.num_tokens,
            num_saved_blocks=num_full,
            num_published_blocks=num_full,
        )

    def give_room(self, request_id: str, num_tokens: int) -> None:
        """A request's next step will have computed its first `num_tokens`, drafts included."""
        admitted = self.admitted[request_id]
        # NOTE: no more than before: a streaming session went back over what was computed, or drafts were rejected.
        if num_tokens >= admitted.next_event or num_tokens <= admitted.num_tokens:
            self._changed[request_id] = None
            admitted.next_event = num_tokens + (-num_tokens % self.block_size or 1)
        admitted.num_tokens = num_tokens

    def save_tail(self, device_id: int, host_id: int) -> None:
        """A block of a preempted request, such as its partial last one, is to be copied to the host."""
        self._tail_saves.append((device_id, host_id))

    def release(self, request_id: str) -> AdmittedRequest | None:
        """A request has lost its blocks. Returns what was known of it; None if it had none."""
        self._changed.pop(request_id, None)
        self.hot_tables.forget(request_id)
        if (admitted := self.admitted.pop(request_id, None)) and admitted.num_sent_blocks:
            self._released.append(admitted.handle)
        return admitted

    def device_blocks(self, request_id: str, first: int, last: int) -> Iterator[tuple[int, KVCacheBlock]]:
        """Blocks [first, last) of a request's device-resident KV with their indices; none where there is no such KV."""
        if self._device_blocks is not None:
            blocks = self._device_blocks[request_id]
            yield from ((index, blocks[index]) for index in range(first, last))

    # Steps

    def take_changes(self, num_scheduled: Mapping[str, int]) -> RequestChanges:
        """What changed since the last call; called once per step.

        Args:
            num_scheduled: request id -> tokens that the step computes.
        """
        changes = RequestChanges()
        for request_id in turns_that_go_back(self, num_scheduled):
            self._drop_state(request_id)
        for request_id in [request_id for request_id in self._changed if request_id in num_scheduled]:
            del self._changed[request_id]
            self._add_changes(changes, self.requests[request_id], num_scheduled[request_id])
        for request_id in self._idle(num_scheduled):
            self._drop_state(request_id)
        changes.hot_tables, changes.state_tables = self.hot_tables.take_changes(self._handles(self.hot_tables.changed))
        for request_id, num_tokens in num_scheduled.items() if self.tracks_decodes else ():
            admitted, first = self.admitted[request_id], self.requests[request_id].num_computed_tokens
            if admitted.note_step(num_tokens <= self.max_query_len):
                changes.first_decodes.append((admitted.handle, first))
            if num_tokens > self.max_query_len:
                changes.prefills.append((admitted.handle, first, first + num_tokens))
        changes.released, self._released = self._released, []
        changes.tail_saves, self._tail_saves = self._tail_saves, []
        return changes

    def _add_changes(self, changes: RequestChanges, request: Request, num_new_tokens: int) -> None:
        """Add a request's new host blocks and the device blocks that it fills in this step."""
        request_id, admitted = request.request_id, self.admitted[request.request_id]
        host_ids = self.host_pool.block_ids(request_id)
        if admitted.num_sent_blocks == 0:
            changes.started.append((admitted.handle, request_id))
        if len(host_ids) > admitted.num_sent_blocks:
            changes.tables[admitted.handle] = (admitted.num_sent_blocks, host_ids[admitted.num_sent_blocks :])
            admitted.num_sent_blocks = len(host_ids)
        self.hot_tables.change(request_id)
        num_written = request.num_computed_tokens + (0 if self.has_draft_layers else num_new_tokens)
        # NOTE: with drafts, no more than the tokens that are known: the others may be rejected.
        num_full = (min(num_written, request.num_tokens) if self.has_drafts else num_written) // self.block_size
        admitted.keep_saved(request.num_computed_tokens // self.block_size)
        for index, block in self.device_blocks(request_id, admitted.num_saved_blocks, num_full):
            changes.saves.append((block.block_id, host_ids[index]))
        admitted.num_saved_blocks = max(admitted.num_saved_blocks, num_full)
        later = self.device_blocks(request_id, num_full, -(-admitted.num_tokens // self.block_size))
        admitted.unsaved_blocks = {index: block.block_id for index, block in later}
        if num_full < admitted.num_tokens // self.block_size:
            self._changed[request_id] = None  # drafts fill a block, which is saved once its tokens are certain
        self._publish(request, admitted)

    def _handles(self, request_ids: Iterable[str]) -> dict[str, int]:
        """Of those of some requests that the worker knows."""
        return {name: self.admitted[name].handle for name in request_ids if self.admitted[name].num_sent_blocks}

    def _idle(self, num_scheduled: Mapping[str, int]) -> list[str]:
        """Requests that the worker forgets, to make room for every request of this step.

        NOTE: a streaming session whose next turn waits keeps its blocks, and vLLM does not count it as running: a
        request whose transfer has ended may be given the last place before it.
        """
        known = self._handles(self.admitted)
        idle = [request_id for request_id in known if request_id not in num_scheduled]
        idle.sort(key=lambda request_id: self.requests[request_id].status == RequestStatus.RUNNING)
        return idle[: max(len(known) - self.max_num_running, 0)]

    def _drop_state(self, request_id: str) -> None:
        """Let the worker forget a request; its table is sent again when it runs."""
        admitted = self.admitted[request_id]
        self._released.append(admitted.handle)
        self._changed[request_id] = None
        self.hot_tables.forget(request_id)
        admitted.num_sent_blocks, admitted.is_decoding = 0, False

    def _publish(self, request: Request, admitted: AdmittedRequest) -> None:
        """Offer saved blocks to the prefix cache: a hit in a later step restores after this step's save.

        NOTE: with async scheduling a block's last token, and so its hash, comes a step after the block was filled.
        """
        last = min(admitted.num_saved_blocks, len(request.block_hashes)) if self.enable_caching else 0
        for index in range(admitted.num_published_blocks, last):
            self.host_pool.register(request.request_id, index, request.block_hashes[index])
        admitted.num_published_blocks = max(admitted.num_published_blocks, last)

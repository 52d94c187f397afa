"""Loads of waiting requests' prefixes from the tiers into the host pool."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.tiers.tier_manager import HostTierManager

MAX_WINDOW = 32  # blocks of a prefix that are looked up, loaded and copied at once
MAX_ORIGINS = 10_000  # blocks whose source is remembered
LOADS_SHARE = 0.5  # share of the transfer buffer for the windows of all loads
RETRY_S, MAX_RETRY_S = 30.0, 600.0  # first and longest pause of a silent source; each doubles the last
MIN_LOOKS = 10  # least checks of a load before it is given up: at most a tenth of its timeout counts between two checks
MAX_TIMEOUTS = 6.0  # timeouts that a load may take in all, however steadily its blocks come
WARNING_PERIOD_S = 600.0  # least time between two warnings of damaged blocks
MAX_WAITING = 32  # requests that wait for another load to end: vLLM asks for each of them in every step
COUNTERS = (
    "tier_loaded_blocks",
    "tier_damaged_blocks",
    "tier_load_timeouts",  # loads that were given up because nothing came
    "tier_slow_loads",  # loads that were given up because they took too long
    "tier_skipped_loads",  # loads that did not begin because too many others were under way
)

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

Clock = Callable[[], float]  # seconds since some fixed time


@dataclass
class Source:
    """A place that blocks may come from: all stores together, or one peer.

    Times are in seconds of the loads' clock.

    Attributes:
        name: name in the log.
        kind: name in vLLM's metrics.
        retry_at: time from which the source may be asked again.
        pause_s: length of its next pause, in which it is not asked, because it has not answered.
        answered_at: time when the last block came from it.
    """

    name: str
    kind: CacheHitSource
    retry_at: float = 0.0
    pause_s: float = RETRY_S
    answered_at: float = -inf

    def mark_answered(self, now: float) -> None:
        """Record that a block came from this source."""
        self.pause_s, self.answered_at = RETRY_S, now

    def mark_silent(self, since: float, now: float) -> None:
        """Begin a pause of this source, because a load has waited for it in vain.

        Nothing happens during a pause, because all loads that wait for the source are given up together; nor if other
        loads have got blocks from it since `since`.

        Args:
            since: time from which on the load has waited.
            now: the present time.
        """
        if now >= self.retry_at and self.answered_at <= since:
            self.retry_at = now + self.pause_s
            self.pause_s = min(2 * self.pause_s, MAX_RETRY_S)


class Stage(Enum):
    """Progress of one block of a load."""

    ASKED = auto()  # a source looks for it
    COMING = auto()  # a source has it and sends it
    HERE = auto()  # it is in the host pool, or being copied there


@dataclass
class PrefixLoad:
    """A request's prefix on its way into the host pool.

    Attributes:
        keys: keys of the blocks that the host pool did not have when the load began.
        reserved: hashes of the blocks that the host pool keeps room for.
        num_more: host blocks that the request needs in addition.
        contexts: the request's context with each source, in the order in which the sources are asked.
        end: index from which on no block will be loaded; at first, the number of keys.
        looked_at: time of the last check of the load, in seconds of the clock.
        moved_at: time of the last check that found progress.
        first: index of the first key that is not in the host pool.
        loaded: indices beyond `first` of keys that are in the host pool.
        copying: indices of keys on their way from the transfer buffer.
        stages: index of a key -> its progress, and the source that has it or looks for it.
        waits_for: source of the first missing block, or None.
        silent_s, total_s: seconds that count against the timeouts: since the last progress, and since the beginning.
        was_looked_at: True if the load was checked in this step.
        loaded_from: number of loaded blocks, by the kind of their source.
    """

    keys: list[OffloadKey]
    reserved: Sequence[bytes]
    num_more: int
    contexts: list[tuple[Source, ReqContext]]
    end: int
    looked_at: float
    moved_at: float
    first: int = 0
    loaded: set[int] = field(default_factory=set)
    copying: set[int] = field(default_factory=set)
    stages: dict[int, tuple[Stage, Source | None]] = field(default_factory=dict)
    waits_for: Source | None = None
    silent_s: float = 0.0
    total_s: float = 0.0
    was_looked_at: bool = False
    loaded_from: Counter[CacheHitSource] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return self.first >= self.end and not self.copying

    def look(self, now: float, most_s: float) -> None:
        """Record a check of the load. At most `most_s` seconds since the last check count against the timeouts."""
        elapsed_s = min(now - self.looked_at, most_s)
        self.silent_s, self.total_s = self.silent_s + elapsed_s, self.total_s + elapsed_s
        self.looked_at, self.was_looked_at = now, True

    def mark_moved(self, now: float) -> None:
        """Record that a block has reached another stage."""
        self.silent_s, self.moved_at = 0.0, now

    def mark_loaded(self, index: int, now: float) -> None:
        """Record that a block is in the host pool."""
        self.loaded.add(index)
        while self.first in self.loaded:
            self.loaded.remove(self.first)
            self.first += 1
        self.mark_moved(now)


@dataclass
class _Copy:
    load: PrefixLoad
    index: int
    context: ReqContext
    block_id: int
    future: Future
    source: Source | None  # None if the block was in the transfer buffer already


class PrefixLoads:
    """Loads prefixes block by block. A request whose load is over, or makes no progress, uses the blocks that arrived.

    Every load is checked once per step, even if vLLM does not ask for its request: vLLM does not ask while the maximum
    number of requests runs, or while running requests use up the token budget.

    Args:
        manager: manager of the tiers.
        host_pool: pool that the blocks are loaded into.
        make_contexts: request id -> the request's context with each source.
        timeout_s: seconds without a block after which a load is given up, and its source is not asked for a while; also
            the time for which a request waits for another load to end.
        mark_stored: called with key -> host block of blocks that came from a tier.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        manager: HostTierManager,
        host_pool: HostBlockPool,
        make_contexts: Callable[[str], list[tuple[Source, ReqContext]]],
        timeout_s: float,
        mark_stored: Callable[[dict[OffloadKey, int]], None],
        clock: Clock = time.monotonic,
    ):
        self.manager, self.host_pool, self.timeout_s = manager, host_pool, timeout_s
        self.make_contexts, self._mark_stored, self._clock = make_contexts, mark_stored, clock
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._loads: dict[str, PrefixLoad] = {}
        self._reserved: Counter[bytes] = Counter()  # `reserved` of all loads -> number of loads
        self._num_more = 0  # sum of `num_more` of all loads
        self._waiting: dict[str, float] = {}  # requests that wait for another load to end -> since when
        self._ended: dict[str, Counter[CacheHitSource]] = {}  # requests whose load is over -> sources of their blocks
        self._copies: list[_Copy] = []
        self._next_warning_of_damage = -inf
        self._origins: OrderedDict[OffloadKey, Source] = OrderedDict()  # sources of blocks that were asked for
        num_chunks = int(manager.num_chunks * LOADS_SHARE)
        self._window = max(min(MAX_WINDOW, num_chunks // 2), 1)
        self.max_loads = max(num_chunks // self._window, 1)

    def take_counters(self) -> dict[str, int]:
        """Return `COUNTERS` since the last call."""
        taken, self._counters = self._counters, dict.fromkeys(COUNTERS, 0)
        return taken

    @property
    def num_copies(self) -> int:
        """Blocks on their way into the host pool."""
        return len(self._copies)

    def has(self, request_id: str) -> bool:
        """Return True if a request's prefix is being loaded."""
        return request_id in self._loads

    def has_ended(self, request_id: str) -> bool:
        """Return True if the load of a request that still waits is over."""
        return request_id in self._ended

    def num_reserved(self, block_hashes: Iterable[bytes]) -> int:
        """Host blocks that the requests with a load need, apart from those that they share with another request.

        Args:
            block_hashes: hashes of the other request's blocks.
        """
        num_shared = sum(map(self._reserved.__contains__, block_hashes))
        return len(self._reserved) - num_shared + self._num_more

    def begin(self, request_id: str, keys: list[OffloadKey], reserved: Sequence[bytes], num_more: int) -> None:
        """Begin to load the prefix of a request that could be admitted; the load ends at once if there is no source.

        Args:
            request_id: id of the request.
            keys: keys of the request's blocks that the host pool does not have.
            reserved: hashes of these blocks, and of those that the host pool has and no request uses.
            num_more: host blocks that the request needs in addition.
        """
        self._waiting.pop(request_id, None)
        contexts = self.make_contexts(request_id)
        if not contexts:
            self._ended[request_id] = Counter()
            return
        for _, context in contexts:
            self.manager.on_new_request(context)
        now = self._clock()
        self._loads[request_id] = PrefixLoad(keys, reserved, num_more, contexts, len(keys), now, now)
        self._reserved.update(reserved)
        self._num_more += num_more

    def must_wait(self, request_id: str, has_room: bool) -> bool:
        """Return True if a request should wait until another load has ended.

        The request should not wait if its own load can begin now. If it has waited for `timeout_s`, or `MAX_WAITING`
        others wait, it goes on without a load. Time in which the pool has no room for it counts, because otherwise
        small requests could overtake it again and again.

        Args:
            request_id: id of the request.
            has_room: True if the host pool has room for this request and those with a load.
        """
        if has_room and len(self._loads) < self.max_loads:
            return False
        if request_id not in self._waiting and len(self._waiting) < MAX_WAITING:
            self._waiting[request_id] = self._clock()
        if self._clock() - self._waiting.get(request_id, -inf) <= self.timeout_s:
            return True
        self._waiting.pop(request_id, None)
        self._ended[request_id] = Counter()
        self._counters["tier_skipped_loads"] += 1
        logger.warning_once(
            "Requests compute prompts that a tier may have, because other prefixes are being loaded; "
            "vllm:hisparse_tier_skipped_loads counts them. A larger tier_buffer_gib, or a larger host pool, lets more "
            "load at once."
        )
        return False

    def is_loading(self, request_id: str) -> bool:
        """Return True if a request should wait for its prefix, whose load has begun."""
        if not self._loads[request_id].was_looked_at:
            self._look(request_id)
        return request_id in self._loads

    def forget(self, request_id: str) -> Counter[CacheHitSource]:
        """Forget a request that was admitted or has ended. If it waits again, it may load again.

        Returns:
            The blocks that were loaded for it, by the kind of their source.
        """
        self._end(request_id)
        self._waiting.pop(request_id, None)
        return self._ended.pop(request_id, Counter())

    def step(self) -> None:
        """Publish blocks that have been copied to the host pool, and check the loads that vLLM did not ask for."""
        self._collect_copies()
        for request_id, load in list(self._loads.items()):
            if not load.was_looked_at:
                self._look(request_id)
            load.was_looked_at = False

    def _collect_copies(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            if copy.future.done():
                self._collect(copy)
            else:
                self._copies.append(copy)

    def wait_for_copies(self) -> None:
        """Wait until no block is on its way into the host pool."""
        for copy in self._copies:
            copy.future.exception()
        self._collect_copies()

    def reset(self) -> None:
        """Give up all loads; their requests go on without more blocks."""
        for request_id in list(self._loads):
            self._end(request_id)
        self._waiting.clear()

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when there is no request, but is not; an empty dict if all is well."""
        kinds = {
            "loads": self._loads,
            "blocks of loads": self._reserved,
            "waiting loads": self._waiting,
            "ended loads": self._ended,
            "copies": self._copies,
        }
        return {name: left for name, left in kinds.items() if left}

    def _end(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._ended[request_id] = load.loaded_from
            self._reserved.subtract(load.reserved)
            self._reserved = +self._reserved
            self._num_more -= load.num_more
            for _, context in load.contexts:
                self.manager.on_request_finished(context)

    def _look(self, request_id: str) -> None:
        """Move a load on, and end it if it is over or takes too long.

        NOTE: vLLM's tiers do not allow a load to end in the step in which it asks for a block. This cannot happen:
        asking is progress, so the load is not silent, and a load that has taken too long in all ends before it asks.
        """
        load, now = self._loads[request_id], self._clock()
        load.look(now, self.timeout_s / MIN_LOOKS)
        limit_s = MAX_TIMEOUTS * self.timeout_s
        if load.total_s > limit_s:
            self._counters["tier_slow_loads"] += 1
            message = (
                "Request %s computes the rest of its prompt: its blocks came too slowly to be there within %.1f s."
            )
            logger.warning(message, request_id, limit_s)
            self._end(request_id)
            return
        self._advance(load, now)
        if not load.is_over and load.silent_s > self.timeout_s:
            self._counters["tier_load_timeouts"] += 1
            name = load.waits_for.name if load.waits_for else "the tiers"
            message = "Request %s computes the rest of its prompt: no block came from %s within %.1f s."
            logger.warning(message, request_id, name, self.timeout_s)
            if load.waits_for:
                load.waits_for.mark_silent(load.moved_at, now)
            self._end(request_id)
        elif load.is_over:
            self._end(request_id)

    def _advance(self, load: PrefixLoad, now: float) -> None:
        load.waits_for = None
        for index in range(load.first, min(load.first + self._window, load.end)):
            if index in load.copying or index in load.loaded:
                continue
            found = self._find(load, index, now)
            if found is None:
                load.end = index
                break
            if load.stages.get(index) != found:
                load.stages[index] = found
                load.mark_moved(now)
            load.waits_for = load.waits_for or found[1]

    def _find(self, load: PrefixLoad, index: int, now: float) -> tuple[Stage, Source | None] | None:
        """Move one block on.

        Returns:
            The block's progress, and the source it comes from; None if it is in no tier, or the host pool has no room.
        """
        key = load.keys[index]
        if self.host_pool.find(get_offload_block_hash(key)) is not None:
            load.mark_loaded(index, now)
            return Stage.HERE, None
        if any(copy.load.keys[copy.index] == key for copy in self._copies):
            return Stage.HERE, None
        _, context = load.contexts[0]
        found = self.manager.buffer.lookup(key, context)
        if found is LookupResult.HIT:
            source = self._origins.pop(key, None)
            if source is not None:
                source.mark_answered(now)
            return (Stage.HERE, None) if self._copy(load, index, context, source) else None
        if found is LookupResult.HIT_PENDING:
            return Stage.COMING, self._origins.get(key)
        return self._ask(load, key, now)

    def _ask(self, load: PrefixLoad, key: OffloadKey, now: float) -> tuple[Stage, Source | None] | None:
        """Ask the sources for a block, in their order; return None if none has it."""
        for source, context in load.contexts:
            if now < source.retry_at:
                continue
            if self.manager.lookup(key, context) is not LookupResult.MISS:
                self._origins[key] = source
                if len(self._origins) > MAX_ORIGINS:
                    self._origins.popitem(last=False)
                is_coming = self.manager.buffer.lookup(key, context) is not LookupResult.MISS
                return Stage.COMING if is_coming else Stage.ASKED, source
        return None

    def _copy(self, load: PrefixLoad, index: int, context: ReqContext, source: Source | None) -> bool:
        block_id = self.host_pool.take()
        if block_id is None:
            return False
        key = load.keys[index]
        (chunk_id,) = self.manager.prepare_load([key], context).chunk_ids.tolist()
        future = self.manager.copier.load(chunk_id, block_id, key)
        self._copies.append(_Copy(load, index, context, block_id, future, source))
        load.copying.add(index)
        return True

    def _collect(self, copy: _Copy) -> None:
        load, key = copy.load, copy.load.keys[copy.index]
        self.manager.complete_load([key], copy.context)
        load.copying.discard(copy.index)
        is_intact = not copy.future.cancelled() and copy.future.exception() is None and copy.future.result()
        if is_intact:
            self._counters["tier_loaded_blocks"] += 1
            self.host_pool.publish(copy.block_id, get_offload_block_hash(key))
            self._mark_stored({key: copy.block_id})
            load.mark_loaded(copy.index, self._clock())
            if copy.source is not None:
                load.loaded_from[copy.source.kind] += 1
        else:
            self._counters["tier_damaged_blocks"] += 1
            self._warn_of_damage(copy.source)
            self.host_pool.unpin([copy.block_id])
            self.manager.discard(key)
            load.end = min(load.end, copy.index)

    def _warn_of_damage(self, source: Source | None) -> None:
        """Warn of a damaged block, at most once in `WARNING_PERIOD_S`."""
        now = self._clock()
        if now < self._next_warning_of_damage:
            return
        self._next_warning_of_damage = now + WARNING_PERIOD_S
        logger.warning(
            "A block from %s is not what was stored there, so it is computed again. Check the disk, and who else "
            "writes to it. vllm:hisparse_tier_damaged_blocks counts such blocks; the next warning comes in %d minutes.",
            source.name if source else "a tier",
            WARNING_PERIOD_S / 60,
        )

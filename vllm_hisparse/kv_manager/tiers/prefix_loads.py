"""Loads of waiting requests' prefixes from the tiers into the host pool."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_block_hash

from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.tiers.tier_manager import HostTierManager

MAX_WINDOW = 32  # blocks of a prefix that are looked up, loaded and copied at once
MAX_ORIGINS = 10_000  # blocks whose source is remembered
LOADS_SHARE = 0.5  # of the transfer buffer, for the windows of all loads
RETRY_S, MAX_RETRY_S = 30.0, 600.0  # for which a source that did not answer is not asked: twice as long each time

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


@dataclass
class Source:
    """Where blocks may come from: the stores that a request needs no peer for, or one peer.

    Attributes:
        name: for the log.
        retry_at: not asked before this time, by `time.monotonic`.
        pause_s: how long it is left alone the next time.
    """

    name: str
    retry_at: float = 0.0
    pause_s: float = RETRY_S

    def has_answered(self) -> None:
        """A block came from it."""
        self.pause_s = RETRY_S

    def has_not_answered(self) -> None:
        """Leave it alone for a while."""
        self.retry_at = time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, MAX_RETRY_S)


@dataclass
class PrefixLoad:
    """A request's prefix on its way into the host pool.

    Attributes:
        keys: blocks beyond what the host pool has.
        contexts: the request's context with each source, in the order in which they are asked.
        end: keys from here on are in no tier.
        first: keys before it are in the host pool.
        loaded: other indices of keys that are.
        copying: indices of keys on their way from the transfer buffer.
        waits_for: the source that has not answered, or None.
        progress_at: when a block came last.
    """

    keys: list[OffloadKey]
    contexts: list[tuple[Source, ReqContext]]
    end: int
    progress_at: float
    first: int = 0
    loaded: set[int] = field(default_factory=set)
    copying: set[int] = field(default_factory=set)
    waits_for: Source | None = None

    @property
    def is_over(self) -> bool:
        return self.first >= self.end and not self.copying

    def has_loaded(self, index: int) -> None:
        """A block is in the host pool."""
        self.loaded.add(index)
        while self.first in self.loaded:
            self.loaded.remove(self.first)
            self.first += 1
        self.progress_at = time.monotonic()


@dataclass
class _Copy:
    load: PrefixLoad
    index: int
    context: ReqContext
    block_id: int
    future: Future


class PrefixLoads:
    """Loads prefixes block by block; a request whose load is over, or makes no progress, goes on with what there is.

    Args:
        manager: of the tiers.
        host_pool: where the blocks go.
        make_contexts: of a request id, its context with each source.
        timeout_s: seconds without a block after which a load is given up, and the source left alone for a while.
        are_stored: told of blocks, by key, that came from a tier.

    Attributes:
        num_loaded, num_damaged, num_timeouts: blocks, blocks and loads since they were last set to 0.
    """

    def __init__(
        self,
        manager: HostTierManager,
        host_pool: HostBlockPool,
        make_contexts: Callable[[str], list[tuple[Source, ReqContext]]],
        timeout_s: float,
        are_stored: Callable[[dict[OffloadKey, int]], None],
    ):
        self.manager, self.host_pool, self.timeout_s = manager, host_pool, timeout_s
        self._make_contexts, self._are_stored = make_contexts, are_stored
        self.num_loaded = self.num_damaged = self.num_timeouts = 0
        self._loads: dict[str, PrefixLoad] = {}
        self._ended: set[str] = set()  # requests that have loaded what they could
        self._copies: list[_Copy] = []
        self._origins: OrderedDict[OffloadKey, Source] = OrderedDict()  # of blocks that were asked for
        num_chunks = int(manager.num_chunks * LOADS_SHARE)
        self._window = max(min(MAX_WINDOW, num_chunks // 2), 1)
        self._max_loads = max(num_chunks // self._window, 1)

    @property
    def num_copies(self) -> int:
        """Blocks on their way into the host pool."""
        return len(self._copies)

    @property
    def is_full(self) -> bool:
        """Whether a load cannot begin before another one is over."""
        return len(self._loads) >= self._max_loads

    def has(self, request_id: str) -> bool:
        """Whether a request's prefix is being loaded."""
        return request_id in self._loads

    def has_ended(self, request_id: str) -> bool:
        """Whether a request that still waits has loaded what it could."""
        return request_id in self._ended

    def begin(self, request_id: str, keys: list[OffloadKey]) -> None:
        """Begin to load the prefix of a request that could be admitted; it has ended at once if there is no source.

        Args:
            request_id: of the request.
            keys: its blocks beyond what the host pool has.
        """
        contexts = self._make_contexts(request_id)
        if not contexts:
            self._ended.add(request_id)
            return
        for _, context in contexts:
            self.manager.on_new_request(context)
        self._loads[request_id] = PrefixLoad(keys, contexts, len(keys), time.monotonic())

    def is_loading(self, request_id: str) -> bool:
        """Whether a request should wait for its prefix, whose load has begun."""
        load = self._loads[request_id]
        # NOTE: in this order: what has just been asked for is not given up in the same step, which vLLM's peers mind.
        is_late = time.monotonic() - load.progress_at > self.timeout_s
        if not is_late:
            self._advance(load)
        if not load.is_over and not is_late:
            return True
        if not load.is_over:
            self._give_up(request_id, load)
        self._end(request_id)
        return False

    def forget(self, request_id: str) -> None:
        """A request was admitted, or has ended: if it waits again, it may load again."""
        self._end(request_id)
        self._ended.discard(request_id)

    def step(self) -> None:
        """Publish what has been copied to the host pool."""
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
        self.step()

    def reset(self) -> None:
        """Give up all loads; the requests go on without."""
        for request_id in list(self._loads):
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._ended.add(request_id)
            for _, context in load.contexts:
                self.manager.on_request_finished(context)

    def _give_up(self, request_id: str, load: PrefixLoad) -> None:
        self.num_timeouts += 1
        source = load.waits_for
        logger.warning(
            "Request %s computes the rest of its prompt: no block came from %s within %.1f s.",
            request_id,
            source.name if source else "the tiers",
            self.timeout_s,
        )
        if source is not None:
            source.has_not_answered()

    def _advance(self, load: PrefixLoad) -> None:
        for index in range(load.first, min(load.first + self._window, load.end)):
            if index not in load.copying and index not in load.loaded and not self._find(load, index):
                load.end = index
                break

    def _find(self, load: PrefixLoad, index: int) -> bool:
        """Move one block on; False if it is in no tier, or the host pool has no room for it."""
        key = load.keys[index]
        if self.host_pool.find(get_offload_block_hash(key)) is not None:
            load.has_loaded(index)
            return True
        if any(copy.load.keys[copy.index] == key for copy in self._copies):
            return True
        _, context = load.contexts[0]
        found = self.manager.buffer.lookup(key, context)
        if found is LookupResult.HIT:
            if (source := self._origins.pop(key, None)) is not None:
                source.has_answered()
            return self._copy(load, index, context)
        if found is LookupResult.HIT_PENDING:
            load.waits_for = self._origins.get(key)
            return True
        return self._ask(load, key)

    def _ask(self, load: PrefixLoad, key: OffloadKey) -> bool:
        """Ask the sources for a block in their order; False if none has it."""
        for source, context in load.contexts:
            if time.monotonic() < source.retry_at:
                continue
            result = self.manager.lookup(key, context)
            if result is not LookupResult.MISS:
                load.waits_for = self._origins[key] = source
                if len(self._origins) > MAX_ORIGINS:
                    self._origins.popitem(last=False)
                return True
        return False

    def _copy(self, load: PrefixLoad, index: int, context: ReqContext) -> bool:
        block_id = self.host_pool.take()
        if block_id is None:
            return False
        key = load.keys[index]
        (chunk_id,) = self.manager.prepare_load([key], context).chunk_ids.tolist()
        future = self.manager.copier.load(chunk_id, block_id, key)
        self._copies.append(_Copy(load, index, context, block_id, future))
        load.copying.add(index)
        return True

    def _collect(self, copy: _Copy) -> None:
        load, key = copy.load, copy.load.keys[copy.index]
        self.manager.complete_load([key], copy.context)
        load.copying.discard(copy.index)
        is_intact = not copy.future.cancelled() and copy.future.exception() is None and copy.future.result()
        if is_intact:
            self.num_loaded += 1
            self.host_pool.publish(copy.block_id, get_offload_block_hash(key))
            self._are_stored({key: copy.block_id})
            load.has_loaded(copy.index)
        else:
            self.num_damaged += 1
            self.host_pool.unpin([copy.block_id])
            self.manager.discard(key)
            load.end = min(load.end, copy.index)

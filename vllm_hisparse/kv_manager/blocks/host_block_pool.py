"""Host block pool: the allocator and prefix cache behind the full KV in host memory (scheduler side)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class HostMatch:
    """The longest prefix of a request that the host pool holds.

    Attributes:
        block_ids: host blocks of the prefix, the last one possibly partial.
        num_tokens: tokens of the prefix.
    """

    block_ids: Sequence[int] = ()
    num_tokens: int = 0


@dataclass
class _Preempted:
    num_tokens: int
    keys: list[Hashable] = field(default_factory=list)


@dataclass(frozen=True)
class PrivateKey:
    """Cache key of a block that only its preempted owner may claim: a partial tail, or a copy of a cached block.

    NOTE: this is no tuple, because a tuple could be equal to a block hash.
    """

    request_id: str
    index: int


class BlockKeys:
    """Index of blocks by key: a block has at most one key, and no two blocks have the same key."""

    def __init__(self, num_blocks: int):
        self._by_block: list[Hashable | None] = [None] * num_blocks
        self._by_key: dict[Hashable, int] = {}

    def of(self, block_id: int) -> Hashable | None:
        """The key of a block; None if it has none."""
        return self._by_block[block_id]

    def find(self, key: Hashable) -> int | None:
        """The block that has a key; None if there is none."""
        return self._by_key.get(key)

    def assign(self, block_id: int, key: Hashable) -> None:
        """Give a key to a block that has none."""
        self._by_block[block_id], self._by_key[key] = key, block_id

    def remove(self, block_id: int) -> None:
        """Take a block's key, if it has one."""
        key, self._by_block[block_id] = self._by_block[block_id], None
        if key is not None:
            del self._by_key[key]

    def check_integrity(self, free: set[int], evictable: set[int]) -> None:
        """Raise an AssertionError if a cached block has no key or a free one has one."""
        keyed = {block_id: key for block_id, key in enumerate(self._by_block) if key is not None}
        assert keyed == {block_id: key for key, block_id in self._by_key.items()}, "cache keys differ"
        assert not free & keyed.keys(), "a free block has a key"
        assert evictable <= keyed.keys(), "a cached block has no key"


class HostBlockPool:
    """Allocates, shares, caches and evicts requests' host blocks; every operation is all or nothing.

    A host block is free, used (referenced by requests, or pinned) or cached (unused, but found by its key). The least
    recently used cached blocks are evicted first; the blocks of one request are evicted from its tail.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        reports_cached: True if `take_newly_cached` and `take_newly_published` are called.
        on_removed: called with each hash that is published no longer.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        reports_cached: bool = False,
        on_removed: Callable[[Hashable], None] | None = None,
    ):
        self.num_blocks, self.block_size, self._on_removed = num_blocks, block_size, on_removed
        self._requests: dict[str, list[int]] = {}
        self._preempted: dict[str, _Preempted] = {}
        self._newly_cached: dict[int, None] | None = {} if reports_cached else None
        self._newly_published: list[int] | None = [] if reports_cached else None
        self._free: deque[int] = deque(range(num_blocks))
        self._num_refs = [0] * num_blocks
        self._num_pins = [0] * num_blocks
        self._keys = BlockKeys(num_blocks)
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    # Blocks of requests

    def block_ids(self, request_id: str) -> list[int]:
        """Host blocks of a request, in token order; read-only."""
        return self._requests[request_id]

    def holders(self) -> set[str]:
        """Ids of the requests that hold blocks."""
        return set(self._requests)

    def preempted(self) -> set[str]:
        """Ids of the preempted requests whose blocks can still be found."""
        return set(self._preempted)

    def capacity(self, request_id: str) -> int:
        """Tokens that a request's blocks hold."""
        return len(self._requests[request_id]) * self.block_size

    def cached_prefix(self, block_hashes: Iterable[Hashable], max_tokens: int) -> HostMatch:
        """The longest prefix of whole blocks, at most `max_tokens` long, whose hashes are cached."""
        block_ids: list[int] = []
        for block_hash in islice(block_hashes, max_tokens // self.block_size):
            block_id = self._keys.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return HostMatch(block_ids, len(block_ids) * self.block_size)

    def block_counts(self) -> dict[str, int]:
        """Host blocks used, free and cached."""
        counts = {"used": self.num_used, "free": self.num_free, "cached": self.num_cached}
        return {f"host_blocks_{name}": count for name, count in counts.items()}

    def find_match(self, request: Request, enable_caching: bool) -> HostMatch:
        """Find the longest prefix of a request: the blocks it left when it was preempted, or published blocks.

        Args:
            request: the request.
            enable_caching: True if published blocks may be used.
        """
        if request.skip_reading_prefix_cache:
            return HostMatch()
        # NOTE: the last token is always computed, for its logits.
        match = self.retained_prefix(request.request_id, request.num_tokens - 1)
        if not enable_caching:
            return match
        cached = self.cached_prefix(request.block_hashes, request.num_tokens - 1)
        return max(match, cached, key=lambda found: found.num_tokens)

    def retained_prefix(self, request_id: str, max_tokens: int) -> HostMatch:
        """The prefix that is left of a preempted request's KV, at most `max_tokens` long."""
        preempted = self._preempted.get(request_id)
        if preempted is None:
            return HostMatch()
        limit = min(preempted.num_tokens, max_tokens)
        block_ids: list[int] = []
        for key in islice(preempted.keys, self._num_blocks_for(limit)):
            block_id = self._keys.find(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return HostMatch(block_ids, min(limit, len(block_ids) * self.block_size))

    def can_allocate(self, num_tokens: int, match: HostMatch, num_reserved: int = 0) -> bool:
        """Return True if `allocate` would succeed with these arguments, and leave `num_reserved` blocks to others."""
        num_new = self.num_new_blocks(num_tokens, match)
        num_matched_evictable = sum(not self._num_refs[block_id] for block_id in match.block_ids)
        return num_new + num_reserved <= self.num_free + self.num_cached - num_matched_evictable

    def num_new_blocks(self, num_tokens: int, match: HostMatch) -> int:
        """Blocks that `allocate` would take in addition to the matched ones."""
        return self._num_blocks_for(num_tokens) - len(match.block_ids)

    def allocate(self, request_id: str, num_tokens: int, match: HostMatch) -> list[int]:
        """Give a request the matched blocks and new ones, for `num_tokens` in all.

        Raises:
            MemoryError: the pool cannot hold them; nothing has changed.
        """
        assert request_id not in self._requests, f"{request_id} holds host blocks already"
        if not self.can_allocate(num_tokens, match):
            raise MemoryError(f"{num_tokens} tokens do not fit: {self.num_free} free, {self.num_cached} cached blocks")
        for block_id in match.block_ids:
            self._claim(block_id)
        self.forget(request_id)
        num_new = self.num_new_blocks(num_tokens, match)
        self._requests[request_id] = [*match.block_ids, *(self._take() for _ in range(num_new))]
        return self._requests[request_id]

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Return True if `grow` with these arguments would succeed."""
        num_new = self._num_blocks_for(num_tokens) - len(self._requests[request_id])
        return num_new <= self.num_free + self.num_cached

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Extend a request's blocks to `num_tokens`.

        Raises:
            MemoryError: the pool cannot hold them; nothing has changed.
        """
        if not self.can_grow(request_id, num_tokens):
            raise MemoryError(f"{request_id} cannot grow to {num_tokens} tokens")
        block_ids = self._requests[request_id]
        block_ids.extend(self._take() for _ in range(self._num_blocks_for(num_tokens) - len(block_ids)))

    def register(self, request_id: str, index: int, block_hash: Hashable) -> None:
        """Publish a request's full block under its hash; a hash that is cached already stays with its block."""
        block_id = self._requests[request_id][index]
        if self._keys.of(block_id) is None and self._keys.find(block_hash) is None:
            self._keys.assign(block_id, block_hash)
            if self._newly_published is not None:
                self._newly_published.append(block_id)

    def free(self, request_id: str) -> None:
        """Release a finished request's blocks; published ones stay cached."""
        self._release(self._requests.pop(request_id))

    def preempt(self, request_id: str, num_tokens: int) -> None:
        """Release a preempted request's blocks but keep its first `num_tokens` findable by `retained_prefix`."""
        block_ids = self._requests.pop(request_id)
        preempted = self._preempted[request_id] = _Preempted(num_tokens)
        for index, block_id in enumerate(block_ids[: self._num_blocks_for(num_tokens)]):
            if self._keys.of(block_id) is None:
                self._keys.assign(block_id, PrivateKey(request_id, index))
            elif isinstance(self._keys.of(block_id), PrivateKey):
                # NOTE: `reset_cache` removed the hash of this shared block, and another preempted owner has given it a
                # key of its own. The key must not be kept here, because it may later name a block with other contents.
                break
            preempted.keys.append(self._keys.of(block_id))
        self._release(block_ids)

    def forget(self, request_id: str) -> None:
        """Drop the blocks that only a preempted request may claim, because it resumed without them or ended."""
        preempted = self._preempted.pop(request_id, None)
        for key in preempted.keys if preempted else ():
            block_id = self._keys.find(key)
            if isinstance(key, PrivateKey) and block_id is not None:
                self._keys.remove(block_id)
                if not self._num_refs[block_id]:
                    del self._evictable[block_id]
                    self._free.append(block_id)

    def reset_cache(self) -> None:
        """Forget every cached block, including the blocks of preempted requests."""
        for block_id in range(self.num_blocks):
            self._unpublish(block_id)
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._preempted.clear()

    # Single blocks

    def find(self, block_hash: Hashable) -> int | None:
        """The block that is published under a hash; None if there is none."""
        return self._keys.find(block_hash)

    def is_cached(self, block_id: int) -> bool:
        """True if a block is cached: it has a key, and is neither referenced by a request nor pinned."""
        return block_id in self._evictable

    def hash_of(self, block_id: int) -> Hashable | None:
        """The hash that a block is published under; None if it is not published."""
        key = self._keys.of(block_id)
        return None if isinstance(key, PrivateKey) else key

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep a request's blocks from being freed or evicted until `unpin`, even if the request gives them up."""
        for block_id in block_ids:
            assert self._num_refs[block_id], f"block {block_id} has no owner"
            self._num_refs[block_id] += 1
            self._num_pins[block_id] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Undo `pin`."""
        for block_id in block_ids:
            self._num_pins[block_id] -= 1
        self._release(block_ids)

    def hold(self, block_id: int) -> None:
        """Pin a published block, even if no request uses it."""
        self._claim(block_id)
        self._num_pins[block_id] += 1

    def take(self) -> int | None:
        """Take a block for no request and pin it. The caller fills it, and then calls `publish`, or `unpin` to give it
        back.

        Returns:
            The block; None if no block is free or cached.
        """
        if not (self._free or self._evictable):
            return None
        block_id = self._take()
        self._num_pins[block_id] = 1
        return block_id

    def publish(self, block_id: int, block_hash: Hashable) -> None:
        """Unpin a block from `take`, and publish it under a hash unless another block has that hash."""
        if self._keys.find(block_hash) is None:
            self._keys.assign(block_id, block_hash)
        self.unpin([block_id])

    def touch(self, block_ids: Iterable[int]) -> None:
        """Make cached blocks the most recently used ones; the first of them is evicted last."""
        for block_id in reversed(list(block_ids)):
            if block_id in self._evictable:
                self._evictable.move_to_end(block_id)

    @property
    def has_newly_cached(self) -> bool:
        """True if `take_newly_cached` would return any block."""
        return bool(self._newly_cached)

    def take_newly_cached(self) -> list[int]:
        """Blocks that have become unused since the last call; some of them may have been evicted already."""
        assert self._newly_cached is not None
        block_ids, self._newly_cached = list(self._newly_cached), {}
        return block_ids

    def take_newly_published(self) -> list[int]:
        """Blocks that requests have published since the last call; the steps that fill these may still run."""
        assert self._newly_published is not None
        block_ids, self._newly_published = self._newly_published, []
        return block_ids

    def check_integrity(self) -> None:
        """Raise an AssertionError if a block is lost, owned twice, cached under a wrong key or unpinned too often."""
        num_refs = list(self._num_pins)
        assert min(num_refs, default=0) >= 0, "a block was unpinned without having been pinned"
        for request_id, block_ids in self._requests.items():
            assert len(set(block_ids)) == len(block_ids), f"{request_id} holds a block twice"
            for block_id in block_ids:
                num_refs[block_id] += 1
        assert num_refs == self._num_refs, "reference counts differ from the requests' blocks"
        free, evictable = set(self._free), set(self._evictable)
        used = {block_id for block_id, refs in enumerate(num_refs) if refs}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & evictable or free & used or evictable & used), "a block has two states"
        assert len(free) + len(evictable) + len(used) == self.num_blocks, "a block is lost"
        self._keys.check_integrity(free, evictable)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _claim(self, block_id: int) -> None:
        if not self._num_refs[block_id]:
            del self._evictable[block_id]
        self._num_refs[block_id] += 1
        if isinstance(self._keys.of(block_id), PrivateKey):
            self._keys.remove(block_id)

    def _take(self) -> int:
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            self._unpublish(block_id)
        self._num_refs[block_id] = 1
        return block_id

    def _unpublish(self, block_id: int) -> None:
        block_hash = self.hash_of(block_id)
        self._keys.remove(block_id)
        if block_hash is not None and self._on_removed is not None:
            self._on_removed(block_hash)

    def _release(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id]:
                continue
            if self._keys.of(block_id) is None:
                self._free.append(block_id)
                continue
            self._evictable[block_id] = None
            if self._newly_cached is not None:
                self._newly_cached[block_id] = None

"""States of host blocks: free, used, cached; and which key finds which block (scheduler side)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateKey:
    """Cache key of a block that only its preempted owner may claim: a partial tail, or a copy of a cached block.

    NOTE: no tuple, which would equal a block hash that is one.
    """

    request_id: str
    index: int


class BlockKeys:
    """Which key finds which block: a block has at most one key, a key one block."""

    def __init__(self, num_blocks: int):
        self._by_block: list[Hashable | None] = [None] * num_blocks
        self._by_key: dict[Hashable, int] = {}

    def of(self, block_id: int) -> Hashable | None:
        """The key of a block."""
        return self._by_block[block_id]

    def find(self, key: Hashable) -> int | None:
        """The block that a key finds."""
        return self._by_key.get(key)

    def set(self, block_id: int, key: Hashable) -> None:
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


class HostBlockStates:
    """What every host block is: free, used (referenced by requests, or pinned) or cached (found by its key).

    Cached blocks are evicted least recently used first.

    Args:
        num_blocks: blocks in the pool.
        reports_cached: whether `take_newly_cached` and `take_newly_published` are called.
    """

    def __init__(self, num_blocks: int, reports_cached: bool = False):
        self.num_blocks = num_blocks
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

    def find(self, block_hash: Hashable) -> int | None:
        """The block that is published under a hash."""
        return self._keys.find(block_hash)

    def hash_of(self, block_id: int) -> Hashable | None:
        """The hash that a block is published under."""
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
        """`pin` of a published block, whether a request uses it or not."""
        self._claim(block_id)
        self._num_pins[block_id] += 1

    def take(self) -> int | None:
        """A block of no request, pinned, to be filled and then published or given back with `unpin`; None if there is
        neither a free nor a cached one.
        """
        if not (self._free or self._evictable):
            return None
        block_id = self._take()
        self._num_pins[block_id] = 1
        return block_id

    def publish(self, block_id: int, block_hash: Hashable) -> None:
        """Publish a block from `take` under a hash, unless another block is, and unpin it."""
        if self._keys.find(block_hash) is None:
            self._keys.set(block_id, block_hash)
        self.unpin([block_id])

    def touch(self, block_ids: Iterable[int]) -> None:
        """Make cached blocks the most recently used ones, the first of them last."""
        for block_id in reversed(list(block_ids)):
            if block_id in self._evictable:
                self._evictable.move_to_end(block_id)

    @property
    def has_newly_cached(self) -> bool:
        """Whether `take_newly_cached` has something to give."""
        return bool(self._newly_cached)

    def take_newly_cached(self) -> list[int]:
        """Blocks that no request uses any more, since the last call; they may have been evicted since."""
        assert self._newly_cached is not None
        block_ids, self._newly_cached = list(self._newly_cached), {}
        return block_ids

    def take_newly_published(self) -> list[int]:
        """Blocks that requests have published since the last call; steps that fill them may not be over."""
        assert self._newly_published is not None
        block_ids, self._newly_published = self._newly_published, []
        return block_ids

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
            self._keys.remove(block_id)
        self._num_refs[block_id] = 1
        return block_id

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

"""Host block pool: the allocator and prefix cache behind the full KV in host memory (scheduler side)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from vllm_hisparse.kv_manager.blocks.host_block_states import HostBlockStates, PrivateKey

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


class HostBlockPool(HostBlockStates):
    """Allocates, shares, caches and evicts requests' host blocks; every operation is all or nothing.

    Cached blocks are evicted least recently used first, and within one request from its tail.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        reports_cached: whether `take_newly_cached` and `take_newly_published` are called.
    """

    def __init__(self, num_blocks: int, block_size: int, reports_cached: bool = False):
        super().__init__(num_blocks, reports_cached)
        self.block_size = block_size
        self._requests: dict[str, list[int]] = {}
        self._preempted: dict[str, _Preempted] = {}

    def block_ids(self, request_id: str) -> list[int]:
        """Host blocks of a request, in token order; read-only."""
        return self._requests[request_id]

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
        """The most that is here of a request: what it left when it was preempted, or what others have published.

        Args:
            request: which one.
            enable_caching: whether others' blocks count.
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
        """What is left of a preempted request's KV, at most `max_tokens` long."""
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

    def can_allocate(self, num_tokens: int, match: HostMatch) -> bool:
        """Whether `allocate` with these arguments would succeed."""
        num_new = self._num_blocks_for(num_tokens) - len(match.block_ids)
        num_matched_evictable = sum(not self._num_refs[block_id] for block_id in match.block_ids)
        return num_new <= self.num_free + self.num_cached - num_matched_evictable

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
        num_new = self._num_blocks_for(num_tokens) - len(match.block_ids)
        self._requests[request_id] = [*match.block_ids, *(self._take() for _ in range(num_new))]
        return self._requests[request_id]

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Whether `grow` with these arguments would succeed."""
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
            self._keys.set(block_id, block_hash)
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
                self._keys.set(block_id, PrivateKey(request_id, index))
            elif isinstance(self._keys.of(block_id), PrivateKey):
                break  # NOTE: shared, its hash lost to `reset_cache`; the other owner may yet reuse that key's name.
            preempted.keys.append(self._keys.of(block_id))
        self._release(block_ids)

    def forget(self, request_id: str) -> None:
        """Drop what a preempted request alone may claim: it resumed without it, or it ended."""
        preempted = self._preempted.pop(request_id, None)
        for key in preempted.keys if preempted else ():
            block_id = self._keys.find(key)
            if isinstance(key, PrivateKey) and block_id is not None:
                self._keys.remove(block_id)
                if not self._num_refs[block_id]:
                    del self._evictable[block_id]
                    self._free.append(block_id)

    def reset_cache(self) -> None:
        """Forget every cached block, those of preempted requests included."""
        for block_id in range(self.num_blocks):
            self._keys.remove(block_id)
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._preempted.clear()

    def check_integrity(self) -> None:
        """Raise an AssertionError if a block is lost, owned twice or cached under a wrong key."""
        num_refs = list(self._num_pins)
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

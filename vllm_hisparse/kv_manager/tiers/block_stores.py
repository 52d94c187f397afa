"""Chooses which host blocks are stored in the tiers, and when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from vllm_hisparse.kv_manager.blocks.deferred import Deferred
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.tiers.tier_manager import HostTierManager

BATCH = 16  # blocks of one job
GROUP = 0  # the key of a block covers its main KV and its device-resident KV


def key_of(block_hash: bytes) -> OffloadKey:
    """Return a block's key, which is the same in all tiers."""
    return make_offload_key(block_hash, GROUP)


class BlockStores:
    """Stores published blocks once no request uses them any more, because until then the host pool cannot evict them.

    A block waits until every step that may write it is over, and until the transfer buffer has room. A block that is
    evicted while it waits is not stored.

    Args:
        manager: manager of the tiers.
        host_pool: pool that reports blocks that no request uses any more.
    """

    def __init__(self, manager: HostTierManager, host_pool: HostBlockPool):
        self.manager, self.host_pool = manager, host_pool
        self._num_dropped = 0
        self._waiting: OrderedDict[int, tuple[bytes, int]] = (
            OrderedDict()
        )  # block -> (hash, last step that may write it)
        self._known: dict[int, bytes] = {}  # block -> hash, if the tiers remember whether they have it

    @property
    def has_waiting(self) -> bool:
        """True if blocks wait to be stored, or have yet to be checked."""
        return bool(self._waiting) or self.host_pool.has_newly_cached

    def step(self, deferred: Deferred) -> None:
        """Start to store what can be stored now; called once per step.

        Args:
            deferred: numbers of the steps so far, this one included.
        """
        for block_id in self.host_pool.take_newly_cached():
            block_hash = self.host_pool.hash_of(block_id)
            if block_hash is not None and self._is_lacking(block_id, block_hash):
                # NOTE: the block goes to the end, because `_next_batch` stops at a block whose step is not over.
                waiting, _ = self._waiting.pop(block_id, (block_hash, 0))
                self._num_dropped += waiting != block_hash
                self._waiting[block_id] = (block_hash, deferred.num_scheduled)
        batch = self._next_batch(deferred)
        if batch and self.manager.store(batch):
            for block_id in batch.values():
                self._waiting.pop(block_id, None)

    def mark_stored(self, blocks: Mapping[OffloadKey, int]) -> None:
        """Record that blocks, by key, came from a tier and need not be stored."""
        for key, block_id in blocks.items():
            self._forget(block_id)
            self._known[block_id] = self.host_pool.hash_of(block_id)
            for tier in self.manager.secondary_tiers:
                tier.mark_stored(key)

    def reset(self) -> None:
        """Forget the blocks that wait, because the host pool has forgotten all cached blocks."""
        self._waiting.clear()

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when there is nothing to store, but is not."""
        return {"stores": self._waiting} if self._waiting else {}

    def _is_lacking(self, block_id: int, block_hash: bytes) -> bool:
        """Return True if some tier takes blocks and, as far as is known, does not have this one."""
        key = key_of(block_hash)
        if self._known.get(block_id) != block_hash:
            self._forget(block_id)
            self._known[block_id] = block_hash
            if not self.manager.is_in_buffer(key):  # NOTE: a tier may have deleted it since
                self._forget_key(key)
        return any(tier.lacks(key) for tier in self.manager.secondary_tiers)

    def _forget(self, block_id: int) -> None:
        block_hash = self._known.pop(block_id, None)
        if block_hash is not None:
            self._forget_key(key_of(block_hash))

    def _forget_key(self, key: OffloadKey) -> None:
        for tier in self.manager.secondary_tiers:
            tier.forget(key)

    def take_counters(self) -> dict[str, int]:
        """Return the number of blocks that were evicted before they could be stored, since the last call."""
        taken, self._num_dropped = self._num_dropped, 0
        return {"tier_dropped_blocks": taken}

    def _next_batch(self, deferred: Deferred) -> dict[OffloadKey, int]:
        batch: dict[OffloadKey, int] = {}
        num_blocks = min(BATCH, self.manager.num_stores_left)
        for block_id, (block_hash, step) in list(islice(self._waiting.items(), 2 * BATCH)):
            if len(batch) >= num_blocks or not deferred.is_over(step):
                break
            if self.host_pool.hash_of(block_id) != block_hash:
                del self._waiting[block_id]
                self._num_dropped += 1
            elif not self.manager.is_unwritten(block_id):  # NOTE: a block published again may be unwritten
                batch[key_of(block_hash)] = block_id
        return batch

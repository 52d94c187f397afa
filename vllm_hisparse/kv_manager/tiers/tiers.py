"""The tiers below the host pool, as the connector's scheduler half uses them."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from vllm_hisparse.kv_manager.blocks.deferred import Deferred
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool, HostMatch
from vllm_hisparse.kv_manager.tiers.block_stores import BlockStores, key_of
from vllm_hisparse.kv_manager.tiers.prefix_loads import Clock, PrefixLoads
from vllm_hisparse.kv_manager.tiers.sources import Sources
from vllm_hisparse.kv_manager.tiers.tier_manager import HostTierManager

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request


class Tiers:
    """Stores blocks that the host pool may evict, and loads blocks that it has evicted.

    Args:
        manager: manager of the tiers.
        host_pool: the host pool.
        sources: stores and peers from which a request's blocks may come.
        timeout_s: seconds without a block after which a request stops waiting for its prefix.
        clock: tells the time.
    """

    def __init__(
        self,
        manager: HostTierManager,
        host_pool: HostBlockPool,
        sources: Sources,
        timeout_s: float,
        clock: Clock = time.monotonic,
    ):
        self.manager, self.host_pool = manager, host_pool
        self.stores = BlockStores(manager, host_pool)
        self.loads = PrefixLoads(manager, host_pool, sources.contexts, timeout_s, self.stores.mark_stored, clock)

    def is_loading(self, request: Request, match: HostMatch) -> bool:
        """Return True if a request that could be admitted should wait until more of its prefix is in the host pool.

        Args:
            request: a waiting request; vLLM asks for it once per step.
            match: the part of its prefix that the host pool has.
        """
        request_id, num_tokens, block_size = request.request_id, request.num_tokens, self.host_pool.block_size
        if not self.loads.has(request_id):
            first, last = match.num_tokens // block_size, (num_tokens - 1) // block_size
            if self.loads.has_ended(request_id):
                self.host_pool.touch(match.block_ids)  # so that they stay until it is admitted
                return False
            if first >= min(last, len(request.block_hashes)):
                return False
            if not self.host_pool.can_allocate(num_tokens, match):
                return False  # it waits for memory first
            hashes = request.block_hashes[:last]
            # NOTE: prefixes that do not fit into the host pool together would evict each other.
            has_room = self.host_pool.can_allocate(num_tokens, match, self.loads.num_reserved(hashes))
            if self.loads.must_wait(request_id, has_room):
                return True
            if self.loads.has_ended(request_id):
                return False
            self.host_pool.touch(match.block_ids)  # so that the blocks that are loaded do not evict them
            matched, missing = zip(hashes, match.block_ids, strict=False), hashes[first:]
            cached = [block_hash for block_hash, block_id in matched if self.host_pool.is_cached(block_id)]
            num_more = self.host_pool.num_new_blocks(num_tokens, match) - len(missing)
            self.loads.begin(request_id, list(map(key_of, missing)), cached + missing, num_more)
        return self.loads.has(request_id) and self.loads.is_loading(request_id)

    def forget(self, request_id: str) -> Counter[CacheHitSource]:
        """Forget a request that was admitted or has ended.

        Returns:
            The blocks that were loaded for it from tiers, by the kind of tier.
        """
        return self.loads.forget(request_id)

    def step_scheduled(self, deferred: Deferred) -> None:
        """Do the work of a step whose metadata is complete; called once for each step, in order.

        Args:
            deferred: counts the steps, this one included.
        """
        if published := self.host_pool.take_newly_published():
            self.manager.mark_unwritten(published)
            deferred.after_step(deferred.num_scheduled, partial(self.manager.mark_written, published))
        self.manager.collect_saves()
        self.loads.step()
        self.stores.step(deferred)
        self.manager.step()

    def has_pending_work(self) -> bool:
        """True if steps are needed even if there is no request."""
        return self.stores.has_waiting or bool(self.loads.num_copies) or self.manager.has_pending_work()

    def reset_cache(self) -> None:
        """Prepare for the host pool to forget its cached blocks. The tiers and the transfer buffer keep their blocks.

        NOTE: this waits for copies in memory, never for a tier.
        """
        self.loads.reset()
        self.loads.wait_for_copies()
        self.manager.wait_for_copies()
        self.stores.reset()

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when there is no request and nothing to store, but is not."""
        return self.loads.leftovers() | self.stores.leftovers() | self.manager.leftovers()

    def take_counters(self) -> dict[str, int]:
        """Return the counters since the last call, by the names of `connector/metrics.py`."""
        return self.loads.take_counters() | self.stores.take_counters()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return vLLM's statistics of its tiers since the last call."""
        return self.manager.get_stats()

    def shutdown(self) -> None:
        self.manager.shutdown()

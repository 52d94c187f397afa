"""vLLM's tiering over the host pool: copies host blocks into its primary tier, and answers peers from the host pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from vllm_hisparse.compat.tiering import forget_chunk, known_jobs, known_requests
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.tiers.block_copier import BlockCopier
from vllm_hisparse.kv_manager.tiers.guarded_tier import GuardedTier

STORE_SHARE = 0.25  # share of the transfer buffer that stores may take; the rest is for loads and for peers
_NOBODY = ReqContext("nobody")  # a lookup with this context belongs to no request
# Saves on their way to the buffer at which no save for a peer begins; one is a peer's block, or a batch to store.
MAX_PEER_COPIES = 64


class BufferTier(CPUPrimaryTierOffloadingManager):
    """The transfer buffer as the primary tier of vLLM's tiering.

    Attributes:
        num_reads: chunks that tiers are reading.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_reads = 0
        self.complete_read = self._complete_read  # NOTE: vLLM's constructor sets this attribute, too

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = super().prepare_read(keys, req_context)
        self.num_reads += len(keys)
        return spec

    def _complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.num_reads -= len(keys)
        self.complete_load(keys, req_context)


@dataclass
class _Save:
    """Blocks on their way from the host pool to the buffer."""

    context: ReqContext
    blocks: Mapping[OffloadKey, int]
    futures: list[Future]
    is_for_peer: bool


class HostTierManager(TieringOffloadingManager):
    """vLLM's tiering over the host pool. Every block that is saved to the transfer buffer goes to all tiers.

    Args:
        buffer_tier: the transfer buffer.
        tiers: tiers below the host pool, in the order in which they are looked up.
        host_pool: pool that the blocks come from.
        copier: copies blocks between host pool and buffer.
    """

    def __init__(
        self,
        buffer_tier: BufferTier,
        tiers: list[GuardedTier],
        host_pool: HostBlockPool,
        copier: BlockCopier,
    ):
        super().__init__(buffer_tier, tiers)
        self.buffer, self.host_pool, self.copier = buffer_tier, host_pool, copier
        self.num_chunks = copier.buffer.num_chunks
        self._saves: list[_Save] = []
        self._unwritten: Counter[int] = Counter()  # published host blocks that a step in flight may still write
        self._numbers = count()

    @property
    def num_stores_left(self) -> int:
        """Number of blocks that may be saved now to be stored.

        NOTE: peers have a share of their own, as large as that of the stores, and only chunks beyond it count here.
        Otherwise nothing would be stored while peers ask for blocks all the time.
        """
        share = int(self.num_chunks * STORE_SHARE)
        num_saves = sum(len(save.blocks) for save in self._saves if not save.is_for_peer)
        num_peer_reads = sum(tier.num_peer_reads for tier in self.secondary_tiers)
        num_reads = self.buffer.num_reads - min(num_peer_reads, share)
        return share - num_reads - num_saves

    def mark_unwritten(self, block_ids: list[int]) -> None:
        """Record published host blocks that a step in flight may still write."""
        self._unwritten.update(block_ids)

    def mark_written(self, block_ids: list[int]) -> None:
        """Record that the step that fills these published blocks is over."""
        self._unwritten -= Counter(block_ids)

    def is_unwritten(self, block_id: int) -> bool:
        """True if a step in flight may still write a published host block."""
        return block_id in self._unwritten

    def is_in_buffer(self, key: OffloadKey) -> bool:
        """True if a block is in the transfer buffer, or on its way there."""
        return self.buffer.lookup(key, _NOBODY) is not LookupResult.MISS

    def lookup(self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> LookupResult:
        asked_by_peer = exclude_tier_idx is not None
        if asked_by_peer and self.buffer.lookup(key, req_context) is LookupResult.MISS:
            block_id = self.host_pool.find(get_offload_block_hash(key))
            if block_id is not None:
                # NOTE: if there is no room now, the peer asks again until its timeout.
                if not self.is_unwritten(block_id) and len(self._saves) < MAX_PEER_COPIES:
                    self._save({key: block_id}, req_context, is_for_peer=True)
                return LookupResult.HIT_PENDING
        return super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)

    def store(self, blocks: Mapping[OffloadKey, int]) -> bool:
        """Save host blocks to the buffer, and from there to every tier that lacks them.

        Args:
            blocks: key -> host block.

        Returns:
            False if the buffer has no room for the blocks that are not in it yet.
        """
        context = ReqContext(f"store:{next(self._numbers)}")
        self.on_new_request(context)
        self._store_again(blocks, context)
        is_started = self._save(blocks, context)
        self.on_request_finished(context)
        return is_started

    def step(self) -> None:
        """Do the work of a step: collect finished copies and jobs, and begin new jobs."""
        self.collect_saves()
        self.on_schedule_end(ScheduleEndContext((), ()))

    def collect_saves(self) -> None:
        """Let vLLM's tiering use the blocks that have been copied to the buffer."""
        saves, self._saves = self._saves, []
        for save in saves:
            if not all(future.done() for future in save.futures):
                self._saves.append(save)
                continue
            success = not any(future.cancelled() or future.exception() for future in save.futures)
            for block_id in save.blocks.values():
                self.host_pool.unpin([block_id])
            self.complete_store(list(save.blocks), save.context, success)

    def discard(self, key: OffloadKey) -> None:
        """Delete a damaged block from the buffer and from all tiers."""
        forget_chunk(self.buffer, key)
        for tier in self.secondary_tiers:
            tier.discard(key)

    def wait_for_copies(self) -> None:
        """Wait until no block is on its way from the host pool."""
        for save in self._saves:
            for future in save.futures:
                future.exception()
        self.collect_saves()

    def has_pending_work(self) -> bool:
        return bool(self._saves) or super().has_pending_work()

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when there is no request and nothing to store, but is not."""
        kinds = {
            "saves": self._saves,
            "jobs": known_jobs(self),
            "tier requests": known_requests(self),
            "chunks being read": self.buffer.num_reads,
            "unwritten blocks": self._unwritten,
        }
        return {name: left for name, left in kinds.items() if left}

    def shutdown(self) -> None:
        self.copier.shutdown()
        super().shutdown()

    def _store_again(self, keys: Iterable[OffloadKey], context: ReqContext) -> None:
        """Store blocks that are in the buffer, because vLLM's tiering stores only those that come there.

        A tier may have deleted them, or failed to store them.
        """
        found = [key for key in keys if self.buffer.lookup(key, context) is LookupResult.HIT]
        for index, tier in enumerate(self.secondary_tiers):
            lacking = [key for key in found if tier.lacks(key)]
            if lacking:
                tier.submit_store(self.create_store_job(lacking, context, index))

    def _save(self, blocks: Mapping[OffloadKey, int], context: ReqContext, is_for_peer: bool = False) -> bool:
        prepared = self.prepare_store(list(blocks), context)
        if prepared is None:
            return False
        keys: Sequence[OffloadKey] = prepared.keys_to_store
        if not keys:
            return True
        for key in keys:
            self.host_pool.hold(blocks[key])
        chunk_ids = prepared.store_spec.chunk_ids.tolist()
        futures = [self.copier.save(blocks[key], chunk_id, key) for key, chunk_id in zip(keys, chunk_ids, strict=True)]
        self._saves.append(_Save(context, {key: blocks[key] for key in keys}, futures, is_for_peer))
        return True

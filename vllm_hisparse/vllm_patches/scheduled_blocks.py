"""A block that is never computed stays in the prefix cache.

vLLM's scheduler caches a block when it schedules the block's tokens. With priorities, it may preempt the request that
was to compute them in the same step (`Scheduler.schedule`, `KVCacheManager.cache_blocks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

RELEASES = ">=0.32"
DELETE = "the call in kv_manager/blocks/request_tracker.py"
VLLM = (
    "vllm.v1.core.sched.scheduler.Scheduler.schedule",
    "vllm.v1.core.block_pool.BlockPool.get_cached_block",
    "vllm.v1.core.block_pool.BlockPool.evict_blocks",
)


def forget_uncomputed(block_pool: BlockPool, group_id: int, request: Request, num_tokens: int) -> None:
    """Remove a preempted request's blocks from vLLM's prefix cache if the step that was to fill them omits the request.

    Other blocks with the same tokens may be removed, too; they can be loaded from the host pool.

    Args:
        block_pool: vLLM's pool of device blocks.
        group_id: KV cache group of the blocks.
        request: the preempted request.
        num_tokens: number of tokens of the request that would have been computed after that step.
    """
    block_size = block_pool.hash_block_size
    last = min(num_tokens // block_size, len(request.block_hashes))
    for block_hash in request.block_hashes[request.num_computed_tokens // block_size : last]:
        while blocks := block_pool.get_cached_block(block_hash, [group_id]):
            block_pool.evict_blocks({block.block_id for block in blocks})

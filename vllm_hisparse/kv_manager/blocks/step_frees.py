"""Device blocks and host blocks that become free when a step has been processed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class StepFrees:
    """Keeps blocks until the step that copies one to the other has been processed.

    NOTE: transfers, and loads from tiers, write to a block whenever they like, perhaps before the device's copy.

    Args:
        block_pool: vLLM's.
        host_pool: the host pool.
    """

    def __init__(self, block_pool: BlockPool, host_pool: HostBlockPool):
        self.block_pool, self.host_pool = block_pool, host_pool
        self._num_scheduled, self._num_processed = 0, 0  # steps
        self._waiting: deque[tuple[int, KVCacheBlock, int]] = deque()  # (step, device and host block)

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """Device blocks that are kept."""
        return [block for _, block, _ in self._waiting]

    def after_next_step(self, block: KVCacheBlock, host_id: int) -> None:
        """Keep blocks until the step that is being scheduled has been processed."""
        self.block_pool.touch([block])
        self.host_pool.pin([host_id])
        self._waiting.append((self._num_scheduled + 1, block, host_id))

    def step_scheduled(self) -> None:
        """A step's metadata is complete; called once per step."""
        self._num_scheduled += 1

    def step_processed(self) -> None:
        """A step's copies and computations are over on the device; called once per step, in the same order."""
        self._num_processed += 1
        while self._waiting and self._waiting[0][0] <= self._num_processed:
            _, block, host_id = self._waiting.popleft()
            self.block_pool.free_blocks([block])
            self.host_pool.unpin([host_id])

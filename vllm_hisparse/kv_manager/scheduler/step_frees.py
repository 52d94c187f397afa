"""Device blocks and host blocks that are freed when a step has been processed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_hisparse.kv_manager.scheduler.host_block_pool import HostBlockPool

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class StepFrees:
    """Frees blocks that steps in flight still read or write.

    NOTE: the order of the device's stream makes it safe for later steps to use such a block, but transfers, and loads
    from tiers, write to a block whenever they like.

    Args:
        block_pool: vLLM's.
    """

    def __init__(self, block_pool: BlockPool):
        self.block_pool = block_pool
        self._num_scheduled, self._num_processed = 0, 0  # steps
        self._waiting: deque[tuple[int, Sequence[KVCacheBlock], HostBlockPool | None, Sequence[int]]] = deque()

    def __len__(self) -> int:
        """Device blocks that wait."""
        return len(self.blocks)

    @property
    def blocks(self) -> list[KVCacheBlock]:
        return [block for _, blocks, _, _ in self._waiting for block in blocks]

    def after_next_step(
        self, blocks: Sequence[KVCacheBlock], host_pool: HostBlockPool, host_ids: Sequence[int]
    ) -> None:
        """Free device blocks, and unpin host blocks, when the step that is being scheduled has been processed."""
        self._waiting.append((self._num_scheduled + 1, blocks, host_pool, host_ids))

    def after_steps_in_flight(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free device blocks that the step that is being scheduled does not use any more."""
        self._waiting.append((self._num_scheduled, blocks, None, ()))
        self._free()

    def step_scheduled(self) -> None:
        """A step's metadata is complete; called once per step."""
        self._num_scheduled += 1

    def step_processed(self) -> None:
        """A step's copies and computations are over on the device; called once per step, in the same order."""
        self._num_processed += 1
        self._free()

    def _free(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_processed:
            _, blocks, host_pool, host_ids = self._waiting.popleft()
            self.block_pool.free_blocks(blocks)
            if host_pool is not None:
                host_pool.unpin(host_ids)

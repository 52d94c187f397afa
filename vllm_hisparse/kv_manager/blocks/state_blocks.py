"""Device blocks that hold an algorithm's state, which requests get as they grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_hisparse.layout import StateLayout

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class StateBlocks:
    """The only writer of which blocks of vLLM's pool hold state; a request keeps them until it loses all of its blocks.

    Args:
        block_pool: vLLM's.
        layout: how many blocks there are for how many tokens.

    Attributes:
        given: request id -> its blocks, in the order of `StateLayout.columns`.
    """

    def __init__(self, block_pool: BlockPool, layout: StateLayout):
        self.block_pool, self.layout = block_pool, layout
        self.given: dict[str, list[KVCacheBlock]] = {}

    def of(self, request_id: str) -> list[KVCacheBlock]:
        """A request's blocks."""
        return self.given.get(request_id, [])

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` has yet to get."""
        return max(self.layout.num_blocks(num_tokens) - len(self.of(request_id)), 0)

    def give(self, request_id: str, num_tokens: int) -> bool:
        """Give a request of `num_tokens` what it is missing. Returns whether that is anything."""
        num_blocks = self.num_missing(request_id, num_tokens)
        if num_blocks:
            self.given.setdefault(request_id, []).extend(self.block_pool.get_new_blocks(num_blocks))
        return num_blocks > 0

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """The blocks of a request that ends or is preempted; the caller frees them."""
        return self.given.pop(request_id, [])

"""vLLM's manager of the KV cache group with hot rows; it passes calls on to the engine's `RequestTracker`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager, register_all_kvcache_specs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_hisparse.kv_manager.blocks.request_tracker import RequestTracker
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheSpec

# `id` of a block pool -> tracker over it.
# NOTE: managers cannot get the tracker when they are constructed, because vLLM binds the connector, which makes the
# tracker, later. vLLM looks up prefix hits through a class method; its only argument that belongs to one engine is
# the block pool.
_TRACKERS: WeakValueDictionary[int, RequestTracker] = WeakValueDictionary()


def serve_managers(tracker: RequestTracker) -> None:
    """Let the managers over a tracker's block pool find the tracker; called before the first request."""
    _TRACKERS[id(tracker.block_pool)] = tracker


class HotBlockManager(CircularBufferManager):
    """Allocates requests' hot blocks and state blocks from vLLM's block pool, together with their host blocks."""

    @cached_property
    def tracker(self) -> RequestTracker:
        """The engine's tracker."""
        return _TRACKERS[id(self.block_pool)]

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return the length of the prefix that the host pool holds, to which vLLM cuts the other group's prefix hit.

        NOTE: without another group there is no device hit, and the connector reports every hit of the host pool.
        """
        tracker, num_tokens = _TRACKERS[id(block_pool)], 0
        if tracker.resident_group_id is not None:
            # NOTE: with a draft model, vLLM treats both groups as the draft model's: it looks up one block too many and
            # drops it.
            max_length = max(max_length - kv_cache_spec.block_size * drop_eagle_block, 0)
            num_tokens = tracker.host_pool.cached_prefix(block_hashes, max_length).num_tokens
        return tuple([] for _ in kv_cache_group_ids), num_tokens

    def new_step_starts(self) -> None:
        self.tracker.step_starts()

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        return self.tracker.num_missing_blocks(request_id, num_tokens)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        # NOTE: `add_local_computed_blocks` would be too early: it runs before every group has touched the blocks of its
        # prefix hit, and hot blocks could be taken from those.
        self.tracker.give_blocks(request_id, num_local_computed_tokens + num_external_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        new_blocks = self.tracker.give_blocks(request_id, num_tokens)
        self.tracker.set_num_tokens(request_id, num_tokens)
        return new_blocks

    def free(self, request_id: str) -> None:
        # NOTE: vLLM calls this only if the next owner of the blocks cannot write to them before the steps in flight.
        blocks = self._take_blocks(request_id, last_step=self.tracker.deferred.num_processed)
        self.block_pool.free_blocks(reversed(blocks))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        # NOTE: vLLM keeps these blocks until the steps in flight are over. Host blocks are kept as long, because those
        # steps write them, too.
        return self._take_blocks(request_id, last_step=self.tracker.deferred.num_scheduled)

    def _take_blocks(self, request_id: str, last_step: int) -> list[KVCacheBlock]:
        return super().pop_blocks_for_free(request_id) + self.tracker.release(request_id, last_step)


def register_hot_block_manager() -> None:
    """Tell vLLM to manage `HotBufferSpec` groups with a `HotBlockManager`."""
    # NOTE: the built-in specs come first, because the registry assumes that they are registered if it has any entry.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(HotBufferSpec, HotBlockManager, uniform_type_base_spec=HotBufferSpec)

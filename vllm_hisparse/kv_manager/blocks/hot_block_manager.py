"""Scheduler-side manager of hot buffers: one transaction over a request's device blocks and host blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager, register_all_kvcache_specs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool
from vllm_hisparse.kv_manager.blocks.request_ledger import AdmittedRequest, Obstacle, RequestLedger
from vllm_hisparse.kv_manager.blocks.sessions import cut_long_sessions
from vllm_hisparse.kv_manager.blocks.spare_blocks import SpareBlocks
from vllm_hisparse.kv_manager.blocks.state_blocks import StateBlocks
from vllm_hisparse.kv_manager.blocks.step_frees import StepFrees
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.vllm_patches.scheduled_blocks import forget_uncomputed

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheSpec

# Attribute of the device block pool.
# NOTE: vLLM looks up prefix hits through a class method, of which only the block pool belongs to one engine.
_HOST_POOL = "hisparse_host_pool"


class HotBlockManager(CircularBufferManager):
    """Hot blocks and state blocks of requests from vLLM's block pool, and their host blocks with them.

    Admission needs both: a request that the host pool cannot take asks for more device blocks than there are, so that
    vLLM's own waiting and preemption do the rest. The whole sequence is reserved on the host at admission, so that a
    load or a chunked prefill never stops half way.

    The scheduler half calls `bind` once; then, for every step in order, `step_scheduled` and `step_processed`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parked: list[tuple[KVCacheBlock, list[int]]] = []  # (first hot block, pinned host blocks)
        self._is_scheduling = False
        self._asked: str | None = None  # the request that vLLM last asked for in this step, until it gets its blocks
        self.spare: SpareBlocks | None = None
        self.state = StateBlocks(self.block_pool, self.kv_cache_spec.layout.state)

    def bind(
        self, host_pool: HostBlockPool, ledger: RequestLedger, max_model_len: int, resident_group_id: int | None
    ) -> None:
        """Attach the host pool; called once, before the first request.

        Args:
            host_pool: the host pool.
            ledger: told of what requests get and lose.
            max_model_len: tokens of the longest request.
            resident_group_id: of the group that keeps a device prefix cache. None: there is none and no device hit, and
                every hit of the host pool is the connector's.
        """
        self.host_pool, self.ledger, self.max_model_len = host_pool, ledger, max_model_len
        self.frees = StepFrees(self.block_pool, host_pool)
        self.resident_group_id = resident_group_id
        if resident_group_id is not None:
            setattr(self.block_pool, _HOST_POOL, host_pool)

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
        """Cap the device's prefix hit (the other group's) to what the host pool holds."""
        # NOTE: with a draft model, vLLM takes both groups for drafting ones: it asks for one block more, to drop it.
        max_length = max(max_length - kv_cache_spec.block_size * drop_eagle_block, 0)
        host_pool: HostBlockPool | None = getattr(block_pool, _HOST_POOL, None)
        num_tokens = host_pool.cached_prefix(block_hashes, max_length).num_tokens if host_pool else 0
        return tuple([] for _ in kv_cache_group_ids), num_tokens

    def new_step_starts(self) -> None:
        self._is_scheduling, self._asked = True, None
        cut_long_sessions(self.ledger, self.max_model_len, self.block_pool.hash_block_size)

    def step_scheduled(self) -> None:
        """A step's metadata is complete; called once per step."""
        self._is_scheduling = False
        self.frees.step_scheduled()

    def step_processed(self) -> None:
        """A step's copies and computations are over on the device; called once per step, in the same order."""
        self.frees.step_processed()

    def balance(self, num_scheduled: Mapping[str, int]) -> None:
        """Lend free device blocks, or take them back; called once per step, before its changes are taken."""
        self.release_parked()  # a block that is lent has an owner again
        if self.spare:
            has_refused = self._asked is not None
            self.spare.balance(self.ledger, self.req_to_blocks, num_scheduled, has_refused)

    def num_waiting_for_host(self) -> int:
        """Requests that wait for host blocks: the first one that the host pool cannot take, and those behind it."""
        obstacles = self.ledger.obstacles.items()
        refused = [name for name, obstacle in obstacles if obstacle is Obstacle.HOST_POOL_FULL]
        refused = [name for name in refused if not self._host_fits(name, self.ledger.requests[name].num_tokens)]
        if not refused:
            return 0
        return len({*refused, *(request.request_id for request in self.ledger.waiting())})

    def hot_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """All hot blocks of a request, lent ones last."""
        return self.req_to_blocks[request_id] + (self.spare.lent.get(request_id, []) if self.spare else [])

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
        self.release_parked()
        is_admitted = request_id in self.ledger.admitted
        has_room = is_admitted and num_tokens <= self.host_pool.capacity(request_id)
        if not has_room and not self._host_fits(request_id, num_tokens):
            return self._refuse_admission(request_id)
        self.ledger.set_obstacle(request_id, None)
        self._asked = request_id
        return self._num_missing(request_id, num_tokens) + self.state.num_missing(request_id, num_tokens)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        # NOTE: not in `add_local_computed_blocks`, which runs before every group has touched the blocks of its prefix
        # hit: hot blocks could be taken from those.
        self._give_blocks(request_id, num_local_computed_tokens + num_external_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        new_blocks = self._give_blocks(request_id, num_tokens)
        if num_tokens > self.host_pool.capacity(request_id):
            self.host_pool.grow(request_id, num_tokens)
        self.ledger.give_room(request_id, num_tokens)
        self._asked = None
        return new_blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request_id)
        admitted = self.ledger.release(request_id)
        if admitted is None:
            return blocks
        blocks += self.state.pop(request_id) + (self.spare.pop(request_id) if self.spare else [])
        host_ids = list(self.host_pool.block_ids(request_id))
        self.host_pool.pin(host_ids)
        self._parked.append((blocks[0], host_ids))
        if self._is_preempted(request_id):
            self._preempt(self.ledger.requests[request_id], admitted)
        else:
            self.host_pool.free(request_id)
        return blocks

    def release_parked(self) -> None:
        """Let go of the host blocks of requests whose hot blocks are back in the pool.

        NOTE: vLLM returns device blocks late when a step in flight may still write them; host blocks follow, because
        that step writes them too. vLLM asks this manager before it hands out any block, so none is missed.
        """
        parked, self._parked = self._parked, []
        for block, host_ids in parked:
            if block.ref_cnt:
                self._parked.append((block, host_ids))
            else:
                self.host_pool.unpin(host_ids)

    def _host_fits(self, request_id: str, num_tokens: int) -> bool:
        if request_id in self.ledger.admitted:
            return self.host_pool.can_grow(request_id, num_tokens)
        num_tokens = max(num_tokens, self._num_reserved(request_id))
        return self.host_pool.can_allocate(num_tokens, self.ledger.match(request_id))

    def _num_reserved(self, request_id: str) -> int:
        """Tokens to admit a request with: its own, and its first drafts, for which it could not preempt another."""
        layout = self.kv_cache_spec.layout
        num_drafts = layout.max_query_len - 1
        if layout.draft_row_bytes:
            num_drafts *= 2  # vLLM asks for room for the draft layer's next ones, too
        return min(self.ledger.requests[request_id].num_tokens + num_drafts, self.max_model_len)

    def _refuse_admission(self, request_id: str) -> int:
        """Have vLLM wait or preempt: returns more device blocks than there can be."""
        self.ledger.set_obstacle(request_id, Obstacle.HOST_POOL_FULL)
        self._asked = None
        return self.block_pool.num_gpu_blocks + 1

    def _num_missing(self, request_id: str, num_tokens: int) -> int:
        """Hot blocks that a request of `num_tokens` has yet to get."""
        return max(self.kv_cache_spec.num_blocks(max(num_tokens, 1)) - len(self.req_to_blocks.get(request_id, ())), 0)

    def _give_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Give a request what it is missing, the first time also host blocks. Returns the new hot blocks."""
        new_blocks = self.block_pool.get_new_blocks(self._num_missing(request_id, num_tokens))
        self.req_to_blocks[request_id].extend(new_blocks)
        has_new_state = self.state.give(request_id, num_tokens)
        if request_id not in self.ledger.admitted:
            self.host_pool.allocate(request_id, self._num_reserved(request_id), self.ledger.match(request_id))
            self.ledger.admit(request_id, new_blocks[0].block_id)
        elif new_blocks or has_new_state:
            self.ledger.hot_tables.change(request_id)
        return new_blocks

    def _is_preempted(self, request_id: str) -> bool:
        """Whether a request that loses its blocks goes on later: vLLM changes its status afterwards."""
        request = self.ledger.requests.get(request_id)
        return request is not None and request.status == RequestStatus.RUNNING

    def _preempt(self, request: Request, admitted: AdmittedRequest) -> None:
        if self.resident_group_id is not None:
            forget_uncomputed(self.block_pool, self.resident_group_id, request, admitted.num_tokens)
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        num_blocks, host_ids = -(-num_tokens // self.block_size), self.host_pool.block_ids(request.request_id)
        unsaved = {index: block_id for index, block_id in admitted.unsaved_blocks.items() if index < num_blocks}
        if self._is_scheduling:
            for index, block_id in unsaved.items():
                self._save_tail(block_id, host_ids[index])
        elif unsaved:
            # NOTE: vLLM resets its prefix cache next, which fails while a block is in use: nothing is copied.
            num_tokens = min(unsaved) * self.block_size
        self.host_pool.preempt(request.request_id, num_tokens)

    def _save_tail(self, device_id: int, host_id: int) -> None:
        """Have a block copied to the host, and keep both until that is done."""
        self.frees.after_next_step(self.block_pool.blocks[device_id], host_id)
        self.ledger.save_tail(device_id, host_id)


def register_hot_block_manager() -> None:
    """Tell vLLM which manager a `HotBufferSpec` group has."""
    # NOTE: the registry takes any entry for "the built-ins are registered", so these come first.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(HotBufferSpec, HotBlockManager, uniform_type_base_spec=HotBufferSpec)

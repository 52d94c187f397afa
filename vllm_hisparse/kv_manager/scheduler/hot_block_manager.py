"""Scheduler-side manager of hot buffers: one transaction over device hot blocks and host blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager, register_all_kvcache_specs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.compat import cut_session
from vllm_hisparse.kv_manager.hot_buffer_spec import HotBufferSpec
from vllm_hisparse.kv_manager.scheduler.host_block_pool import HostBlockPool, HostMatch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

# The host pool beside each device block pool: vLLM looks up prefix hits through a class method that sees the latter.
# A model whose device blocks are all hot has no device hits to cap: everything is a hit of the connector.
_HOST_POOLS: WeakKeyDictionary[BlockPool, HostBlockPool] = WeakKeyDictionary()


@dataclass
class RequestBlocks:
    """What the manager tracks of one admitted request.

    Attributes:
        handle: its first hot block, which names the request on the worker.
        num_reserved_tokens: tokens its host blocks hold.
        num_matched_tokens: tokens the host held when it was admitted.
        num_tokens: tokens it was last given room for.
        next_event: number of tokens at which a block becomes full or a new one is begun.
        num_sent_blocks: host blocks the worker knows; 0 before the request first runs.
        num_saved_blocks: leading blocks whose indexer keys are on the host.
        num_published_blocks: leading blocks that the host prefix cache knows.
        tail_block_id: device indexer block of the tokens after the last full block, or None (also without an indexer).
        is_decoding: whether its last step computed one token; kept for dense models only.
    """

    handle: int
    num_reserved_tokens: int
    num_matched_tokens: int = 0
    num_tokens: int = 0
    next_event: int = 0
    num_sent_blocks: int = 0
    num_saved_blocks: int = 0
    num_published_blocks: int = 0
    tail_block_id: int | None = None
    is_decoding: bool = False


class HotBlockManager(CircularBufferManager):
    """Fixed hot blocks per request from vLLM's block pool, and the request's host blocks with them.

    Admission needs both: a request that the host pool cannot take asks for more device blocks than there are, so that
    vLLM's own waiting and preemption do the rest. The whole sequence is reserved on the host at admission, so that a
    load or a chunked prefill never stops half way.

    The connector's scheduler half calls `bind`, reads `changed`, `released` and `tail_saves` once per step, and calls
    `step_scheduled` and `step_processed` for every step, in order.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requests: dict[str, Request] = {}
        self.sessions: set[str] = set()  # requests that get their prompts in turns
        self.states: dict[str, RequestBlocks] = {}
        self.matches: dict[str, HostMatch] = {}
        self.changed: dict[str, None] = {}
        self.released: list[int] = []
        self.tail_saves: list[tuple[int, int]] = []
        self.waiting_for_host: set[str] = set()
        self._parked: list[tuple[KVCacheBlock, list[int]]] = []  # (first hot block, pinned host blocks)
        self._is_scheduling = False
        self._num_scheduled, self._num_processed = 0, 0  # steps
        self._tails: deque[tuple[int, KVCacheBlock]] = deque()  # (number of the step that copies it, device block)

    def bind(self, host_pool: HostBlockPool, max_model_len: int, caps_device_hits: bool = True) -> None:
        """Attach the host pool; called once, before the first request.

        Args:
            host_pool: the host pool.
            max_model_len: tokens of the longest request.
            caps_device_hits: whether another group keeps a device prefix cache.
        """
        self.host_pool, self.max_model_len = host_pool, max_model_len
        if caps_device_hits:
            _HOST_POOLS[self.block_pool] = host_pool

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
        """Cap the device's prefix hit (the indexer group's) to what the host pool holds."""
        host_pool = _HOST_POOLS.get(block_pool)
        num_tokens = host_pool.cached_prefix(block_hashes, max_length).num_tokens if host_pool else 0
        return tuple([] for _ in kv_cache_group_ids), num_tokens

    def new_step_starts(self) -> None:
        self._is_scheduling = True
        self._cut_long_sessions()

    def step_scheduled(self) -> None:
        """A step's metadata is complete; called once per step."""
        self._is_scheduling = False
        self._num_scheduled += 1

    def step_processed(self) -> None:
        """A step's copies and computations are over on the device; called once per step, in the same order."""
        self._num_processed += 1
        while self._tails and self._tails[0][0] <= self._num_processed:
            self.block_pool.free_blocks([self._tails.popleft()[1]])

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
        state = self.states.get(request_id)
        if state is not None and num_tokens <= state.num_reserved_tokens:
            return 0
        if self._host_fits(request_id, state, num_tokens):
            self.waiting_for_host.discard(request_id)
            return 0 if state else self.kv_cache_spec.blocks_per_request
        self.waiting_for_host.add(request_id)
        return self.block_pool.num_gpu_blocks + 1  # NOTE: more than there can be: vLLM waits or preempts.

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        # NOTE: not in `add_local_computed_blocks`, which runs before every group has touched the blocks of its prefix
        # hit: hot blocks could be taken from those.
        self._admit(request_id)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        state = self.states.get(request_id)
        new_blocks: list[KVCacheBlock] = []
        if state is None:
            state, new_blocks = self._admit(request_id), self.req_to_blocks[request_id]
        if num_tokens > state.num_reserved_tokens:
            self.host_pool.grow(request_id, num_tokens)
            state.num_reserved_tokens = len(self.host_pool.block_ids(request_id)) * self.block_size
        # NOTE: no more than before: a streaming session went back over what a step in flight had computed.
        if num_tokens >= state.next_event or num_tokens <= state.num_tokens:
            self.changed[request_id] = None
            tail = num_tokens % self.block_size
            state.next_event = num_tokens + (self.block_size - tail if tail else 1)
        state.num_tokens = num_tokens
        return new_blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request_id)
        self.waiting_for_host.discard(request_id)
        self.changed.pop(request_id, None)
        state = self.states.pop(request_id, None)
        if state is None:
            return blocks
        if state.num_sent_blocks:
            self.released.append(state.handle)
        host_ids = list(self.host_pool.block_ids(request_id))
        self.host_pool.pin(host_ids)
        self._parked.append((blocks[0], host_ids))
        request = self.requests.get(request_id)
        if request is not None and request.status == RequestStatus.RUNNING:
            self._preempt(request, state)
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

    def drop_worker_state(self, request_id: str) -> None:
        """Let the worker forget a request that does not run; its tables are sent again when it does."""
        state = self.states[request_id]
        self.released.append(state.handle)
        self.changed[request_id] = None
        state.num_sent_blocks, state.is_decoding = 0, False

    def forget(self, request_id: str) -> None:
        """Drop a request that ended; its blocks follow through `pop_blocks_for_free`."""
        self.requests.pop(request_id, None)
        self.sessions.discard(request_id)
        self.matches.pop(request_id, None)
        self.host_pool.forget(request_id)

    def _host_fits(self, request_id: str, state: RequestBlocks | None, num_tokens: int) -> bool:
        if state is not None:
            return self.host_pool.can_grow(request_id, num_tokens)
        num_tokens = max(num_tokens, self.requests[request_id].num_tokens)
        return self.host_pool.can_allocate(num_tokens, self.matches.get(request_id, HostMatch()))

    def _admit(self, request_id: str) -> RequestBlocks:
        if request_id in self.states:
            return self.states[request_id]
        match = self.matches.pop(request_id, HostMatch())
        block_ids = self.host_pool.allocate(request_id, self.requests[request_id].num_tokens, match)
        hot_blocks = self.block_pool.get_new_blocks(self.kv_cache_spec.blocks_per_request)
        self.req_to_blocks[request_id].extend(hot_blocks)
        state = self.states[request_id] = RequestBlocks(
            handle=hot_blocks[0].block_id,
            num_reserved_tokens=len(block_ids) * self.block_size,
            num_matched_tokens=match.num_tokens,
            num_saved_blocks=match.num_tokens // self.block_size,
            num_published_blocks=match.num_tokens // self.block_size,
        )
        return state

    def _preempt(self, request: Request, state: RequestBlocks) -> None:
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        num_full, tail = divmod(num_tokens, self.block_size)
        if tail and state.tail_block_id is not None:
            if self._is_scheduling:
                self._save_tail(state.tail_block_id, self.host_pool.block_ids(request.request_id)[num_full])
            else:
                # NOTE: vLLM resets its prefix cache next, which fails while a block is in use: nothing is copied.
                num_tokens -= tail
        self.host_pool.preempt(request.request_id, num_tokens)

    def _save_tail(self, device_id: int, host_id: int) -> None:
        """Have a block copied to the host and keep it until that is done.

        NOTE: a transfer into a block that vLLM has given to another request writes whenever it likes, perhaps before
        the device has come to the copy.
        """
        block = self.block_pool.blocks[device_id]
        self.block_pool.touch([block])
        self._tails.append((self._num_scheduled + 1, block))
        self.tail_saves.append((device_id, host_id))

    def _cut_long_sessions(self) -> None:
        """Shorten sessions that a turn has made too long for `max_model_len`: that turn ends with its first token.

        NOTE: vLLM checks the length of a turn alone. It schedules the rest of a longer session as a whole, beyond
        the blocks that it gives to any request.
        """
        for request_id in self.sessions:
            request = self.requests[request_id]
            if request.status == RequestStatus.WAITING and request.num_tokens >= self.max_model_len:
                logger.warning(
                    "Session %s has %d tokens, and at most %d leave room for an answer (--max-model-len %d): its last "
                    "turn is cut.",
                    request_id,
                    request.num_tokens,
                    self.max_model_len - 1,
                    self.max_model_len,
                )
                cut_session(request, self.max_model_len - 1, self.block_pool.hash_block_size)


def register_hot_block_manager() -> None:
    """Tell vLLM which manager a `HotBufferSpec` group has."""
    # NOTE: the registry takes any entry for "the built-ins are registered", so these come first.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(HotBufferSpec, HotBlockManager, uniform_type_base_spec=HotBufferSpec)

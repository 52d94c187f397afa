"""Events that tell routers which prefixes the host pool holds (vLLM's `--kv-events-config`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import KVCacheSpecKind

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


GROUP = 0  # NOTE: vllm-router looks for a prompt's prefix among the blocks of this group alone.


class HostPoolEvents:
    """Collects vLLM's events about published host blocks: `BlockStored` and `BlockRemoved`, with medium "CPU".

    A block is reported once, with a request that has its tokens, or again if a request asks for it. The removal of a
    block that was reported is reported, too. A prefix that came from a tier is therefore reported when a request is
    admitted with it.

    vLLM's events about its device blocks are switched off. A request finds a prefix only as far as the host pool has
    it, so these events would tell routers of prefixes that nobody finds.

    Args:
        block_size: tokens per block.
        is_mla: True if these layers are MLA layers.
        block_pool: vLLM's pool of device blocks.

    Attributes:
        pending: events since the last `take`, in their order.
    """

    def __init__(self, block_size: int, is_mla: bool, block_pool: BlockPool):
        self.block_size = block_size
        self.kind = KVCacheSpecKind.MLA_ATTENTION if is_mla else KVCacheSpecKind.FULL_ATTENTION
        self.pending: list[KVCacheEvent] = []
        self._reported: set[Hashable] = set()  # hashes
        block_pool.enable_kv_cache_events = False

    def stored(self, request: Request, indices: Iterable[int]) -> None:
        """Report that blocks of a request are published.

        Args:
            request: the request; with `kv_cache_report_mode` "full", blocks that were reported are reported again.
            indices: numbers of the blocks in the request, ascending.
        """
        hashes, reports_all = request.block_hashes, request.kv_cache_report_mode == "full"
        new = [index for index in indices if reports_all or hashes[index] not in self._reported]
        self._reported.update(hashes[index] for index in new)
        self.pending.extend(self._stored(request, run.start, run.stop) for run in _runs(new))

    def removed(self, block_hash: Hashable) -> None:
        """Report that a block is published no longer."""
        if block_hash not in self._reported:
            return
        self._reported.remove(block_hash)
        if not (self.pending and isinstance(self.pending[-1], BlockRemoved)):
            self.pending.append(BlockRemoved([], MEDIUM_CPU, GROUP, "LOCAL"))
        self.pending[-1].block_hashes.append(maybe_convert_block_hash(block_hash))

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call, in their order."""
        events, self.pending = self.pending, []
        return events

    def _stored(self, request: Request, first: int, last: int) -> BlockStored:
        hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes[max(first - 1, 0) : last]]
        start, end = first * self.block_size, last * self.block_size
        # NOTE: with a connector, a block's hash covers no tokens behind the block, also in vLLM 0.33.
        extra_keys, mm_index = [], 0
        for begin in range(start, end, self.block_size):
            keys, mm_index = generate_block_hash_extra_keys(request, begin, begin + self.block_size, mm_index)
            extra_keys.append(keys)
        return BlockStored(
            block_hashes=hashes[1:] if first else hashes,
            parent_block_hash=hashes[0] if first else None,
            token_ids=request.all_token_ids[start:end],
            block_size=self.block_size,
            lora_id=request.lora_request.adapter_id if request.lora_request else None,
            medium=MEDIUM_CPU,
            lora_name=request.lora_request.name if request.lora_request else None,
            extra_keys=to_event_extra_keys(extra_keys),
            group_idx=GROUP,
            kv_cache_spec_kind=self.kind.value,
            locality="LOCAL",
            session_id=request.session_id,
        )


def _runs(numbers: list[int]) -> Iterator[range]:
    """Divide ascending numbers into runs of consecutive ones."""
    start = 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            yield range(numbers[start], numbers[stop - 1] + 1)
            start = stop

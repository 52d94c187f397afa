"""A router that follows an engine's KV cache events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from .checks import check

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch


class Router:
    """Knows which blocks an engine's host pool holds, by what the engine has published.

    Args:
        hasher: hash of a block by its parent's hash, its tokens and its extra keys.

    Attributes:
        may_repeat: True if blocks that are known may be told again.
        blocks: hashes of the blocks, as events name them.
    """

    def __init__(self, hasher: Callable[[Any, Any, Any], bytes]):
        self.hasher, self.may_repeat, self.blocks = hasher, False, set[Any]()
        self._hashes = dict[Any, bytes]()  # name in events -> hash, also of blocks that are gone: children may stay

    def publish(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            check(getattr(event, "medium", None) == MEDIUM_CPU, f"{event} is about other memory")
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                check(self.blocks.issuperset(event.block_hashes), f"{event} removes a block that was not stored")
                self.blocks.difference_update(event.block_hashes)

    def told(self, pending: Iterable[KVCacheEvent]) -> set[Any]:
        """Return the blocks that are known once some more events have been published."""
        found = set(self.blocks)
        for event in pending:
            (found.update if isinstance(event, BlockStored) else found.difference_update)(event.block_hashes)
        return found

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        check(len(event.token_ids) == size * len(event.block_hashes), f"{event} has another number of tokens")
        check(parent is None or parent in self._hashes, f"{event} follows an unknown block")
        for index, name in enumerate(event.block_hashes):
            tokens = event.token_ids[index * size : (index + 1) * size]
            parent_hash = None if parent is None else self._hashes[parent]
            self._hashes[name] = self.hasher(parent_hash, tokens, event.extra_keys[index])
            check(name == maybe_convert_block_hash(self._hashes[name]), f"{event} has wrong tokens")
            check(self.may_repeat or name not in self.blocks, f"{event} stores a block twice")
            self.blocks.add(name)
            parent = name

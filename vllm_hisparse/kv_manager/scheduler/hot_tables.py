"""Which hot blocks the worker knows of each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class HotTables:
    """Finds out what to tell the worker when hot blocks come and go.

    Args:
        blocks: all hot blocks of a request, by its id.

    Attributes:
        changed: ids of requests that the worker may have to be told of.
    """

    def __init__(self, blocks: Callable[[str], list[KVCacheBlock]]):
        self._blocks = blocks
        self._sent: dict[str, list[int]] = {}
        self.changed: dict[str, None] = {}

    def __len__(self) -> int:
        """Requests that something is known of."""
        return len(self._sent.keys() | self.changed.keys())

    def change(self, request_id: str) -> None:
        """A request has got or lost hot blocks, or the worker hears of it for the first time."""
        self.changed[request_id] = None

    def forget(self, request_id: str) -> None:
        """The worker forgets a request."""
        self.changed.pop(request_id, None)
        self._sent.pop(request_id, None)

    def take_changes(self, handles: Mapping[str, int]) -> dict[int, tuple[int, list[int]]]:
        """Handle -> index of the first block that the worker does not know, and the blocks from there on.

        NOTE: also of requests that do not run: another one may get what they lost.

        Args:
            handles: of the requests that the worker knows, by their ids.
        """
        changed, self.changed = self.changed, {}
        found = {}
        for request_id in changed:
            block_ids, sent = [block.block_id for block in self._blocks(request_id)], self._sent.get(request_id, [])
            if request_id not in handles or block_ids == sent:
                continue
            pairs = enumerate(zip(block_ids, sent, strict=False))
            first = next((index for index, (new, old) in pairs if new != old), min(len(block_ids), len(sent)))
            found[handles[request_id]] = first, block_ids[first:]
            self._sent[request_id] = block_ids
        return found

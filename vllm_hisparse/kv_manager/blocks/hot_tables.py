"""Which device blocks the worker knows of each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

Changes = dict[int, tuple[int, list[int]]]


class HotTables:
    """Finds out what to tell the worker when hot blocks and state blocks come and go.

    Args:
        hot_blocks: all hot blocks of a request, by its id.
        state_blocks: its state blocks.

    Attributes:
        changed: ids of requests that the worker may have to be told of.
    """

    def __init__(
        self, hot_blocks: Callable[[str], list[KVCacheBlock]], state_blocks: Callable[[str], list[KVCacheBlock]]
    ):
        self._kinds = hot_blocks, state_blocks
        self._sent: dict[str, tuple[list[int], list[int]]] = {}
        self.changed: dict[str, None] = {}

    def __len__(self) -> int:
        """Requests that something is known of."""
        return len(self._sent.keys() | self.changed.keys())

    def change(self, request_id: str) -> None:
        """A request has got or lost blocks, or the worker hears of it for the first time."""
        self.changed[request_id] = None

    def forget(self, request_id: str) -> None:
        """The worker forgets a request."""
        self.changed.pop(request_id, None)
        self._sent.pop(request_id, None)

    def take_changes(self, handles: Mapping[str, int]) -> tuple[Changes, Changes]:
        """Of hot blocks, and of state blocks: handle -> index of the first block that the worker does not know, and the
        blocks from there on.

        NOTE: also of requests that do not run: another one may get what they lost.

        Args:
            handles: of the requests that the worker knows, by their ids.
        """
        changed, self.changed = self.changed, {}
        found: tuple[Changes, Changes] = {}, {}
        for request_id in changed:
            if request_id not in handles:
                continue
            sent = self._sent.get(request_id, ([], []))
            self._sent[request_id] = now = tuple([block.block_id for block in kind(request_id)] for kind in self._kinds)
            for changes, new, old in zip(found, now, sent, strict=True):
                if new != old:
                    first = _first_difference(new, old)
                    changes[handles[request_id]] = first, new[first:]
        return found


def _first_difference(new: list[int], old: list[int]) -> int:
    pairs = enumerate(zip(new, old, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(new), len(old)))

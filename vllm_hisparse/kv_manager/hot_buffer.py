"""Hot buffer: residency, recency, host block tables and statistics of the running requests (worker side)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hisparse.ops import swap_in
from vllm_hisparse.ops.swap_in import Residency, Resolved


@dataclass(frozen=True)
class DecodeBatch:
    """The requests that decode one token in this step.

    Attributes:
        tokens: [batch] int64 row of each request's token in the step's token batch.
        requests: [batch] int64 rows of the hot buffer's state.
        newest: [batch] int64 position of each request's token.
        hot_tables: [batch, hot blocks per request] int32 device blocks.
        host_tables: [batch, blocks] int32 host blocks.
        step: recency of this step.
    """

    tokens: torch.Tensor
    requests: torch.Tensor
    newest: torch.Tensor
    hot_tables: torch.Tensor
    host_tables: torch.Tensor
    step: int


class HotBuffer:
    """State of all hot buffers. A request has one row, found by its handle (its first hot block).

    Args:
        num_requests: requests that may run at once.
        num_slots: hot rows per request and layer, `device_buffer_size`.
        num_layers: layers with a hot buffer.
        max_blocks: host blocks of the longest request.
        refresh_hits: True for LRU eviction, False for FIFO.
    """

    def __init__(self, num_requests: int, num_slots: int, num_layers: int, max_blocks: int, refresh_hits: bool):
        self.num_slots, self.refresh_hits = num_slots, refresh_hits
        self.residency = [
            Residency(
                torch.full((num_requests, num_slots), -1, dtype=torch.int32),
                torch.zeros((num_requests, num_slots), dtype=torch.int32),
            )
            for _ in range(num_layers)
        ]
        self.host_tables = torch.full((num_requests, max_blocks), -1, dtype=torch.int32)
        self.num_hits = torch.zeros(num_requests, dtype=torch.int64)
        self.num_misses = torch.zeros(num_requests, dtype=torch.int64)
        self.step = 0
        self.decode_batch: DecodeBatch | None = None  # of the running step; its newest rows are not on the host yet
        self._new_counts = torch.zeros(2, dtype=torch.int64)
        self._free_rows = list(reversed(range(num_requests)))
        self._row_by_handle: dict[int, int] = {}

    def extend_table(self, handle: int, first: int, host_ids: Sequence[int]) -> None:
        """Append host blocks to a request's table; `first` 0 starts a request with an empty buffer."""
        if first == 0:
            self._row_by_handle[handle] = self._free_rows.pop()
        row = self._row_by_handle[handle]
        self.host_tables[row, first : first + len(host_ids)] = torch.tensor(host_ids, dtype=torch.int32)

    def release(self, handle: int) -> tuple[int, int]:
        """Forget a request; returns its hits and misses."""
        row = self._row_by_handle.pop(handle)
        counts = int(self.num_hits[row]), int(self.num_misses[row])
        for residency in self.residency:
            residency.positions[row] = -1
            residency.last_used[row] = 0
        self.host_tables[row] = -1
        self.num_hits[row] = self.num_misses[row] = 0
        self._free_rows.append(row)
        return counts

    def rows_of(self, handles: Sequence[int]) -> list[int]:
        """State row of each handle; -1 for block tables of no request (profiling, padding)."""
        return [self._row_by_handle.get(handle, -1) for handle in handles]

    def next_step(self) -> int:
        """Begin a step; returns its recency."""
        self.step += 1
        return self.step

    def admit(self, layer: int, batch: DecodeBatch) -> torch.Tensor:
        """Make room for the newest rows; returns their slots, [batch] int64."""
        swap_in.admit_newest(self.residency[layer], batch.requests, batch.newest, batch.step)
        return swap_in.newest_slot(batch.newest, self.num_slots)

    def admit_prefill(self, layer: int, row: int, first: int, last: int, step: int) -> int:
        """Record that positions [first, last) were written to the slots of the same number; returns how many fit."""
        num_rows = max(min(last, self.num_slots) - first, 0)
        positions = torch.arange(first, first + num_rows, dtype=torch.int32)
        self.residency[layer].positions[row, first : first + num_rows] = positions
        self.residency[layer].last_used[row, first : first + num_rows] = step
        return num_rows

    def resolve(self, layer: int, batch: DecodeBatch, top_k: torch.Tensor) -> Resolved:
        """Resolve one layer's selection and count hits and misses."""
        resolved = swap_in.resolve(
            self.residency[layer], batch.requests, top_k, batch.newest, batch.step, self.refresh_hits
        )
        self.num_hits[batch.requests] += resolved.num_hits
        self.num_misses[batch.requests] += resolved.num_misses
        self._new_counts += torch.stack((resolved.num_hits.sum(), resolved.num_misses.sum()))
        return resolved

    def take_counts(self) -> tuple[int, int]:
        """Hits and misses of all requests since the last call."""
        hits, misses = self._new_counts.tolist()
        self._new_counts.zero_()
        return hits, misses

    def check_integrity(self) -> None:
        """Check that every row is free or owned and that no position is hot twice.

        Raises:
            AssertionError: the first violation.
        """
        owned = list(self._row_by_handle.values())
        assert sorted(owned + self._free_rows) == list(range(len(self.num_hits))), "a row is lost or owned twice"
        for residency in self.residency:
            for row in owned:
                hot = residency.positions[row][residency.positions[row] >= 0]
                assert len(hot.unique()) == len(hot), "a position is hot twice"
            assert (residency.positions[self._free_rows] == -1).all(), "a free row holds positions"

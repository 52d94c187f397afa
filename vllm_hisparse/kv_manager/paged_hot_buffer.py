"""Hot buffer of a dense model: one selection per KV head, in units of an algorithm, with the algorithm's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm
from vllm_hisparse.kv_manager.hot_buffer import HotBuffer, HotBufferShape
from vllm_hisparse.ops.base import HotRows, Resolved


@dataclass(frozen=True)
class Represent:
    """Keys that the algorithm has yet to see: positions [first, last) of a request, read from the host."""

    row: int
    first: int
    last: int


class PagedHotBuffer(HotBuffer):
    """A `HotBuffer` whose rows are units of one KV head, and what the algorithm knows of each request.

    To the swap-in operations every KV head is a request of its own and every unit a row: head h of request row r has
    state row `r * num_heads + h`, its part of device block b is block `b * head_stride + h`, of host block b block
    `b * num_heads + h`. Units replace tokens in lengths, positions and block sizes.

    Representations follow the host pool: whatever brought a request's KV there - prefill, a transfer, a prefix hit, a
    resumption - the positions not represented yet are read from the host before they are needed.

    Args:
        algorithm: selects the units.
        shape: sizes by request and token.
        head_stride: parts of KV heads from one device block to the next.
        device: where the hot rows are.
        refresh_hits: True for LRU eviction, False for FIFO.

    Attributes:
        states: the algorithm's state of each layer.
    """

    def __init__(
        self,
        algorithm: SparseAlgorithm,
        shape: HotBufferShape,
        head_stride: int,
        device: torch.device,
        refresh_hits: bool,
    ):
        per_unit, num_heads = algorithm.tokens_per_unit, algorithm.shape.num_kv_heads
        by_head = HotBufferShape(
            num_requests=shape.num_requests * num_heads,
            num_slots=shape.num_slots // per_unit,
            num_layers=shape.num_layers,
            top_k=algorithm.num_selected,
            max_blocks=shape.max_blocks,
            block_size=shape.block_size // per_unit,
            num_device_blocks=shape.num_device_blocks * head_stride,
        )
        super().__init__(by_head, device, refresh_hits)
        self.algorithm, self.num_heads, self.head_stride = algorithm, num_heads, head_stride
        self.num_requests = shape.num_requests
        self.states = [algorithm.allocate_state(shape.num_requests, device) for _ in range(shape.num_layers)]
        self._heads = torch.arange(num_heads, device=device)
        self._num_represented = [-1] * shape.num_requests  # -1: not even begun
        self._last_decoded = [-1] * shape.num_requests
        self._arrived: list[tuple[int, int, int]] = []

    def extend_table(self, handle: int, first: int, host_ids: Sequence[int]) -> None:
        for head in range(self.num_heads):
            by_head = [host_id * self.num_heads + head for host_id in host_ids]
            super().extend_table(handle * self.head_stride + head, first, by_head)
        if first == 0:
            row = self._row_by_handle[handle * self.head_stride] // self.num_heads
            self._num_represented[row] = self._last_decoded[row] = -1

    def release(self, handle: int) -> None:
        # NOTE: last head first, so that the next request's heads find their rows in order.
        for head in reversed(range(self.num_heads)):
            super().release(handle * self.head_stride + head)

    def take_released(self) -> list[tuple[int, int, int]]:
        self._arrived += super().take_released()
        taken, num_heads = [], self.num_heads
        while len(self._arrived) >= num_heads:
            heads, self._arrived = self._arrived[:num_heads], self._arrived[num_heads:]
            handles, hits, misses = zip(*heads, strict=True)
            taken.append((handles[0] // self.head_stride, sum(hits), sum(misses)))
        return taken

    def request_rows(self, hot_tables: torch.Tensor) -> torch.Tensor:
        """Row of each request, [batch] int64; `num_requests` where there is none."""
        return self.rows_of(hot_tables * self.head_stride) // self.num_heads

    def host_blocks(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """Host block of each position of a request: int64, as `positions`."""
        block_size = self.shape.block_size * self.algorithm.tokens_per_unit
        return self.host_tables[row * self.num_heads, positions // block_size].long() // self.num_heads

    def host_units(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Flat host unit that holds each KV head's part of a position: [batch, num_heads] int64.

        Args:
            rows, positions: [batch] int64, one position of each request.
        """
        units, per_block = positions // self.algorithm.tokens_per_unit, self.shape.block_size
        tables = self.host_tables[rows[:, None] * self.num_heads + self._heads]
        blocks = tables.gather(2, (units // per_block)[:, None, None].expand(-1, self.num_heads, 1))[..., 0]
        return blocks.long() * per_block + (units % per_block)[:, None]

    def begin_unit_decode(self, hot_tables: torch.Tensor, positions: torch.Tensor, hot: HotRows) -> None:
        """Say which requests decode one token in this step.

        Args:
            hot_tables: [batch, hot blocks per request] int32.
            positions: [batch] int64 position of each request's token.
            hot: hot units of any layer.
        """
        by_head = (hot_tables[:, None] * self.head_stride + self._heads[:, None]).flatten(0, 1).int()
        num_units = (positions // self.algorithm.tokens_per_unit + 1).repeat_interleave(self.num_heads)
        self.begin_decode(by_head, num_units.int(), len(by_head), hot)

    def resolve(self, layer: int, units: torch.Tensor, hot: HotRows) -> Resolved:
        """`swap_in` without the copies, which depend on how the host orders a unit.

        Args:
            layer: index of the layer.
            units: [batch * num_heads, k] int32 of the decoding requests.
            hot: hot units of the layer.
        """
        assert self.decode_tables is not None
        self.ops.resolve(self.residency[layer], self.decode_tables, units, hot, self.counts, self.resolved)
        return self.resolved

    def write_back(self, hot: Sequence[HotRows], host_rows: Sequence[torch.Tensor]) -> int:
        """Nothing to copy: new rows are written to the host first."""
        self.decode_tables = None
        return 0

    def represent_prefill(self, row: int, last: int) -> list[Represent]:
        """What to represent now that positions [.., last) of a request are on the host."""
        return [] if self.algorithm.needs_whole_prompt else self._represent(row, last)

    def represent_decode(self, row: int, position: int) -> list[Represent]:
        """What to represent before the token at `position` is; the caller represents that one."""
        missing = self._represent(row, position)
        self._num_represented[row] = position + 1
        return missing

    def continues(self, row: int, position: int) -> bool:
        """Whether the newest unit is in the buffer up to `position`; from now on it is."""
        before, self._last_decoded[row] = self._last_decoded[row], position
        return position % self.algorithm.tokens_per_unit == 0 or before == position - 1

    def check_integrity(self) -> None:
        super().check_integrity()
        for handle, row in self._row_by_handle.items():
            assert row % self.num_heads == handle % self.head_stride, "a KV head is in the row of another"

    def _represent(self, row: int, last: int) -> list[Represent]:
        first, self._num_represented[row] = self._num_represented[row], last
        return [Represent(row, max(first, 0), last)] if first < last else []

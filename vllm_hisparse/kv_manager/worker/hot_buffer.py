"""Hot buffer: residency, host block tables and statistics of the running requests (worker side)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hisparse.kv_manager.worker.hit_counts import HitCounts
from vllm_hisparse.ops.base import HotRows, Residency, Resolved, StepTables
from vllm_hisparse.ops.registry import swap_in_ops


@dataclass(frozen=True)
class HotBufferShape:
    """Sizes of all hot buffers.

    Attributes:
        num_requests: requests that can have hot blocks at once.
        max_batch: selections of a step in a layer, padding included: requests, or their KV heads.
        num_slots: hot rows per request and layer, `device_buffer_size`; the newest-row slot is not counted.
        num_layers: layers with a hot buffer.
        top_k: entries of a selection.
        max_blocks: host blocks of the longest request.
        block_size: tokens of a host block.
        num_device_blocks: blocks of vLLM's device pool, or parts of them.
    """

    num_requests: int
    max_batch: int
    num_slots: int
    num_layers: int
    top_k: int
    max_blocks: int
    block_size: int
    num_device_blocks: int


@dataclass(frozen=True)
class Seeds:
    """Units of a request that become hot when a chunk of its prompt is computed: the latest whole ones that fit.

    Attributes:
        rows: [num_heads] int64 rows of the hot buffer's state.
        first, last: the units, half-open.
        hot_rows: [num_heads, last - first] int64 flat hot row of each.
    """

    rows: torch.Tensor
    first: int
    last: int
    hot_rows: torch.Tensor

    @property
    def units(self) -> torch.Tensor:
        """[last - first] int64."""
        return torch.arange(self.first, self.last, device=self.hot_rows.device)


class HotBuffer:
    """State of all hot buffers: what those of both model families share. A request has as many neighbouring rows as
    selections, found by its handle (its first hot block).

    Everything a step reads lies in static tensors, so that a CUDA graph may replay it; changes are enqueued on the
    current stream and never wait for the device.

    Args:
        shape: sizes.
        device: where the hot rows are.
        num_heads: selections of a request in a layer: KV heads that select for themselves.
        head_stride: parts of KV heads from one device block to the next; head h's part of block b has number `b *
            head_stride + h`, its part of host block b number `b * num_heads + h`.
        tokens_per_unit: tokens of a hot row.

    Attributes:
        ops: swap-in operations of the device.
        num_rows: rows of all requests.
        host_tables: [num_rows + 1, max_blocks] int32 parts of host blocks, -1 beyond. The last row is of no request:
            steps that vLLM runs without requests (profiling, padding) use it.
        state_rows: [num_device_blocks] int32 row of each handle's part, -1 elsewhere.
        counts: hits and misses.
        staged_bytes: of prompts' history, copied from the host for their next chunks since `take_staged_bytes`.
        newest_rows: [max_batch] int64 flat hot row of each decoding request's newest position, -1 for padding.
        resolved: output of the last `swap_in`.
        decode_tables: of the running step's decoding requests.
    """

    def __init__(
        self,
        shape: HotBufferShape,
        device: torch.device,
        num_heads: int = 1,
        head_stride: int = 1,
        tokens_per_unit: int = 1,
    ):
        self.shape, self.num_slots = shape, shape.num_slots
        self.num_heads, self.head_stride, self.num_rows = num_heads, head_stride, shape.num_requests * num_heads
        self.tokens_per_unit = tokens_per_unit
        self.ops = swap_in_ops(device)
        self.pin_memory = device.type != "cpu"
        self._slot_order = torch.arange(shape.num_slots, dtype=torch.int32, device=device)
        self._row_numbers = torch.arange(self.num_rows, dtype=torch.int32, device=device)
        self._slots = self._slot_order.repeat(shape.num_layers, self.num_rows + 1, 1)
        self._positions = torch.full_like(self._slots, -1)
        self.residency = [Residency(self._slots[i], self._positions[i]) for i in range(shape.num_layers)]
        self.host_tables = torch.full((self.num_rows + 1, shape.max_blocks), -1, dtype=torch.int32, device=device)
        self.state_rows = torch.full((shape.num_device_blocks,), -1, dtype=torch.int32, device=device)
        self.counts = HitCounts(self.num_rows, num_heads, device)
        self.staged_bytes = 0
        self.newest_rows = torch.full((shape.max_batch,), -1, dtype=torch.int64, device=device)
        self.resolved = Resolved.allocate(shape.max_batch, shape.top_k, device)
        self.decode_tables: StepTables | None = None
        self._free_rows = list(reversed(range(shape.num_requests)))
        self._row_by_handle: dict[int, int] = {}
        self._staging: torch.Tensor | None = None

    def extend_table(self, handle: int, first: int, host_ids: Sequence[int]) -> None:
        """Append host blocks to a request's table; `first` 0 starts a request with an empty buffer."""
        if first == 0:
            row = self._row_by_handle[handle] = self._free_rows.pop()
            self.state_rows[self._parts(handle)] = self._row_numbers[self.rows_of_heads(row)]
        rows = self.rows_of_heads(self.row_of(handle))
        heads = torch.arange(self.num_heads, dtype=torch.int32)
        ids = torch.tensor(host_ids, dtype=torch.int32) * self.num_heads + heads[:, None]
        ids = ids.pin_memory() if self.pin_memory else ids
        self.host_tables[rows, first : first + len(host_ids)].copy_(ids, non_blocking=True)

    def release(self, handle: int) -> None:
        """Forget a request; `counts` reports its hits and misses."""
        row = self._row_by_handle.pop(handle)
        rows = self.rows_of_heads(row)
        self.counts.release(handle, row, rows)
        self.state_rows[self._parts(handle)] = -1
        self._empty(row)
        self.host_tables[rows] = -1
        self._free_rows.append(row)

    def row_of(self, handle: int) -> int:
        """Row of a request among the requests, below `num_requests`."""
        return self._row_by_handle[handle]

    def rows_of_heads(self, row: int) -> slice:
        """Rows of a request's heads.

        Args:
            row: of the request, from `row_of`.
        """
        return slice(row * self.num_heads, (row + 1) * self.num_heads)

    def _parts(self, handle: int) -> slice:
        return slice(handle * self.head_stride, handle * self.head_stride + self.num_heads)

    def _empty(self, row: int) -> None:
        """Forget what a request has hot."""
        rows = self.rows_of_heads(row)
        self._slots[:, rows], self._positions[:, rows] = self._slot_order, -1

    def find_newest_rows(self, hot: HotRows) -> None:
        """Set `newest_rows`.

        Args:
            hot: hot rows of any layer.
        """
        assert self.decode_tables is not None
        self.ops.newest_row_ids(self.decode_tables, self.num_slots, hot, self.newest_rows)

    def swap_in(self, layer: int, top_k: torch.Tensor, host_rows: torch.Tensor, hot: HotRows) -> Resolved:
        """Make one layer's selection hot.

        Args:
            layer: index of the layer.
            top_k: [batch, top_k] int32 of the decoding requests, padding included.
            host_rows: [num_host_rows, row elements] of the layer.
            hot: hot rows of the layer.
        """
        assert self.decode_tables is not None
        self.ops.swap_in(
            self.residency[layer], self.decode_tables, top_k, host_rows, hot, self.counts.by_row, self.resolved
        )
        return self.resolved

    def rows_of(self, hot_tables: torch.Tensor) -> torch.Tensor:
        """State row of each hot block table, [batch] int64; the row of no request where there is none."""
        rows = self.state_rows[hot_tables[:, 0].long()].long()
        return torch.where(rows < 0, self.num_rows, rows)

    def seeds(self, hot_table: torch.Tensor, num_tokens: int, hot: HotRows) -> Seeds:
        """What becomes hot when a chunk of a prompt is computed, whatever brought the tokens before it.

        Args:
            hot_table: [1, hot blocks per request] int32 of the request.
            num_tokens: of the request, the chunk's included.
            hot: hot rows of any layer.
        """
        heads, last_unit = self._row_numbers[: self.num_heads], num_tokens // self.tokens_per_unit
        first_unit = max(last_unit - self.num_slots, 0)
        tables = hot_table * self.head_stride + heads[:, None]
        slots = torch.arange(first_unit, last_unit, device=heads.device) % self.num_slots
        return Seeds(self.rows_of(tables), first_unit, last_unit, hot.flat_row_ids(tables, slots))

    def seed(self, layer: int, seeds: Seeds) -> None:
        """Record seeds whose rows have been written: unit u is in slot `u % num_slots`. They fill all slots, the last
        one used last, or all units fit and entries keep their places (`Residency`).

        Args:
            layer: index of the layer.
            seeds: from `seeds`.
        """
        units = seeds.units.int()
        self._positions[layer, seeds.rows, : len(units)] = units
        if seeds.first > 0:
            self._slots[layer, seeds.rows] = units % self.num_slots

    def staging(self, hot: HotRows) -> torch.Tensor:
        """Device memory for the longest request in one layer, shared: [max_blocks, block_size, row elements].

        Args:
            hot: hot rows of any layer, for dtype and width.
        """
        if self._staging is None:
            size = (self.shape.max_blocks, self.shape.block_size, hot.rows.shape[1])
            self._staging = hot.rows.new_zeros(size)
        return self._staging

    def take_staged_bytes(self) -> int:
        """`staged_bytes`, which starts from 0 again."""
        taken, self.staged_bytes = self.staged_bytes, 0
        return taken

    def check_integrity(self) -> None:
        """Check that every row is free or owned and that no position or slot occurs twice. Waits for the device.

        Raises:
            AssertionError: the first violation.
        """
        owned = list(self._row_by_handle.values())
        assert sorted(owned + self._free_rows) == list(range(self.shape.num_requests)), "a row is lost or owned twice"
        for handle, row in self._row_by_handle.items():
            rows = self.state_rows[self._parts(handle)]
            assert torch.equal(rows, self._row_numbers[self.rows_of_heads(row)]), "a head is in the row of another"
        for residency in self.residency:
            assert (residency.slots.sort(-1).values == self._slot_order).all(), "a slot is lost"
            for row in owned:
                for positions in residency.positions[self.rows_of_heads(row)]:
                    hot = positions[positions >= 0]
                    assert len(hot.unique()) == len(hot), "a position is hot twice"
            for row in self._free_rows:
                assert (residency.positions[self.rows_of_heads(row)] == -1).all(), "a free row holds positions"

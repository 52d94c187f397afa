"""Hot buffer: keeps track of the rows of running requests that are on the device (worker side)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch

from vllm_hisparse.kv_manager.rows.decode_step import DecodeStep, LayerRows, StepShape
from vllm_hisparse.kv_manager.rows.hit_counts import HitCounts
from vllm_hisparse.kv_manager.rows.request_table import BlockTableChanges, HotBlockChanges, RequestTable
from vllm_hisparse.kv_manager.rows.residency_table import ResidencyTable
from vllm_hisparse.kv_manager.rows.row_classes import RowClasses
from vllm_hisparse.kv_manager.rows.swap_in import SwapIn
from vllm_hisparse.layout import RowPlace
from vllm_hisparse.ops.base import HotRows, SwapInOps
from vllm_hisparse.ops.kv_heads import KVHeads
from vllm_hisparse.ops.registry import swap_in_ops

TAKES_PER_SNAPSHOT = 16  # vLLM asks for counts in every step, and a copy from a device costs host time
MIN_STAGED_ROWS = 256  # NOTE: TensorRT-LLM's sparse MLA kernel may read so many rows from the start of any cache


@dataclass(frozen=True)
class HotBufferShape:
    """Sizes of all hot buffers, in requests and tokens.

    Attributes:
        num_requests: requests that can have hot blocks at once.
        max_batch: requests of a step, graph padding included.
        num_layers: layers with a hot buffer.
        top_k: tokens of a selection.
        max_blocks: host blocks of the longest request.
        block_size: tokens of a host block.
        num_device_blocks: blocks of vLLM's device pool.
        max_hot_blocks: hot blocks that a request can have.
        rows_per_hot_block: hot rows of a layer in a device block, if all layers have as many.
        max_query_len: tokens that a decoding request computes in a step: one and its drafts.
        state_columns: as in `RequestTable`.
        layer_rows: hot rows of each layer in a device block; (): `rows_per_hot_block`.
        places: place of each layer's rows in a device block, as in `RowClasses.of`.
        equal_rows: hot rows of each layer in a device block of a request that has equal rows; 0: none has.
    """

    num_requests: int
    max_batch: int
    num_layers: int
    top_k: int
    max_blocks: int
    block_size: int
    num_device_blocks: int
    max_hot_blocks: int
    rows_per_hot_block: int
    max_query_len: int = 1
    state_columns: Sequence[int] = ()
    layer_rows: tuple[int, ...] = ()
    places: tuple[RowPlace, ...] = ()
    equal_rows: int = 0

    @cached_property
    def classes(self) -> RowClasses:
        """The layers by their hot rows in a device block."""
        layer_rows = self.layer_rows or [self.rows_per_hot_block] * self.num_layers
        return RowClasses.of(layer_rows, self.equal_rows, self.places)

    @property
    def fewest_rows(self) -> int:
        """Hot rows in a device block of the layer that has the fewest."""
        return min(self.classes.rows_per_block)

    def holds_all(self, num_requests: int) -> bool:
        """Return True if `num_requests` of the longest sequences can all be hot as a whole."""
        longest = self.max_blocks * self.block_size
        return num_requests * longest <= self.num_device_blocks * (self.equal_rows or self.fewest_rows)


@dataclass(frozen=True)
class Seeds:
    """Units of a request that become hot when a chunk of its prompt is computed: the latest whole ones that fit.

    Attributes:
        seq_indices: [num_heads] int64 sequence indices.
        first, last: the units, half-open.
        hot_row_ids: [num_heads, last - first] int64 flat hot row of each unit in the first layer of the row class.
        moves: [num_heads, last - first] bool, True for units that are kept, in blocks that are divided equally among
            layers: `HotRows.equal_offset` is part of their row ids. None: no request has equal rows.
        entries: [num_heads, last - first] int64 entry of each unit in a residency.
        held: [num_heads, last - first] int32 unit that each entry holds from now on; -1 if there is no slot for it.
        stale_entries: [num_heads, n] int64 entries of hot rows that become empty.
    """

    seq_indices: torch.Tensor
    first: int
    last: int
    hot_row_ids: torch.Tensor
    moves: torch.Tensor | None
    entries: torch.Tensor
    held: torch.Tensor
    stale_entries: torch.Tensor

    @property
    def units(self) -> torch.Tensor:
        """The units: [last - first] int64."""
        return torch.arange(self.first, self.last, device=self.hot_row_ids.device)


class HotBuffer(ABC):
    """The hot buffers of all requests: tables, residency and counts, as far as both model families share them.

    The residency lies in static tensors, so that a CUDA graph may replay the kernels that change it. Changes by the
    host are enqueued on the current stream and never wait for the device.

    Args:
        shape: sizes.
        heads: KV heads that select for themselves.
        table: residency of all layers, on the device of the hot rows.
        selects: for each layer, True if it selects; False if it shares selection and residency with the last layer
            that does.
        ops: swap-in operations; None: those for the device.

    Attributes:
        ops: swap-in operations.
        classes: the layers by their hot rows of a KV head in a device block, in units.
        requests: the running requests.
        layers: rows of each layer, in order; `add_layer` fills it.
        residency: residency of each layer, in the table.
        selects: as in the arguments.
        counts: hits and misses.
        step: decoding requests of the running step.
    """

    step: DecodeStep

    def __init__(
        self,
        shape: HotBufferShape,
        heads: KVHeads,
        table: ResidencyTable,
        selects: Sequence[bool],
        ops: SwapInOps | None = None,
    ):
        self.shape, self.heads, self.device = shape, heads, table.entries[0].device
        self.table, self.residency, self.selects = table, table.layers, list(selects)
        device = self.device
        self.ops = ops or swap_in_ops(device)
        units_per_block = tuple(rows // heads.tokens_per_unit for rows in shape.classes.rows_per_block)
        self.classes = replace(shape.classes, rows_per_block=units_per_block)
        blocks = shape.max_blocks, shape.max_hot_blocks, self.classes, shape.num_device_blocks
        self.requests = RequestTable(shape.num_requests, *blocks, heads, device, shape.state_columns)
        self.layers: list[LayerRows] = []
        takes_per_snapshot = 1 if device.type == "cpu" else TAKES_PER_SNAPSHOT
        self.counts = HitCounts(shape.num_requests, heads, device, takes_per_snapshot)
        self._staged_bytes = 0
        self._staging: torch.Tensor | None = None

    def step_shape(self, num_selected: int) -> StepShape:
        """Sizes of a step.

        Args:
            num_selected: units of a selection.
        """
        heads, shape = self.heads, self.shape
        units_per_block = shape.block_size // heads.tokens_per_unit
        max_batch = shape.max_batch * heads.num_heads
        return StepShape(max_batch, num_selected, units_per_block, shape.max_query_len)

    def add_layer(self, hot: HotRows, host: torch.Tensor) -> None:
        """Add the rows of the next layer; called once per layer, in order.

        Args:
            hot: hot rows on the device.
            host: [num_host_rows, row elements] rows in the host pool.
        """
        self.layers.append(LayerRows(hot, host))

    def extend_host_block_tables(self, changes: BlockTableChanges) -> None:
        """Append host blocks to requests' tables; a change from index 0 on starts a request without hot blocks."""
        for first_hot_block_id, (first, _) in changes.items():
            if first == 0:
                self._start(self.requests.add(first_hot_block_id))
        self.requests.extend(changes)

    def change_hot_block_tables(
        self, changes: BlockTableChanges, equal_rows: Mapping[int, bool] = MappingProxyType({})
    ) -> None:
        """Set requests' hot blocks. Rows of blocks that a request did not have before become empty.

        All rows of a request become empty if its blocks are divided in another way than before. If the request has lost
        a block, or has another one in its place, the rows of its last step become empty, because the next step may
        compute these positions again (drafts were rejected, or a session's turn drops tokens), and because the last
        units may be partial.

        Args:
            changes: first hot block id -> change, as in `RequestTable.change_hot`.
            equal_rows: requests whose blocks are divided in another way, as in `RequestTable.change_hot`.
        """
        if changes:
            self._change_hot_blocks(self.requests.change_hot(changes, equal_rows))

    def _change_hot_blocks(self, changed: HotBlockChanges) -> None:
        """Make rows empty as `change_hot_block_tables` describes; the tables themselves have been changed already."""
        if len(changed.added):
            self.table.empty(changed.added)
        tables, stride = self.requests.hot_block_tables, self.heads.head_stride
        for entries, moved in zip(self.table.entries, changed.moved, strict=True):
            if len(moved.seqs):
                # NOTE: no layer holds a position that the request's last step did not compute.
                self.ops.empty_latest(entries, tables, stride, moved, self.shape.max_query_len)

    def release(self, first_hot_block_id: int) -> None:
        """Forget a request; `counts` reports its hits and misses."""
        request_index = self.requests.remove(first_hot_block_id)
        self.counts.release(first_hot_block_id, request_index)

    @abstractmethod
    def _start(self, request_index: int) -> None:
        """Prepare for a request that has no rows on the device."""

    def _empty(self, request_index: int) -> None:
        """Make all hot rows of a request empty."""
        self.table.empty(self._hot_blocks_of(request_index))

    def _hot_blocks_of(self, request_index: int) -> torch.Tensor:
        """Hot block ids of a request: [n] int64, on the device."""
        return self.requests.to_device(torch.from_numpy(self.requests.hot_blocks_of(request_index)))

    @abstractmethod
    def swap_in_of(self, layer_index: int) -> SwapIn:
        """Choose the way in which a layer makes its selection hot."""

    def seeds(self, first_hot_block_id: torch.Tensor, num_tokens: int, row_class: int = 0) -> Seeds:
        """Choose the units that become hot when a chunk of a prompt is computed.

        If the next token would still fit into the request's hot blocks (`SwapInOps`), unit u goes to slot u. If not,
        the latest units become hot, as many as there are slots, and unit u goes to slot u modulo the number of slots.
        It does not matter how the tokens before the chunk were computed or loaded.

        NOTE: only the device knows how many hot blocks this request has, so the host computes with the largest number
        of hot blocks of any request.

        Args:
            first_hot_block_id: [1] int32.
            num_tokens: tokens of the request, including the chunk.
            row_class: row class of the layers in which the units become hot.
        """
        hot, num_new = self.layers[self.classes.layers[row_class][0]].hot, self.shape.max_query_len
        last_unit, most_blocks = num_tokens // self.heads.tokens_per_unit, int(self.requests.num_hot_blocks.max())
        first_unit = max(last_unit - max(most_blocks * hot.entries_per_block - num_new, 0), 0)
        seqs = self.requests.find_seqs(first_hot_block_id)
        tables, has_equal_rows = self.requests.hot_block_tables[seqs], self.requests.has_equal_rows
        is_equal = None if has_equal_rows is None else has_equal_rows[seqs]
        num_rows = self.requests.num_hot_rows[row_class][seqs, None].long()
        num_slots = (num_rows - num_new).clamp_min(1)
        units = torch.arange(first_unit, last_unit, device=first_hot_block_id.device)
        fits = -(-num_tokens // self.heads.tokens_per_unit) + num_new <= num_rows
        is_kept = fits | (units >= last_unit - num_slots)
        slots = units.where(fits, units % num_slots)
        reserved = num_slots + torch.arange(num_new, device=first_hot_block_id.device)
        return Seeds(  # units that are not kept go to row 0 and entry 0, which belong to the null block
            seqs,
            first_unit,
            last_unit,
            hot.flat_row_ids(tables, slots, is_equal).where(is_kept, 0),
            None if is_equal is None else is_kept & (is_equal[:, None] > 0),
            hot.entries(tables, slots, is_equal).where(is_kept, 0),
            units.where(is_kept, -1).int(),
            hot.entries(tables, reserved, is_equal).where(~fits, 0),
        )

    def seeded_rows(self, layer_index: int, seeds: Seeds) -> torch.Tensor:
        """Return the flat hot row of each seed in a layer: [num_heads, units] int64.

        Args:
            layer_index: index of the layer.
            seeds: result of `seeds` for the layer's row class.
        """
        if seeds.moves is None:
            return seeds.hot_row_ids
        first = self.classes.layers[self.classes.of_layer[layer_index]][0]
        distance = self.classes.equal_offsets[layer_index] - self.classes.equal_offsets[first]
        return seeds.hot_row_ids + distance * seeds.moves

    def seed(self, layer_index: int, seeds: Seeds) -> None:
        """Record seeds whose rows have been written. A unit's expiry is the unit itself, so earlier ones go first.

        Args:
            layer_index: index of the layer.
            seeds: result of `seeds`.
        """
        residency = self.residency[layer_index]
        # NOTE: an assignment to `positions[entries]` would wait for the device, because torch copies the -1 there.
        residency.positions.index_fill_(0, seeds.stale_entries.flatten(), -1)
        held = seeds.held.flatten()[:, None].expand(-1, 2)  # position and expiry
        residency.entries.index_copy_(0, seeds.entries.flatten(), held)

    def staging_memory(self) -> torch.Tensor:
        """Device memory for the longest request in one layer, shared by all layers; allocated at the first call.

        Returns:
            [max_blocks, block_size, row elements], rows with all KV heads of a token, in the dtype of hot rows.
        """
        if self._staging is None:
            rows = self.layers[0].hot.rows
            token_elements = rows.shape[1] // self.heads.tokens_per_unit * self.heads.num_heads
            num_blocks = max(self.shape.max_blocks, -(-MIN_STAGED_ROWS // self.shape.block_size))
            staging = rows.new_zeros(num_blocks, self.shape.block_size, token_elements)
            self._staging = staging[: self.shape.max_blocks]
        return self._staging

    def count_staged(self, num_bytes: int) -> None:
        """Count bytes of a prompt's history that are copied from the host."""
        self._staged_bytes += num_bytes

    def take_staged_bytes(self) -> int:
        """Return the bytes counted by `count_staged` since the last call."""
        taken, self._staged_bytes = self._staged_bytes, 0
        return taken

    def check_integrity(self) -> None:
        """Check the table of requests, and that hot rows hold positions. Waits for the device.

        Raises:
            AssertionError: the first violation.
        """
        self.requests.check_integrity()
        num_positions = self.shape.max_blocks * self.shape.block_size // self.heads.tokens_per_unit
        for request_index in range(self.requests.num_requests):
            for held in self.table.held(self._hot_blocks_of(request_index)):
                assert ((held >= -1) & (held < num_positions)).all(), "a hot row holds no position"

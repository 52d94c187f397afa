"""Hot buffer: which rows of the running requests are on the device (worker side)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hisparse.kv_manager.rows.decode_step import DecodeStep, LayerRows, StepShape
from vllm_hisparse.kv_manager.rows.hit_counts import HitCounts
from vllm_hisparse.kv_manager.rows.request_table import RequestTable, TableChanges
from vllm_hisparse.kv_manager.rows.residency_table import ResidencyTable
from vllm_hisparse.kv_manager.rows.swap_in import SwapIn
from vllm_hisparse.ops.base import HotRows
from vllm_hisparse.ops.kv_heads import KVHeads
from vllm_hisparse.ops.registry import swap_in_ops


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
        rows_per_hot_block: hot tokens of a layer in a block.
        max_query_len: tokens that a decoding request computes in a step: one, and those drafted.
        state_columns: as in `RequestTable`.
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

    def holds_all(self, num_requests: int) -> bool:
        """Whether so many sequences may all be wholly hot, however long they are."""
        longest = self.max_blocks * self.block_size
        return num_requests * longest <= self.num_device_blocks * self.rows_per_hot_block


@dataclass(frozen=True)
class Seeds:
    """Units of a request that become hot when a chunk of its prompt is computed: the latest whole ones that fit.

    Attributes:
        seq_indices: [num_heads] int64.
        first, last: the units, half-open.
        hot_row_ids: [num_heads, last - first] int64 flat hot row of each.
        entries: [num_heads, last - first] int64 entry of each in a residency.
        held: [num_heads, last - first] int32 unit of each entry; -1 where there is no slot for it.
        stale_entries: [num_heads, n] int64 of hot rows that become empty.
    """

    seq_indices: torch.Tensor
    first: int
    last: int
    hot_row_ids: torch.Tensor
    entries: torch.Tensor
    held: torch.Tensor
    stale_entries: torch.Tensor

    @property
    def units(self) -> torch.Tensor:
        """[last - first] int64."""
        return torch.arange(self.first, self.last, device=self.hot_row_ids.device)


class HotBuffer(ABC):
    """Residency of all hot buffers: what those of both model families share.

    The residency lies in static tensors, so that a CUDA graph may replay what changes it; what the host changes is
    enqueued on the current stream and never waits for the device.

    Args:
        shape: sizes.
        heads: KV heads that select for themselves.
        table: residency of all layers, on the device of the hot rows.
        selects: whether each layer selects, or shares selections and residency with the last one that does.

    Attributes:
        ops: swap-in operations of the device.
        requests: the running requests.
        layers: where each layer keeps its rows, in order; `add_layer` fills it.
        residency: of each layer, in the table.
        selects: of each layer.
        counts: hits and misses.
        staged_bytes: of prompts' history, copied from the host for their next chunks since `take_staged_bytes`.
        step: the running step's decoding requests.
    """

    step: DecodeStep

    def __init__(self, shape: HotBufferShape, heads: KVHeads, table: ResidencyTable, selects: Sequence[bool]):
        self.shape, self.heads, self.device = shape, heads, table.entries.device
        self.table, self.residency, self.selects = table, table.layers, list(selects)
        device = self.device
        self.ops = swap_in_ops(device)
        units_per_block = shape.rows_per_hot_block // heads.tokens_per_unit
        blocks = shape.max_blocks, shape.max_hot_blocks, units_per_block, shape.num_device_blocks
        self.requests = RequestTable(shape.num_requests, *blocks, heads, device, shape.state_columns)
        self.layers: list[LayerRows] = []
        self.counts = HitCounts(shape.num_requests, heads, device)
        self.staged_bytes = 0
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
        """Say where the next layer keeps its rows; called once per layer, in order.

        Args:
            hot: on the device.
            host: [num_host_rows, row elements] in the host pool.
        """
        self.layers.append(LayerRows(hot, host))

    def extend_tables(self, changes: TableChanges) -> None:
        """Append host blocks to requests' tables; a run from block 0 on starts a request without hot blocks."""
        for handle, (first, _) in changes.items():
            if first == 0:
                self._start(self.requests.add(handle))
        self.requests.extend(changes)

    def change_hot_tables(self, changes: TableChanges) -> None:
        """Set requests' hot blocks. Blocks that a request did not have are empty."""
        blocks_of = [self.requests.hot_blocks[self.requests.index_of(handle)] for handle in changes]
        moved = [blocks for blocks, (first, _) in zip(blocks_of, changes.values(), strict=True) if first < len(blocks)]
        if added := self.requests.change_hot(changes):
            self._empty_blocks(added)
        if moved:
            self._empty_latest(moved)

    def release(self, handle: int) -> None:
        """Forget a request; `counts` reports its hits and misses."""
        request_index = self.requests.remove(handle)
        self.counts.release(handle, request_index)

    @abstractmethod
    def _start(self, request_index: int) -> None:
        """Prepare for a request that has none of its rows on the device."""

    def _empty(self, request_index: int) -> None:
        """Forget what a request has hot."""
        self._empty_blocks(self.requests.hot_blocks[request_index])

    def _empty_blocks(self, blocks: Sequence[int]) -> None:
        self.table.empty(self.requests.to_device(torch.tensor(blocks, dtype=torch.int64)))

    def _empty_latest(self, moved: Sequence[Sequence[int]]) -> None:
        """Empty rows of the last step of requests that were moved: the next step may compute its positions again, where
        they were rejected or a session's turn drops them, and its units may not be whole.

        Args:
            moved: blocks of each request.
        """
        owned = [(block, number) for number, blocks in enumerate(moved) for block in blocks]
        blocks, owners = self.requests.to_device(torch.tensor(owned).t().contiguous())
        self.table.empty_latest(blocks, owners, len(moved), self.shape.max_query_len)

    @abstractmethod
    def swap_in_of(self, layer_index: int) -> SwapIn:
        """What makes a layer's selection hot."""

    def seeds(self, handle: torch.Tensor, num_tokens: int) -> Seeds:
        """What becomes hot when a chunk of a prompt is computed, whatever brought the tokens before it: unit u in slot
        u if a next token would fit into the request's hot blocks (`SwapInOps`), else the latest units, as many as there
        are slots for, in slot u modulo their number.

        NOTE: how many hot blocks a request has is known on the device; the host knows the most that any request has.

        Args:
            handle: [1] int32 first hot block of the request.
            num_tokens: of the request, the chunk's included.
        """
        hot, num_new = self.layers[0].hot, self.shape.max_query_len
        last_unit, most_blocks = num_tokens // self.heads.tokens_per_unit, max(map(len, self.requests.hot_blocks))
        first_unit = max(last_unit - max(most_blocks * hot.rows_per_block - num_new, 0), 0)
        seqs = self.requests.find_seqs(handle)
        tables, num_rows = self.requests.hot_tables[seqs], self.requests.num_hot_rows[seqs, None].long()
        num_slots = (num_rows - num_new).clamp_min(1)
        units = torch.arange(first_unit, last_unit, device=handle.device)
        fits = -(-num_tokens // self.heads.tokens_per_unit) + num_new <= num_rows
        is_kept = fits | (units >= last_unit - num_slots)
        slots = units.where(fits, units % num_slots)
        reserved = num_slots + torch.arange(num_new, device=handle.device)
        return Seeds(  # where nothing is kept, row and entry 0, which are of the null block
            seqs,
            first_unit,
            last_unit,
            hot.flat_row_ids(tables, slots).where(is_kept, 0),
            hot.entries(tables, slots).where(is_kept, 0),
            units.where(is_kept, -1).int(),
            hot.entries(tables, reserved).where(~fits, 0),
        )

    def seed(self, layer_index: int, seeds: Seeds) -> None:
        """Record seeds whose rows have been written; later units count as used later.

        Args:
            layer_index: of the layer.
            seeds: from `seeds`.
        """
        residency = self.residency[layer_index]
        residency.positions[seeds.stale_entries] = -1
        residency.positions[seeds.entries] = residency.last_uses[seeds.entries] = seeds.held

    def staging_memory(self) -> torch.Tensor:
        """Device memory for the longest request in one layer, shared by all layers; allocated when first asked for.

        Returns:
            [max_blocks, block_size, row elements] of whole tokens, in the dtype of hot rows.
        """
        if self._staging is None:
            rows = self.layers[0].hot.rows
            token_elements = rows.shape[1] // self.heads.tokens_per_unit * self.heads.num_heads
            self._staging = rows.new_zeros(self.shape.max_blocks, self.shape.block_size, token_elements)
        return self._staging

    def take_staged_bytes(self) -> int:
        """`staged_bytes`, which starts from 0 again."""
        taken, self.staged_bytes = self.staged_bytes, 0
        return taken

    def check_integrity(self) -> None:
        """Check the table of requests, and that hot rows hold positions. Waits for the device.

        Raises:
            AssertionError: the first violation.
        """
        self.requests.check_integrity()
        num_positions = self.shape.max_blocks * self.shape.block_size // self.heads.tokens_per_unit
        for blocks in self.requests.hot_blocks:
            held = self.table.held(self.requests.to_device(torch.tensor(blocks, dtype=torch.int64)))
            assert ((held >= -1) & (held < num_positions)).all(), "a hot row holds no position"

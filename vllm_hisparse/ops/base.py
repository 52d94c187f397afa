"""Swap-in operations: what they work on, and what every implementation of them provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hisparse.ops.kv_heads import KVHeads


@dataclass(frozen=True)
class HotRows:
    """The hot blocks of one layer as one list of rows. The index of a row in it is its flat row id.

    Row `offset` of device block `block` has id `block * block_stride_rows + offset`; rows between two blocks belong to
    other layers.

    Attributes:
        rows: [num_rows, row elements] of any dtype, contiguous, on the device.
        rows_per_block: rows of this layer in a block.
        block_stride_rows: rows from one block to the next.
    """

    rows: torch.Tensor
    rows_per_block: int
    block_stride_rows: int

    @classmethod
    def from_cache(cls, cache: torch.Tensor) -> HotRows:
        """View a layer's cache as rows.

        Args:
            cache: [num_blocks, rows_per_block, row elements] with contiguous rows; blocks a whole number of rows apart.

        Raises:
            AssertionError: they are not.
        """
        num_blocks, rows_per_block, width = cache.shape
        stride, rest = divmod(cache.stride(0), width)
        assert rest == 0, "the block stride is not a whole number of rows"
        num_rows = (num_blocks - 1) * stride + rows_per_block
        return cls(cache.as_strided((num_rows, width), (width, 1)), rows_per_block, stride)

    def flat_row_ids(self, hot_tables: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Flat row ids of the same slots of several requests.

        Args:
            hot_tables: [num_requests, hot blocks per request] int32 device blocks.
            slots: [num_slots] int64, each within the blocks of a request.

        Returns:
            [num_requests, num_slots] int64.
        """
        blocks = hot_tables[:, slots // self.rows_per_block].long()
        return blocks * self.block_stride_rows + slots % self.rows_per_block


@dataclass(frozen=True)
class Residency:
    """Which position each hot slot of one layer holds, least recently used first.

    Entry j of a request: slot `slots[j]` holds position `positions[j]`, or nothing where that is -1. While a sequence
    fits (`SwapInOps`), entry j is slot j and holds position j or nothing: nothing is evicted, no order kept. An entry
    may hold a position that was drafted and rejected; it counts as nothing until it has been computed again.

    Attributes:
        slots: [num_states, num_slots] int32, a permutation of the slots for each request.
        positions: [num_states, num_slots] int32.
    """

    slots: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class StepTables:
    """Where the decoding requests of a step keep their rows. Static device tensors: a CUDA graph may read them.

    Attributes:
        state_indices: [num_device_blocks] int32 index of the request's state (first dimension of `Residency` and
            `host_tables`) at its first hot block; -1 elsewhere.
        hot_tables: [batch, >= hot blocks per request] int32 device blocks. A row whose first block is of no request is
            padding.
        seq_lens: [batch] int32 tokens of each request, the new ones included. A row with less than 1 is padding, too:
            vLLM pads a graph's batch so, and its row of `hot_tables` may be stale.
        host_tables: [num_states, max blocks] int32 host blocks of each request, -1 beyond.
        block_size: tokens of a host block.
        query_lens: [batch] int32 new tokens of each request, 1 to `max_query_len`; None: one each.
        max_query_len: new tokens of a request in any step.
    """

    state_indices: torch.Tensor
    hot_tables: torch.Tensor
    seq_lens: torch.Tensor
    host_tables: torch.Tensor
    block_size: int
    query_lens: torch.Tensor | None = None
    max_query_len: int = 1


@dataclass(frozen=True)
class Resolved:
    """Output of `resolve`, in static buffers of the largest batch.

    Ids are flat: of hot rows as in `HotRows`, of host rows `host block * block_size + offset`.

    Attributes:
        hot_row_ids: [max_batch, columns] int32 hot row of each selected position; -1 where there is none.
        num_valid: [max_batch] int32 leading entries of `hot_row_ids` that contain every valid one.
        miss_host_row_ids: [max_batch, columns] int64 host rows to copy; the first `num_misses` count.
        miss_hot_row_ids: [max_batch, columns] int32 hot rows to copy them to.
        num_misses: [max_batch] int32 rows to copy.
    """

    hot_row_ids: torch.Tensor
    num_valid: torch.Tensor
    miss_host_row_ids: torch.Tensor
    miss_hot_row_ids: torch.Tensor
    num_misses: torch.Tensor

    @classmethod
    def allocate(cls, max_batch: int, num_columns: int, device: torch.device) -> Resolved:
        """Buffers in which nothing is valid.

        Args:
            max_batch: requests of the largest batch, padding included; or their KV heads where each selects for itself.
            num_columns: entries of the selections of all new tokens of a request.
            device: where the hot rows are.
        """
        matrix, vector = (max_batch, num_columns), (max_batch,)
        return cls(
            torch.full(matrix, -1, dtype=torch.int32, device=device),
            torch.zeros(vector, dtype=torch.int32, device=device),
            torch.zeros(matrix, dtype=torch.int64, device=device),
            torch.zeros(matrix, dtype=torch.int32, device=device),
            torch.zeros(vector, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class UnitTables:
    """Tables of a step's decoding requests where every KV head selects for itself and a row is a unit of tokens.

    Static buffers of the largest batch. States and blocks are those of KV heads (`KVHeads`).

    Attributes:
        request_indices: [max_batch] int64 index of each request; `num_requests` where there is none.
        positions: [max_batch] int64 newest position; 0 where there is no request.
        tails: [max_batch * num_heads] int32 tokens of the newest unit less those of a whole one; 0 for no request.
        hot_tables: [max_batch * num_heads, hot blocks per request] int32.
        num_units: [max_batch * num_heads] int32 units of each KV head, the newest included.
        num_requests: request indices are below it.
        heads: how states and blocks of KV heads are numbered, and tokens of a unit.
    """

    request_indices: torch.Tensor
    positions: torch.Tensor
    tails: torch.Tensor
    hot_tables: torch.Tensor
    num_units: torch.Tensor
    num_requests: int
    heads: KVHeads

    @classmethod
    def allocate(
        cls, max_batch: int, num_requests: int, num_hot_blocks: int, heads: KVHeads, device: torch.device
    ) -> UnitTables:
        """Empty buffers.

        Args:
            max_batch: requests of a step.
            num_requests: requests that can run at once.
            num_hot_blocks: device blocks of a request.
            heads: of each.
            device: where the buffers are.
        """
        by_head = max_batch * heads.num_heads
        return cls(
            torch.zeros(max_batch, dtype=torch.int64, device=device),
            torch.zeros(max_batch, dtype=torch.int64, device=device),
            torch.zeros(by_head, dtype=torch.int32, device=device),
            torch.full((by_head, num_hot_blocks), -1, dtype=torch.int32, device=device),
            torch.zeros(by_head, dtype=torch.int32, device=device),
            num_requests,
            heads,
        )


class SwapInOps(ABC):
    """Operations on hot rows and host rows. None allocates, waits for the device or reads a tensor's value.

    Where every KV head selects for itself, each counts as a request and each unit of tokens as a row. A flat row id
    outside its tensor is never read or written. Sizes and dtypes are the caller's duty: implementations may raise
    AssertionError for those they cannot take.

    The new positions of a request, from `seq_lens - query_lens` on, are hot by construction: in the slots of their own
    numbers while the sequence fits, in the reserved slots from `num_slots` on after that. They are never victims, and
    count neither as hits nor as misses. A sequence fits while the buffer has room for its earlier tokens and
    `max_query_len` new ones.
    """

    @abstractmethod
    def resolve(
        self,
        residency: Residency,
        tables: StepTables,
        top_k: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        """Find hits, choose victims for the misses, update the residency.

        The least recently used entries that are not hits of this step are the victims, in the order of the misses in
        `top_k`. The new order: entries neither hit nor filled, filled ones, hits, each part in its old order. While the
        sequence fits, a miss fills the slot of its own number, and entries keep their places.

        Args:
            residency: of one layer, updated in place; has at least as many slots as `top_k` has columns.
            tables: of the step.
            top_k: [batch, columns] int32 selections of the new tokens of each request side by side, each of distinct
                positions; -1 anywhere, and every other value outside [0, seq_len), is padding.
            hot_rows: of the layer; only its sizes are used.
            counts: [num_states, 2] int64 hits and misses, added to; a position that several tokens select counts once.
            out: written for the first `batch` requests; padding gets -1, 0 valid entries and no misses.
        """

    @abstractmethod
    def gather(self, host_rows: torch.Tensor, hot_rows: HotRows, resolved: Resolved, batch: int) -> None:
        """Copy missed rows to their hot slots.

        Args:
            host_rows: [num_host_rows, row elements] of the layer, contiguous; pinned on CUDA, where a row is a multiple
                of 16 bytes.
            hot_rows, resolved, batch: as given to `resolve`.
        """

    @abstractmethod
    def swap_in(
        self,
        residency: Residency,
        tables: StepTables,
        top_k: torch.Tensor,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        """`resolve`, then `gather`.

        Args:
            residency, tables, top_k, hot_rows, counts, out: as in `resolve`.
            host_rows: as in `gather`.
        """

    @abstractmethod
    def newest_row_ids(self, tables: StepTables, num_slots: int, hot_rows: HotRows, out: torch.Tensor) -> None:
        """Flat id of the hot row of each request's new positions: the slot mapping of a decode step.

        Args:
            tables: of the step.
            num_slots: hot slots per request, the reserved ones not counted.
            hot_rows: of any layer.
            out: [>= batch * max_query_len] int64, the first of these written, request by request; -1 for padding.
        """

    @abstractmethod
    def write_back(
        self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], tables: StepTables, num_slots: int
    ) -> None:
        """Copy each request's new rows of all layers to the host.

        Args:
            hot_rows, host_rows: one entry per layer, as in `gather`.
            tables: of the step; nothing is written for padding.
            num_slots: hot slots per request, the reserved ones not counted.
        """

    @abstractmethod
    def stage_rows(
        self, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        """Copy a request's first rows from the host, for queries of several tokens.

        Args:
            host_rows: as in `gather`.
            host_table: [blocks] int32 host blocks of the request, contiguous; rows of a negative block are skipped.
            block_size: tokens of a host block.
            staging: [num_rows, row elements] of `host_rows`' dtype, contiguous; positions [0, num_rows), written.
        """

    @abstractmethod
    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int
    ) -> None:
        """Copy new rows of a request to the host.

        Args:
            rows: [num_rows, row elements] of `host_rows`' dtype, contiguous; positions [first, first + num_rows).
            first: position of the first row.
            host_rows, host_table, block_size: as in `stage_rows`.
        """

    @abstractmethod
    def begin_units(
        self, hot_tables: torch.Tensor, seq_lens: torch.Tensor, state_indices: torch.Tensor, out: UnitTables
    ) -> None:
        """Tables by KV head and in units, from those by request and in tokens.

        Args:
            hot_tables: [batch, hot blocks per request] int32 device blocks. A request whose first one is of no request
                is padding.
            seq_lens: [batch] int32 tokens of each request; less than 1 for padding.
            state_indices: [num_device_blocks * head_stride] int32 state index at each part of a device block, or -1.
            out: written for the first `batch` requests.
        """

    @abstractmethod
    def write_tokens(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        units: UnitTables,
        tables: StepTables,
        num_slots: int,
        hot_rows: HotRows,
        host_rows: torch.Tensor,
        reload: torch.Tensor,
    ) -> None:
        """Put each request's new token into its newest unit, on the device and on the host.

        Args:
            key, value: [batch, num_heads, head_size] of the new tokens, in the rows' dtype; heads side by side, on CUDA
                of a multiple of 16 bytes.
            units: of the step.
            tables: of the step by KV head, over `units`.
            num_slots: hot slots per KV head, the reserved one not counted.
            hot_rows, host_rows: units, as in `gather`; a token's key and value lie side by side.
            reload: [num_states] int32: where not 0, the newest unit's earlier tokens are only on the host; they are
                copied to the device, and the entry becomes 0.
        """

"""Swap-in operations: what they work on, and what every implementation of them provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from vllm_hisparse.ops.kernels import kernels
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

    @cached_property
    def native(self) -> Any:
        """The object that the CUDA kernels take, made when it is first asked for."""
        return kernels().hot_rows(self.rows, self.rows_per_block, self.block_stride_rows)

    def flat_row_ids(self, hot_block_tables: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Flat row ids of slots of several requests.

        Args:
            hot_block_tables: [num_requests, hot blocks per request] int32 device blocks.
            slots: [num_requests, num_slots] int64, each within the blocks of its request.

        Returns:
            [num_requests, num_slots] int64.
        """
        return self._ids(hot_block_tables, slots, self.block_stride_rows)

    def entries(self, hot_block_tables: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Entries of a `Residency`, as `flat_row_ids`."""
        return self._ids(hot_block_tables, slots, self.rows_per_block)

    def _ids(self, hot_block_tables: torch.Tensor, slots: torch.Tensor, block_stride: int) -> torch.Tensor:
        blocks = hot_block_tables.gather(1, slots // self.rows_per_block).long()
        return blocks * block_stride + slots % self.rows_per_block


@dataclass(frozen=True)
class Residency:
    """Which position each hot row of a layer holds, and when it was last used.

    Row `offset` of device block `block` has entry `block * rows_per_block + offset`, whoever owns the block. While a
    sequence fits (`SwapInOps`), a position is looked for in the slot of its own number only, and nothing is evicted.
    A reserved slot counts as empty. A row may hold a position that was drafted and rejected; it counts as empty until
    that position has been computed again.

    Attributes:
        entries: [num_entries, 2] int32: position, or -1 where the row is empty; and last use, which is the first new
            position of the request's step that last selected the row.
        num_layers: layers that make the same selections and so have the same residency.
    """

    entries: torch.Tensor
    num_layers: int = 1

    @classmethod
    def allocate(cls, num_entries: int, device: torch.device) -> Residency:
        """All rows are empty."""
        return cls(torch.tensor([[-1, 0]], dtype=torch.int32, device=device).repeat(num_entries, 1))

    @cached_property
    def native(self) -> Any:
        """The object that the CUDA kernels take, made when it is first asked for."""
        return kernels().residency(self.entries, self.num_layers)

    @property
    def positions(self) -> torch.Tensor:
        """[num_entries] int32."""
        return self.entries[:, 0]

    @property
    def last_uses(self) -> torch.Tensor:
        """[num_entries] int32."""
        return self.entries[:, 1]


@dataclass(frozen=True)
class StepTables:
    """Where the decoding requests of a step keep their rows. Static device tensors: a CUDA graph may read them.

    Attributes:
        seq_indices: [num_device_blocks] int32 index of the request's sequence (first dimension of the tables by
            sequence) at its first hot block; -1 elsewhere.
        first_hot_block_ids: [batch] int32 first hot block of each request. One that is of no request is padding.
        seq_lens: [batch] int32 tokens of each request, the new ones included. A request with less than 1 is padding,
            too: vLLM pads a graph's batch so, and its first hot block may be stale.
        hot_block_tables: [num_seqs, max hot blocks] int32 device blocks of each request; entries beyond `num_hot_rows`
            are not read.
        num_hot_rows: [num_seqs] int32 rows of these blocks that the request may use; without any, it is padding.
        host_block_tables: [num_seqs, max host blocks] int32 host blocks of each request, -1 beyond.
        block_size: tokens of a host block.
        query_lens: [batch] int32 new tokens of each request, 1 to `max_query_len`, any number for padding; None: one
            each.
        max_query_len: new tokens of a request in any step.
    """

    seq_indices: torch.Tensor
    first_hot_block_ids: torch.Tensor
    seq_lens: torch.Tensor
    hot_block_tables: torch.Tensor
    num_hot_rows: torch.Tensor
    host_block_tables: torch.Tensor
    block_size: int
    query_lens: torch.Tensor | None = None
    max_query_len: int = 1

    @cached_property
    def native(self) -> Any:
        """The object that the CUDA kernels take, made when it is first asked for."""
        by_request = self.seq_indices, self.first_hot_block_ids, self.seq_lens
        by_seq = self.hot_block_tables, self.num_hot_rows, self.host_block_tables
        return kernels().step_tables(*by_request, *by_seq, self.block_size, self.query_lens, self.max_query_len)

    def part(self, requests: slice) -> StepTables:
        """The tables of some of the requests."""
        query_lens = None if self.query_lens is None else self.query_lens[requests]
        return replace(
            self,
            first_hot_block_ids=self.first_hot_block_ids[requests],
            seq_lens=self.seq_lens[requests],
            query_lens=query_lens,
        )


READ_AHEAD = 31  # ids that vLLM's Triton kernel reads, and does not use, behind the last one of a table


@dataclass(frozen=True)
class Resolved:
    """Output of `resolve`, in static buffers of the largest batch.

    Ids are flat: of hot rows as in `HotRows`, of host rows `host block * block_size + offset`.

    Attributes:
        hot_row_ids: [max_batch, columns] int32 hot row of each selected position; -1 where there is none.
        num_valid: [max_batch * max_query_len] int32 leading entries of each selection that contain every valid one.
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
    def allocate(cls, max_batch: int, num_columns: int, device: torch.device, max_query_len: int = 1) -> Resolved:
        """Buffers in which nothing is valid.

        Args:
            max_batch: requests of the largest batch, padding included; or their KV heads where each selects for itself.
            num_columns: entries of the selections of all new tokens of a request.
            device: where the hot rows are.
            max_query_len: as in `StepTables`.
        """
        matrix, vector = (max_batch, num_columns), (max_batch,)
        ids = torch.full((max_batch * num_columns + READ_AHEAD,), -1, dtype=torch.int32, device=device)
        return cls(
            ids[: max_batch * num_columns].view(matrix),
            torch.zeros(max_batch * max_query_len, dtype=torch.int32, device=device),
            torch.zeros(matrix, dtype=torch.int64, device=device),
            torch.zeros(matrix, dtype=torch.int32, device=device),
            torch.zeros(vector, dtype=torch.int32, device=device),
        )

    @cached_property
    def native(self) -> Any:
        """The object that the CUDA kernels take, made when it is first asked for."""
        misses = self.miss_host_row_ids, self.miss_hot_row_ids, self.num_misses
        return kernels().resolved(self.hot_row_ids, self.num_valid, *misses)

    def part(self, requests: slice) -> Resolved:
        """The results of some of a batch's requests, in the same memory."""
        query_len = len(self.num_valid) // len(self.num_misses)
        return Resolved(
            self.hot_row_ids[requests],
            self.num_valid[requests.start * query_len : requests.stop * query_len],
            self.miss_host_row_ids[requests],
            self.miss_hot_row_ids[requests],
            self.num_misses[requests],
        )


@dataclass(frozen=True)
class UnitTables:
    """Tables of a step's decoding requests where every KV head selects for itself and a row is a unit of tokens.

    Static buffers of the largest batch. States and blocks are those of KV heads (`KVHeads`). A request has a place for
    each of `max_query_len` new tokens; without a request, or with fewer tokens, places are empty.

    Attributes:
        request_indices: [max_query_len, max_batch] int64 index of each new token's request; `num_requests` in an empty
            place.
        positions: [max_query_len, max_batch] int64 position of each new token; 0 in an empty place.
        num_tokens: [max_query_len, max_batch] int64 tokens of the request up to this one; 0 in an empty place.
        tails: [max_batch * num_heads, max_query_len] int32 tokens of the new token's unit up to this one, less those of
            a whole unit; 0 in an empty place.
        first_hot_block_ids: [max_batch * num_heads] int32 part of each head in the request's first hot block; -1 for no
            request.
        num_units: [max_batch * num_heads] int32 units of each KV head, the newest included; 0 for no request.
        num_new_units: [max_batch * num_heads] int32 units with a new token, from 1 on.
        num_requests: request indices are below it.
        heads: how sequences and blocks of KV heads are numbered, and tokens of a unit.
    """

    request_indices: torch.Tensor
    positions: torch.Tensor
    num_tokens: torch.Tensor
    tails: torch.Tensor
    first_hot_block_ids: torch.Tensor
    num_units: torch.Tensor
    num_new_units: torch.Tensor
    num_requests: int
    heads: KVHeads

    @classmethod
    def allocate(
        cls, max_batch: int, num_requests: int, heads: KVHeads, device: torch.device, max_query_len: int = 1
    ) -> UnitTables:
        """Empty buffers.

        Args:
            max_batch: requests of a step.
            num_requests: requests that can run at once.
            heads: of each.
            device: where the buffers are.
            max_query_len: new tokens of a request.
        """
        by_token, by_head = (max_query_len, max_batch), max_batch * heads.num_heads
        return cls(
            torch.full(by_token, num_requests, dtype=torch.int64, device=device),
            torch.zeros(by_token, dtype=torch.int64, device=device),
            torch.zeros(by_token, dtype=torch.int64, device=device),
            torch.zeros((by_head, max_query_len), dtype=torch.int32, device=device),
            torch.full((by_head,), -1, dtype=torch.int32, device=device),
            torch.zeros(by_head, dtype=torch.int32, device=device),
            torch.ones(by_head, dtype=torch.int32, device=device),
            num_requests,
            heads,
        )

    @cached_property
    def native(self) -> Any:
        """The object that the CUDA kernels take, made when it is first asked for."""
        by_token = self.request_indices, self.positions, self.num_tokens
        by_head = self.tails, self.first_hot_block_ids, self.num_units, self.num_new_units
        sizes = self.heads.num_heads, self.heads.head_stride, self.heads.tokens_per_unit
        return kernels().unit_tables(*by_token, *by_head, *sizes)

    @property
    def max_query_len(self) -> int:
        return len(self.positions)


class SwapInOps(ABC):
    """Operations on hot rows and host rows. None allocates, waits for the device or reads a tensor's value.

    Where every KV head selects for itself, each counts as a request and each unit of tokens as a row. A flat row id
    outside its tensor is never read or written. Sizes and dtypes are the caller's duty: implementations may raise
    ValueError or TypeError for those they cannot take.

    The slots of a request are the rows of its hot blocks, in order. Its new positions, from `seq_lens - query_lens` on,
    are hot by construction: in the slots of their own numbers while the sequence fits, in the last `max_query_len`
    slots, which are reserved for them, after that. They are never victims, and count neither as hits nor as misses. A
    sequence fits while the slots are enough for its earlier tokens and `max_query_len` new ones. Between steps a
    request's slots may become more, the new ones empty, or fewer.
    """

    @abstractmethod
    def resolve(
        self,
        residency: Residency,
        tables: StepTables,
        selected_positions: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        """Find hits, choose victims for the misses, update the residency.

        A position that is hot in several slots stays in the lowest; the others become empty. The victims are empty
        rows, then those whose last use is longest ago, and among equals those in lower slots; never a hit of this step.
        In the order of their slots, they take the misses in the order of `selected_positions`. Rows that were not used
        for `MAX_AGE` tokens count as equally old. While the sequence fits, a miss takes the slot of its own number.

        Args:
            residency: of one layer, updated in place. A request that does not fit has at least as many slots that are
                not reserved as `selected_positions` has columns.
            tables: of the step.
            selected_positions: [batch, columns] int32 selections of the new tokens of each request side by side, each
                of distinct positions; -1 anywhere, and every other value outside [0, seq_len), is padding.
            hot_rows: of the layer; only its sizes are used.
            counts: [num_seqs, 2] int64 hits and misses of all layers, added to; a position that several tokens select
                counts once.
            out: written for the first `batch` requests; padding gets -1, 0 valid entries and no misses.
        """

    @abstractmethod
    def gather(
        self,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        resolved: Resolved,
        batch: int,
        shares_device: bool = False,
    ) -> None:
        """Copy missed rows to their hot slots.

        Args:
            host_rows: [num_host_rows, row elements] of the layer, contiguous; pinned on CUDA, where a row is a multiple
                of 16 bytes.
            hot_rows, resolved, batch: as given to `resolve`.
            shares_device: kernels of other streams run at the same time, and are left most of the device.
        """

    @abstractmethod
    def swap_in(
        self,
        residency: Residency,
        tables: StepTables,
        selected_positions: torch.Tensor,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
        shares_device: bool = False,
    ) -> None:
        """`resolve`, then `gather`.

        Args:
            residency, tables, selected_positions, hot_rows, counts, out: as in `resolve`.
            host_rows, shares_device: as in `gather`.
        """

    @abstractmethod
    def compact(self, row_ids: torch.Tensor, num_valid: torch.Tensor) -> None:
        """Move the valid ids of each selection to its front, in their order.

        Args:
            row_ids: [num_selections, columns] int32, contiguous; -1 where there is none. Updated in place.
            num_valid: [num_selections] int32 leading ids that contain every valid one, contiguous; becomes the number
                of valid ids. Leading ids behind these are -1 then.
        """

    @abstractmethod
    def newest_row_ids(self, tables: StepTables, hot_rows: HotRows, out: torch.Tensor) -> None:
        """Flat id of the hot row of each request's new positions: the slot mapping of a decode step.

        Args:
            tables: of the step.
            hot_rows: of any layer.
            out: [>= batch * max_query_len] int64, the first of these written, request by request; -1 for padding.
        """

    @abstractmethod
    def write_back(self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], tables: StepTables) -> None:
        """Copy each request's new rows of all layers to the host.

        Args:
            hot_rows, host_rows: one entry per layer, as in `gather`.
            tables: of the step; nothing is written for padding.
        """

    @abstractmethod
    def stage_rows(
        self, host_rows: torch.Tensor, host_block_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        """Copy a request's first rows from the host, for queries of several tokens.

        Args:
            host_rows: as in `gather`.
            host_block_table: [blocks] int32 host blocks of the request, contiguous; rows of a negative block are
                skipped.
            block_size: tokens of a host block.
            staging: [num_rows, row elements] of `host_rows`' dtype, contiguous; positions [0, num_rows), written.
        """

    @abstractmethod
    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_block_table: torch.Tensor, block_size: int
    ) -> None:
        """Copy new rows of a request to the host.

        Args:
            rows: [num_rows, row elements] of `host_rows`' dtype, contiguous; positions [first, first + num_rows).
            first: position of the first row.
            host_rows, host_block_table, block_size: as in `stage_rows`.
        """

    @abstractmethod
    def begin_units(
        self,
        first_hot_block_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | None,
        seq_indices: torch.Tensor,
        out: UnitTables,
    ) -> None:
        """Tables by KV head and in units, from those by request and in tokens.

        Args:
            first_hot_block_ids: [batch] int32 first hot block of each request. One that is of no request is padding.
            seq_lens: [batch] int32 tokens of each request, the new ones included; less than 1 for padding.
            query_lens: [batch] int32 new tokens of each, as in `StepTables`.
            seq_indices: [num_device_blocks * head_stride] int32 sequence index at each part of a device block, or -1.
            out: written for the first `batch` requests.
        """

    @abstractmethod
    def write_tokens(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        units: UnitTables,
        tables: StepTables,
        hot_rows: HotRows,
        host_rows: torch.Tensor,
        first_units: torch.Tensor,
    ) -> None:
        """Put each request's new tokens into their units, on the device and on the host.

        Args:
            key, value: [batch * max_query_len, num_heads, head_size] of the new tokens, request by request with all
                places, in the rows' dtype; heads side by side, on CUDA of a multiple of 16 bytes.
            units: of the step.
            tables: of the step by KV head, over `units`.
            hot_rows, host_rows: units, as in `gather`; a token's key and value lie side by side.
            first_units: [num_seqs] int32 unit of the first new token in the step before, whose tokens are in the slot
                of a first new unit; -1: they are only on the host. Where the first new token continues another unit,
                that unit's tokens are copied to the device first.
        """

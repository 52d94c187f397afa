"""Swap-in operations: their interface, and the data structures that they work on."""

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
    """The hot blocks of one layer as one list of rows. A row's index in the list is its flat row id.

    Row `offset` of device block `block` has id `block * block_stride_rows + offset * pitch`; other rows of a block
    belong to other layers. Some requests may divide their blocks equally among layers
    (`DecodeMetadata.has_equal_rows`). In their blocks, `equal_offset` is added.

    Attributes:
        rows: [num_rows, row elements] of any dtype, contiguous, on the device.
        rows_per_block: rows of this layer in a block.
        block_stride_rows: rows from one block to the next.
        pitch: rows from one of the layer's rows in a block to the next.
        equal_rows_per_block: rows of every layer in a block that is divided equally; 0: no block is.
        equal_offset: rows from the layer's first row in a block to its first row in a block that is divided equally. It
            may be negative, but row ids are not, because block 0 is vLLM's null block, which is no hot block.
    """

    rows: torch.Tensor
    rows_per_block: int
    block_stride_rows: int
    pitch: int = 1
    equal_rows_per_block: int = 0
    equal_offset: int = 0

    @classmethod
    def from_cache(cls, cache: torch.Tensor, equal_rows_per_block: int = 0, equal_offset: int = 0) -> HotRows:
        """View a layer's cache as rows.

        Args:
            cache: [num_blocks, rows_per_block, row elements] with contiguous rows; the distances between two blocks and
                between two rows are whole numbers of rows, and there is memory for the last block as a whole.
            equal_rows_per_block, equal_offset: as in the attributes.

        Raises:
            AssertionError: `cache` has another memory layout.
        """
        num_blocks, rows_per_block, width = cache.shape
        stride, rest = divmod(cache.stride(0), width)
        has_next_row = max(rows_per_block, equal_rows_per_block) > 1
        pitch, rest_of_rows = divmod(cache.stride(1), width) if has_next_row else (1, 0)
        assert rest == rest_of_rows == 0, "a stride is not a whole number of rows"
        last_row = (rows_per_block - 1) * pitch
        if equal_rows_per_block:
            last_row = max(last_row, equal_offset + (equal_rows_per_block - 1) * pitch)
        rows = cache.as_strided(((num_blocks - 1) * stride + last_row + 1, width), (width, 1))
        return cls(rows, rows_per_block, stride, pitch, equal_rows_per_block, equal_offset)

    @cached_property
    def native(self) -> Any:
        """The object that the CUDA kernels take, made when it is first asked for."""
        equal = self.equal_rows_per_block, self.equal_offset
        return kernels().hot_rows(self.rows, self.rows_per_block, self.block_stride_rows, self.pitch, *equal)

    @property
    def entries_per_block(self) -> int:
        """Entries of a block in a `Residency` of the layer."""
        return max(self.rows_per_block, self.equal_rows_per_block)

    def division(self, has_equal_rows: torch.Tensor | None) -> tuple[int | torch.Tensor, int | torch.Tensor]:
        """Return rows per block, and the offset of the first row, for several requests.

        Args:
            has_equal_rows: [num_requests] int32, as in `DecodeMetadata`; None: no request has equal rows.

        Returns:
            Two integers, or two [num_requests, 1] int32 tensors.
        """
        if has_equal_rows is None:
            return self.rows_per_block, 0
        is_equal = has_equal_rows[:, None] > 0
        rows = torch.where(is_equal, self.equal_rows_per_block, self.rows_per_block)
        return rows.int(), torch.where(is_equal, self.equal_offset, 0).int()

    def flat_row_ids(
        self, hot_block_tables: torch.Tensor, slots: torch.Tensor, has_equal_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the flat row ids of slots of several requests.

        Args:
            hot_block_tables: [num_requests, hot blocks per request] int32 device blocks.
            slots: [num_requests, num_slots] int64, each within the blocks of its request.
            has_equal_rows: [num_requests] int32, as in `DecodeMetadata`; None: no request has equal rows.

        Returns:
            [num_requests, num_slots] int64.
        """
        rows_per_block, first_row = self.division(has_equal_rows)
        blocks = hot_block_tables.gather(1, slots // rows_per_block).long()
        return blocks * self.block_stride_rows + first_row + slots % rows_per_block * self.pitch

    def entries(
        self, hot_block_tables: torch.Tensor, slots: torch.Tensor, has_equal_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the entries of slots in a `Residency`; arguments and result as in `flat_row_ids`."""
        rows_per_block, _ = self.division(has_equal_rows)
        blocks = hot_block_tables.gather(1, slots // rows_per_block).long()
        return blocks * self.entries_per_block + slots % rows_per_block


@dataclass(frozen=True)
class Residency:
    """The position that each hot row of a layer holds, and its expiry, by which rows are evicted.

    Row `offset` of device block `block` has entry `block * entries_per_block + offset` (`HotRows`), no matter which
    request owns the block. While a sequence fits (`SwapInOps`), position p can be in slot p only, and nothing is
    evicted. A reserved slot counts as empty. A row that holds a rejected draft's position counts as empty until that
    position is computed again.

    The expiry is a position of the request. A step whose first new position is `now` sets it: to `now` plus `USE_BONUS`
    if the row is copied, and to `min(max(expiry, now) + USE_BONUS, now + MAX_BONUS)` if it is hit. A row that no step
    has selected has an expiry that is at most its position. A step that has a lower `now` than earlier ones, because a
    session's turn drops tokens, may find later expiries than these.

    Attributes:
        entries: [num_entries, 2] int32. First the position, -1 for an empty row; then the expiry.
        num_layers: number of layers that share the selections and therefore this residency.
    """

    entries: torch.Tensor
    num_layers: int = 1

    @classmethod
    def allocate(cls, num_entries: int, device: torch.device) -> Residency:
        """Make a residency whose rows are all empty."""
        return cls(torch.tensor([[-1, 0]], dtype=torch.int32, device=device).repeat(num_entries, 1))

    @cached_property
    def native(self) -> Any:
        """The object that the CUDA kernels take, made when it is first asked for."""
        return kernels().residency(self.entries, self.num_layers)

    @property
    def positions(self) -> torch.Tensor:
        """Positions: [num_entries] int32."""
        return self.entries[:, 0]

    @property
    def expiries(self) -> torch.Tensor:
        """Expiries: [num_entries] int32."""
        return self.entries[:, 1]


@dataclass(frozen=True)
class DecodeMetadata:
    """Metadata of a step's decoding requests: lengths and block tables, in static tensors that a CUDA graph may read.

    Attributes:
        seq_indices: [num_device_blocks] int32. At a request's first hot block, the index of its sequence in the tables
            below; -1 at other blocks.
        first_hot_block_ids: [batch] int32 first hot block of each request; an entry of no request is padding.
        seq_lens: [batch] int32 tokens of each request, the new ones included. An entry with less than 1 is padding,
            too, because vLLM pads the batch of a graph in this way, and leaves a stale first hot block there.
        hot_block_tables: [num_seqs, max hot blocks] int32 device blocks of each request; entries beyond `num_hot_rows`
            are not read.
        num_hot_rows: [num_seqs] int32 rows of these blocks that the request may use; a request with 0 is padding.
        host_block_tables: [num_seqs, max host blocks] int32 host blocks of each request, -1 beyond its blocks.
        block_size: tokens of a host block.
        query_lens: [batch] int32 new tokens of each request, from 1 to `max_query_len`, any number for padding; None:
            one each.
        max_query_len: largest number of new tokens of a request in any step.
        has_equal_rows: [num_seqs] int32, 1 for a request whose hot blocks are divided equally among layers, 0 for other
            ones; None: there is no such request.
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
    has_equal_rows: torch.Tensor | None = None

    @cached_property
    def native(self) -> Any:
        """The object that the CUDA kernels take, made when it is first asked for."""
        by_request = self.seq_indices, self.first_hot_block_ids, self.seq_lens
        by_seq = self.hot_block_tables, self.num_hot_rows, self.host_block_tables, self.has_equal_rows
        return kernels().decode_metadata(*by_request, *by_seq, self.block_size, self.query_lens, self.max_query_len)

    def slice_requests(self, requests: slice) -> DecodeMetadata:
        """Return the metadata of a range of the requests."""
        query_lens = None if self.query_lens is None else self.query_lens[requests]
        return replace(
            self,
            first_hot_block_ids=self.first_hot_block_ids[requests],
            seq_lens=self.seq_lens[requests],
            query_lens=query_lens,
        )


@dataclass(frozen=True)
class MovedRequests:
    """Requests that have lost a hot block, or have another one in its place. Tensors are on the device.

    Attributes:
        seqs: [n] int64 sequence index of each request's first KV head.
        num_blocks: [n] int64 hot blocks of each request.
        latest: [n] int64 scratch memory of `empty_latest`, which is -1 before the call.
        most_blocks: the largest of `num_blocks`.
    """

    seqs: torch.Tensor
    num_blocks: torch.Tensor
    latest: torch.Tensor
    most_blocks: int


READ_AHEAD = 31  # ids behind the end of a table that vLLM's Triton kernel reads and does not use


@dataclass(frozen=True)
class Resolved:
    """Output of `resolve`, in static buffers for the largest batch.

    Hot rows have the flat row ids of `HotRows`. The flat id of a host row is `host block * block_size + offset`.

    Attributes:
        hot_row_ids: [max_batch, columns] int32 hot row of each selected position; -1 for padding.
        num_valid: [max_batch * max_query_len] int32 number of leading entries of a selection that contain all valid
            ones.
        miss_host_row_ids: [max_batch, columns] int64 host rows to copy; only the first `num_misses` entries are valid.
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
        """Make buffers without valid entries.

        Args:
            max_batch: requests of the largest batch, padding included; or their KV heads if each selects for itself.
            num_columns: entries of the selections of all new tokens of a request.
            device: device of the hot rows.
            max_query_len: as in `DecodeMetadata`.
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

    def slice_requests(self, requests: slice) -> Resolved:
        """Return the results of a range of a batch's requests, in the same memory."""
        query_len = len(self.num_valid) // len(self.num_misses)
        return Resolved(
            self.hot_row_ids[requests],
            self.num_valid[requests.start * query_len : requests.stop * query_len],
            self.miss_host_row_ids[requests],
            self.miss_hot_row_ids[requests],
            self.num_misses[requests],
        )


@dataclass(frozen=True)
class UnitMetadata:
    """Metadata of a dense model's decoding requests: every KV head selects for itself, and a row is a unit of tokens.

    The tensors are static buffers for the largest batch. Sequences and blocks are numbered by KV head (`KVHeads`). Each
    request of the batch has `max_query_len` places for new tokens. Places beyond its tokens, and those of padding, are
    empty.

    Attributes:
        request_indices: [max_query_len, max_batch] int64 index of each new token's request; `num_requests` in an empty
            place.
        positions: [max_query_len, max_batch] int64 position of each new token; 0 in an empty place.
        num_tokens: [max_query_len, max_batch] int64 tokens of the request up to this one; 0 in an empty place.
        tails: [max_batch * num_heads, max_query_len] int32, at most 0: number of tokens from the start of the new
            token's unit up to this token, minus the tokens of a whole unit; 0 in an empty place.
        first_hot_block_ids: [max_batch * num_heads] int32 part of each head in the request's first hot block; -1 for no
            request.
        num_units: [max_batch * num_heads] int32 units of each KV head, the newest included; 0 for no request.
        num_new_units: [max_batch * num_heads] int32 units with a new token, from 1 on.
        num_requests: upper bound of request indices.
        heads: numbering of KV heads' sequences and blocks, and number of tokens of a unit.
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
    ) -> UnitMetadata:
        """Make buffers whose places are all empty.

        Args:
            max_batch: requests of a step.
            num_requests: requests that can run at once.
            heads: KV heads of a request.
            device: device of the buffers.
            max_query_len: largest number of new tokens of a request.
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
        return kernels().unit_metadata(*by_token, *by_head, *sizes)

    @property
    def max_query_len(self) -> int:
        return len(self.positions)


class SwapInOps(ABC):
    """Operations on hot rows and host rows. None of them allocates, waits for the device or reads a tensor's value.

    If every KV head selects for itself, a KV head counts as a request, and a unit of tokens as a row. Rows with a flat
    row id outside the tensor are never read or written. The caller must pass correct sizes and dtypes; implementations
    may raise ValueError or TypeError for others.

    The slots of a request are the rows of its hot blocks, in order. A sequence fits if it has slots for its earlier
    tokens and for `max_query_len` new ones. New positions, from `seq_lens - query_lens` on, are always hot: position p
    is in slot p if the sequence fits; if not, new positions are in the last `max_query_len` slots, which are reserved
    for them. New positions are never victims, and are neither hits nor misses. Between two steps, a request may get
    more slots, which are empty, or lose some.
    """

    @abstractmethod
    def resolve(
        self,
        residency: Residency,
        decode: DecodeMetadata,
        selected_positions: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        """Find hits, choose victims for the misses, update the residency.

        A position that is hot in several slots stays in the lowest; the other slots become empty. If the sequence fits,
        a miss of position p takes slot p. If not, misses take the slots of victims: first empty slots, then those with
        the earliest expiry (`Residency`), and lower slots before higher ones with the same expiry; never a hit of this
        step. A row's age is the first new position plus `MAX_BONUS`, minus the row's expiry; ages from `MAX_AGE` on
        count as equal. Victims, in the order of their slots, take misses in the order of `selected_positions`.

        Args:
            residency: residency of one layer, updated in place. The slots, without the reserved ones, of a request that
                does not fit must be at least as many as the columns of `selected_positions`.
            decode: the requests that decode.
            selected_positions: [batch, columns] int32 selections of each request's new tokens, side by side. Positions
                of one selection are distinct; a value outside [0, seq_len) is padding and may be anywhere.
            hot_rows: hot rows of the layer; only their sizes are used.
            counts: [num_seqs, 2] int64 hits and misses of all layers, which this call adds to; a position that several
                tokens select counts once.
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
            host_rows: [num_host_rows, row elements] host rows of the layer, contiguous; on CUDA, mapped by the device,
                and a row is a multiple of 16 bytes.
            hot_rows, resolved, batch: arguments and result of `resolve`.
            shares_device: True if kernels of other streams run at the same time and get most of the device.
        """

    @abstractmethod
    def swap_in(
        self,
        residency: Residency,
        decode: DecodeMetadata,
        selected_positions: torch.Tensor,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
        shares_device: bool = False,
    ) -> None:
        """Run `resolve`, then `gather`.

        Args:
            residency, decode, selected_positions, hot_rows, counts, out: as in `resolve`.
            host_rows, shares_device: as in `gather`.
        """

    @abstractmethod
    def compact(self, row_ids: torch.Tensor, num_valid: torch.Tensor) -> None:
        """Move the valid ids of each selection to its front, and keep their order.

        Args:
            row_ids: [num_selections, columns] int32, contiguous; -1 is not valid. Updated in place.
            num_valid: [num_selections] int32, contiguous: number of leading ids that contain all valid ones. Becomes
                the number of valid ids; the remaining ones of those leading ids become -1.
        """

    @abstractmethod
    def newest_row_ids(
        self,
        decode: DecodeMetadata,
        hot_rows: HotRows,
        out: torch.Tensor,
        equal_offsets: torch.Tensor | None = None,
    ) -> None:
        """Find the hot row of each new position: the slot mapping of a decode step.

        Args:
            decode: the requests that decode.
            hot_rows: hot rows of any of the layers, which have the same number of rows in a block.
            out: [>= batch * max_query_len] int64, or [num_layers, >= batch * max_query_len] with `equal_offsets`. The
                first `batch * max_query_len` of each layer become flat row ids, request by request, -1 for padding.
            equal_offsets: [num_layers] int32 `HotRows.equal_offset` of each layer; None: ids for `hot_rows` only.
        """

    @abstractmethod
    def write_back(
        self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], decode: DecodeMetadata
    ) -> None:
        """Copy each request's new rows of all layers to the host.

        Args:
            hot_rows, host_rows: one entry per layer, as in `gather`.
            decode: the requests that decode; nothing is written for padding.
        """

    @abstractmethod
    def stage_rows(
        self, host_rows: torch.Tensor, host_block_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        """Copy the first rows of a prefilling request from the host.

        Args:
            host_rows: as in `gather`.
            host_block_table: [blocks] int32 host blocks of the request, contiguous; rows of a negative block are
                skipped.
            block_size: tokens of a host block.
            staging: [num_rows, row elements] in the dtype of `host_rows`, contiguous; gets positions [0, num_rows).
        """

    @abstractmethod
    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_block_table: torch.Tensor, block_size: int
    ) -> None:
        """Copy new rows of a request to the host.

        Args:
            rows: [num_rows, row elements] in the dtype of `host_rows`, contiguous: positions [first, first + num_rows).
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
        out: UnitMetadata,
    ) -> None:
        """Make metadata by KV head and in units from metadata by request and in tokens.

        Args:
            first_hot_block_ids: [batch] int32 first hot block of each request; an entry that belongs to no request is
                padding.
            seq_lens: [batch] int32 tokens of each request, the new ones included; less than 1 for padding.
            query_lens: [batch] int32 new tokens of each request, as in `DecodeMetadata`.
            seq_indices: [num_device_blocks * head_stride] int32 sequence index at each part of a device block, or -1.
            out: metadata, written for the first `batch` requests.
        """

    @abstractmethod
    def write_tokens(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        units: UnitMetadata,
        decode: DecodeMetadata,
        hot_rows: HotRows,
        host_rows: torch.Tensor,
        first_units: torch.Tensor,
    ) -> None:
        """Write each request's new tokens into their units, on the device and on the host.

        Args:
            key, value: [batch * max_query_len, num_heads, head_size] keys and values of the new tokens, request by
                request with empty places, in the rows' dtype. Heads are contiguous; on CUDA, a head is a multiple of
                16 bytes.
            units: the requests that decode, by KV head.
            decode: metadata of the same requests by KV head, whose tensors are those of `units`.
            hot_rows, host_rows: units, as in `gather`; a token's key and value lie side by side.
            first_units: [num_seqs] int32 unit of the first new token in the step before. The slot of the first new
                unit holds this unit's tokens; with -1, they are only on the host. If the first new token continues
                another unit, that unit's earlier tokens are copied to the device first.
        """

    @abstractmethod
    def empty_latest(
        self,
        entries: torch.Tensor,
        hot_block_tables: torch.Tensor,
        head_stride: int,
        moved: MovedRequests,
        num_latest: int,
    ) -> None:
        """Make the rows of the latest positions of some requests empty, in all layers and heads.

        The latest position of a request is the latest that any layer or head holds, because some may hold fewer
        positions than others.

        Args:
            entries: [num_tables, num_device_blocks, entries of a block, 2] int32 residency of all layers, contiguous;
                updated in place.
            hot_block_tables: [num_seqs, max hot blocks] int32 parts of each sequence's hot blocks (`KVHeads`).
            head_stride: parts from one device block to the next.
            moved: the requests; no block is in two of their tables.
            num_latest: number of positions to forget, counted back from the latest one; at least 1.
        """

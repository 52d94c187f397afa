"""Swap-in operations in plain torch: the reference for other implementations, and the implementation for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_hisparse.ops.base import DecodeMetadata, HotRows, MovedRequests, Residency, Resolved, SwapInOps, UnitMetadata
from vllm_hisparse.ops.limits import MAX_AGE, MAX_BONUS, USE_BONUS

_NO_SLOT = torch.iinfo(torch.int32).max


class _Choice(NamedTuple):
    """Slots of the selected positions of some requests after `resolve`.

    Attributes:
        slots: [n, columns] int32 slot of each selected position, -1 for padding.
        missed: [n, columns] bool, True for positions that have yet to be copied to their slots; once per position.
        num_hits: [n] int64 hits of each request.
    """

    slots: torch.Tensor
    missed: torch.Tensor
    num_hits: torch.Tensor


class TorchSwapInOps(SwapInOps):
    """Works on tensors of any device. Against the rule of `SwapInOps`, it allocates and waits for the device.

    Attributes:
        writes_host_tokens: True if `write_tokens` writes new tokens to the host, too.
    """

    writes_host_tokens = True

    def resolve(
        self,
        residency: Residency,
        decode: DecodeMetadata,
        selected_positions: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        batch = len(selected_positions)
        out.hot_row_ids[:batch], out.num_misses[:batch] = -1, 0
        out.num_valid[: batch * decode.max_query_len] = 0
        live, seqs = _live_requests(decode, batch)
        fits = _fits(decode, live, seqs)
        for part, choose in ((fits, _choose_fitting), (~fits, _choose_evicting)):
            if not part.any():
                continue
            buffers = _Buffers.of(decode, live[part], seqs[part], hot_rows)
            selected = selected_positions[live[part]]
            choice = choose(residency, buffers, selected)
            found = torch.stack((choice.num_hits, choice.missed.sum(1)), 1)
            counts[seqs[part]] += residency.num_layers * found
            _write_resolved(decode, hot_rows, live[part], seqs[part], selected, choice, out)

    def gather(
        self,
        host_rows: torch.Tensor,
        hot_rows: HotRows,
        resolved: Resolved,
        batch: int,
        shares_device: bool = False,
    ) -> None:
        num_misses = resolved.num_misses[:batch, None]
        counted = torch.arange(resolved.miss_hot_row_ids.shape[1], device=num_misses.device) < num_misses
        source_ids, target_ids = resolved.miss_host_row_ids[:batch][counted], resolved.miss_hot_row_ids[:batch][counted]
        self._load_rows(host_rows, source_ids, hot_rows.rows, target_ids.long())

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
        self.resolve(residency, decode, selected_positions, hot_rows, counts, out)
        self.gather(host_rows, hot_rows, out, len(selected_positions))

    def compact(self, row_ids: torch.Tensor, num_valid: torch.Tensor) -> None:
        leads = torch.arange(row_ids.shape[1], device=row_ids.device) < num_valid[:, None]
        is_valid = leads & (row_ids >= 0)
        order = (~is_valid).int().where(leads, 2).sort(dim=1, stable=True).indices
        row_ids.copy_(row_ids.where(is_valid | ~leads, -1).gather(1, order))
        num_valid.copy_(is_valid.sum(1))

    def newest_row_ids(
        self,
        decode: DecodeMetadata,
        hot_rows: HotRows,
        out: torch.Tensor,
        equal_offsets: torch.Tensor | None = None,
    ) -> None:
        batch = len(decode.seq_lens)
        live, seqs = _live_requests(decode, batch)
        row_ids = _newest_row_ids(decode, live, seqs, hot_rows)
        row_ids = row_ids.where(row_ids < len(hot_rows.rows), -1)
        by_layer = out[None] if equal_offsets is None else out
        by_layer[:, : batch * decode.max_query_len] = -1
        by_request = by_layer[:, : batch * decode.max_query_len].unflatten(1, (batch, decode.max_query_len))
        by_request[:, live] = row_ids
        if equal_offsets is not None and decode.has_equal_rows is not None:
            moves = (decode.has_equal_rows[seqs, None] > 0) & (row_ids >= 0)
            distances = equal_offsets - hot_rows.equal_offset
            by_request[:, live] += torch.where(moves, distances[:, None, None], 0)

    def write_back(
        self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], decode: DecodeMetadata
    ) -> None:
        live, seqs = _live_requests(decode, len(decode.seq_lens))
        targets = _flat_row_ids(
            decode.host_block_tables[seqs], _new_positions(decode, live), decode.block_size
        ).flatten()
        for hot, host in zip(hot_rows, host_rows, strict=True):
            _copy_rows(hot.rows, _newest_row_ids(decode, live, seqs, hot).flatten(), host, targets)

    def stage_rows(
        self, host_rows: torch.Tensor, host_block_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        positions = torch.arange(len(staging), device=host_block_table.device)
        sources = _flat_row_ids(host_block_table[None], positions[None], block_size)[0]
        _copy_rows(host_rows, sources, staging, positions)

    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_block_table: torch.Tensor, block_size: int
    ) -> None:
        sources = torch.arange(len(rows), device=host_block_table.device)
        targets = _flat_row_ids(host_block_table[None], first + sources[None], block_size)[0]
        _copy_rows(rows, sources, host_rows, targets)

    def begin_units(
        self,
        first_hot_block_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | None,
        seq_indices: torch.Tensor,
        out: UnitMetadata,
    ) -> None:
        batch, heads = len(seq_lens), out.heads
        num_heads, per_unit = heads.num_heads, heads.tokens_per_unit
        num_seqs = out.num_requests * num_heads
        live, seqs = _find_live(heads.first_parts(first_hot_block_ids), seq_lens, seq_indices, num_seqs)
        for tensor, padding in ((out.request_indices, out.num_requests), (out.positions, 0), (out.num_tokens, 0)):
            tensor[:, :batch] = padding
        for tensor, padding in (
            (out.first_hot_block_ids, -1),
            (out.num_units, 0),
            (out.num_new_units, 1),
            (out.tails, 0),
        ):
            tensor[: batch * num_heads] = padding
        newest = seq_lens[live] - 1
        first = newest + 1 - (1 if query_lens is None else query_lens[live])
        positions = first + torch.arange(out.max_query_len, device=first.device)[:, None]
        exists = positions <= newest
        out.request_indices[:, live] = heads.request_indices(seqs).where(exists, out.num_requests)
        out.positions[:, live] = positions.where(exists, 0)
        out.num_tokens[:, live] = (positions + 1).where(exists, 0)
        tails = (positions % per_unit + 1 - per_unit).where(exists, 0)
        live_heads = heads.seq_indices(live)  # numbered as seqs are
        out.tails[live_heads] = tails.T.repeat_interleave(num_heads, 0).int()
        out.first_hot_block_ids[live_heads] = heads.parts_of(first_hot_block_ids[live]).flatten()
        out.num_units[live_heads] = (newest // per_unit + 1).repeat_interleave(num_heads).int()
        num_new = newest // per_unit + 1 - first // per_unit
        out.num_new_units[live_heads] = num_new.repeat_interleave(num_heads).int()

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
        live, seqs = _live_requests(decode, len(decode.seq_lens))
        num_heads, per_unit = units.heads.num_heads, units.heads.tokens_per_unit
        requests, heads, first_new = live // num_heads, live % num_heads, _first_new(decode, live)[:, None]
        targets = _newest_row_ids(decode, live, seqs, hot_rows)
        homes = _flat_row_ids(decode.host_block_tables[seqs], _new_positions(decode, live), decode.block_size)
        continues = units.positions[0, requests] % per_unit > 0
        stale = continues & (first_units[seqs] != first_new[:, 0])
        self._load_rows(host_rows, homes[stale, 0], hot_rows.rows, targets[stale, 0])
        first_units[seqs] = first_new[:, 0]
        tokens = torch.cat((key, value), -1).unflatten(0, (-1, units.max_query_len))
        copies = [(hot_rows.rows, targets), (host_rows, homes)][: 1 + self.writes_host_tokens]
        for i in range(units.max_query_len):
            exists = units.num_tokens[i, requests] > 0
            positions = units.positions[i, requests][exists]
            columns = positions[:, None] // per_unit - first_new[exists]
            new = tokens[requests[exists], i, heads[exists]]
            for rows, places in copies:
                by_token, where = rows.unflatten(1, (per_unit, -1)), places[exists].gather(1, columns)[:, 0]
                by_token[where.to(rows.device), (positions % per_unit).to(rows.device)] = new.to(
                    rows.device, rows.dtype
                )

    def empty_latest(
        self,
        entries: torch.Tensor,
        hot_block_tables: torch.Tensor,
        head_stride: int,
        moved: MovedRequests,
        num_latest: int,
    ) -> None:
        positions = entries[..., 0]
        for seq, num_blocks in zip(moved.seqs.tolist(), moved.num_blocks.tolist(), strict=True):
            if num_blocks > 0:
                blocks = hot_block_tables[seq, :num_blocks].long() // head_stride
                held = positions[:, blocks]
                positions[:, blocks] = held.where(held <= held.max() - num_latest, -1)

    def read_host_rows(self, host_rows: torch.Tensor, host_row_ids: torch.Tensor) -> torch.Tensor:
        """Read rows of the host pool: [n, row elements], on its device.

        Args:
            host_rows: as in `gather`.
            host_row_ids: [n] int64 flat ids of host rows.
        """
        return host_rows.index_select(0, host_row_ids)  # it copies whole rows; indexing copies single elements

    def _load_rows(
        self, host_rows: torch.Tensor, host_row_ids: torch.Tensor, hot_rows: torch.Tensor, hot_row_ids: torch.Tensor
    ) -> None:
        """Copy rows from the host; a pair with an id outside its tensor is skipped."""
        host_row_ids, hot_row_ids = _keep_existing(host_rows, host_row_ids, hot_rows, hot_row_ids)
        if len(host_row_ids):
            rows = self.read_host_rows(host_rows, host_row_ids.to(host_rows.device))
            hot_rows[hot_row_ids] = rows.to(hot_rows.device)


class _Buffers(NamedTuple):
    """Hot buffers of some requests, and their new positions.

    Attributes:
        entries: [n, max slots] int64 entry of each slot in the residency; undefined beyond a request's slots.
        num_slots: [n, 1] int32 slots of each request, without the reserved ones.
        first_new: [n, 1] int32 first new position of each request.
        new: [n, max_query_len] int32 new positions, from `first_new` on; -1 beyond the last.
    """

    entries: torch.Tensor
    num_slots: torch.Tensor
    first_new: torch.Tensor
    new: torch.Tensor

    @classmethod
    def of(cls, decode: DecodeMetadata, live: torch.Tensor, seqs: torch.Tensor, hot_rows: HotRows) -> _Buffers:
        """Make the buffers of the requests with these batch indices and sequence indices, [n] int64 each."""
        num_rows = decode.num_hot_rows[seqs]
        slots = torch.arange(int(num_rows.max()), device=seqs.device).expand(len(seqs), -1)
        tables, is_equal = decode.hot_block_tables[seqs], _has_equal_rows(decode, seqs)
        entries = hot_rows.entries(tables, slots.clamp_max(num_rows[:, None] - 1), is_equal)
        num_slots = num_rows[:, None] - decode.max_query_len
        return cls(entries, num_slots, _first_new(decode, live)[:, None], _new_positions(decode, live))


def _live_requests(decode: DecodeMetadata, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the requests of a batch that are not padding: batch indices and sequence indices, [<= batch] int64 each."""
    num_seqs = len(decode.host_block_tables)
    live, seqs = _find_live(decode.first_hot_block_ids[:batch], decode.seq_lens[:batch], decode.seq_indices, num_seqs)
    has_rows = decode.num_hot_rows[seqs] > 0
    return live[has_rows], seqs[has_rows]


def _find_live(
    first_blocks: torch.Tensor, seq_lens: torch.Tensor, seq_indices: torch.Tensor, num_seqs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the requests of a batch that are not padding; result as in `_live_requests`.

    Args:
        first_blocks: [batch] first hot block of each request; any number for padding.
        seq_lens: [batch] int32 tokens of each request.
        seq_indices: as in `DecodeMetadata`.
        num_seqs: upper bound of sequence indices.
    """
    first_blocks, num_blocks = first_blocks.long(), len(seq_indices)
    seqs = seq_indices[first_blocks.clamp(0, num_blocks - 1)].long()
    live = (first_blocks >= 0) & (first_blocks < num_blocks) & (seqs >= 0) & (seqs < num_seqs)
    live = (live & (seq_lens > 0)).nonzero()[:, 0]
    return live, seqs[live]


def _first_new(decode: DecodeMetadata, live: torch.Tensor) -> torch.Tensor:
    """First new position of requests: [n] int32.

    Args:
        decode: the requests that decode.
        live: [n] int64 batch indices of the requests.
    """
    return decode.seq_lens[live] - (1 if decode.query_lens is None else decode.query_lens[live])


def _new_positions(decode: DecodeMetadata, live: torch.Tensor) -> torch.Tensor:
    """New positions of requests: [n, max_query_len] int32, -1 beyond the last.

    Args:
        decode, live: as in `_first_new`.
    """
    offsets = torch.arange(decode.max_query_len, dtype=torch.int32, device=live.device)
    positions = _first_new(decode, live)[:, None] + offsets
    return positions.where(positions < decode.seq_lens[live][:, None], -1)


def _fits(decode: DecodeMetadata, live: torch.Tensor, seqs: torch.Tensor) -> torch.Tensor:
    """Tell for each sequence whether it fits (`SwapInOps`): [n] bool.

    Args:
        decode: the requests that decode.
        live, seqs: [n] int64 batch indices and sequence indices of the requests.
    """
    return _first_new(decode, live) + decode.max_query_len <= decode.num_hot_rows[seqs]


def _choose_fitting(residency: Residency, buffers: _Buffers, selected: torch.Tensor) -> _Choice:
    """Resolve requests that fit into their buffers: slot p holds position p or nothing.

    Args:
        residency: updated in place.
        buffers: hot buffers of the requests.
        selected: [n, columns] int32 positions.
    """
    entries, _, first_new, new = buffers
    wanted = (selected >= 0) & (selected < first_new)
    own_slots = selected.where(wanted, first_new)  # a new position is always hot
    own_entries = entries.gather(1, own_slots.long())
    first_columns = _first_columns(selected, wanted, entries.shape[1])
    leads = wanted & (first_columns.gather(1, own_slots.long()) == _columns(selected))
    hits = leads & (residency.positions[own_entries] == selected)
    new = new.where(new >= 0, first_new)
    expiries = _next_expiries(residency, own_entries, residency.positions[own_entries] == own_slots, first_new)
    changes = (own_slots, own_entries, expiries), (new, entries.gather(1, new.long()), first_new.expand_as(new))
    for slots, changed, given in changes:
        residency.positions[changed], residency.expiries[changed] = slots, given
    slots = selected.where((selected >= 0) & (selected <= new.amax(1, keepdim=True)), -1)
    return _Choice(slots, leads & ~hits, hits.sum(1))


def _choose_evicting(residency: Residency, buffers: _Buffers, selected: torch.Tensor) -> _Choice:
    """Resolve requests that have outgrown their buffers: misses take the slots of the rows that expire first.

    Args:
        residency, buffers, selected: as in `_choose_fitting`.
    """
    entries, num_slots, first_new, new = buffers
    slots = torch.arange(entries.shape[1], dtype=torch.int32, device=entries.device).expand_as(entries)
    positions = residency.positions[entries]  # positions from `first_new` on are rejected drafts
    positions = positions.where((slots < num_slots) & (positions < first_new), -1)
    wanted = (selected >= 0) & (selected < first_new)
    num_positions = int(first_new.max())
    first_columns = _first_columns(selected, wanted, num_positions)
    columns = first_columns.gather(1, positions.where(positions >= 0, num_positions).long())
    found = columns >= 0
    chosen = torch.full_like(selected, _NO_SLOT)
    found_columns = found.nonzero()[:, 0] * selected.shape[1] + columns[found]
    chosen.view(-1).scatter_reduce_(0, found_columns, slots[found], "amin")
    hits = found & (chosen.gather(1, columns.clamp_min(0).long()) == slots)
    positions = positions.where(hits | ~found, -1)  # other slots hold a position that is hot twice
    lead_columns = first_columns.gather(1, selected.where(wanted, num_positions).long())
    leads = wanted & (lead_columns == _columns(selected))
    missed = leads & (chosen == _NO_SLOT)
    ages = first_new + MAX_BONUS - residency.expiries[entries]
    ages = ages.clamp(0, MAX_AGE).where(positions >= 0, MAX_AGE + 1)
    filled = _oldest(ages.where((slots < num_slots) & ~hits, -1), missed.sum(1, keepdim=True))
    chosen[missed] = slots[filled]  # equally many of each request, paired in order
    is_reserved = (slots >= num_slots) & (slots < num_slots + new.shape[1])
    residency.positions[entries[is_reserved | (found & ~hits)]] = -1
    residency.positions[entries[filled]] = selected[missed]
    used = hits | filled
    residency.expiries[entries[used]] = _next_expiries(residency, entries, hits, first_new)[used]
    chosen = chosen.gather(1, lead_columns.clamp_min(0).long()).where(wanted, -1)
    is_new = (selected >= first_new) & (selected <= new.amax(1, keepdim=True))
    return _Choice(chosen.where(~is_new, num_slots + selected - first_new), missed, (leads & ~missed).sum(1))


def _next_expiries(
    residency: Residency, entries: torch.Tensor, hits: torch.Tensor, first_new: torch.Tensor
) -> torch.Tensor:
    """Expiries of rows that a step uses: [n, entries] int32.

    Args:
        residency: positions and expiries before the step.
        entries: [n, entries] int64 entries of the rows.
        hits: [n, entries] bool, False for rows that are copied.
        first_new: [n, 1] int32 first new position of each request.
    """
    expiries = residency.expiries[entries].maximum(first_new).where(hits, first_new) + USE_BONUS
    return expiries.minimum(first_new + MAX_BONUS)


def _oldest(ages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Choose the `counts` entries of each row with the highest ages, and the first of equals: [n, entries] bool.

    Args:
        ages: [n, entries] int.
        counts: [n, 1] int.
    """
    num_chosen, slots = int(counts.max()), torch.arange(ages.shape[1], device=ages.device)
    chosen = (ages * len(slots) - slots).topk(num_chosen).indices  # no two entries are equal
    is_one = (torch.arange(num_chosen, device=ages.device) < counts).expand_as(chosen)
    return torch.zeros_like(ages, dtype=torch.bool).scatter_(1, chosen, is_one)


def _write_resolved(
    decode: DecodeMetadata,
    hot_rows: HotRows,
    live: torch.Tensor,
    seqs: torch.Tensor,
    selected: torch.Tensor,
    choice: _Choice,
    out: Resolved,
) -> None:
    """Write the flat row ids of selected positions, and the copies of missed rows.

    Args:
        decode, hot_rows, out: as in `SwapInOps.resolve`.
        live, seqs: [n] int64 batch indices and sequence indices of the requests.
        selected: [n, columns] int32 positions.
        choice: slots that were chosen for the requests.
    """
    hot_ids = _flat_hot_row_ids(decode, seqs, hot_rows, choice.slots)
    host_ids = _flat_row_ids(decode.host_block_tables[seqs], selected.where(choice.missed, -1), decode.block_size)
    by_token = choice.slots.unflatten(1, (decode.max_query_len, -1))
    columns = torch.arange(1, by_token.shape[2] + 1, dtype=torch.int32, device=selected.device)
    out.hot_row_ids[live] = hot_ids.int()
    out.num_valid.view(-1, decode.max_query_len)[live] = torch.where(by_token >= 0, columns, 0).amax(2)
    out.num_misses[live] = choice.missed.sum(1).int()
    requests, missed_columns = choice.missed.nonzero(as_tuple=True)
    places = live[requests], choice.missed.cumsum(1)[requests, missed_columns] - 1
    out.miss_hot_row_ids[places] = hot_ids[requests, missed_columns].int()
    out.miss_host_row_ids[places] = host_ids[requests, missed_columns]


def _columns(selected: torch.Tensor) -> torch.Tensor:
    """Number of each column: int32, shaped as `selected`, [n, columns]."""
    return torch.arange(selected.shape[1], dtype=torch.int32, device=selected.device).expand_as(selected)


def _first_columns(selected: torch.Tensor, wanted: torch.Tensor, num_positions: int) -> torch.Tensor:
    """First column that wants each position, or -1: [n, num_positions + 1] int32; the last entry is for no position.

    Args:
        selected: [n, columns] int32 positions.
        wanted: [n, columns] bool.
        num_positions: more than any wanted position.
    """
    num_columns = selected.shape[1]
    table = torch.full((len(selected), num_positions + 1), num_columns, dtype=torch.int32, device=selected.device)
    places = selected.where(wanted, num_positions).long()
    table.scatter_reduce_(1, places, _columns(selected), "amin")
    table[:, num_positions] = num_columns
    return table.where(table < num_columns, -1)


def _has_equal_rows(decode: DecodeMetadata, seqs: torch.Tensor) -> torch.Tensor | None:
    """Tell for sequences, [n] int64, whether their hot blocks are divided equally: [n] int32; None: no one's are."""
    return None if decode.has_equal_rows is None else decode.has_equal_rows[seqs]


def _flat_hot_row_ids(
    decode: DecodeMetadata, seqs: torch.Tensor, hot_rows: HotRows, slots: torch.Tensor
) -> torch.Tensor:
    """Flat ids of the hot rows of slots: [n, slots] int64, -1 where the slot is -1.

    Args:
        decode: the requests that decode.
        seqs: [n] int64 sequence indices.
        hot_rows: hot rows of the layer.
        slots: [n, slots] ints, or -1.
    """
    rows_per_block, first_row = hot_rows.division(_has_equal_rows(decode, seqs))
    strides = hot_rows.block_stride_rows, hot_rows.pitch
    ids = _flat_row_ids(decode.hot_block_tables[seqs], slots, rows_per_block, *strides)
    return (ids + first_row).where(ids >= 0, -1)


def _flat_row_ids(
    tables: torch.Tensor,
    rows: torch.Tensor,
    rows_per_block: int | torch.Tensor,
    stride: int | None = None,
    pitch: int = 1,
) -> torch.Tensor:
    """Flat ids of rows of paged tables: [n, rows] int64, -1 where the row or its block is -1.

    Args:
        tables: [n, blocks] int32 block ids, or -1.
        rows: [n, rows] or [1, rows] ints, row numbers within a table, or -1.
        rows_per_block: rows of a block; with a stride, perhaps [n, 1] ints.
        stride: rows from one block to the next; None: blocks lie side by side.
        pitch: rows from one row of a block to the next.
    """
    blocks = rows.div(rows_per_block, rounding_mode="floor").long()
    known = (rows >= 0) & (blocks < tables.shape[1])
    block_ids = tables.gather(1, blocks.where(known, 0)).long()
    flat = block_ids * (rows_per_block if stride is None else stride) + rows % rows_per_block * pitch
    return flat.where(known & (block_ids >= 0), -1)


def _newest_row_ids(decode: DecodeMetadata, live: torch.Tensor, seqs: torch.Tensor, hot_rows: HotRows) -> torch.Tensor:
    """Flat ids of the hot rows of the new positions: [n, max_query_len] int64, -1 beyond the last.

    Args:
        decode, hot_rows: as in `SwapInOps.newest_row_ids`.
        live, seqs: [n] int64 batch indices and sequence indices of the requests.
    """
    first_new, positions = _first_new(decode, live)[:, None], _new_positions(decode, live)
    first_reserved = decode.num_hot_rows[seqs][:, None] - decode.max_query_len
    moved = positions + (first_reserved - first_new) * ~_fits(decode, live, seqs)[:, None]
    slots = moved.where(positions >= 0, -1)
    return _flat_hot_row_ids(decode, seqs, hot_rows, slots)


def _copy_rows(source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy rows, across devices too.

    Args:
        source, target: [rows, row elements] of one width, any dtypes.
        source_ids, target_ids: [n] int64; a pair with an id outside its tensor is skipped.
    """
    source_ids, target_ids = _keep_existing(source, source_ids, target, target_ids)
    rows = source.index_select(0, source_ids.to(source.device))  # it copies whole rows; indexing copies single elements
    target[target_ids.to(target.device)] = rows.to(target.device)


def _keep_existing(
    source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop the pairs with an id outside its tensor; arguments as for `_copy_rows`."""
    kept = (source_ids >= 0) & (source_ids < len(source)) & (target_ids >= 0) & (target_ids < len(target))
    return (source_ids, target_ids) if kept.all() else (source_ids[kept], target_ids[kept])

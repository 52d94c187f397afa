"""Swap-in operations in plain torch: the reference of every other implementation, and the CPU platform's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_hisparse.ops.base import HotRows, Residency, Resolved, StepTables, SwapInOps, UnitTables


class _Choice(NamedTuple):
    """Where the selected positions of some requests are after `resolve`.

    Attributes:
        slots: [n, top_k] int32 hot slot of each, -1 where there is none.
        missed: [n, top_k] bool, those that have yet to be copied there.
        num_hits: [n] int64.
    """

    slots: torch.Tensor
    missed: torch.Tensor
    num_hits: torch.Tensor


class TorchSwapInOps(SwapInOps):
    """Works on tensors of any device. Unlike what `SwapInOps` promises, it allocates and waits for the device."""

    def resolve(
        self,
        residency: Residency,
        tables: StepTables,
        top_k: torch.Tensor,
        hot_rows: HotRows,
        counts: torch.Tensor,
        out: Resolved,
    ) -> None:
        batch = len(top_k)
        out.hot_row_ids[:batch], out.num_valid[:batch], out.num_misses[:batch] = -1, 0, 0
        live, states = _live_requests(tables, batch, len(residency.slots))
        newest = tables.seq_lens[live][:, None] - 1
        fits = newest[:, 0] < residency.slots.shape[1]
        for part, choose in ((fits, _choose_fitting), (~fits, _choose_evicting)):
            if not part.any():
                continue
            selected = top_k[live[part]]
            choice = choose(residency, states[part], selected, newest[part])
            counts[states[part]] += torch.stack((choice.num_hits, choice.missed.sum(1)), 1)
            _write_resolved(tables, hot_rows, live[part], states[part], selected, choice, out)

    def gather(self, host_rows: torch.Tensor, hot_rows: HotRows, resolved: Resolved, batch: int) -> None:
        num_misses = resolved.num_misses[:batch, None]
        counted = torch.arange(resolved.miss_hot_row_ids.shape[1], device=num_misses.device) < num_misses
        source_ids, target_ids = resolved.miss_host_row_ids[:batch][counted], resolved.miss_hot_row_ids[:batch][counted]
        _copy_rows(host_rows, source_ids, hot_rows.rows, target_ids.long())

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
        self.resolve(residency, tables, top_k, hot_rows, counts, out)
        self.gather(host_rows, hot_rows, out, len(top_k))

    def newest_row_ids(self, tables: StepTables, num_slots: int, hot_rows: HotRows, out: torch.Tensor) -> None:
        batch = len(tables.seq_lens)
        live, _ = _live_requests(tables, batch, len(tables.host_tables))
        row_ids = _newest_row_ids(tables, live, num_slots, hot_rows)
        out[:batch] = -1
        out[live] = row_ids.where(row_ids < len(hot_rows.rows), -1)

    def write_back(
        self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], tables: StepTables, num_slots: int
    ) -> None:
        live, states = _live_requests(tables, len(tables.seq_lens), len(tables.host_tables))
        newest = tables.seq_lens[live][:, None] - 1
        targets = _flat_row_ids(tables.host_tables[states], newest, tables.block_size)[:, 0]
        for hot, host in zip(hot_rows, host_rows, strict=True):
            _copy_rows(hot.rows, _newest_row_ids(tables, live, num_slots, hot), host, targets)

    def stage_rows(
        self, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        positions = torch.arange(len(staging), device=host_table.device)
        sources = _flat_row_ids(host_table[None], positions[None], block_size)[0]
        _copy_rows(host_rows, sources, staging, positions)

    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int
    ) -> None:
        sources = torch.arange(len(rows), device=host_table.device)
        targets = _flat_row_ids(host_table[None], first + sources[None], block_size)[0]
        _copy_rows(rows, sources, host_rows, targets)

    def begin_units(self, tables: StepTables, out: UnitTables) -> None:
        batch, num_heads, per_unit = len(tables.seq_lens), out.num_heads, out.tokens_per_unit
        heads = torch.arange(num_heads, device=out.request_indices.device)
        by_head = tables.hot_tables[:, None] * out.head_stride + heads[:, None]
        firsts = dataclasses.replace(tables, hot_tables=by_head[:, 0])
        live, states = _live_requests(firsts, batch, len(tables.host_tables))
        out.request_indices[:batch] = (len(tables.host_tables) - 1) // num_heads  # its last table is of no request
        out.positions[:batch] = 0
        for tensor, padding in ((out.hot_tables, -1), (out.num_units, 0), (out.tails, 0)):
            tensor[: batch * num_heads] = padding
        newest = tables.seq_lens[live] - 1
        out.request_indices[live], out.positions[live] = states // num_heads, newest.long()
        live_heads = (live[:, None] * num_heads + heads).flatten()
        out.hot_tables[live_heads] = by_head[live].flatten(0, 1).int()
        out.num_units[live_heads] = (newest // per_unit + 1).repeat_interleave(num_heads).int()
        out.tails[live_heads] = (newest % per_unit + 1 - per_unit).repeat_interleave(num_heads).int()

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
        live, states = _live_requests(tables, len(tables.seq_lens), len(tables.host_tables))
        newest = tables.seq_lens[live][:, None] - 1
        targets = _newest_row_ids(tables, live, num_slots, hot_rows)
        homes = _flat_row_ids(tables.host_tables[states], newest, tables.block_size)[:, 0]
        stale = reload[states] != 0
        _copy_rows(host_rows, homes[stale], hot_rows.rows, targets[stale])
        reload[states] = 0
        offsets = (units.positions[: len(key)] % units.tokens_per_unit).repeat_interleave(units.num_heads)[live]
        tokens = torch.cat((key, value), -1).flatten(0, 1)[live]
        for rows, places in ((hot_rows.rows, targets), (host_rows, homes)):
            by_token = rows.unflatten(1, (units.tokens_per_unit, -1))
            by_token[places.to(rows.device), offsets.to(rows.device)] = tokens.to(rows.device, rows.dtype)


def _live_requests(tables: StepTables, batch: int, num_states: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Requests of the batch that are no padding: two [<= batch] int64, their batch indices and their state indices."""
    first_blocks, num_blocks = tables.hot_tables[:batch, 0].long(), len(tables.state_indices)
    states = tables.state_indices[first_blocks.clamp(0, num_blocks - 1)].long()
    live = (first_blocks >= 0) & (first_blocks < num_blocks) & (states >= 0) & (states < num_states)
    live = (live & (tables.seq_lens[:batch] > 0)).nonzero()[:, 0]
    return live, states[live]


def _choose_fitting(
    residency: Residency, states: torch.Tensor, selected: torch.Tensor, newest: torch.Tensor
) -> _Choice:
    """Resolve requests that fit into their buffers: entry p is slot p, and holds position p or nothing.

    Args:
        residency: updated in place.
        states: [n] int64 state indices.
        selected: [n, top_k] int32 positions.
        newest: [n, 1] int32 position, less than the number of slots.
    """
    positions = residency.positions[states]
    wanted = (selected >= 0) & (selected < newest)
    own_slots = selected.where(wanted, newest).long()  # the newest position is hot in any case
    hits = wanted & (positions.gather(1, own_slots) == selected)
    positions.scatter_(1, own_slots, own_slots.int()).scatter_(1, newest.long(), newest)
    residency.positions[states] = positions
    return _Choice(selected.where(wanted | (selected == newest), -1), wanted & ~hits, hits.sum(1))


def _choose_evicting(
    residency: Residency, states: torch.Tensor, selected: torch.Tensor, newest: torch.Tensor
) -> _Choice:
    """Resolve requests that have outgrown their buffers: misses take the slots of the least recently used entries.

    Args:
        residency: updated in place.
        states: [n] int64 state indices.
        selected: [n, top_k] int32 positions.
        newest: [n, 1] int32 position, at least the number of slots.
    """
    slots, positions = residency.slots[states], residency.positions[states]
    wanted = (selected >= 0) & (selected < newest)
    columns = _columns_of(positions, selected, wanted, int(newest.max()))
    hits = columns >= 0
    chosen = torch.full_like(selected, -1)
    chosen[hits.nonzero()[:, 0], columns[hits].long()] = slots[hits]
    missed = wanted & (chosen < 0)
    filled = ~hits & ((~hits).cumsum(1) <= missed.sum(1, keepdim=True))
    chosen[missed] = slots[filled]  # as many of each request, paired in order
    positions[filled] = selected[missed]
    _store_entries(residency, states, slots, positions, (~(hits | filled), filled, hits))
    return _Choice(chosen.where(selected != newest, slots.shape[1]), missed, hits.sum(1))


def _store_entries(
    residency: Residency,
    states: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    parts: tuple[torch.Tensor, ...],
) -> None:
    """Write entries back part by part, each part in its old order.

    Args:
        residency: updated in place.
        states: [n] int64 state indices.
        slots, positions: [n, num_slots] int32 entries in their old order.
        parts: [n, num_slots] bool masks; every entry is in one of them.
    """
    target = torch.zeros_like(slots, dtype=torch.int64)
    first = 0
    for part in parts:
        rank = part.cumsum(1)
        target = torch.where(part, first + rank - 1, target)
        first = first + rank[:, -1:]
    residency.slots[states] = torch.empty_like(slots).scatter_(1, target, slots)
    residency.positions[states] = torch.empty_like(slots).scatter_(1, target, positions)


def _write_resolved(
    tables: StepTables,
    hot_rows: HotRows,
    live: torch.Tensor,
    states: torch.Tensor,
    selected: torch.Tensor,
    choice: _Choice,
    out: Resolved,
) -> None:
    """Write flat row ids of selected positions and of the copies that bring the missed ones.

    Args:
        tables, hot_rows, out: as in `SwapInOps.resolve`.
        live, states: [n] int64 batch indices and state indices of the requests.
        selected: [n, top_k] int32 positions.
        choice: of these requests.
    """
    hot_ids = _flat_row_ids(tables.hot_tables[live], choice.slots, hot_rows.rows_per_block, hot_rows.block_stride_rows)
    host_ids = _flat_row_ids(tables.host_tables[states], selected.where(choice.missed, -1), tables.block_size)
    columns = torch.arange(1, selected.shape[1] + 1, dtype=torch.int32, device=selected.device)
    out.hot_row_ids[live] = hot_ids.int()
    out.num_valid[live] = torch.where(choice.slots >= 0, columns, 0).amax(1)
    out.num_misses[live] = choice.missed.sum(1).int()
    requests, missed_columns = choice.missed.nonzero(as_tuple=True)
    places = live[requests], choice.missed.cumsum(1)[requests, missed_columns] - 1
    out.miss_hot_row_ids[places] = hot_ids[requests, missed_columns].int()
    out.miss_host_row_ids[places] = host_ids[requests, missed_columns]


def _columns_of(keys: torch.Tensor, selected: torch.Tensor, wanted: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Column of `selected` that holds each key where it is wanted, or -1: [n, keys] int32.

    Args:
        keys: [n, keys] int32 positions, or -1.
        selected: [n, top_k] int32 positions, distinct where wanted.
        wanted: [n, top_k] bool.
        num_positions: more than any wanted position.
    """
    table = torch.full((len(keys), num_positions + 1), -1, dtype=torch.int32, device=keys.device)
    columns = torch.arange(selected.shape[1], dtype=torch.int32, device=keys.device).expand_as(selected)
    table.scatter_(1, selected.where(wanted, num_positions).long(), columns)
    table[:, num_positions] = -1
    return table.gather(1, keys.where((keys >= 0) & (keys < num_positions), num_positions).long())


def _flat_row_ids(
    tables: torch.Tensor, rows: torch.Tensor, rows_per_block: int, stride: int | None = None
) -> torch.Tensor:
    """Flat ids of rows of paged tables: [n, rows] int64, -1 where the row or its block is none.

    Args:
        tables: [n, blocks] int32 block ids, or -1.
        rows: [n, rows] or [1, rows] ints, row numbers within a table, or -1.
        rows_per_block: rows of a block.
        stride: rows from one block to the next; None: blocks lie side by side.
    """
    blocks = rows.div(rows_per_block, rounding_mode="floor").long()
    known = (rows >= 0) & (blocks < tables.shape[1])
    block_ids = tables.gather(1, blocks.where(known, 0)).long()
    flat = block_ids * (stride or rows_per_block) + rows % rows_per_block
    return flat.where(known & (block_ids >= 0), -1)


def _newest_row_ids(tables: StepTables, live: torch.Tensor, num_slots: int, hot_rows: HotRows) -> torch.Tensor:
    """Flat ids of the hot rows of the newest positions: [n] int64, -1 where there is none.

    Args:
        tables, num_slots, hot_rows: as in `SwapInOps.newest_row_ids`.
        live: [n] int64 batch indices of the requests.
    """
    slots = (tables.seq_lens[live][:, None] - 1).clamp(max=num_slots)
    return _flat_row_ids(tables.hot_tables[live], slots, hot_rows.rows_per_block, hot_rows.block_stride_rows)[:, 0]


def _copy_rows(source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy rows, across devices too.

    Args:
        source, target: [rows, row elements] of one width, any dtypes.
        source_ids, target_ids: [n] int64; a pair with an id outside its tensor is skipped.
    """
    kept = (source_ids >= 0) & (source_ids < len(source)) & (target_ids >= 0) & (target_ids < len(target))
    if not kept.all():
        source_ids, target_ids = source_ids[kept], target_ids[kept]
    rows = source.index_select(0, source_ids.to(source.device))  # copies whole rows, where indexing copies elements
    target[target_ids.to(target.device)] = rows.to(target.device)

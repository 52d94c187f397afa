"""Swap-in operations in plain torch: the reference of every other implementation, and the CPU platform's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_hisparse.ops.base import HotRows, Residency, Resolved, StepTables, SwapInOps, UnitTables


@dataclass
class _Entries:
    """What one step does to the residency entries of its requests; all [requests of the step, num_slots].

    Attributes:
        slots, positions: the entries, least recently used first.
        hits: entries that the step selects.
        moving_hits: those that LRU eviction moves to the end.
        filled: entries that take a miss in place of a victim.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    hits: torch.Tensor
    moving_hits: torch.Tensor
    filled: torch.Tensor


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
        live, requests = _requests_of(tables, batch, len(residency.slots))
        if not len(live):
            return
        selected, seq_lens = top_k[live], tables.seq_lens[live][:, None]
        chosen, missed, entries = _choose(residency, requests, selected, seq_lens)
        self._store(residency, requests, entries)
        num_misses = missed.sum(1)
        counts[requests] += torch.stack((entries.hits.sum(1), num_misses), 1)

        hot_ids = _flat_rows(tables.hot_tables[live], chosen, hot_rows.rows_per_block, hot_rows.block_stride_rows)
        columns = torch.arange(1, top_k.shape[1] + 1, dtype=torch.int32, device=top_k.device)
        out.hot_row_ids[live] = hot_ids.int()
        out.num_valid[live] = torch.where(chosen >= 0, columns, 0).amax(1)
        out.num_misses[live] = num_misses.int()
        host_ids = _flat_rows(tables.host_tables[requests], selected.where(missed, -1), tables.block_size)
        miss_rows, miss_columns = missed.nonzero(as_tuple=True)
        places = live[miss_rows], missed.cumsum(1)[miss_rows, miss_columns] - 1
        out.miss_hot_row_ids[places] = hot_ids[miss_rows, miss_columns].int()
        out.miss_host_row_ids[places] = host_ids[miss_rows, miss_columns]

    def _store(self, residency: Residency, requests: torch.Tensor, entries: _Entries) -> None:
        """Write entries back in their new order."""
        target = torch.zeros_like(entries.slots, dtype=torch.int64)
        first = 0
        for part in (~(entries.filled | entries.moving_hits), entries.filled, entries.moving_hits):
            rank = part.cumsum(1)
            target = torch.where(part, first + rank - 1, target)
            first = first + rank[:, -1:]
        residency.slots[requests] = torch.empty_like(entries.slots).scatter_(1, target, entries.slots)
        residency.positions[requests] = torch.empty_like(entries.slots).scatter_(1, target, entries.positions)

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
        live, _ = _requests_of(tables, batch, len(tables.host_tables))
        rows = _newest_hot_rows(tables, live, num_slots, hot_rows)
        out[:batch] = -1
        out[live] = rows.where(rows < len(hot_rows.rows), -1)

    def write_back(
        self, hot_rows: Sequence[HotRows], host_rows: Sequence[torch.Tensor], tables: StepTables, num_slots: int
    ) -> None:
        live, requests = _requests_of(tables, len(tables.seq_lens), len(tables.host_tables))
        newest = tables.seq_lens[live][:, None] - 1
        targets = _flat_rows(tables.host_tables[requests], newest, tables.block_size)[:, 0]
        for hot, host in zip(hot_rows, host_rows, strict=True):
            _copy_rows(hot.rows, _newest_hot_rows(tables, live, num_slots, hot), host, targets)

    def stage_rows(
        self, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int, staging: torch.Tensor
    ) -> None:
        positions = torch.arange(len(staging), device=host_table.device)
        sources = _flat_rows(host_table[None], positions[None], block_size)[0]
        _copy_rows(host_rows, sources, staging, positions)

    def save_rows(
        self, rows: torch.Tensor, first: int, host_rows: torch.Tensor, host_table: torch.Tensor, block_size: int
    ) -> None:
        sources = torch.arange(len(rows), device=host_table.device)
        targets = _flat_rows(host_table[None], first + sources[None], block_size)[0]
        _copy_rows(rows, sources, host_rows, targets)

    def begin_units(self, tables: StepTables, out: UnitTables) -> None:
        batch, num_heads, per_unit = len(tables.seq_lens), out.num_heads, out.tokens_per_unit
        heads = torch.arange(num_heads, device=out.request_indices.device)
        by_head = tables.hot_tables[:, None] * out.head_stride + heads[:, None]
        firsts = dataclasses.replace(tables, hot_tables=by_head[:, 0])
        live, requests = _requests_of(firsts, batch, len(tables.host_tables))
        out.request_indices[:batch] = (len(tables.host_tables) - 1) // num_heads  # it has a row of no request
        out.positions[:batch] = 0
        for tensor, padding in ((out.hot_tables, -1), (out.num_units, 0), (out.tails, 0)):
            tensor[: batch * num_heads] = padding
        newest = tables.seq_lens[live] - 1
        out.request_indices[live], out.positions[live] = requests // num_heads, newest.long()
        rows = (live[:, None] * num_heads + heads).flatten()
        out.hot_tables[rows] = by_head[live].flatten(0, 1).int()
        out.num_units[rows] = (newest // per_unit + 1).repeat_interleave(num_heads).int()
        out.tails[rows] = (newest % per_unit + 1 - per_unit).repeat_interleave(num_heads).int()

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
        live, requests = _requests_of(tables, len(tables.seq_lens), len(tables.host_tables))
        newest = tables.seq_lens[live][:, None] - 1
        targets = _newest_hot_rows(tables, live, num_slots, hot_rows)
        homes = _flat_rows(tables.host_tables[requests], newest, tables.block_size)[:, 0]
        stale = reload[requests] != 0
        _copy_rows(host_rows, homes[stale], hot_rows.rows, targets[stale])
        reload[requests] = 0
        offsets = (units.positions[: len(key)] % units.tokens_per_unit).repeat_interleave(units.num_heads)[live]
        tokens = torch.cat((key, value), -1).flatten(0, 1)[live]
        for rows, places in ((hot_rows.rows, targets), (host_rows, homes)):
            by_token = rows.unflatten(1, (units.tokens_per_unit, -1))
            by_token[places.to(rows.device), offsets.to(rows.device)] = tokens.to(rows.device, rows.dtype)


def _requests_of(tables: StepTables, batch: int, num_requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the batch that are no padding, and the row of the state that each belongs to: two [<= batch] int64."""
    first_blocks, num_blocks = tables.hot_tables[:batch, 0].long(), len(tables.state_indices)
    requests = tables.state_indices[first_blocks.clamp(0, num_blocks - 1)].long()
    live = (first_blocks >= 0) & (first_blocks < num_blocks) & (requests >= 0) & (requests < num_requests)
    live = (live & (tables.seq_lens[:batch] > 0)).nonzero()[:, 0]
    return live, requests[live]


def _choose(
    residency: Residency, requests: torch.Tensor, selected: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, _Entries]:
    """Find hits and give every miss an entry.

    Args:
        residency: read.
        requests: [n] int64 rows of `residency`.
        selected: [n, top_k] int32 positions.
        seq_lens: [n, 1] int32.

    Returns:
        [n, top_k] int32 slot of each selected position, -1 where there is none; [n, top_k] which are misses; the
        entries with their new positions, in the old order.
    """
    slots, positions = residency.slots[requests], residency.positions[requests]
    num_slots, newest = slots.shape[1], seq_lens - 1
    fits = seq_lens <= num_slots
    wanted = (selected >= 0) & (selected < newest)

    # A slot takes only the position of its own number while the sequence fits, and any other position after that.
    keys = slots.where(fits, positions)
    columns = _columns_of(keys, selected, wanted, int(newest.max()))
    hits = (columns >= 0) & (positions == keys)
    chosen = torch.full_like(selected, -1)
    hit_rows, _ = hits.nonzero(as_tuple=True)
    chosen[hit_rows, columns[hits].long()] = slots[hits]
    missed = wanted & (chosen < 0)

    own = fits & ((slots == newest) | (columns >= 0))
    evicting = ~fits & ~hits & ((~hits).cumsum(1) <= missed.sum(1, keepdim=True))
    loading = missed & ~fits  # as many in each row as are evicted, paired in order
    chosen = selected.where(missed & fits, chosen)
    chosen[loading] = slots[evicting]
    positions[evicting] = selected[loading]
    positions = slots.where(own, positions)
    chosen = torch.where(selected == newest, newest.clamp(max=num_slots), chosen)
    return chosen, missed, _Entries(slots, positions, hits, hits & ~fits, evicting)


def _columns_of(keys: torch.Tensor, selected: torch.Tensor, wanted: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Column of `selected` that holds each key where it is wanted, or -1: [n, keys] int32."""
    table = torch.full((len(keys), num_positions + 1), -1, dtype=torch.int32, device=keys.device)
    columns = torch.arange(selected.shape[1], dtype=torch.int32, device=keys.device).expand_as(selected)
    table.scatter_(1, selected.where(wanted, num_positions).long(), columns)
    table[:, num_positions] = -1
    return table.gather(1, keys.where((keys >= 0) & (keys < num_positions), num_positions).long())


def _flat_rows(
    tables: torch.Tensor, rows: torch.Tensor, rows_per_block: int, stride: int | None = None
) -> torch.Tensor:
    """Flat row of each row of a paged table, or -1 where the row or its block is none: [n, rows] int64."""
    blocks = rows.div(rows_per_block, rounding_mode="floor").long()
    known = (rows >= 0) & (blocks < tables.shape[1])
    block_ids = tables.gather(1, blocks.where(known, 0)).long()
    flat = block_ids * (stride or rows_per_block) + rows % rows_per_block
    return flat.where(known & (block_ids >= 0), -1)


def _newest_hot_rows(tables: StepTables, batch_rows: torch.Tensor, num_slots: int, hot_rows: HotRows) -> torch.Tensor:
    """Flat hot row of the newest position of some rows of the batch; -1 where there is none."""
    slots = (tables.seq_lens[batch_rows][:, None] - 1).clamp(max=num_slots)
    hot_tables = tables.hot_tables[batch_rows]
    return _flat_rows(hot_tables, slots, hot_rows.rows_per_block, hot_rows.block_stride_rows)[:, 0]


def _copy_rows(source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy rows, across devices too. Ids outside a tensor are skipped."""
    kept = (source_ids >= 0) & (source_ids < len(source)) & (target_ids >= 0) & (target_ids < len(target))
    if not kept.all():
        source_ids, target_ids = source_ids[kept], target_ids[kept]
    rows = source.index_select(0, source_ids.to(source.device))  # copies whole rows, where indexing copies elements
    target[target_ids.to(target.device)] = rows.to(target.device)

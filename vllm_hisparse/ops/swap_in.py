"""Swap-in: resolve which selected rows are hot, evict, and gather the missed ones from the host (torch reference)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Residency:
    """Which position each hot slot of one layer holds; one row per request.

    Attributes:
        positions: [num_requests, num_slots] int32; -1 where a slot is empty.
        last_used: [num_requests, num_slots] int32 step of the last use; 0 where a slot is empty.
    """

    positions: torch.Tensor
    last_used: torch.Tensor


@dataclass
class Resolved:
    """Result of `resolve`.

    Attributes:
        slots: [batch, top_k] int64 hot slot of each selected position; -1 where the selection is -1.
        miss_rows: [num_misses] int64 row of the batch.
        miss_positions: [num_misses] int64 positions to copy.
        miss_slots: [num_misses] int64 hot slots to copy them to.
        num_hits: [batch] int64, the newest row not counted.
        num_misses: [batch] int64.
    """

    slots: torch.Tensor
    miss_rows: torch.Tensor
    miss_positions: torch.Tensor
    miss_slots: torch.Tensor
    num_hits: torch.Tensor
    num_misses: torch.Tensor


def newest_slot(positions: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Slot of the row being written: its position while the sequence fits, else the reserved slot after the buffer."""
    return positions.clamp(max=num_slots)


def admit_newest(residency: Residency, requests: torch.Tensor, newest: torch.Tensor, step: int) -> None:
    """Record that each request's newest row now sits in its `newest_slot`.

    Args:
        residency: updated in place.
        requests: [batch] int64 rows of `residency`, distinct.
        newest: [batch] int64 positions.
        step: recency of this step.
    """
    fits = newest < residency.positions.shape[1]
    rows, slots = requests[fits], newest[fits]
    residency.positions[rows, slots] = newest[fits].int()
    residency.last_used[rows, slots] = step


def resolve(
    residency: Residency,
    requests: torch.Tensor,
    top_k: torch.Tensor,
    newest: torch.Tensor,
    step: int,
    refresh_hits: bool,
) -> Resolved:
    """Find hits, choose victims for the misses and update the residency.

    The newest row is hot by construction (`admit_newest` first) and never a victim. Empty slots are taken first, then
    the least recently used; a hit of this step is never evicted.

    Args:
        residency: updated in place; must have at least as many slots as a row of `top_k` has valid entries.
        requests: [batch] int64 rows of `residency`, distinct.
        top_k: [batch, k] int32 distinct positions; -1 anywhere is padding.
        newest: [batch] int64 position written this step.
        step: recency of this step, larger than any before.
        refresh_hits: True for LRU, False for FIFO.
    """
    positions, last_used = residency.positions[requests], residency.last_used[requests]
    num_slots = positions.shape[1]
    valid = top_k >= 0
    slots = _lookup(positions, top_k, valid, int(newest.max()) + 1)
    is_newest = valid & (top_k == newest[:, None])
    slots = torch.where(is_newest, newest_slot(newest, num_slots)[:, None], slots)
    missed = valid & (slots < 0)
    num_misses = missed.sum(1)

    in_use = torch.zeros(positions.shape[0], num_slots + 1, dtype=torch.bool, device=positions.device)
    in_use.scatter_(1, torch.where(valid & ~missed, slots, num_slots), True)
    in_use.scatter_(1, newest_slot(newest, num_slots)[:, None], True)
    in_use = in_use[:, :num_slots]
    if refresh_hits:
        last_used = last_used.masked_fill(in_use, step)
    max_misses = int(num_misses.max())
    victims = last_used.masked_fill(in_use, torch.iinfo(torch.int32).max).topk(max_misses, largest=False).indices
    if max_misses:
        rank = (missed.cumsum(1) - 1).clamp(0, max_misses - 1)
        slots = torch.where(missed, victims.gather(1, rank), slots)

    miss_rows, miss_columns = missed.nonzero(as_tuple=True)
    miss_slots = slots[miss_rows, miss_columns]
    miss_positions = top_k[miss_rows, miss_columns]
    positions[miss_rows, miss_slots] = miss_positions
    last_used[miss_rows, miss_slots] = step
    residency.positions[requests], residency.last_used[requests] = positions, last_used
    num_hits = valid.sum(1) - is_newest.sum(1) - num_misses
    return Resolved(slots, miss_rows, miss_positions.long(), miss_slots, num_hits, num_misses)


def _lookup(positions: torch.Tensor, top_k: torch.Tensor, valid: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Slot of each selected position, or -1: [batch, k] int64."""
    batch, num_slots = positions.shape
    table = torch.full((batch, num_positions + 1), -1, dtype=torch.int32, device=positions.device)
    slot_ids = torch.arange(num_slots, dtype=torch.int32, device=positions.device).expand(batch, -1)
    table.scatter_(1, torch.where(positions >= 0, positions, num_positions).long(), slot_ids)
    table[:, num_positions] = -1
    return table.gather(1, torch.where(valid, top_k, num_positions).long()).long()


def gather(
    hot_rows: torch.Tensor,
    hot_tables: torch.Tensor,
    host_rows: torch.Tensor,
    host_tables: torch.Tensor,
    resolved: Resolved,
) -> None:
    """Copy the missed rows from the host pool into their hot slots.

    Args:
        hot_rows: [num_device_blocks, rows_per_hot_block, row elements], any block stride.
        hot_tables: [batch, hot blocks per request] int device blocks of the batch.
        host_rows: [num_host_blocks, block_size, row elements].
        host_tables: [batch, blocks] int host blocks of the batch.
        resolved: result of `resolve`.
    """
    rows, positions, slots = resolved.miss_rows, resolved.miss_positions, resolved.miss_slots
    block_size, rows_per_block = host_rows.shape[1], hot_rows.shape[1]
    host_ids = host_tables[rows, positions // block_size].long() * block_size + positions % block_size
    source = host_rows.flatten(0, 1).index_select(0, host_ids)  # copies whole rows, where indexing copies elements
    hot_rows[hot_tables[rows, slots // rows_per_block].long(), slots % rows_per_block] = source.to(hot_rows.device)


def write_back(
    hot_rows: torch.Tensor,
    hot_tables: torch.Tensor,
    host_rows: torch.Tensor,
    host_tables: torch.Tensor,
    newest: torch.Tensor,
    num_slots: int,
) -> None:
    """Copy each request's newest row from its hot slot to the host pool.

    Args:
        hot_rows, hot_tables, host_rows, host_tables: as in `gather`.
        newest: [batch] int64 positions.
        num_slots: hot slots per request, the reserved one not counted.
    """
    slots = newest_slot(newest, num_slots)
    block_size, rows_per_block = host_rows.shape[1], hot_rows.shape[1]
    batch = torch.arange(len(newest), device=hot_tables.device)
    rows = hot_rows[hot_tables[batch, slots // rows_per_block].long(), slots % rows_per_block]
    host_rows[host_tables[batch, newest // block_size].long(), newest % block_size] = rows.to(host_rows.device)

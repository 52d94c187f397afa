"""Reports hits, misses and the ages of hot rows to the scheduler's side, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch

from vllm_hisparse.kv_manager.rows.hit_counts import CountSnapshot
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer
from vllm_hisparse.kv_manager.usage import Usage, miss_curves
from vllm_hisparse.ops.limits import MAX_AGE

STEPS_PER_REPORT = 16
LAYERS_PER_REPORT = 4  # layers whose rows are looked at; each report looks at other ones


@dataclass(frozen=True)
class Slots:
    """Slots that a report looks at: those of one request in some layers.

    Attributes:
        request_index: the request.
        blocks: [n] int64 its hot blocks, on the host.
        has_equal_rows: True if these are divided equally among layers.
        layers: the layers.
        entries: for each number of rows that one of the layers has in a block (`HotRows.rows_per_block`), [num_heads,
            slots] int64 entries of the slots in the residency of such a layer.
    """

    request_index: int
    blocks: np.ndarray
    has_equal_rows: bool
    layers: list[int]
    entries: dict[int, torch.Tensor]


@dataclass(frozen=True)
class HeldRows:
    """Contents of these slots after a step, on the device.

    Attributes:
        positions, expiries: [layers * heads, most slots] int32; -1 where a layer with fewer rows than others has no
            slot.
    """

    positions: torch.Tensor
    expiries: torch.Tensor

    @property
    def is_used(self) -> torch.Tensor:
        """True for rows that a step has selected since they became hot: [layers * heads, rows] bool."""
        return (self.positions >= 0) & (self.expiries > self.positions)

    def is_selected_after(self, before: HeldRows) -> torch.Tensor:
        """True for rows that the last step has selected: [layers * heads, rows] bool.

        Args:
            before: the same slots before this step. NOTE: a step changes the expiry of each row that it selects, if its
                first new position is higher than that of every earlier step.
        """
        return self.is_used & ((self.positions != before.positions) | (self.expiries != before.expiries))


class UsageSampler:
    """Looks at one request in a few layers after each of the last three of every `STEPS_PER_REPORT` steps, and at the
    hits and misses of all requests after the last one.

    Args:
        buffer: the hot buffers.
        looks_at_rows: False if only counts are wanted.
    """

    def __init__(self, buffer: HotBuffer, looks_at_rows: bool = True):
        self._buffer, self._looks_at_rows = buffer, looks_at_rows
        self._selecting = [index for index, selects in enumerate(buffer.selects) if selects]
        self._num_steps = self._num_reports = 0
        self._request_index = -1  # index of the request that was looked at last
        self._slots: Slots | None = None  # slots for the next report
        self._looks: list[HeldRows] = []  # contents of these slots after each of the latest steps
        self._reported = (0, 0)
        # Number of the step, counts, rows by age in some layers (None: no request), and the layers.
        self._pending: tuple[int, CountSnapshot, CountSnapshot | None, list[int]] | None = None

    def step_ends(self, number: int) -> None:
        """Look, if it is time to; called once per step, when its kernels have been enqueued.

        Args:
            number: number of the step.
        """
        self._num_steps += 1
        if self._pending is not None:
            return
        steps_left = -self._num_steps % STEPS_PER_REPORT
        if steps_left == 2 and self._looks_at_rows and (index := self._next_request()) is not None:
            self._slots = self._slots_of(index, self._next_layers())
        if self._slots is not None and steps_left <= 2:
            # NOTE: if the request has got or lost blocks, other rows may be in its slots.
            if self._is_current(self._slots):
                self._looks.append(self._look(self._slots))
            else:
                self._slots, self._looks = None, []
        if steps_left:
            return
        counts, (slots, self._slots) = CountSnapshot(self._buffer.counts.by_seq.sum(0)), (self._slots, None)
        ages = None if slots is None else CountSnapshot(self._count(*self._looks))
        self._looks = []
        self._pending = number, counts, ages, [] if slots is None else slots.layers

    def take(self) -> Usage | None:
        """Return a report, once it has arrived on the host."""
        if self._pending is None:
            return None
        number, counts, ages, layers = self._pending
        if not (counts.ready and (ages is None or ages.ready)):
            return None
        self._pending, before = None, self._reported
        hits, misses = self._reported = counts.values
        curves = None
        if ages is not None:
            held, used = ages.array
            curves = miss_curves(held[:, :-1], used, self._scales(layers))  # ages in the last column are unknown
        if curves is None:
            return Usage(number, hits - before[0], misses - before[1])
        by_layer = curves.reshape(len(layers), self._buffer.heads.num_heads, -1).mean(1)
        places = map(self._selecting.index, layers)
        found = {place: tuple(curve.tolist()) for place, curve in zip(places, by_layer, strict=True)}
        return Usage(number, hits - before[0], misses - before[1], found)

    def _next_request(self) -> int | None:
        """Choose the next request whose buffer can hold a selection; None: there is none."""
        requests, heads, shape = self._buffer.requests, self._buffer.heads, self._buffer.shape
        num_blocks, least_rows = requests.num_hot_blocks, shape.top_k + shape.max_query_len * heads.tokens_per_unit
        for offset in range(1, len(num_blocks) + 1):
            index = (self._request_index + offset) % len(num_blocks)
            rows_per_block = shape.equal_rows if requests.divides_equally(index) else shape.fewest_rows
            if num_blocks[index] * rows_per_block > least_rows:
                self._request_index = index
                return index
        return None

    def _next_layers(self) -> list[int]:
        """Choose the layers whose rows are looked at."""
        first, num_layers = self._num_reports * LAYERS_PER_REPORT, len(self._selecting)
        self._num_reports += 1
        return sorted({self._selecting[(first + index) % num_layers] for index in range(LAYERS_PER_REPORT)})

    def _scales(self, layers: list[int]) -> list[float]:
        """Return the rows of a mean layer over the rows of each of the given layers, once for each KV head."""
        rows = [self._buffer.classes.rows_per_block[each] for each in self._buffer.classes.of_layer]
        scales = [fmean(rows) / rows[layer] for layer in layers]
        return [scale for scale in scales for _ in range(self._buffer.heads.num_heads)]

    def _slots_of(self, request_index: int, layers: list[int]) -> Slots:
        """Find the slots of a request in some layers."""
        buffer, heads = self._buffer, self._buffer.heads
        tables = buffer.requests.hot_block_tables[heads.seqs(request_index)]
        blocks, is_equal = buffer.requests.hot_blocks_of(request_index), buffer.requests.divides_equally(request_index)
        division = None if buffer.requests.has_equal_rows is None else torch.full_like(tables[:, 0], int(is_equal))
        entries: dict[int, torch.Tensor] = {}
        for hot in (buffer.layers[layer].hot for layer in layers):
            if hot.rows_per_block not in entries:
                num_rows = hot.equal_rows_per_block if is_equal else hot.rows_per_block
                slots = torch.arange(len(blocks) * num_rows, device=buffer.device)
                entries[hot.rows_per_block] = hot.entries(tables, slots.expand(heads.num_heads, -1), division)
        return Slots(request_index, blocks, is_equal, layers, entries)

    def _is_current(self, slots: Slots) -> bool:
        """Return True if the slots are still those of the request."""
        requests, index = self._buffer.requests, slots.request_index
        has_same_blocks = np.array_equal(slots.blocks, requests.hot_blocks_of(index))
        return has_same_blocks and slots.has_equal_rows == requests.divides_equally(index)

    def _look(self, slots: Slots) -> HeldRows:
        """Copy what is in the slots."""
        buffer, num_heads = self._buffer, self._buffer.heads.num_heads
        most_slots = max(entries.shape[1] for entries in slots.entries.values())
        held = torch.full((len(slots.layers), num_heads, most_slots, 2), -1, dtype=torch.int32, device=buffer.device)
        for index, layer in enumerate(slots.layers):
            entries = slots.entries[buffer.layers[layer].hot.rows_per_block]
            held[index, :, : entries.shape[1]] = buffer.residency[layer].entries[entries]
        return HeldRows(*held.flatten(0, 1).unbind(-1))

    def _count(self, earlier: HeldRows, before: HeldRows, after: HeldRows) -> torch.Tensor:
        """Count hot rows by age, and those that a step has selected.

        The age of a row is 0 if the step before selected it, because a buffer of any size holds it then. Other ages are
        in the order in which rows are evicted. Rows that no step has selected since they became hot, such as those of
        the prompt, count only when they are selected.

        Args:
            earlier: rows before the last step but one.
            before: rows between these two steps.
            after: rows after the last step.

        Returns:
            [2, layers * heads, MAX_AGE + 1] int32 on the device: rows before the step by age, and selected rows by age.
            The last column counts rows of higher ages, and selected rows that were not hot or do not count.
        """
        expiries = before.expiries.where(before.is_used, -1)
        ages = (1 + expiries.amax() - expiries).clamp_max(MAX_AGE)
        ages = ages.where(~before.is_selected_after(earlier), 0)
        stayed = before.is_used & (after.positions == before.positions)
        counts = torch.zeros((2, len(ages), MAX_AGE + 1), dtype=torch.int32, device=ages.device)
        counts[0].scatter_add_(1, ages.long(), before.is_used.int())
        counts[1].scatter_add_(1, ages.where(stayed, MAX_AGE).long(), after.is_selected_after(before).int())
        return counts

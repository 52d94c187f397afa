"""Reports hits, misses and the ages of hot rows to the scheduler's side, without waiting for the device."""

from __future__ import annotations

from statistics import fmean

import torch

from vllm_hisparse.kv_manager.rows.hit_counts import CountSnapshot
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer
from vllm_hisparse.kv_manager.usage import Usage, miss_curves
from vllm_hisparse.ops.limits import MAX_AGE

STEPS_PER_REPORT = 16
LAYERS_PER_REPORT = 4  # layers whose rows are looked at; each report looks at other ones


class UsageSampler:
    """Looks at one request in a few layers every `STEPS_PER_REPORT` steps, and at the counts of all.

    Args:
        buffer: the hot buffers.
        looks_at_rows: False if only counts are wanted.
    """

    def __init__(self, buffer: HotBuffer, looks_at_rows: bool = True):
        self._buffer, self._looks_at_rows = buffer, looks_at_rows
        self._selecting = [index for index, selects in enumerate(buffer.selects) if selects]
        self._num_steps = self._num_reports = 0
        self._request_index = -1  # that was looked at last
        self._reported = (0, 0)
        # Number of the step, counts, ages in some layers (None: no request), and the layers.
        self._pending: tuple[int, CountSnapshot, CountSnapshot | None, list[int]] | None = None

    def step_ends(self, number: int) -> None:
        """Look, if it is time to; called once per step, when its kernels have been enqueued.

        Args:
            number: number of the step.
        """
        self._num_steps += 1
        if self._num_steps % STEPS_PER_REPORT or self._pending is not None:
            return
        counts = CountSnapshot(self._buffer.counts.by_seq.sum(0))
        index = self._next_request() if self._looks_at_rows else None
        layers = [] if index is None else self._next_layers()
        self._pending = number, counts, None if index is None else CountSnapshot(self._ages(index, layers)), layers

    def take(self) -> Usage | None:
        """Return a report, once it has arrived on the host."""
        if self._pending is None:
            return None
        number, counts, ages, layers = self._pending
        if not (counts.ready and (ages is None or ages.ready)):
            return None
        self._pending, before = None, self._reported
        hits, misses = self._reported = counts.values
        curves = None if ages is None else miss_curves(ages.array, self._scales(layers))
        if curves is None:
            return Usage(number, hits - before[0], misses - before[1])
        by_layer = curves.reshape(len(layers), self._buffer.heads.num_heads, -1).mean(1)
        places = map(self._selecting.index, layers)
        found = {place: tuple(curve.tolist()) for place, curve in zip(places, by_layer, strict=True)}
        return Usage(number, hits - before[0], misses - before[1], found)

    def _next_request(self) -> int | None:
        """Choose the next request whose buffer can hold a selection; None: there is none."""
        num_blocks, heads, shape = self._buffer.requests.num_hot_blocks, self._buffer.heads, self._buffer.shape
        for offset in range(1, len(num_blocks) + 1):
            index = (self._request_index + offset) % len(num_blocks)
            if num_blocks[index] * shape.fewest_rows > shape.top_k + shape.max_query_len * heads.tokens_per_unit:
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

    def _ages(self, request_index: int, layers: list[int]) -> torch.Tensor:
        """Count a request's hot rows in some layers by the tokens since their last use.

        Rows that were not used since they became hot, such as those of the prompt, do not count.

        Returns:
            [layers * heads, MAX_AGE + 1] int32 on the device; higher ages count as `MAX_AGE`.
        """
        buffer, heads = self._buffer, self._buffer.heads
        tables = buffer.requests.hot_block_tables[heads.seqs(request_index)]
        num_blocks = int(buffer.requests.num_hot_blocks[request_index])
        is_equal = buffer.requests.divides_equally(request_index)
        equal = None if buffer.requests.has_equal_rows is None else torch.full_like(tables[:, 0], int(is_equal))
        rows_of = {
            layer: hot.equal_rows_per_block if is_equal else hot.rows_per_block
            for layer, hot in ((layer, buffer.layers[layer].hot) for layer in layers)
        }
        # NOTE: rows that a layer with fewer rows lacks are empty.
        most_rows = num_blocks * max(rows_of.values())
        held = torch.full((len(layers), heads.num_heads, most_rows, 2), -1, dtype=torch.int32, device=buffer.device)
        entries: dict[int, torch.Tensor] = {}  # of all slots, by the rows of a block
        for index, layer in enumerate(layers):
            hot = buffer.layers[layer].hot
            key = hot.rows_per_block
            if key not in entries:
                slots = torch.arange(num_blocks * rows_of[layer], device=buffer.device).expand(heads.num_heads, -1)
                entries[key] = hot.entries(tables, slots, equal)
            found = buffer.residency[layer].entries[entries[key]]
            held[index, :, : found.shape[1]] = found
        positions, last_uses = held.flatten(0, 1).unbind(-1)  # [layers * heads, most_rows] each
        is_used = (positions >= 0) & (last_uses > positions)
        newest = last_uses.where(is_used, -1).amax()
        ages = (newest - last_uses).clamp(0, MAX_AGE).long()
        counts = torch.zeros((len(positions), MAX_AGE + 1), dtype=torch.int32, device=buffer.device)
        return counts.scatter_add_(1, ages, is_used.int())

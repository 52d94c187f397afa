"""The best division of hot rows among layers, learned from the ages of the rows in an engine."""

from __future__ import annotations

from math import ceil

import numpy as np
from vllm.logger import init_logger

from vllm_hisparse.kv_manager.blocks.admission import Demand
from vllm_hisparse.kv_manager.usage import SIZES, Usage
from vllm_hisparse.layout import KVLayout

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

MARGIN = 0.01  # added to the least share, because shares are rounded to two decimals
STEP = 0.25  # distance of the sizes that are looked at, in selections
FIRST_LOOKS = 8  # looks at each layer before the first log line; each further line needs twice as many
LEAST_GAIN = 0.05  # share of the misses that a division has to save
NEAR_END = 1.4  # a curve falls beyond its largest known size as between this size / `NEAR_END` and this size


class RowsByLayer:
    """Learns how often layers miss with more or fewer rows, and logs the best list for `rows_by_layer`.

    Args:
        layout: sizes of the model.
        top_k: rows of a selection.
        device_buffer_size: hot rows of a long sequence in a mean layer, without lent ones.
        elastic: True if requests are lent more.
    """

    def __init__(self, layout: KVLayout, top_k: int, device_buffer_size: int, elastic: bool = True):
        self._elastic = elastic
        self._top_k = top_k
        # A layer with this share has room for the selections of a step, however its rows are rounded.
        mean_rows = layout.device_block_bytes // layout.row_bytes / layout.num_layers
        needed, size = layout.max_query_len * (top_k + 1), device_buffer_size + layout.max_query_len
        self._least_share = min(ceil(needed / size * mean_rows) / mean_rows + MARGIN, 1.0)
        self._group_sizes = np.array([num_layers for _, num_layers in layout.row_shares])
        self.present_shares = np.array(layout.selecting_rows) / layout.mean_rows
        num_groups = len(self.present_shares)
        self._sums, self._counts = np.zeros((num_groups, len(SIZES))), np.zeros((num_groups, len(SIZES)), np.int64)
        self._looks = np.zeros(num_groups, np.int64)
        self._next_log = FIRST_LOOKS

    def measured(self, usage: Usage, demand: Demand | None) -> None:
        """Learn from a report of the workers, and log the best division if it is time to.

        Args:
            usage: the report.
            demand: description of the running requests; None: no request runs.
        """
        for group, curve in (usage.curves or {}).items():
            self._looks[group] += 1
            self._counts[group] += ~np.isnan(curve)
            self._sums[group] += np.nan_to_num(curve)
        if demand is None or self._looks.min() < self._next_log:
            return
        self._next_log = 2 * int(self._looks.min())
        rows = demand.rows_with(np.array([demand.num_requests]))[0] if self._elastic else demand.rows
        missing = rows < demand.whole_rows
        if not missing.any():
            logger.info("HiSparse rows by layer: requests are hot as a whole, so no layer needs more rows.")
            return
        self._log(float(rows[missing].mean()) / self._top_k, float(demand.tokens[missing].mean()) / self._top_k)

    def best(self, size: float, whole: float) -> tuple[list[float], float]:
        """Return the best shares, with a mean of 1 over all layers, and their estimated misses divided by the misses of
        the present shares.

        Args:
            size: rows of a mean layer's hot buffer, in selections.
            whole: rows with which a whole sequence is hot, in selections.
        """
        least = max(1.0, self._least_share * size)
        sizes = np.arange(least, max(whole, size) + STEP, STEP)
        curves = np.stack([self._missed(group, sizes) for group in range(len(self._looks))])
        budget = int((size - least) / STEP * self._group_sizes.sum() + 1e-6)
        held = best_division(curves, budget, self._group_sizes)
        found = sizes[held]
        missed, present = (
            sum(
                num_layers * self._missed(group, np.array([each]))[0]
                for group, (num_layers, each) in enumerate(zip(self._group_sizes, given, strict=True))
            )
            for given in (found, size * self.present_shares)
        )
        shares = found / np.average(found, weights=self._group_sizes)
        return np.round(shares, 2).tolist(), float(missed / max(present, 1e-9))

    def _missed(self, group: int, sizes: np.ndarray) -> np.ndarray:
        """Estimate the share of a selection that a layer misses, for any sizes, [n] float64 selections.

        NOTE: buffers tell nothing of larger ones; from the largest known size on, misses are assumed to fall by the
        same power of the size as just before it.
        """
        known = self._counts[group] >= np.maximum(self._looks[group] / 2, 1)
        if not known.any():
            return np.ones(len(sizes))
        at = np.array(SIZES)[known] * self.present_shares[group]  # curves are given for mean layers
        shares = np.clip(self._sums[group, known] / self._counts[group, known], 1e-5, 1)
        shares = np.minimum.accumulate(shares)
        before = np.interp(at[-1] / NEAR_END, at, shares)
        power = np.log(before / shares[-1]) / np.log(NEAR_END)
        beyond = shares[-1] * (np.maximum(sizes, at[-1]) / at[-1]) ** -power
        return np.where(sizes <= at[-1], np.interp(sizes, at, shares), beyond)

    def _log(self, size: float, whole: float) -> None:
        num_looks = int(self._looks.min())
        shares, ratio = self.best(size, whole)
        if ratio > 1 - LEAST_GAIN:
            logger.info("HiSparse rows by layer: no list misses clearly fewer rows than the present one.")
            return
        logger.info(
            'HiSparse rows by layer: with "rows_by_layer": %s, about %.2f times as many rows as now would be missed '
            "(each layer was read %d times; requests have %.1f times top_k rows in a mean layer).",
            shares,
            ratio,
            num_looks,
            size,
        )


def best_division(misses: np.ndarray, budget: int, group_sizes: np.ndarray) -> np.ndarray:
    """Divide memory among groups of layers. Each move gives rows to the group that saves most misses per row.

    A move may give any number of rows (utility-based cache partitioning).

    Args:
        misses: [groups, n] float64 misses of a layer with each of n sizes, which are equally far from each other.
        budget: steps from one size to the next that all layers together may take.
        group_sizes: [groups] layers of each group, which all get the same size.

    Returns:
        [groups] index of each group's size.
    """
    held = np.zeros(len(misses), np.int64)

    def next_move(group: int) -> tuple[float, int]:
        at = held[group]
        most = min(budget // group_sizes[group], misses.shape[1] - 1 - at)
        if most <= 0:
            return 0.0, 0
        gains = (misses[group, at] - misses[group, at + 1 : at + 1 + most]) / np.arange(1, most + 1)
        return float(gains.max()), most - int(gains[::-1].argmax())

    moves = [next_move(group) for group in range(len(misses))]
    while True:
        group = max(range(len(moves)), key=lambda index: moves[index][0])
        gain, steps = moves[group]
        if gain <= 0:
            return held
        if steps * group_sizes[group] <= budget:
            held[group] += steps
            budget -= steps * group_sizes[group]
        moves[group] = next_move(group)

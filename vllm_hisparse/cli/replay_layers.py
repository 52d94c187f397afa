"""Hot rows by layer: what LRU buffers miss if layers get different shares of the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_hisparse.kv_manager.blocks.rows_by_layer import STEP, best_division
from vllm_hisparse.trace import Trace

DRAFT_LAYER = "draft"
PERIOD = 4  # steps between two moves of the controller
OLDEST = 2  # sizes in the oldest part of a buffer, whose hits the controller counts
LEAST_GAIN = 1.25  # least ratio of the hits that one layer gains to the hits that another one loses
MEMORY = 0.8  # weight of earlier periods in the counted hits
LEAST_SHARE = 0.54  # with `device_buffer_size` of two selections, each layer has room for 1.08


@dataclass(frozen=True)
class LayerMisses:
    """Misses of LRU buffers of every size, by request, layer and step.

    Attributes:
        layers: names of the layers; a draft layer is none of them, because its KV stays on the device.
        top_k: rows of a selection.
        sizes: [n] float64 sizes in selections, from 1 on, `STEP` apart.
        missed: [requests, layers, steps, n] float64 rows, with as many steps as the shortest request has.
    """

    layers: tuple[str, ...]
    top_k: int
    sizes: np.ndarray
    missed: np.ndarray

    @classmethod
    def of(cls, trace: Trace) -> LayerMisses:
        """Run all sizes at once: a buffer of a size holds the most recently used rows, whatever its size.

        Rows of a step of which only some have a place count in proportion. At first, the prompt's last rows are hot.
        """
        num_steps = min(request.num_steps for request in trace.requests)
        longest = max(request.first_position + num_steps for request in trace.requests)
        sizes = np.arange(1, longest / trace.top_k + STEP, STEP)
        places = [place for place, name in enumerate(trace.layers) if name != DRAFT_LAYER]
        missed = np.zeros((len(trace.requests), len(places), num_steps, len(sizes)))
        for request, found in zip(trace.requests, missed, strict=True):
            for positions, of_layer in zip(request.positions[places], found, strict=True):
                _count(positions[:num_steps, : trace.top_k], request.first_position, sizes * trace.top_k, of_layer)
        return cls(tuple(trace.layers[place] for place in places), trace.top_k, sizes, missed)

    def of_layers(self, places: Sequence[int]) -> LayerMisses:
        """Return the misses of a model with these layers, each of which may come several times."""
        return replace(self, layers=tuple(self.layers[place] for place in places), missed=self.missed[:, places])

    def of_requests(self, places: np.ndarray) -> LayerMisses:
        return replace(self, missed=self.missed[places])

    def equal(self, size: float, first_step: int) -> float:
        """Return the mean rows that a request misses in a layer in a step, if all layers' buffers have the same size.

        Args:
            size: size in selections.
            first_step: earlier steps are not counted.
        """
        return self.divided(np.full(self.missed.shape[1], size), first_step)

    def divided(self, sizes: np.ndarray, first_step: int) -> float:
        """Return the mean rows that a request misses in a layer in a step, if each layer has a size of its own.

        Args:
            sizes: [layers] float64 sizes in selections.
            first_step: as in `equal`.
        """
        return float(self._at(sizes, first_step).mean())

    def best(self, size: float, first_step: int, least_share: float = 0.0) -> tuple[float, np.ndarray]:
        """Find the best division that does not change from step to step, from the misses of all steps that are counted.

        Args:
            size: size of a mean layer in selections.
            first_step: as in `equal`.
            least_share: least size of a layer, over that of a mean layer; each has at least 1 selection, too.

        Returns:
            Mean rows that a request misses in a layer in a step, and [layers] float64 sizes in selections.
        """
        least, num_layers = max(1.0, least_share * size), len(self.layers)
        sizes = np.arange(least, max(least, self.sizes[-1]) + STEP, STEP)
        means = self.missed[:, :, first_step:].mean((0, 2))
        curves = _interpolate(np.broadcast_to(means[:, None], (num_layers, len(sizes), means.shape[-1])), sizes[None])
        budget = int((size - least) / STEP * num_layers + 1e-6)
        found = sizes[best_division(curves, budget, np.ones(num_layers, int))]
        return self.divided(found, first_step), found

    def rows_by_layer(self, size: float, first_step: int, least_share: float = LEAST_SHARE) -> list[float]:
        """Return the best division as shares with a mean of 1, as in the option `rows_by_layer`."""
        _, sizes = self.best(size, first_step, least_share)
        return np.round(sizes / sizes.mean(), 2).tolist()

    def shared(self, rows_by_layer: list[float], size: float, first_step: int) -> float:
        """Return the same as `equal`, if memory for `size` selections in each layer is divided by these shares."""
        shares = np.array(rows_by_layer)
        return self.divided(shares / shares.mean() * size, first_step)

    def controlled(self, size: float, first_step: int) -> tuple[float, np.ndarray]:
        """Simulate a controller that knows only earlier steps.

        Every `PERIOD` steps, it moves rows from the layer with the fewest hits in the oldest part of its buffers to the
        layer with the most. A buffer that grows is filled by its misses.

        Args:
            size: size of a mean layer in selections.
            first_step: as in `equal`.

        Returns:
            Mean rows that a request misses in a layer in a step, and [layers] float64 sizes after the last step.
        """
        num_requests, num_layers, num_steps, _ = self.missed.shape
        sizes = np.full(num_layers, float(size))
        filled = np.full((num_requests, num_layers), float(size))
        hits, total = np.zeros(num_layers), 0.0
        for step in range(num_steps):
            curves = self.missed[:, :, step]
            filled = np.minimum(filled, sizes)
            missed, fewer = _interpolate(curves, filled), _interpolate(curves, filled - OLDEST * STEP)
            hits += (fewer - missed).sum(0)
            total += missed.mean() if step >= first_step else 0.0
            filled = np.minimum(filled + missed / self.top_k, sizes)
            if step % PERIOD == PERIOD - 1:
                gives = np.where(sizes >= 1 + OLDEST * STEP, hits, np.inf).argmin()
                takes = np.where(sizes < self.sizes[-1], hits, -np.inf).argmax()
                if hits[takes] > LEAST_GAIN * hits[gives]:
                    sizes[gives] -= STEP
                    sizes[takes] += STEP
                hits *= MEMORY
        return total / (num_steps - first_step), sizes

    def _at(self, sizes: np.ndarray, first_step: int) -> np.ndarray:
        """Return misses, [requests, layers, steps], with a size for each layer, [layers]."""
        curves = self.missed[:, :, first_step:]
        return _interpolate(curves, np.broadcast_to(sizes[None, :, None], curves.shape[:-1]))


def by_layer(misses: LayerMisses, size: float, first_step: int, least_share: float = LEAST_SHARE) -> dict[str, Any]:
    """Compare the divisions of one size.

    Args:
        misses: misses of buffers of every size.
        size: size of a mean layer in selections.
        first_step: as in `LayerMisses.equal`.
        least_share: as in `LayerMisses.best`; for `fixed` only.

    Returns:
        `missed`: rows that a request misses in a layer in a step with equal shares. `controller`, `best`, `fixed`: the
        misses of a controller, of the best division, and of the best division with `least_share`, each over `missed`.
        `controller_sizes`, `best_sizes`: size of each layer in selections. `rows_by_layer`: shares of `fixed`.
    """
    equal = misses.equal(size, first_step)
    best, best_sizes = misses.best(size, first_step)
    controlled, sizes = misses.controlled(size, first_step)
    shares = misses.rows_by_layer(size, first_step, least_share)
    return {
        "size": size,
        "missed": round(equal, 1),
        "controller": round(controlled / max(equal, 1e-9), 3),
        "best": round(best / max(equal, 1e-9), 3),
        "fixed": round(misses.shared(shares, size, first_step) / max(equal, 1e-9), 3),
        "controller_sizes": sizes.tolist(),
        "best_sizes": best_sizes.tolist(),
        "rows_by_layer": shares,
    }


def from_others(
    misses: LayerMisses, files: Sequence[int], size: float, first_step: int, least_share: float = LEAST_SHARE
) -> list[float]:
    """Try a fixed division on requests from which it was not learned.

    Args:
        misses: misses of the requests of all files, in order.
        files: number of requests of each file, at least two files.
        size, first_step, least_share: as in `by_layer`.

    Returns:
        Misses over those with equal shares, for each file with the division of all others.
    """
    file_of, found = np.repeat(np.arange(len(files)), files), []
    for file in range(len(files)):
        own, others = (misses.of_requests(np.flatnonzero(each)) for each in (file_of == file, file_of != file))
        shares = others.rows_by_layer(size, first_step, least_share)
        found.append(round(own.shared(shares, size, first_step) / max(own.equal(size, first_step), 1e-9), 3))
    return found


def _interpolate(curves: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the misses [...] of curves [..., n] at sizes [...] in selections; a size below 1 counts as 1."""
    places = np.clip((sizes - 1) / STEP, 0, curves.shape[-1] - 1)
    low = np.floor(places).astype(int)
    high = np.minimum(low + 1, curves.shape[-1] - 1)
    first, second = (np.take_along_axis(curves, each[..., None], -1)[..., 0] for each in (low, high))
    return first + (places - low) * (second - first)


def _count(positions: np.ndarray, first_position: int, num_rows: np.ndarray, missed: np.ndarray) -> None:
    """Count the misses of one layer of one request.

    Args:
        positions: [steps, top_k] int32 selections, -1 for none.
        first_position: newest position of the first step, which needs no copy.
        num_rows: [n] float64 rows of the buffers.
        missed: [steps, n] float64, to fill.
    """
    last_use = np.full(first_position + len(positions), -(1 << 30))
    last_use[:first_position] = np.arange(-first_position, 0)
    for step, selected in enumerate(positions):
        rows = selected[(selected >= 0) & (selected < first_position + step)]
        ages = step - last_use
        known = np.flatnonzero(ages < 1 << 29)
        by_age = np.bincount(ages[known])
        before = by_age.cumsum() - by_age
        selected_by_age = np.bincount(ages[rows][ages[rows] < 1 << 29], minlength=len(by_age))
        used = np.flatnonzero(selected_by_age)
        kept = np.clip((num_rows[:, None] - before[used]) / by_age[used], 0, 1)
        missed[step] = len(rows) - kept @ selected_by_age[used]
        last_use[rows] = step
        last_use[first_position + step] = step

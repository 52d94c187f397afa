"""Residency of all layers over vLLM's device blocks, and the device memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from vllm_hisparse.ops.base import Residency

CHUNK_BYTES = 64 << 20  # of positions that are looked at together


class ResidencyTable:
    """The position that each row of vLLM's device blocks holds, in all layers.

    A DSA model has a table for each layer that selects, which the layers after it share. The layers of a dense model
    share one table, in which every row of a block has an entry: a layer's entries begin at its own rows, so that the
    layers' entries lie side by side as their rows do.

    Args:
        entries: [num_tables, num_device_blocks, entries of a block, 2] int32, as in `Residency`.
        layers: the residency of each layer, views of `entries`.
    """

    def __init__(self, entries: torch.Tensor, layers: Sequence[Residency]):
        self.entries, self.layers = entries, list(layers)
        self._positions = entries[..., 0]

    @classmethod
    def by_selection(
        cls, num_device_blocks: int, rows_per_block: int, selects: Sequence[bool], device: torch.device
    ) -> ResidencyTable:
        """A table for each layer that selects, in which all rows are empty.

        Args:
            num_device_blocks: blocks of vLLM's device pool.
            rows_per_block: rows of a layer in a block.
            selects: whether each layer selects, or shares the residency of the last one that does.
            device: where the rows are.
        """
        assert selects[0], "the first layer has nobody to share a selection with"
        starts = [index for index, selecting in enumerate(selects) if selecting]
        entries = _empty_entries(len(starts), num_device_blocks, rows_per_block, device)
        layers: list[Residency] = []
        for table, (first, end) in zip(entries, pairwise([*starts, len(selects)]), strict=True):
            layers += [Residency(table.flatten(0, 1), end - first)] * (end - first)
        return cls(entries, layers)

    @classmethod
    def by_row(
        cls, num_device_blocks: int, rows_per_block: int, layer_rows: int, num_layers: int, device: torch.device
    ) -> ResidencyTable:
        """One table for all layers, in which all rows are empty.

        Args:
            num_device_blocks: blocks of vLLM's device pool.
            rows_per_block: rows of a block, those of no layer included.
            layer_rows: rows of one layer in a block.
            num_layers: layers whose rows lie one after the other at the start of a block.
            device: where the rows are.

        Raises:
            AssertionError: a block has no room for the layers' rows.
        """
        assert num_layers * layer_rows <= rows_per_block, "the layers' rows do not fit into a block"
        entries = _empty_entries(1, num_device_blocks, rows_per_block, device)
        flat = entries.view(-1, 2)
        return cls(entries, [Residency(flat[layer * layer_rows :]) for layer in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self.entries.nbytes

    def empty(self, blocks: torch.Tensor) -> None:
        """Forget what blocks hold.

        Args:
            blocks: [n] int64, on the device.
        """
        self._positions.index_fill_(1, blocks, -1)

    def empty_latest(self, blocks: torch.Tensor, owners: torch.Tensor, num_owners: int, num_latest: int) -> None:
        """Forget the latest positions of some requests, in all layers.

        A layer may hold less than another of the same request, but none holds a position that its step did not compute.

        Args:
            blocks: [n] int64 blocks of the requests, on the device; each once.
            owners: [n] int64 number of each block's request, on the device.
            num_owners: requests.
            num_latest: positions to forget, from the latest that any layer of the request holds.
        """
        num_tables, _, num_entries = self._positions.shape
        num_blocks = max(CHUNK_BYTES // (4 * num_tables * num_entries), 1)
        chunks = list(zip(blocks.split(num_blocks), owners.split(num_blocks), strict=True))
        latest = torch.full((num_owners,), -1, dtype=torch.int32, device=blocks.device)
        for ids, of in chunks:
            latest.scatter_reduce_(0, of, self._positions[:, ids].amax((0, 2)), "amax")
        last_certain = latest - num_latest
        for ids, of in chunks:
            held = self._positions[:, ids]
            self._positions[:, ids] = held.where(held <= last_certain[of, None], -1)

    def held(self, blocks: torch.Tensor) -> torch.Tensor:
        """Positions that blocks hold: [num_tables, n, entries of a block] int32, -1 where a row is empty.

        Args:
            blocks: [n] int64.
        """
        return self._positions[:, blocks]


def _empty_entries(num_tables: int, num_blocks: int, num_rows: int, device: torch.device) -> torch.Tensor:
    entries = torch.empty(num_tables, num_blocks, num_rows, 2, dtype=torch.int32, device=device)
    entries[..., 0], entries[..., 1] = -1, 0
    return entries

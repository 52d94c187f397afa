"""Residency of all layers over vLLM's device blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from vllm_hisparse.ops.base import Residency


class ResidencyTable:
    """The position that each row of vLLM's device blocks holds, in all layers.

    A DSA model has a table for each layer that selects; the layers that share the selection share the table. A dense
    model has one table with an entry for every row of a block. A layer's entries begin at its own rows, so the layers'
    entries lie side by side as their rows do.

    Args:
        entries: [num_tables, num_device_blocks, entries of a block, 2] int32 position and last use of each row, as in
            `Residency`.
        layers: residency of each layer; views of `entries`.
    """

    def __init__(self, entries: torch.Tensor, layers: Sequence[Residency]):
        self.entries, self.layers = entries, list(layers)
        self._positions = entries[..., 0]

    @classmethod
    def by_selection(
        cls, num_device_blocks: int, rows_per_block: int, selects: Sequence[bool], device: torch.device
    ) -> ResidencyTable:
        """Make a table for each layer that selects; all rows are empty.

        Args:
            num_device_blocks: blocks of vLLM's device pool.
            rows_per_block: rows of a layer in a block.
            selects: for each layer, True if it selects; False if it shares the residency of the last layer that does.
            device: device of the rows.
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
        """Make one table for all layers; all rows are empty.

        Args:
            num_device_blocks: blocks of vLLM's device pool.
            rows_per_block: rows of a block, including rows that belong to no layer.
            layer_rows: rows of one layer in a block.
            num_layers: layers whose rows lie one after the other at the start of a block.
            device: device of the rows.

        Raises:
            AssertionError: a block has no room for the layers' rows.
        """
        assert num_layers * layer_rows <= rows_per_block, "the layers' rows do not fit into a block"
        entries = _empty_entries(1, num_device_blocks, rows_per_block, device)
        flat = entries.view(-1, 2)
        return cls(entries, [Residency(flat[layer * layer_rows :]) for layer in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.entries.nbytes

    def empty(self, blocks: torch.Tensor) -> None:
        """Make all rows of some blocks empty.

        Args:
            blocks: [n] int64, on the device.
        """
        self._positions.index_fill_(1, blocks, -1)

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

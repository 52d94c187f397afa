"""Residency of all layers over vLLM's device blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from vllm_hisparse.kv_manager.rows.row_classes import RowClasses
from vllm_hisparse.ops.base import Residency


class ResidencyTable:
    """The position that each row of vLLM's device blocks holds, in all layers.

    A DSA model has a table for each layer that selects; the layers that share the selection share the table. A dense
    model has one table with an entry for every row of a block. A layer's entries begin at its own rows, so the layers'
    entries lie side by side as their rows do.

    Args:
        entries: for each row class, [num_tables, num_device_blocks, entries of a block, 2] int32 position and expiry
            of each row, as in `Residency`.
        layers: residency of each layer; views of `entries`.
    """

    def __init__(self, entries: Sequence[torch.Tensor], layers: Sequence[Residency]):
        self.entries, self.layers = list(entries), list(layers)
        self._positions = [each[..., 0] for each in entries]

    @classmethod
    def by_selection(
        cls, num_device_blocks: int, classes: RowClasses, selects: Sequence[bool], device: torch.device
    ) -> ResidencyTable:
        """Make a table for each layer that selects; all rows are empty.

        Args:
            num_device_blocks: blocks of vLLM's device pool.
            classes: the layers by their rows in a block.
            selects: for each layer, True if it selects; False if it shares the residency of the last layer that does.
            device: device of the rows.

        Raises:
            AssertionError: layers that share a residency have different numbers of rows.
        """
        assert selects[0], "the first layer has nobody to share a selection with"
        starts = [index for index, selecting in enumerate(selects) if selecting]
        class_of = classes.of_layer
        entries = [
            _empty_entries(sum(class_of[start] == index for start in starts), num_device_blocks, num_rows, device)
            for index, num_rows in enumerate(classes.entries_per_block)
        ]
        unused, layers = list(map(iter, entries)), list[Residency]()
        for first, end in pairwise([*starts, len(selects)]):
            assert len(set(class_of[first:end])) == 1, "layers that share a selection have different numbers of rows"
            layers += [Residency(next(unused[class_of[first]]).flatten(0, 1), end - first)] * (end - first)
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
        return cls([entries], [Residency(flat[layer * layer_rows :]) for layer in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(each.nbytes for each in self.entries)

    def empty(self, blocks: torch.Tensor) -> None:
        """Make all rows of some blocks empty.

        Args:
            blocks: [n] int64, on the device.
        """
        for positions in self._positions:
            positions.index_fill_(1, blocks, -1)

    def held(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Positions that blocks hold: for each row class, [num_tables, n, entries of a block] int32, -1 where a row is
        empty.

        Args:
            blocks: [n] int64.
        """
        return [positions[:, blocks] for positions in self._positions]


def _empty_entries(num_tables: int, num_blocks: int, num_rows: int, device: torch.device) -> torch.Tensor:
    entries = torch.empty(num_tables, num_blocks, num_rows, 2, dtype=torch.int32, device=device)
    entries[..., 0], entries[..., 1] = -1, 0
    return entries

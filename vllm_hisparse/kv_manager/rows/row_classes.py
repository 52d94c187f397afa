"""Row classes: layers with the same number of hot rows in a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RowClasses:
    """The layers of a model, divided by their hot rows in a device block. Layers of a class share tables and launches.

    Attributes:
        rows_per_block: hot rows of a layer in a block, for each class; of one KV head and in units for a dense model.
        of_layer: class of each layer.
    """

    rows_per_block: tuple[int, ...]
    of_layer: tuple[int, ...]

    @classmethod
    def of(cls, layer_rows: Sequence[int]) -> RowClasses:
        """Divide layers into classes, in the order in which a class first occurs.

        Args:
            layer_rows: hot rows of each layer in a block.
        """
        rows = tuple(dict.fromkeys(layer_rows))
        return cls(rows, tuple(map(rows.index, layer_rows)))

    def __len__(self) -> int:
        return len(self.rows_per_block)

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the layers of each class."""
        members = range(len(self))
        return tuple(tuple(i for i, found in enumerate(self.of_layer) if found == each) for each in members)

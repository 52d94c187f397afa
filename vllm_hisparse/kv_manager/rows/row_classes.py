"""Division of hot blocks among layers. Layers with the same number of hot rows in a block, and the same distance from
one of these rows to the next (`RowPlace.pitch`), form a row class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_hisparse.layout import RowPlace


@dataclass(frozen=True)
class RowClasses:
    """The layers of a model, divided by their hot rows in a device block. Layers of a class share tables and launches.

    Attributes:
        rows_per_block: hot rows of a layer in a block, for each class; of one KV head and in units for a dense model.
        of_layer: class of each layer.
        equal_rows: hot rows of every layer in a block of a request that has equal rows; 0: none has.
        equal_offsets: for each layer, as in `RowPlace`; (): 0 for all.
    """

    rows_per_block: tuple[int, ...]
    of_layer: tuple[int, ...]
    equal_rows: int = 0
    equal_offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, layer_rows: Sequence[int], equal_rows: int = 0, places: Sequence[RowPlace] = ()) -> RowClasses:
        """Divide layers into classes, in the order in which a class first occurs.

        Args:
            layer_rows: hot rows of each layer in a block.
            equal_rows: as in the attributes.
            places: place of each layer's rows; layers of a class have the same pitch. (): the pitch is 1.
        """
        kinds = list(zip(layer_rows, [place.pitch for place in places] or [1] * len(layer_rows), strict=True))
        classes, offsets = list(dict.fromkeys(kinds)), tuple(place.equal_offset for place in places)
        return cls(tuple(rows for rows, _ in classes), tuple(map(classes.index, kinds)), equal_rows, offsets)

    def __len__(self) -> int:
        return len(self.rows_per_block)

    @cached_property
    def entries_per_block(self) -> tuple[int, ...]:
        """Most hot rows of a layer in a block of any request, for each class."""
        return tuple(max(rows, self.equal_rows) for rows in self.rows_per_block)

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the layers of each class."""
        members = range(len(self))
        return tuple(tuple(i for i, found in enumerate(self.of_layer) if found == each) for each in members)

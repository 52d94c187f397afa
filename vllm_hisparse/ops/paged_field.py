"""A per-request tensor that grows with the request, in blocks that may lie anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedField:
    """A tensor with entries for every n tokens of each request, stored in blocks.

    It is indexed like a tensor [num_requests, num_entries, *shape]: `field[requests]` reads all entries,
    `field[requests, entries]` reads some, `field[requests, entries] = values` writes them. `requests` is an int or an
    int64 tensor. `entries` is an int64 tensor of the same shape, or of any shape if `requests` is an int.

    Attributes:
        table: [num_requests, max_blocks] int32 blocks of each request. Entries beyond its blocks name a block that
            belongs to no request, holds anything, and may be written.
        blocks: [num_blocks, entries_per_block, *shape] of any dtype; entries are contiguous.
        num_entries: entries of the longest request.
    """

    table: torch.Tensor
    blocks: torch.Tensor
    num_entries: int

    def __getitem__(self, index: int | torch.Tensor | tuple[int | torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if isinstance(index, tuple):
            return self.blocks[self._places(index)]
        tables = self.table[index].long()
        first = tables.dim() - 1
        return self.blocks[tables].flatten(first, first + 1).narrow(first, 0, self.num_entries)

    def __setitem__(self, index: tuple[int | torch.Tensor, torch.Tensor], values: torch.Tensor | float) -> None:
        blocks, offsets = self._places(index)
        self.blocks[blocks, offsets] = values

    def _places(self, index: tuple[int | torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block of each entry, and its place in the block; both int64.

        Raises:
            TypeError: `index` is not requests and entries.
        """
        if not (isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], torch.Tensor)):
            raise TypeError(
                "A field that grows is indexed by requests and an int64 tensor of entries, as in field[requests, "
                "entries]; only field[requests], a copy of all entries, needs no second index."
            )
        (requests, entries), per_block = index, self.blocks.shape[1]
        return self.table[requests, entries // per_block].long(), entries % per_block

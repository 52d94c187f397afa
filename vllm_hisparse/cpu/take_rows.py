"""Takes rows by their ids, on the CPU."""

from __future__ import annotations

from math import gcd

import torch


def take_rows(rows: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    """Return rows by their ids: [*row_ids.shape, row elements].

    NOTE: `index_select` is used, because it copies whole rows; indexing copies single elements.

    Args:
        rows: [num_rows, row elements] of any dtype.
        row_ids: int64 or int32, in any shape.
    """
    return rows.index_select(0, row_ids.flatten()).view(*row_ids.shape, -1)


def without_gaps(ids: torch.Tensor) -> torch.Tensor:
    """Replace each -1 by the largest id of the same line, or by 0 in a line of only -1, so that all ids can be taken.

    NOTE: a row with attention weight 0 must be finite, and the other rows of the line are.

    Args:
        ids: [..., k] of any integer dtype.
    """
    return ids.where(ids >= 0, ids.amax(-1, keepdim=True)).clamp_min(0)


class PagedRows:
    """A paged cache as one list of rows.

    Attributes:
        rows: [rows, row elements]; rows of this view may overlap, but rows of the cache do not.
    """

    def __init__(self, cache: torch.Tensor):
        """View a cache.

        Args:
            cache: [num_blocks, block_size, row elements] of any dtype, with contiguous rows.
        """
        num_blocks, self.block_size, width = cache.shape
        block_stride, row_stride = cache.stride()[:2]
        stride = gcd(block_stride, row_stride)
        last = (num_blocks - 1) * block_stride + (self.block_size - 1) * row_stride
        self.rows = cache.as_strided((last // stride + 1, width), (stride, 1), cache.storage_offset())
        self._block_step, self._row_step = block_stride // stride, row_stride // stride

    def ids(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the ids in `rows` of positions: int64, in the shape of `positions`; -1 for -1.

        Args:
            tables: [..., blocks] block ids of any integer dtype, a table for each line of `positions`; or [blocks].
            positions: [..., k] int64 positions in the line's table; -1 for none.
        """
        known = positions.clamp_min(0)
        blocks = known // self.block_size
        block_ids = (tables[blocks] if tables.dim() == 1 else tables.gather(-1, blocks)).long()
        row_ids = block_ids * self._block_step + (known - blocks * self.block_size) * self._row_step
        return row_ids.where(positions >= 0, -1)

"""Rows by their ids, on the CPU."""

from __future__ import annotations

from math import gcd

import torch


def take_rows(rows: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    """Rows by their ids: [*row_ids.shape, row elements].

    NOTE: `index_select` copies whole rows, indexing copies elements.

    Args:
        rows: [num_rows, row elements] of any dtype.
        row_ids: int64 or int32, any shape.
    """
    return rows.index_select(0, row_ids.flatten()).view(*row_ids.shape, -1)


def without_gaps(ids: torch.Tensor) -> torch.Tensor:
    """Ids that can all be taken: where one is -1, the largest of the same line; 0 in a line without any.

    NOTE: what a line's attention weighs with 0 has to be finite, as its other rows are.

    Args:
        ids: [..., k] of any integer dtype.
    """
    return ids.where(ids >= 0, ids.amax(-1, keepdim=True)).clamp_min(0)


class PagedRows:
    """A paged cache as one list of rows.

    Attributes:
        rows: [rows, row elements]; they may overlap, those of the cache do not.
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
        """Ids of rows in `rows`: int64, of the shape of `positions`, -1 where this is -1.

        Args:
            tables: [..., blocks] block ids of any integer dtype; of `positions`' dimensions, or of one.
            positions: [..., k] int64 positions of a line's table; -1 is none.
        """
        known = positions.clamp_min(0)
        blocks = known // self.block_size
        block_ids = (tables[blocks] if tables.dim() == 1 else tables.gather(-1, blocks)).long()
        row_ids = block_ids * self._block_step + (known - blocks * self.block_size) * self._row_step
        return row_ids.where(positions >= 0, -1)

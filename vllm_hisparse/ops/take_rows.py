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


def take_paged_rows(cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of a paged cache: [*blocks.shape, row elements].

    Args:
        cache: [num_blocks, block_size, row elements] of any dtype, with contiguous rows.
        blocks, offsets: int64 block and place in the block of each, of one shape.
    """
    num_blocks, block_size, width = cache.shape
    block_stride, row_stride = cache.stride()[:2]
    stride = gcd(block_stride, row_stride)  # of rows that may overlap; of those asked for, none does
    last = (num_blocks - 1) * block_stride + (block_size - 1) * row_stride
    rows = cache.as_strided((last // stride + 1, width), (stride, 1), cache.storage_offset())
    return take_rows(rows, blocks * (block_stride // stride) + offsets * (row_stride // stride))

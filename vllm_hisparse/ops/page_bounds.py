"""Bounds of pages, which are the elementwise minima and maxima of their keys: update, and scores of pages.

The operations run on any device. Source: Quest (arXiv:2406.10774), algorithm 1.
"""

from __future__ import annotations

import torch

from vllm_hisparse.ops.kernels import current_stream, kernels
from vllm_hisparse.ops.paged_field import PagedField

# NOTE: torch's dispatcher picks the implementation by device, so that the algorithm has one path.


@torch.library.custom_op("vllm_hisparse::update_page_bounds", mutates_args=("blocks", "latest"))
def update(
    table: torch.Tensor,
    blocks: torch.Tensor,
    latest: torch.Tensor,
    request_indices: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
) -> None:
    """Extend the bounds of a page by one new key per request; a page's first key begins them.

    Args:
        table: [num_requests, max_blocks] int32 blocks of each request.
        blocks: [num_blocks, pages_per_block, 2, num_kv_heads, head_size] minima and maxima of one float dtype, updated
            in place.
        latest: [num_requests, num_latest, 2, num_kv_heads, head_size], updated in place: the bounds of its page after
            each of the latest positions, at that position modulo `num_latest`. A new key extends the bounds after the
            position before its own, so that later keys, which were rejected, do not count. With `num_latest` 0, it
            extends the bounds in `blocks`.
        request_indices: [batch] int64 index of each request, distinct.
        keys: [batch, num_kv_heads, head_size] new keys.
        positions: [batch] int64 position of each key.
        page_size: tokens per page.

    Raises:
        TypeError: on CUDA, bounds and keys are not of one 16-bit float dtype.
        ValueError: on CUDA, the head size is over 256 or not a multiple of 8, pages are not contiguous or not aligned,
            or heads do not lie side by side.
    """
    pages, num_latest = PagedField(table, blocks, 0), latest.shape[1]
    before = latest[request_indices, (positions - 1) % num_latest] if num_latest else None
    old = pages[request_indices, positions // page_size] if before is None else before
    new = keys.to(blocks.dtype)
    combined = torch.stack((torch.minimum(old[:, 0], new), torch.maximum(old[:, 1], new)), 1)
    opens_page = (positions % page_size == 0)[:, None, None, None]
    combined = torch.where(opens_page, new[:, None], combined)
    pages[request_indices, positions // page_size] = combined
    if num_latest:
        latest[request_indices, positions % num_latest] = combined


@torch.library.custom_op("vllm_hisparse::page_scores", mutates_args=())
def scores(
    table: torch.Tensor,
    blocks: torch.Tensor,
    request_indices: torch.Tensor,
    query: torch.Tensor,
    num_tokens: torch.Tensor,
    page_size: int,
    max_pages: int,
) -> torch.Tensor:
    """Score pages: for each KV head, the upper bound of the score of any key in the page with any of the head's
    queries.

    Args:
        table: [num_requests, max_blocks] int32 blocks of each request.
        blocks: [num_blocks, pages_per_block, 2, num_kv_heads, head_size] minima and maxima of one float dtype.
        request_indices: [batch] int64 index of each request.
        query: [batch, num_heads, head_size]; the query heads of one KV head are neighbours.
        num_tokens: [batch] int64 tokens of each request.
        page_size: tokens per page.
        max_pages: pages of the longest request.

    Returns:
        [batch, num_kv_heads, max_pages] float32; undefined beyond a request's tokens.

    Raises:
        TypeError, ValueError: as in `update`, with `query` for the keys.
    """
    # Per channel max(q * m, q * M), which is q * M where q > 0 and q * m elsewhere: two matrix products.
    grouped = query.float().unflatten(1, (blocks.shape[3], -1))
    bounds = PagedField(table, blocks, max_pages)[request_indices]
    low, high = (each.float().permute(0, 2, 3, 1) for each in bounds.unbind(2))
    return (grouped.clamp_min(0) @ high + grouped.clamp_max(0) @ low).amax(2)


@update.register_kernel("cuda")
def _(
    table: torch.Tensor,
    blocks: torch.Tensor,
    latest: torch.Tensor,
    request_indices: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
) -> None:
    kernels().update_page_bounds(table, blocks, latest, request_indices, keys, positions, page_size, current_stream())


@scores.register_kernel("cuda")
def _(
    table: torch.Tensor,
    blocks: torch.Tensor,
    request_indices: torch.Tensor,
    query: torch.Tensor,
    num_tokens: torch.Tensor,
    page_size: int,
    max_pages: int,
) -> torch.Tensor:
    out = torch.empty(len(query), blocks.shape[3], max_pages, dtype=torch.float32, device=query.device)
    kernels().page_scores(table, blocks, request_indices, query, num_tokens, page_size, out, current_stream())
    return out

"""Elementwise minima and maxima of the keys of pages, on any device: updating them and scoring pages by them.

Quest (arXiv:2406.10774), algorithm 1.
"""

from __future__ import annotations

import torch

# NOTE: torch's dispatcher picks the implementation by device, so that the algorithm has one path.


@torch.library.custom_op(
    "vllm_hisparse::update_page_bounds", mutates_args=("minima", "maxima", "latest_minima", "latest_maxima")
)
def update(
    minima: torch.Tensor,
    maxima: torch.Tensor,
    latest_minima: torch.Tensor,
    latest_maxima: torch.Tensor,
    request_indices: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
) -> None:
    """Take one new key per request into the bounds of its page; a page's first key starts them.

    Args:
        minima, maxima: [num_requests, max_pages, num_kv_heads, head_size] of one float dtype, updated in place.
        latest_minima, latest_maxima: [num_requests, num_latest, num_kv_heads, head_size] bounds of a page after its key
            at a position, at that modulo `num_latest`, updated in place: the new key comes after that at the position
            before its own, whatever the page has taken in since. With `num_latest` 0, after all of the page.
        request_indices: [batch] int64, distinct.
        keys: [batch, num_kv_heads, head_size].
        positions: [batch] int64 of the keys.
        page_size: tokens per page.

    Raises:
        AssertionError: on CUDA, bounds and keys are not of one 16-bit float dtype, bounds are not contiguous, or heads
            do not lie side by side.
        RuntimeError: on CUDA, the head size is over 256 or not a multiple of 8.
    """
    pages, opens_page = positions // page_size, (positions % page_size == 0)[:, None, None]
    num_latest = latest_minima.shape[1]
    for bounds, latest, combine in (
        (minima, latest_minima, torch.minimum),
        (maxima, latest_maxima, torch.maximum),
    ):
        old = latest[request_indices, (positions - 1) % num_latest] if num_latest else bounds[request_indices, pages]
        new = keys.to(bounds.dtype)
        bounds[request_indices, pages] = combined = torch.where(opens_page, new, combine(old, new))
        if num_latest:
            latest[request_indices, positions % num_latest] = combined


@torch.library.custom_op("vllm_hisparse::page_scores", mutates_args=())
def scores(
    minima: torch.Tensor,
    maxima: torch.Tensor,
    request_indices: torch.Tensor,
    query: torch.Tensor,
    num_tokens: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """The largest upper bound that the queries of a KV head have of any key's score in each page.

    Args:
        minima, maxima: [num_requests, max_pages, num_kv_heads, head_size] of one float dtype.
        request_indices: [batch] int64.
        query: [batch, num_heads, head_size]; the heads of one KV head are neighbours.
        num_tokens: [batch] int64 tokens of each request.
        page_size: tokens per page.

    Returns:
        [batch, num_kv_heads, max_pages] float32; anything beyond a request's tokens.

    Raises:
        AssertionError, RuntimeError: as in `update`, with `query` for the keys.
    """
    # Per channel max(q * m, q * M), which is q * M where q > 0 and q * m elsewhere: two matrix products.
    grouped = query.float().unflatten(1, (minima.shape[2], -1))
    low, high = (bounds[request_indices].float().permute(0, 2, 3, 1) for bounds in (minima, maxima))
    return (grouped.clamp_min(0) @ high + grouped.clamp_max(0) @ low).amax(2)


@update.register_kernel("cuda")
def _(minima, maxima, latest_minima, latest_maxima, request_indices, keys, positions, page_size) -> None:
    from vllm_hisparse.ops.cuda_ops import launch

    bounds, is_bfloat16 = _bounds(minima, maxima, keys, page_size)
    assert {latest_minima.dtype, latest_maxima.dtype} == {minima.dtype} and latest_minima.shape == latest_maxima.shape
    assert latest_minima.is_contiguous() and latest_maxima.is_contiguous(), "bounds must be contiguous"
    latest = latest_minima.data_ptr(), latest_maxima.data_ptr(), latest_minima.shape[1]
    pointers = request_indices.data_ptr(), positions.data_ptr(), keys.data_ptr()
    launch("update_page_bounds", bounds, *latest, *pointers, keys.stride(0), len(request_indices), is_bfloat16)


@scores.register_kernel("cuda")
def _(minima, maxima, request_indices, query, num_tokens, page_size) -> torch.Tensor:
    from vllm_hisparse.ops.cuda_ops import launch

    bounds, is_bfloat16 = _bounds(minima, maxima, query, page_size)
    (batch, num_heads, _), (_, max_pages, num_kv_heads, _) = query.shape, minima.shape
    out = torch.empty(batch, num_kv_heads, max_pages, dtype=torch.float32, device=query.device)
    pointers = request_indices.data_ptr(), num_tokens.data_ptr(), query.data_ptr()
    group = num_heads // num_kv_heads
    launch("page_scores", bounds, *pointers, query.stride(0), group, batch, is_bfloat16, out.data_ptr())
    return out


def _bounds(minima: torch.Tensor, maxima: torch.Tensor, vectors: torch.Tensor, page_size: int):
    """Arguments of a launch, checked, and whether the elements are bfloat16.

    Args:
        minima, maxima, page_size: as in `update`.
        vectors: [batch, heads, head_size], the keys or queries.
    """
    from vllm_hisparse.ops.cuda_ops import PageBounds

    dtypes, (_, max_pages, num_kv_heads, head_size) = {minima.dtype, maxima.dtype, vectors.dtype}, minima.shape
    assert len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}, f"bounds and vectors are {dtypes}"
    assert minima.is_contiguous() and maxima.is_contiguous(), "bounds must be contiguous"
    assert vectors.stride(2) == 1 and vectors.stride(1) == head_size and vectors.stride(0) % 8 == 0, "heads lie apart"
    sizes = max_pages, num_kv_heads, head_size, page_size
    return PageBounds(minima.data_ptr(), maxima.data_ptr(), *sizes), vectors.dtype == torch.bfloat16

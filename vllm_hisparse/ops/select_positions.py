"""The best positions of a query by the indexer's scores, on any device."""

from __future__ import annotations

import torch

from vllm_hisparse.ops.kernels import current_stream, kernels

MAX_QUERIES = 128  # of a launch; beyond, a query has one thread block, and vLLM's kernels are meant for that


def can_select(scores: torch.Tensor, lengths: torch.Tensor) -> bool:
    """Return True if the kernel takes these scores on their device.

    Args:
        scores, lengths: as in `select_positions`, but `lengths` may have another shape.
    """
    num_queries = len(scores)
    is_aligned = scores.stride(0) % 4 == 0 and scores.stride(1) == 1 and scores.data_ptr() % 16 == 0
    has_clusters = scores.is_cpu or torch.cuda.get_device_capability(scores.device) == (9, 0)
    is_known = scores.dtype == torch.float32 and lengths.numel() == num_queries <= MAX_QUERIES
    return has_clusters and is_known and is_aligned


@torch.library.custom_op("vllm_hisparse::select_positions", mutates_args=("positions",))
def select_positions(scores: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor) -> None:
    """Select the positions with the best scores of each query.

    Args:
        scores: [queries, max_length] float32. Scores from a query's length on are ignored. NaN is the best score; on
            CUDA, NaN with a sign is the worst one, and 0.0 is better than -0.0.
        lengths: [queries] int32 positions that a query may select, at most max_length; 0 or less: none.
        positions: [queries, top_k] int32, overwritten: the positions with better scores than the lowest selected one in
            ascending order, then the first positions with this score; -1 behind the last one. All positions in
            ascending order if a query has no more than top_k.

    Raises:
        TypeError, ValueError: on CUDA, a tensor is of another dtype or shape, or rows of scores are not aligned to 16
            bytes.
        RuntimeError: the GPU has no thread block clusters (compute capability 9.0).
    """
    positions.fill_(-1)
    top_k = positions.shape[1]
    for row, length, out in zip(scores, lengths.tolist(), positions, strict=True):
        if length <= top_k:
            out[: max(length, 0)] = torch.arange(max(length, 0))
            continue
        best = row[:length].argsort(descending=True, stable=True)[:top_k]
        is_last = row[best] == row[best[-1]]
        out.copy_(torch.cat((best[~is_last].sort().values, best[is_last].sort().values)))


@select_positions.register_kernel("cuda")
def _(scores: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor) -> None:
    kernels().select_positions(scores, lengths, positions, current_stream())

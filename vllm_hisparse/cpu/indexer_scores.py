"""Lightning indexer in torch: quantised keys in the byte layout of the CUDA kernels, scores, and top-k.

DeepSeek-V3.2-Exp technical report, equation 1: I[t, s] = sum over heads j of w[t, j] * relu(q[t, j] . k[s]).
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MAX_SCORE_ELEMENTS = 1 << 24  # scores per head held at once
QUERIES_PER_CHUNK = 64  # at most, because every query of a chunk scores the keys of the chunk's last query


def ue8m0_scale(amax: torch.Tensor, floor: float) -> torch.Tensor:
    """Return the power-of-two scale that maps `amax` into fp8's range (UE8M0, as in vLLM's
    `indexer_k_quant_and_cache`).

    Args:
        amax: float32 of any shape, the largest absolute values.
        floor: smaller values of `amax` count as this value.

    Returns:
        float32 of the same shape.
    """
    return torch.exp2(torch.ceil(torch.log2(amax.clamp_min(floor) / FP8_MAX)))


def quantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `values / scale` in fp8; values beyond its range saturate.

    Args:
        values: float32 of any shape.
        scale: float32 that broadcasts to it.

    Returns:
        float8_e4m3fn in the shape of `values`.
    """
    return (values / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_groups(
    values: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    num_columns: int,
    row_stride: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    use_ue8m0: bool,
    **tuning: int,
) -> None:
    """Quantise groups of consecutive elements, each with a scale of its own (CUDA: vLLM's Triton kernel
    `_per_token_group_quant_fp8`, whose arguments these are).

    Args:
        values: contiguous, of any float dtype.
        out: fp8 of the same shape, written.
        scales: [..., groups] float32, written.
        group_size: elements of a group.
        num_columns, row_stride: unused, because `values` is contiguous.
        eps: smaller maxima of a group count as this value.
        fp8_min, fp8_max: range of fp8.
        use_ue8m0: True if scales are powers of two.
        tuning: arguments that only the kernel needs.
    """
    groups = values.reshape(-1, group_size).float()
    largest = groups.abs().amax(-1)
    scale = ue8m0_scale(largest, eps) if use_ue8m0 else largest.clamp_min(eps) / fp8_max
    scales.copy_(scale.view_as(scales))
    out.copy_((groups / scale[:, None]).clamp(fp8_min, fp8_max).view_as(out).to(out.dtype))


def key_views(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the elements and scales of an indexer cache. A block has all its elements first, then all its
    scales.

    Args:
        cache: [num_blocks, block_size, head_dim + 4] uint8; a block is contiguous, and blocks may lie apart.
        head_dim: elements of a key.

    Returns:
        [num_blocks, block_size, head_dim] fp8 and [num_blocks, block_size] fp32.
    """
    num_blocks, block_size, row_bytes = cache.shape
    flat = torch.as_strided(cache, (num_blocks, block_size * row_bytes), (cache.stride(0), 1), cache.storage_offset())
    split = block_size * head_dim
    return flat[:, :split].view(FP8).unflatten(1, (block_size, head_dim)), flat[:, split:].view(torch.float32)


def insert_keys(cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise keys and write them to their slots (CUDA: `indexer_k_quant_and_cache`).

    Args:
        cache: as in `key_views`.
        keys: [tokens, head_dim] of any float dtype.
        slots: [tokens] int64 `block * block_size + offset`; tokens with -1 are skipped.
    """
    keys, slots = keys[slots >= 0].float(), slots[slots >= 0]
    scale = ue8m0_scale(keys.abs().amax(-1), 1e-4)
    elements, scales = key_views(cache, keys.shape[1])
    block_size = cache.shape[1]
    elements[slots // block_size, slots % block_size] = quantize(keys, scale[:, None])
    scales[slots // block_size, slots % block_size] = scale


def load_keys(cache: torch.Tensor, head_dim: int, blocks: torch.Tensor) -> torch.Tensor:
    """Return the dequantised keys of whole blocks.

    Args:
        cache: as in `key_views`.
        head_dim: elements of a key.
        blocks: [..., blocks] int64.

    Returns:
        [..., blocks * block_size, head_dim] float32.
    """
    elements, scales = key_views(cache, head_dim)
    return (elements[blocks].float() * scales[blocks][..., None]).flatten(-3, -2)


def select_top_k(
    query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Select the keys with the best scores at or before each query; all of them, in order, if there are at most
    `top_k`.

    Args:
        query: [batch, queries, heads, head_dim] of any float dtype.
        keys: [batch, context, head_dim] float32; keys beyond the queries' positions are ignored.
        weights: [batch, queries, heads] float32, w of equation 1.
        positions: [batch, queries] int64 position of each query.
        top_k: entries per query.

    Returns:
        [batch, queries, top_k] int32 positions, then -1 if there are fewer keys.
    """
    order = torch.arange(top_k, dtype=torch.int32)
    selected = order.where(order <= positions[..., None], -1)
    chunk = max(1, min(QUERIES_PER_CHUNK, MAX_SCORE_ELEMENTS // (keys.shape[1] * query.shape[0] * query.shape[2])))
    for start in range(0, query.shape[1], chunk):
        part = slice(start, start + chunk)
        last = positions[:, part]
        if (num_keys := int(last.max()) + 1) <= top_k:
            continue
        scores = score_keys(query[:, part], keys[:, :num_keys], weights[:, part])
        scores.masked_fill_(torch.arange(num_keys) > last[..., None], float("-inf"))
        best = scores.topk(top_k, dim=-1).indices.int()
        selected[:, part] = best.where(last[..., None] >= top_k, selected[:, part])
    return selected


def score_keys(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the scores of all keys (equation 1).

    Args:
        query: [batch, queries, heads, head_dim] of any float dtype.
        keys: [batch, context, head_dim] float32.
        weights: [batch, queries, heads] float32.

    Returns:
        [batch, queries, context] float32.
    """
    products = torch.bmm(query.float().flatten(1, 2), keys.transpose(1, 2)).relu_()
    return torch.einsum("bqhk,bqh->bqk", products.unflatten(1, query.shape[1:3]), weights.float())

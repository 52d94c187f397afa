"""Sparse multi-query MLA attention (torch reference): over given rows of each token, or over all rows, masked."""

from __future__ import annotations

import torch

MAX_GATHERED_ELEMENTS = 1 << 20  # rows attended at once, in elements: what a core's caches hold
QUERIES_PER_CHUNK = 64  # few rows that a chunk's last token sees, and its first does not, are masked
MASKED_CONTEXTS = 4  # rows that a token attends over at once, in selections: more take longer than copies
MIN_MASKED = 16  # tokens that attend over all rows; more than a step with drafts has
MASKED = torch.finfo(torch.float32).min


def tokens_per_chunk(top_k: int, row_elements: int) -> int:
    """Query tokens whose selected rows are gathered together, at least one.

    Args:
        top_k: rows of a token.
        row_elements: elements of a row.
    """
    return max(1, MAX_GATHERED_ELEMENTS // (top_k * row_elements))


def num_masked(top_k: int, first: int, num_tokens: int) -> int:
    """How many of a request's tokens had better attend over all rows: while they are few, products of large
    matrices take less time than copies of each token's own rows.

    NOTE: none of a few tokens, which may be drafts: rows of those that are rejected may hold anything, NaN too.

    Args:
        top_k: rows of a token.
        first: position of the first token.
        num_tokens: consecutive ones, from there on.
    """
    return min(max(MASKED_CONTEXTS * top_k - first, 0), num_tokens) if num_tokens >= MIN_MASKED else 0


def sparse_mla(
    query: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, scale: float, kv_lora_rank: int, out: torch.Tensor
) -> None:
    """Attend each query token over its own rows (DeepSeek-V2, arXiv:2405.04434, in the absorbed form).

    Args:
        query: [tokens, heads, row elements] of any float dtype.
        rows: [tokens, k, row elements] of any float dtype; finite for a token with a valid row, else anything.
        valid: [tokens, k] bool; False rows do not count. A token without any gives zeros.
        scale: softmax scale.
        kv_lora_rank: leading elements of a row that are its value.
        out: [tokens, heads, kv_lora_rank] of any float dtype, written.
    """
    rows = rows.float()
    bias = torch.zeros(valid.shape).masked_fill_(~valid, MASKED)[:, None]
    logits = torch.baddbmm(bias, query.float(), rows.transpose(1, 2), alpha=scale)
    out.copy_(torch.bmm(logits.softmax(-1), rows[..., :kv_lora_rank]))
    _clear_without_rows(out, valid)


def masked_mla(
    query: torch.Tensor, rows: torch.Tensor, selected: torch.Tensor, scale: float, kv_lora_rank: int, out: torch.Tensor
) -> None:
    """Attend the last tokens of a sequence over its rows, those that a token has not selected masked.

    Args:
        query: [tokens, heads, row elements] of any float dtype.
        rows: [positions, row elements] of any float dtype; finite.
        selected: [tokens, k] int64 positions, none after its token's; -1 is none. A token without any gives zeros.
        scale, kv_lora_rank: as of `sparse_mla`.
        out: [tokens, heads, kv_lora_rank] of any float dtype, written.
    """
    rows, first = rows.float(), len(rows) - len(query)
    for start in range(0, len(query), QUERIES_PER_CHUNK):
        chunk = slice(start, min(start + QUERIES_PER_CHUNK, len(query)))
        keys, own = rows[: first + chunk.stop], selected[chunk]
        bias = torch.full((len(own), len(keys) + 1), MASKED)
        bias.scatter_(1, own.where(own >= 0, len(keys)), 0.0)
        logits = torch.mm((query[chunk].float() * scale).flatten(0, 1), keys.T).view(len(own), -1, len(keys))
        weights = logits.add_(bias[:, None, :-1]).softmax(-1)
        out[chunk] = torch.mm(weights.flatten(0, 1), keys[:, :kv_lora_rank]).view_as(out[chunk])
    _clear_without_rows(out, selected >= 0)


def _clear_without_rows(out: torch.Tensor, valid: torch.Tensor) -> None:
    has_rows = valid.any(1)
    if not has_rows.all():
        out[~has_rows] = 0.0

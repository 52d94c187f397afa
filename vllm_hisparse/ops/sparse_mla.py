"""Sparse multi-query MLA attention over given rows (torch reference)."""

from __future__ import annotations

import torch

MAX_GATHERED_ELEMENTS = 1 << 20  # rows attended at once, in elements: what a core's caches hold


def tokens_per_chunk(top_k: int, row_elements: int) -> int:
    """Query tokens whose selected rows are gathered together, at least one.

    Args:
        top_k: rows of a token.
        row_elements: elements of a row.
    """
    return max(1, MAX_GATHERED_ELEMENTS // (top_k * row_elements))


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
    logits = torch.bmm(query.float() * scale, rows.transpose(1, 2))
    logits.masked_fill_(~valid[:, None], torch.finfo(logits.dtype).min)
    out.copy_(torch.bmm(logits.softmax(-1), rows[..., :kv_lora_rank]))
    out.masked_fill_(~valid.any(1)[:, None, None], 0.0)

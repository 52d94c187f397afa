"""Sparse multi-query MLA attention over given rows (torch reference)."""

from __future__ import annotations

import torch

MAX_GATHERED_ELEMENTS = 1 << 23  # rows attended at once, in elements: bounds the scratch memory of a prefill chunk


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
        rows: [tokens, k, row elements] of any float dtype; anything where not valid, NaN included.
        valid: [tokens, k] bool; False rows do not count. A token without any gives zeros.
        scale: softmax scale.
        kv_lora_rank: leading elements of a row that are its value.
        out: [tokens, heads, kv_lora_rank] of any float dtype, written.
    """
    rows = rows.float()
    logits = torch.bmm(query.float() * scale, rows.transpose(1, 2))
    if not valid.all():
        # NOTE: the lowest finite value, so that a token without valid rows gives zeros below and not NaN.
        logits.masked_fill_(~valid[:, None], torch.finfo(logits.dtype).min)
        rows = rows.masked_fill(~valid[..., None], 0.0)
    out.copy_(torch.bmm(logits.softmax(-1), rows[..., :kv_lora_rank]))

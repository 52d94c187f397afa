"""Sparse multi-query MLA attention in torch: over given rows of each token, or over all rows with a mask."""

from __future__ import annotations

import torch

MAX_GATHERED_ELEMENTS = 1 << 20  # elements of the rows that are attended at once; they fit into a core's caches
QUERIES_PER_CHUNK = 64  # at most, because every token of a chunk computes with the rows of the chunk's last token
MASKED_CONTEXTS = 4  # most rows, in multiples of a selection, with which masked attention is faster than copies
MIN_MASKED = 16  # least number of tokens that attend over all rows; more than a step with drafts has
MASKED = torch.finfo(torch.float32).min


def tokens_per_chunk(top_k: int, row_elements: int) -> int:
    """Return the number of query tokens whose selected rows are gathered together, at least one.

    Args:
        top_k: rows of a token.
        row_elements: elements of a row.
    """
    return max(1, MAX_GATHERED_ELEMENTS // (top_k * row_elements))


def num_masked(top_k: int, first: int, num_tokens: int) -> int:
    """Return the number of leading tokens that should attend over all rows.

    While there are few rows, products of large matrices take less time than copies of each token's selected rows.

    NOTE: the number is 0 if there are few tokens, because they may be drafts, and rows of rejected drafts may hold
    anything, even NaN.

    Args:
        top_k: selected rows of a token.
        first: position of the first token.
        num_tokens: number of consecutive tokens.
    """
    return min(max(MASKED_CONTEXTS * top_k - first, 0), num_tokens) if num_tokens >= MIN_MASKED else 0


def sparse_mla(
    query: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend for each query token over its own rows (DeepSeek-V2, arXiv:2405.04434, in the absorbed form).

    Args:
        query: [tokens, heads, row elements] of any float dtype.
        rows: [tokens, k, row elements] of any float dtype. All rows of a token with a valid row must be finite; the
            rows of other tokens may hold anything.
        valid: [tokens, k] bool; rows with False do not count. A token without valid rows gets zeros.
        scale: softmax scale.
        kv_lora_rank: number of leading elements of a row that are its value.
        out: [tokens, heads, kv_lora_rank] of any float dtype, written.
        sinks: [heads] float32 logits that take a share of the softmax and have no value; None: the heads have none.
    """
    rows = rows.float()
    bias = torch.zeros(valid.shape).masked_fill_(~valid, MASKED)[:, None]
    logits = torch.baddbmm(bias, query.float(), rows.transpose(1, 2), alpha=scale)
    out.copy_(torch.bmm(softmax_with_sinks(logits, sinks), rows[..., :kv_lora_rank]))
    _clear_without_rows(out, valid)


def masked_mla(
    query: torch.Tensor,
    rows: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend for the last tokens of a sequence over all its rows, with a mask for rows that a token has not selected.

    Args:
        query: [tokens, heads, row elements] of any float dtype.
        rows: [positions, row elements] of any float dtype; finite.
        selected: [tokens, k] int64 positions up to the token's own; -1 for none. A token without positions gets zeros.
        scale, kv_lora_rank, sinks: as in `sparse_mla`.
        out: [tokens, heads, kv_lora_rank] of any float dtype, written.
    """
    rows, first = rows.float(), len(rows) - len(query)
    for start in range(0, len(query), QUERIES_PER_CHUNK):
        chunk = slice(start, min(start + QUERIES_PER_CHUNK, len(query)))
        keys, own = rows[: first + chunk.stop], selected[chunk]
        bias = torch.full((len(own), len(keys) + 1), MASKED)
        bias.scatter_(1, own.where(own >= 0, len(keys)), 0.0)
        logits = torch.mm((query[chunk].float() * scale).flatten(0, 1), keys.T).view(len(own), -1, len(keys))
        weights = softmax_with_sinks(logits.add_(bias[:, None, :-1]), sinks)
        out[chunk] = torch.mm(weights.flatten(0, 1), keys[:, :kv_lora_rank]).view_as(out[chunk])
    _clear_without_rows(out, selected >= 0)


def softmax_with_sinks(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax weights of rows. Each head's sink takes a share of the softmax, too.

    Args:
        logits: [tokens, heads, rows] float32.
        sinks: [heads] float32; None: the heads have none.

    Returns:
        [tokens, heads, rows] float32; with sinks, a head's weights add up to less than 1.
    """
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.view(-1, 1).expand(*logits.shape[:2], 1)
    return torch.cat((logits, column), -1).softmax(-1)[..., :-1]


def _clear_without_rows(out: torch.Tensor, valid: torch.Tensor) -> None:
    has_rows = valid.any(1)
    if not has_rows.all():
        out[~has_rows] = 0.0

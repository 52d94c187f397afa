"""The best units of a decoding token by score, on any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from vllm_hisparse.ops.kernels import current_stream, kernels

# NOTE: torch's dispatcher picks the implementation by device, so that the algorithms have one path.


@torch.library.custom_op("vllm_hisparse::select_units", mutates_args=())
def select_units(
    scores: torch.Tensor, num_tokens: torch.Tensor, tokens_per_unit: int, num_selected: int
) -> torch.Tensor:
    """Select the unit of the newest token, and the units with the best scores before it.

    Args:
        scores: [batch, num_kv_heads, max_units] float32. Units with minus infinity or NaN are never selected. Scores
            from the newest token's unit on are ignored.
        num_tokens: [batch] int64 tokens of each request; with 0, nothing is selected.
        tokens_per_unit: neighbouring tokens of a unit.
        num_selected: largest number of units to select, from 1 to max_units.

    Returns:
        [batch, num_kv_heads, num_selected] int32 distinct units: valid ones first, in any order, but the newest last,
        then -1. If several units have the lowest selected score, any of them may be selected.

    Raises:
        TypeError, ValueError: on CUDA, `scores` or `num_tokens` is of another dtype or not contiguous.
    """
    units = torch.arange(scores.shape[-1], device=scores.device)
    newest = (num_tokens + tokens_per_unit - 1) // tokens_per_unit - 1
    out = (units >= newest[:, None])[:, None] | scores.isnan()
    best = scores.masked_fill(out, -float("inf")).topk(num_selected - 1)
    valid = best.values > -float("inf")
    num_others = valid.sum(-1, keepdim=True)
    chosen = functional.pad(best.indices.masked_fill(~valid, -1), (0, 1), value=-1)
    newest = newest[:, None, None].expand_as(num_others)
    chosen.scatter_(-1, num_others, newest)
    return chosen.int()


@select_units.register_kernel("cuda")
def _(scores: torch.Tensor, num_tokens: torch.Tensor, tokens_per_unit: int, num_selected: int) -> torch.Tensor:
    batch, num_heads, _ = scores.shape
    units = torch.empty(batch, num_heads, num_selected, dtype=torch.int32, device=scores.device)
    kernels().select_units(scores, num_tokens, tokens_per_unit, units, current_stream())
    return units

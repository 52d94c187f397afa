"""Kernels of vLLM's rejection sampler on the CPU, where there is no Triton.

NOTE: vLLM 0.32's own versions in C++ leave the sampling parameters of drafts unwritten, and do not reject the
placeholders (-1) that its scheduler uses as drafts. Arguments are those of the Triton kernels in
`vllm/v1/sample/rejection_sampler.py`.
"""

from __future__ import annotations

import torch


def expand(
    output: torch.Tensor, values: torch.Tensor, cu_num_tokens: torch.Tensor, replace_from: int, replace_to: int, _: int
) -> None:
    """Give each token the value of its request.

    Args:
        output: [num_tokens] of any dtype, written.
        values: [batch] in the same dtype.
        cu_num_tokens: [batch] int32 cumulative number of tokens of the requests.
        replace_from, replace_to: a value, and the value that replaces it.
    """
    values = values.where(values != replace_from, torch.tensor(replace_to, dtype=values.dtype))
    output.copy_(values[_requests(cu_num_tokens)])


def reject(
    output: torch.Tensor,
    cu_num_drafts: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus: torch.Tensor,
    recovered: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    *_: object,
) -> None:
    """Accept drafts of requests that sample, up to the first one that is rejected (Leviathan et al., arXiv:2211.17192).

    Args:
        output: [batch, most drafts + 1] int32, written: accepted drafts, then the recovered or the bonus token.
        cu_num_drafts: [batch] int32 cumulative number of drafts of the requests.
        drafts: [num_drafts] int32; -1 is a placeholder, which is rejected.
        draft_probs: [num_drafts, vocabulary] float32; None: each draft has probability 1.
        target_probs: [num_drafts, vocabulary] float32.
        bonus: [batch] or [batch, 1] int32 token that follows if all drafts are accepted.
        recovered: [num_drafts] int32 token that replaces each draft if it is rejected.
        uniform_probs: [num_drafts] float64 random numbers.
        is_greedy: [batch] bool, True for requests that are skipped.
    """
    columns = drafts.clamp_min(0)[:, None].long()
    probs = target_probs.gather(1, columns)[:, 0]
    if draft_probs is not None:
        proposed = draft_probs.gather(1, columns)[:, 0]
        probs = (probs / proposed).where(proposed > 0, 0)
        accepted = (drafts >= 0) & (proposed > 0) & (probs >= uniform_probs)
    else:
        accepted = (drafts >= 0) & (probs >= uniform_probs)
    first = 0
    for request, last in enumerate(cu_num_drafts.tolist()):
        if not is_greedy[request]:
            num_accepted = int(accepted[first:last].cumprod(0).sum())
            output[request, :num_accepted] = drafts[first : first + num_accepted]
            is_all = num_accepted == last - first
            output[request, num_accepted] = bonus.flatten()[request] if is_all else recovered[first + num_accepted]
        first = last


def recover(
    output: torch.Tensor,
    cu_num_drafts: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    *_: object,
) -> None:
    """Sample the token that replaces each draft if it is rejected.

    Args:
        output: [num_drafts] int32, written.
        cu_num_drafts, drafts, draft_probs, target_probs: as in `reject`.
        inv_q: [batch, vocabulary] reciprocals of exponential random numbers.
    """
    if draft_probs is None:
        rows = (drafts >= 0).nonzero()[:, 0]
        probs = target_probs.clone()
        probs[rows, drafts[rows].long()] = 0
    else:
        probs = (target_probs - draft_probs).clamp_min(0)
    output.copy_((probs * inv_q[_requests(cu_num_drafts)]).argmax(-1))


def _requests(cu_num_tokens: torch.Tensor) -> torch.Tensor:
    """Return the request of each token: [num_tokens] int64."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return torch.arange(len(counts)).repeat_interleave(counts)

"""Ids that vLLM makes for the prompts and samples of a request of the API."""

from __future__ import annotations

import re

RELEASES = ">=0.32"
VLLM = (
    "vllm.v1.engine.input_processor.InputProcessor.assign_request_id",
    "vllm.v1.engine.parallel_sampling.ParentRequest.get_child_info",
)

# The id of an engine's request: [<sample>_]<id in the API>[-<eight random hexadecimal digits>]
_REQUEST_ID = re.compile(r"(?:(\d+)_)?(.*?)(?:-[0-9a-f]{8})?", re.DOTALL)
# Ids in the API that number the prompts of one HTTP request
_PROMPT_INDEX = re.compile(r"cmpl-.*-(\d+)|chatcmpl-.*_(\d+)", re.DOTALL)


def owns_transfer(request_id: str, remote_request_id: str) -> bool:
    """Tell whether a request is the one that the prefill side's request `remote_request_id` was made for.

    A router forwards an HTTP request with all its prompts and samples to both sides, and the transfer parameters of one
    of them to the decode side, where vLLM gives a copy to every prompt and sample. It is the first prompt's, or the one
    of the same id where the router names requests (`X-Request-Id`). One sample may use it: the prefill side lets go of
    the blocks after one pull.
    """
    sample, name = _REQUEST_ID.fullmatch(request_id).groups()
    _, remote_name = _REQUEST_ID.fullmatch(remote_request_id).groups()
    return _is_zero(sample) and (name == remote_name or (_is_first_prompt(name) and _is_first_prompt(remote_name)))


def transfer_of_sample(request_id: str, remote_request_id: str) -> str | None:
    """The prefill side's request that nobody will pull because this sample here is computed; None if there is none.

    The prefill side computes as many samples as the decode side, under ids that differ in their number alone, and hands
    over the transfer of one of them. The first sample here owns that one. Each other sample here stands for the one of
    its number there, or for the first one where its own was handed over.
    """
    sample, name = _REQUEST_ID.fullmatch(request_id).groups()
    remote_sample, remote_name = _REQUEST_ID.fullmatch(remote_request_id).groups()
    is_same_prompt = name == remote_name or (_is_first_prompt(name) and _is_first_prompt(remote_name))
    if _is_zero(sample) or remote_sample is None or not is_same_prompt:
        return None
    return f"{'0' if sample == remote_sample else sample}_{remote_request_id.partition('_')[2]}"


def _is_first_prompt(name: str) -> bool:
    match = _PROMPT_INDEX.fullmatch(name)
    return match is None or _is_zero(match[1] or match[2])


def _is_zero(digits: str | None) -> bool:
    """Tell whether digits, or none, spell 0. NOTE: clients choose ids, and `int` fails on more than 4,300 digits."""
    return not (digits or "").strip("0")

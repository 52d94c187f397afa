"""Ids that vLLM makes for the prompts and samples of an API request."""

from __future__ import annotations

import re

RELEASES = ">=0.32"
VLLM = (
    "vllm.v1.engine.input_processor.InputProcessor.assign_request_id",
    "vllm.v1.engine.parallel_sampling.ParentRequest.get_child_info",
)

# The id of an engine's request: [<sample>_]<id in the API>[-<eight random hexadecimal digits>]
_REQUEST_ID = re.compile(r"(?:(\d+)_)?(.*?)(?:-[0-9a-f]{8})?", re.DOTALL)
# Ids in the API that contain the number of a prompt of one HTTP request
_PROMPT_INDEX = re.compile(r"cmpl-.*-(\d+)|chatcmpl-.*_(\d+)", re.DOTALL)


def owns_transfer(request_id: str, remote_request_id: str) -> bool:
    """Return True if the prefill side's request `remote_request_id` was made for this request.

    A router forwards an HTTP request with all its prompts and samples to both sides. To the decode side, it also sends
    the transfer parameters of one of them, and vLLM copies these to every prompt and sample. They belong to the request
    with the same id if the router names requests (`X-Request-Id`), or else to the first prompt. Only one sample may use
    them, because the prefill side frees the blocks after one pull.
    """
    sample, name = _REQUEST_ID.fullmatch(request_id).groups()
    _, remote_name = _REQUEST_ID.fullmatch(remote_request_id).groups()
    return _is_zero(sample) and (name == remote_name or (_is_first_prompt(name) and _is_first_prompt(remote_name)))


def transfer_of_sample(request_id: str, remote_request_id: str) -> str | None:
    """Return the prefill side's request that nobody will pull because this sample is computed here; None if there is
    none.

    The prefill side computes as many samples as the decode side, under ids that differ only in a number, and hands over
    the transfer of one of them. The first sample here owns that transfer. Each other sample here corresponds to the
    sample with its number there; if that one was handed over, it corresponds to the first one.
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
    """Return True for no digits or only zeros. NOTE: clients choose ids, and `int` fails on more than 4,300 digits."""
    return not (digits or "").strip("0")

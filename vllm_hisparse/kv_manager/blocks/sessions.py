"""Streaming sessions: requests whose prompt arrives in turns."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.vllm_patches.long_sessions import cut_session

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


def cut_long_sessions(sessions: Iterable[Request], max_model_len: int, hash_block_size: int) -> None:
    """Cut sessions that a turn has made too long to `max_model_len - 1` tokens, so that the turn ends with one token.

    Args:
        sessions: all sessions.
        max_model_len: tokens of the longest request.
        hash_block_size: tokens per block hash.
    """
    num_kept = max_model_len - 1
    for request in sessions:
        if request.status == RequestStatus.WAITING and request.num_tokens > num_kept:
            logger.warning(
                "Session %s has %d tokens; %d leave room for an answer (--max-model-len %d): its last turn is cut.",
                request.request_id,
                request.num_tokens,
                num_kept,
                max_model_len,
            )
            cut_session(request, num_kept, hash_block_size)

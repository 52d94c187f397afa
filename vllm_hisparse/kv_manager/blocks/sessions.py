"""Streaming sessions: requests that get their prompt in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from vllm_hisparse.vllm_patches.long_sessions import cut_session

if TYPE_CHECKING:
    from vllm_hisparse.kv_manager.blocks.request_ledger import RequestLedger

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


def cut_long_sessions(ledger: RequestLedger, max_model_len: int, hash_block_size: int) -> None:
    """Shorten sessions that a turn has made too long for `max_model_len`: that turn ends with its first token.

    Args:
        ledger: knows the sessions.
        max_model_len: tokens of the longest request.
        hash_block_size: tokens of a block hash.
    """
    num_kept = max_model_len - 1
    for request_id in ledger.sessions:
        request = ledger.requests[request_id]
        if request.status == RequestStatus.WAITING and request.num_tokens > num_kept:
            logger.warning(
                "Session %s has %d tokens; %d leave room for an answer (--max-model-len %d): its last turn is cut.",
                request_id,
                request.num_tokens,
                num_kept,
                max_model_len,
            )
            cut_session(request, num_kept, hash_block_size)


def turns_that_go_back(ledger: RequestLedger, num_scheduled: Mapping[str, int]) -> list[str]:
    """Sessions whose turn begins before their last step did; the worker has to forget what it knows of them.

    NOTE: a turn that ends at an accepted draft drops those after it. A step in flight may have taken them for certain:
    it has brought their rows to the device, and an algorithm has gone on from them.

    Args:
        ledger: notes where the sessions' steps start.
        num_scheduled: request id -> tokens that the step computes.
    """
    sessions = sorted(ledger.sessions & num_scheduled.keys()) if ledger.has_drafts else ()
    return [name for name in sessions if ledger.admitted[name].note_start(ledger.requests[name].num_computed_tokens)]

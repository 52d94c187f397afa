"""A streaming session grows beyond `--max-model-len`.

vLLM checks the length of each turn, but not of the session (`Scheduler._update_request_as_session`). It then schedules
more tokens than the blocks of a request can hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

RELEASES = ">=0.32"
DELETE = "`cut_long_sessions` of kv_manager/blocks/sessions.py"
VLLM = (
    "vllm.v1.request.Request._all_token_ids",
    "vllm.v1.core.sched.scheduler.Scheduler._update_request_as_session",
)


def cut_session(session: Request, num_tokens: int, hash_block_size: int) -> None:
    """Shorten a streaming session that waits with its next turn; at least one token is left to compute.

    Args:
        session: the session; all of its tokens are prompt tokens.
        num_tokens: number of tokens to keep.
        hash_block_size: tokens of a block hash.
    """
    del session._all_token_ids[num_tokens:], session.prompt_token_ids[num_tokens:]
    del session.block_hashes[num_tokens // hash_block_size :]
    session.num_prompt_tokens = num_tokens
    session.num_computed_tokens = min(session.num_computed_tokens, num_tokens - 1)

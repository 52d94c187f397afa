"""A streaming session grows beyond `--max-model-len`.

vLLM checks the length of a turn alone. It schedules the rest of a longer session as a whole, beyond the blocks that it
gives to any request (`Scheduler._update_request_as_session`).
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
        session: all of its tokens are prompt.
        num_tokens: to keep.
        hash_block_size: tokens of a block hash.
    """
    del session._all_token_ids[num_tokens:], session.prompt_token_ids[num_tokens:]
    del session.block_hashes[num_tokens // hash_block_size :]
    session.num_prompt_tokens = num_tokens
    session.num_computed_tokens = min(session.num_computed_tokens, num_tokens - 1)

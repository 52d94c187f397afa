"""A session's turn that ends at an accepted draft drops the drafts after it, but counts them as computed.

vLLM 0.32 then takes the next turn's first tokens for the dropped drafts, and does not compute them
(`Scheduler._update_request_as_session`). It subtracts only the placeholders of a step in flight. vLLM 0.33 subtracts
the dropped drafts when it trims the output (`Scheduler._update_request_with_output`); with this mend in addition, it
would compute tokens twice.
"""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus

from vllm_hisparse.releases import serves

RELEASES = ">=0.32,<0.33"
DELETE = "the call in kv_manager/blocks/request_tracker.py, and `forgotten_placeholders` of tests/campaign/damage.py"
VLLM = (
    "vllm.v1.core.sched.scheduler.Scheduler._update_request_as_session",
    "vllm.v1.core.sched.scheduler.Scheduler._update_request_with_output",
)


class DraftingSession(Request):
    """A session that verifies drafts. After a turn, only tokens that the session keeps count as computed."""

    @property
    def num_computed_tokens(self) -> int:
        num_tokens = self.__dict__["num_computed_tokens"]
        if self.status == RequestStatus.RUNNING:
            return num_tokens
        return min(num_tokens, self.num_tokens - 1 + self.num_output_placeholders)

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        self.__dict__["num_computed_tokens"] = num_tokens


def count_kept_tokens(session: Request) -> None:
    """Turn a session into a `DraftingSession`, in releases with the defect."""
    if serves(RELEASES):
        session.__class__ = DraftingSession

"""A turn that ends at an accepted draft drops the drafts after it, but counts them as computed.

vLLM 0.32 takes the next turn's first tokens for them (`Scheduler._update_request_as_session`); its placeholders, which
it has scheduled of a step in flight, it takes off itself. vLLM 0.33 takes the dropped drafts off where it trims the
output (`Scheduler._update_request_with_output`), and with this mend, too, would compute tokens twice.
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
    """A session that verifies drafts, and has computed no more than what it keeps when a turn is over."""

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
    """Let a session that verifies drafts count no more than it keeps, in the releases that do not."""
    if serves(RELEASES):
        session.__class__ = DraftingSession

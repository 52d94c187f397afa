"""A streaming session whose requests verify drafts."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus


class DraftingSession(Request):
    """A session that has computed no more than what it keeps when a turn is over.

    NOTE: a turn that ends at an accepted draft drops the drafts after it, but vLLM 0.32 still counts them as computed,
    and would take the next turn's first tokens for them (`Scheduler._update_request_as_session`).
    """

    @classmethod
    def take_over(cls, session: Request) -> None:
        """Give a request that vLLM has made this class."""
        session.__class__ = cls

    @property
    def num_computed_tokens(self) -> int:
        num_tokens = self.__dict__["num_computed_tokens"]
        return num_tokens if self.status == RequestStatus.RUNNING else min(num_tokens, self.num_tokens - 1)

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        self.__dict__["num_computed_tokens"] = num_tokens

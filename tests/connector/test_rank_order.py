"""Tensor parallel ranks of an MLA model that share a host pool and whose devices run apart.

See `docs/decisions/one-host-pool-per-node.md`.
"""

from collections import deque
from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, FakeWorker
from vllm.v1.request import Request

PROMPT = [10, 11, 12]


class Rank:
    """A rank's device: carries out steps in their order, later than they are submitted."""

    def __init__(self, worker: FakeWorker):
        self.worker = worker
        self.steps: deque[Callable[[], None]] = deque()
        self.num_run = 0

    def run(self, num_steps: int) -> None:
        """Run on until `num_steps` have been run since the beginning."""
        while self.steps and self.num_run < num_steps:
            self.steps.popleft()()
            self.num_run += 1


class Ranks:
    """Two ranks with one host pool.

    Args:
        run_together: whether a rank enters a step's forward only when all have ended the one before, as the all-reduce
            of every layer has it.
    """

    def __init__(self, engine: FakeEngine, run_together: bool):
        self.engine, self.run_together = engine, run_together
        self.ranks = [Rank(FakeWorker(engine.groups.layout)) for _ in range(2)]
        self.ranks[1].worker.main_rows = self.ranks[0].worker.main_rows
        self.ranks[1].worker.host_keys = self.ranks[0].worker.host_keys
        self.num_submitted = 0

    def submit(self, request: Request, num_tokens: int) -> None:
        """Schedule a step of one request; the ranks run it when they are told to."""
        metadata, first, last = self.engine.schedule_one(request, num_tokens)
        first_hot_block_id, device_ids = self.engine.tables_of(request)
        tokens, index = list(request.all_token_ids), self.num_submitted
        self.num_submitted += 1
        for rank in self.ranks:
            rank.steps.append(
                lambda rank=rank: self.run(rank, index, metadata, first_hot_block_id, device_ids, tokens, first, last)
            )

    def run(self, rank: Rank, index: int, metadata, *forward) -> None:
        if self.run_together:
            for other in self.ranks:
                other.run(index)
        rank.worker.apply(metadata)
        rank.worker.forward(*forward)
        rank.worker.finish(metadata)


def run_session(run_together: bool) -> None:
    """A session's turn ends while the step of a token that is then dropped is in flight; rank 1 is late with it."""
    engine = FakeEngine()
    session = engine.add("session", PROMPT, resumable=True)
    ranks = Ranks(engine, run_together)
    ranks.submit(session, len(PROMPT))
    ranks.ranks[1].run(1)
    session.append_output_token_ids(1)
    ranks.submit(session, 1)  # position 3 is token 1
    session._all_token_ids[-1] = 2  # the next turn begins with token 2 instead
    session.num_computed_tokens -= 1
    ranks.submit(session, 1)  # position 3 is token 2
    ranks.ranks[0].run(3)
    ranks.ranks[1].run(2)  # without all-reduce, it writes the dropped token's row only now
    session.append_output_token_ids(3)
    ranks.submit(session, 1)  # reads position 3
    ranks.ranks[0].run(4)


def test_the_all_reduce_keeps_a_late_rank_from_overwriting_a_sessions_next_turn() -> None:
    run_session(run_together=True)


def test_ranks_that_run_apart_overwrite_each_others_rows() -> None:
    with pytest.raises(AssertionError, match="host row 3 holds another prefix"):
        run_session(run_together=False)

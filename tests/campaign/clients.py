"""Behaviour of requests: arrive, share prefixes, continue in turns, leave early."""

from __future__ import annotations

import copy
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from .adapter import HASHER
from .configuration import MAX_MODEL_LEN, Configuration
from .engine import Engine
from .malformed import malformed
from .nixl import Prefill
from .texts import STOP_TOKEN

MAX_LIVE = 14  # requests of one engine
MAX_TOKENS = 14


@dataclass
class Session:
    """A streaming session: its client sends turns, early or late, and at last ends it.

    Attributes:
        num_turns: turns to come.
        num_tokens: largest length that it may have by now.
        minds_length: whether its client ends it before it outgrows the model.
    """

    request_id: str
    engine: Engine
    num_turns: int
    num_tokens: int
    minds_length: bool

    def room(self) -> int:
        return MAX_MODEL_LEN - self.num_tokens - 8 if self.minds_length else MAX_MODEL_LEN


class Clients:
    """Sends requests to the engines of a world until `stop`.

    Args:
        configuration: configuration of the world.
        rng: random numbers of the world.
        engines: engines of the world; each request goes to a random one.
        prefill: the prefill instance.
        counts: counts of the world's events, which are added to.
    """

    def __init__(
        self,
        configuration: Configuration,
        rng: random.Random,
        engines: Sequence[Engine],
        prefill: Prefill,
        counts: Counter[str],
    ):
        self.configuration, self.rng, self.engines = configuration, rng, engines
        self.prefill, self.counts = prefill, counts
        self._numbers = count(1)
        self._sessions: list[Session] = []
        self._is_stopped = False

    def stop(self) -> None:
        """No new requests; sessions end with their next turn."""
        self._is_stopped = True
        for session in self._sessions:
            session.num_turns = 0

    def act(self) -> None:
        """Requests that arrive between two steps."""
        for _ in range(self.rng.choice((0, 0, 1, 1, 2))):
            engine = self.rng.choice(self.engines)
            if not self._is_stopped and len(engine.live_requests()) < MAX_LIVE:
                self._arrive(engine)
        self._sessions = [session for session in self._sessions if self._continue(session)]
        for engine in self.engines if self._may_leave else ():
            self.leave(engine, 0.05)
            if self.rng.random() < 0.02:
                engine.reset(self.rng.random() < 0.6, self.rng.random() < 0.5)

    def leave(self, engine: Engine, share: float = 0.08) -> None:
        """Perhaps a client disconnects."""
        live = engine.live_requests()
        if live and self._may_leave and self.rng.random() < share:
            engine.abort(self.rng.choice(live).request_id)

    @property
    def _may_leave(self) -> bool:
        """No client leaves at the end, because that would hide a deadlock.

        NOTE: but for sessions. One that waits keeps its blocks, and vLLM preempts no request that waits: where such
        sessions fill a pool and their next turns need more, they wait until a client leaves.
        """
        return not self._is_stopped or self.configuration.has_sessions

    def _arrive(self, engine: Engine) -> None:
        """One HTTP request: of one prompt, or of several, which the router sends on with one prompt's transfer."""
        name, prompts = f"cmpl-{next(self._numbers)}", [self._prompt()]
        transfer = None
        if self.configuration.is_pd and self.rng.random() < 0.6:
            transfer = self.prefill.compute(_request_id(name, 0), prompts[0])
            if self.rng.random() < self.configuration.sibling_share:
                prompts += self._siblings(prompts[0])
            if self.rng.random() < self.configuration.malformed_share:
                transfer = malformed(transfer, self.rng)
        for index, prompt in self.rng.sample(list(enumerate(prompts)), len(prompts)):
            engine = engine if index == 0 else self.rng.choice(self.engines)
            self._live(engine, _request_id(name, index), prompt, copy.deepcopy(transfer))

    def _live(self, engine: Engine, request_id: str, prompt: list[int], transfer: dict[str, Any] | None) -> None:
        skips_cache = self.rng.random() < 0.1
        is_session = self.configuration.has_sessions and not skips_cache and self.rng.random() < 0.3
        sampling = self._sampling(MAX_TOKENS, transfer, skips_cache)
        self._send(engine, request_id, prompt, sampling, is_session)
        self.counts["lives"] += 1
        if is_session:
            num_tokens = len(prompt) + sampling.max_tokens
            minds_length, num_turns = self.rng.random() < 0.8, self.rng.randint(0, 3)
            self._sessions.append(Session(request_id, engine, num_turns, num_tokens, minds_length))

    def _siblings(self, prompt: list[int]) -> list[list[int]]:
        """Other prompts, every other one as long as the first."""
        others = [self._prompt() for _ in range(self.rng.randint(1, 2))]
        return [(other * len(prompt))[: len(prompt)] if self.rng.random() < 0.5 else other for other in others]

    def _prompt(self) -> list[int]:
        """Beginnings are few, so that requests share them."""
        base, num_shared = 10 * self.rng.randint(0, 1), self.rng.randint(0, 30)
        shared = [base + index % 10 for index in range(num_shared)] if self.rng.random() < 0.3 else [base] * num_shared
        own = [100 + self.rng.randrange(10_000) for _ in range(self.rng.randint(0, 8))]
        return shared + own or [3]

    def _sampling(
        self, max_tokens: int, transfer: dict[str, Any] | None = None, skips_cache: bool = False
    ) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.rng.randint(1, max_tokens),
            ignore_eos=True,
            stop_token_ids=[STOP_TOKEN] if self.rng.random() < 0.4 else None,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
            skip_reading_prefix_cache=skips_cache or None,
        )

    def _send(
        self, engine: Engine, request_id: str, prompt: list[int], sampling: SamplingParams, is_session: bool
    ) -> None:
        request = Request(
            request_id,
            prompt,
            sampling,
            None,
            block_hasher=HASHER,
            priority=self.rng.randint(0, 2),
            arrival_time=float(next(self._numbers)),
            resumable=is_session,
        )
        engine.add(request)

    def _continue(self, session: Session) -> bool:
        """Perhaps send a session's next turn; returns whether it goes on."""
        request = session.engine.scheduler.requests.get(session.request_id)
        if request is None or request.is_finished():
            return False
        if self.rng.random() >= 0.3:
            return True
        room = session.room()
        goes_on = session.num_turns > 0 and room > 0
        prompt = [50 + self.rng.randrange(3)] * self.rng.randint(1, max(1, min(9, room)))
        sampling = self._sampling(5)
        self._send(session.engine, session.request_id, prompt, sampling, goes_on)
        session.num_turns -= 1
        session.num_tokens += len(prompt) + sampling.max_tokens
        self.counts["turns"] += goes_on
        return goes_on


def _request_id(name: str, index: int) -> str:
    """Ids that vLLM's servers give to the prompts of an HTTP request."""
    return f"{name}-{index}-{zlib.crc32(name.encode()):08x}"

"""The engine of a soak, in this process, and its clients: conversations, streaming sessions, clients that leave."""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.process_memory import PythonGrowth, memory

E2E = Path(__file__).parents[1] / "tests" / "e2e"
VOCABULARY = range(3, 500)
NUM_DOCUMENTS, NUM_CONVERSATIONS = 6, 64  # prompts are few, so that prefixes are shared and found again
MAX_TURNS = 4
ABORT_SHARE, RESET_SHARE = 0.03, 0.002  # of the steps in which a client leaves, or the prefix caches are emptied
DRAIN_TIMEOUT_S = 300
WARM_UP_SHARE = 1 / 3  # of a soak: before, pools fill and code is loaded
NUM_BEST = 5  # tokens of a step whose logprobs full KV gives


@dataclass
class Lengths:
    """Ranges of tokens: of a document, which several conversations start with, of a question and of an answer."""

    document: tuple[int, int]
    question: tuple[int, int]
    answer: tuple[int, int]

    def longest(self) -> int:
        return self.document[1] + MAX_TURNS * (self.question[1] + self.answer[1])


@dataclass
class Conversation:
    """A conversation, whose questions follow from its number.

    Attributes:
        number: less than `NUM_CONVERSATIONS`.
        name: id of the request in flight, or of the session.
        is_session: true for one streaming session, false for a request for each turn.
        source: random numbers of its questions.
        tokens: prompt of its latest turn.
        reply: tokens of the answer to it.
        logprobs: logprobs of these tokens.
        max_tokens: length of the answer.
        num_turns: turns to come.
        is_idle: true while its client reads the answer.
    """

    number: int
    name: str
    is_session: bool
    source: random.Random
    tokens: list[int]
    num_turns: int
    max_tokens: int = 0
    reply: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_idle: bool = True


class Clients:
    """Talk to an engine until they are told to stop.

    Args:
        engine: vLLM's `LLMEngine`, in this process.
        lengths: lengths of what they say.
        num_live: requests that they have in flight together, more than the engine runs.
        max_sessions: largest number of streaming sessions at a time.
        seed: seed of their random numbers.
        report: function that takes every answer, whole or not.
    """

    def __init__(
        self,
        engine: Any,
        lengths: Lengths,
        num_live: int,
        max_sessions: int,
        seed: int,
        report: Callable[[dict], None],
    ):
        self.engine, self.lengths, self.num_live, self.max_sessions = engine, lengths, num_live, max_sessions
        self.counts: Counter[str] = Counter()
        self._rng, self._report = random.Random(seed), report
        self._conversations: dict[str, Conversation] = {}
        self._internal_ids: dict[str, str] = {}  # of sessions
        self._is_stopped = False

    def act(self) -> None:
        """Between two steps: fill the queue; perhaps a client leaves, or somebody empties the prefix caches."""
        while not self._is_stopped and sum(not each.is_idle for each in self._conversations.values()) < self.num_live:
            self._say_something()
        if self._rng.random() < ABORT_SHARE and self._conversations:
            self._leave(self._rng.choice(list(self._conversations.values())))
        if self._rng.random() < RESET_SHARE:
            stops_running = self._rng.random() < 0.5
            try:
                self.engine.reset_prefix_cache(reset_running_requests=stops_running, reset_connector=True)
                self.counts["resets"] += 1
            except RuntimeError:  # vLLM cannot take the blocks of sessions that wait for a turn; others are preempted
                self.counts["resets_refused"] += 1

    def receive(self, outputs: list[Any]) -> None:
        """Take the outputs of a step."""
        for output in outputs:
            conversation = self._conversations.get(output.request_id)
            if conversation is None:
                continue
            best = output.outputs[0]
            conversation.reply += best.token_ids
            conversation.logprobs += [
                step[token].logprob for step, token in zip(best.logprobs, best.token_ids, strict=True)
            ]
            if best.finish_reason is not None:
                self._finish(conversation)

    def kept(self) -> dict[str, int]:
        """Conversations that the clients keep in the engine's process, and their tokens and logprobs."""
        conversations = self._conversations.values()
        num_values = sum(len(each.tokens) + len(each.reply) + len(each.logprobs) for each in conversations)
        return {"kept_conversations": len(conversations), "kept_tokens": num_values}

    def stop(self) -> None:
        """Start nothing more; who waits for a client's next turn ends."""
        self._is_stopped = True
        for conversation in [each for each in self._conversations.values() if each.is_idle]:
            self._end(conversation)

    def _say_something(self) -> None:
        """The next turn of a conversation that is idle, or a new conversation."""
        idle = [each for each in self._conversations.values() if each.is_idle]
        if len(idle) > self.num_live or (idle and self._rng.random() < 0.6):
            self._ask(self._rng.choice(idle))
        else:
            self._ask(self._begin(self._rng.randrange(NUM_CONVERSATIONS)))

    def _begin(self, number: int) -> Conversation:
        source = random.Random(f"conversation {number}")
        document = random.Random(f"document {number % NUM_DOCUMENTS}")
        tokens = document.choices(VOCABULARY, k=document.randint(*self.lengths.document))
        num_sessions = sum(each.is_session for each in self._conversations.values())
        is_session = number % 4 == 0 and num_sessions < self.max_sessions
        self.counts["conversations"] += 1
        self.counts["sessions"] += is_session
        name = f"{number}-{self.counts['conversations']}"
        conversation = Conversation(number, name, is_session, source, tokens, source.randint(1, MAX_TURNS))
        self._conversations[name] = conversation
        return conversation

    def _ask(self, conversation: Conversation) -> None:
        """Send a conversation's next turn."""
        source = conversation.source
        question = source.choices(VOCABULARY, k=source.randint(*self.lengths.question))
        is_first = not conversation.reply
        if conversation.is_session and not is_first:
            # NOTE: a session forgets the last token of an answer, whose KV was not computed.
            conversation.tokens += conversation.reply[:-1] + question
            new_tokens = question
        else:
            conversation.tokens += conversation.reply + question
            new_tokens = conversation.tokens
        conversation.reply, conversation.logprobs, conversation.is_idle = [], [], False
        conversation.max_tokens = source.randint(*self.lengths.answer)
        conversation.num_turns -= 1
        if not is_first and not conversation.is_session:
            del self._conversations[conversation.name]
            conversation.name = f"{conversation.name}+"
            self._conversations[conversation.name] = conversation
        self.counts["turns"] += not is_first
        self._send(conversation, new_tokens)

    def _send(self, conversation: Conversation, tokens: list[int], is_end: bool = False) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=conversation.max_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name, priority = conversation.name, self._rng.randint(0, 2)
        if not conversation.is_session:
            self.engine.add_request(name, {"prompt_token_ids": list(tokens)}, params, priority=priority)
            return
        # NOTE: vLLM's `AsyncLLM` does this with streamed input; `LLMEngine` has no method for it.
        request = self.engine.input_processor.process_inputs(
            self._internal_ids.get(name, name),
            {"prompt_token_ids": list(tokens)},
            params,
            supported_tasks=self.engine.get_supported_tasks(),
            priority=priority,
            resumable=not is_end,
        )
        if name not in self._internal_ids:
            self.engine.input_processor.assign_request_id(request)
            self._internal_ids[name] = request.request_id
        request.external_req_id = name
        # NOTE: in one process, vLLM's output processor and its scheduler would append each turn to the same list.
        own = copy(request)
        own.prompt_token_ids = list(tokens)
        self.engine.output_processor.add_request(own, None, None, 0)
        self.engine.engine_core.add_request(request)

    def _finish(self, conversation: Conversation) -> None:
        """A turn has its answer."""
        self.counts["finished"] += 1
        self._tell(conversation)
        conversation.is_idle = True
        if conversation.num_turns == 0 or self._is_stopped:
            self._end(conversation)

    def _end(self, conversation: Conversation) -> None:
        """End a conversation that is idle."""
        if conversation.is_session:
            self._send(conversation, [0], is_end=True)
        self._forget(conversation)

    def _leave(self, conversation: Conversation) -> None:
        """A client disconnects in the middle of an answer, before it, or while it reads one."""
        if not conversation.is_idle:
            self.counts["aborted"] += 1
            self._tell(conversation)
        if conversation.is_session or not conversation.is_idle:
            self.engine.abort_request([conversation.name])
        self._forget(conversation)

    def _forget(self, conversation: Conversation) -> None:
        del self._conversations[conversation.name]
        self._internal_ids.pop(conversation.name, None)

    def _tell(self, conversation: Conversation) -> None:
        names = ("number", "is_session", "tokens", "reply", "logprobs", "max_tokens")
        self._report({name: getattr(conversation, name) for name in names})


class FullKVWatch:
    """Looks at an engine with full KV in this process between steps: memory and counters.

    Args:
        llm: vLLM's `LLM`.
    """

    def __init__(self, llm: Any):
        self._llm = llm

    def sample(self) -> dict[str, Any]:
        """Return the state of memory, and numbers of requests."""
        metrics = {each.name: each.value for each in self._llm.get_metrics() if hasattr(each, "value")}
        return {
            **memory(),
            "running": round(metrics["vllm:num_requests_running"]),
            "waiting": round(metrics["vllm:num_requests_waiting"]),
            "preempted": round(metrics["vllm:num_preemptions"]),
            "wrong_rows": 0,
        }

    def end(self) -> dict[str, Any]:
        """Return what is left in an engine without requests; everything should be 0."""
        block_pool = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        # NOTE: one block is never given to a request.
        return {"device_blocks_used": block_pool.num_gpu_blocks - 1 - block_pool.get_num_free_blocks()}


class Watch(FullKVWatch):
    """Looks at an engine with the plugin in this process between steps: also pools, rows and tiers.

    Args:
        llm: vLLM's `LLM`.
        offline: module `offline_engine` of the end-to-end tests.
        tier_dir: directory of the fs tier.
    """

    def __init__(self, llm: Any, offline: Any, tier_dir: Path):
        super().__init__(llm)
        self._offline, self._tier_dir = offline, tier_dir
        self.recorder = offline.make_recorder(llm)
        self.row_check = offline.RowCheck(self.recorder.halves[1], every=50, corrupt=False)

    def sample(self) -> dict[str, Any]:
        """Return the state of memory and pools.

        Raises:
            AssertionError: scheduler or worker half is inconsistent.
        """
        scheduler, worker = self.recorder.halves
        scheduler.tracker.check_integrity()
        worker.hot_buffer.check_integrity()
        return super().sample() | {
            "tier_files": sum(1 for _ in self._tier_dir.rglob("*.bin")),
            "tier_buffer_mib": self._tier_buffer_mib(),
            "host_blocks_used": scheduler.host_pool.num_used,
            "host_blocks_cached": scheduler.host_pool.num_cached,
            "tier_loaded_blocks": self.recorder.counters["tier_loaded_blocks"],
            "cached_prompt_tokens": self.recorder.counters["host_prefix_tokens"],
            "rows_lent": self.recorder.peaks.get("hot_rows_lent", 0),
            "rows_taken_back": self.recorder.counters["hot_rows_taken_back"],
            "checked_rows": self.row_check.num_rows,
            "wrong_rows": self.row_check.num_wrong,
        }

    def end(self) -> dict[str, Any]:
        """Return what is left in an engine without requests; everything should be 0.

        Raises:
            AssertionError: scheduler or worker half is inconsistent.
        """
        record = self._offline.record_engine(self._llm, self.recorder)
        left = {name: value for name, value in record["pools"].items() if name != "host_blocks_cached"}
        return left | {"worker_requests": record["worker_requests"], "drafts": self._drafts()}

    def _tier_buffer_mib(self) -> float:
        """Part of the transfer buffer that has been used: memory that grows until the whole buffer has been."""
        manager = self.recorder.halves[0].tiers.manager
        return round(manager.buffer._num_allocated_chunks * manager.copier.buffer.chunk_bytes / 2**20, 1)

    def _drafts(self) -> dict[str, int] | None:
        if self._llm.llm_engine.vllm_config.speculative_config is None:
            return None
        return self._offline.count_drafts(self._llm)


def serve(connection: Connection, job: dict[str, Any]) -> None:
    """Load an engine in this process and let clients talk to it; sends ("ready", None), ("answer", …) for every answer,
    ("sample", …) from time to time, with `trace_python` ("growth", …), and at last ("end", …). A message to it ends the
    soak before its time."""
    sys.path.insert(0, str(E2E))
    offline = importlib.import_module("offline_engine")
    if job["async_on_cpu"]:
        offline.schedule_asynchronously()
    if job["engine"].get("speculative_config"):
        importlib.import_module("forks").compile_drafting_once()
    from vllm import LLM

    llm = LLM(**job["engine"])
    has_plugin = "kv_transfer_config" in job["engine"]
    watch = Watch(llm, offline, Path(job["tier_dir"])) if has_plugin else FullKVWatch(llm)
    clients = Clients(
        llm.llm_engine,
        Lengths(**job["lengths"]),
        job["num_live"],
        job["max_sessions"],
        job["seed"],
        lambda answer: connection.send(("answer", answer)),
    )
    connection.send(("ready", None))
    growth = PythonGrowth() if job["trace_python"] else None
    start = next_sample = time.monotonic()
    latest, longest_pause, is_warm = start, 0.0, False

    def send_sample() -> None:
        sample = {"minute": round((time.monotonic() - start) / 60, 2), **watch.sample(), **clients.kept()}
        connection.send(("sample", sample | clients.counts | {"longest_pause_s": round(longest_pause, 1)}))

    while (now := time.monotonic()) < start + job["seconds"] and not connection.poll():
        if now >= next_sample:
            send_sample()
            next_sample += job["sample_s"]
        if growth is not None and not is_warm and now >= start + WARM_UP_SHARE * job["seconds"]:
            growth.begin()
            is_warm = True
        clients.act()
        if outputs := llm.llm_engine.step():
            longest_pause, latest = max(longest_pause, time.monotonic() - latest), time.monotonic()
        clients.receive(outputs)
    clients.stop()
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while llm.llm_engine.has_unfinished_requests():
        assert time.monotonic() < deadline, f"requests are left that never end: {watch.sample()}"
        clients.receive(llm.llm_engine.step())
        clients.stop()
    send_sample()
    if growth is not None:
        connection.send(("growth", growth.largest()))
        growth.close()
    connection.send(("end", watch.end()))
    llm.llm_engine.engine_core.shutdown()


def serve_full_kv(connection: Connection, engine: dict[str, Any]) -> None:
    """Answer (prompt, max_tokens, tokens of a chunk) with full KV, one after the other: tokens, logprobs, and for each
    step how much less likely the best tokens are than the best one, in logprobs. None ends it."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    connection.send(None)
    for prompt, max_tokens, chunk in iter(connection.recv, None):
        scheduler.max_num_scheduled_tokens = chunk
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=NUM_BEST, detokenize=False
        )
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        best = output.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(best.logprobs, best.token_ids, strict=True)]
        distances = [
            {token: largest - entry.logprob for token, entry in step.items()}
            for step, largest in zip(best.logprobs, logprobs, strict=True)
        ]
        connection.send({"tokens": list(best.token_ids), "logprobs": logprobs, "distances": distances})

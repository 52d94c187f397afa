"""`benchmarks.soak` without engines: what counts as wrong, as flat and as clean, and what its clients say."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import wait
from threading import Barrier, Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.soak import (
    Comparisons,
    Device,
    Judge,
    connector_options,
    is_clean,
    slope_per_hour,
    summary,
    verdict,
)
from benchmarks.soak_engine import Clients, Lengths
from benchmarks.soak_float32 import distances
from vllm_hisparse.config import HiSparseConfig

PROMPT = [5, 6, 7]


class FullKV:
    """Stands for the engine with full KV: each token is the number of tokens before it, a tie 100 or 200 more.

    Args:
        margin: distance of these from the best token.
        shift: number that is added to each token if the prompt is computed in chunks of less than 64 tokens.
    """

    def __init__(self, margin: float = 0.25, shift: int = 0):
        self.margin, self.shift, self.asked = margin, shift, []

    def send(self, question: tuple[list[int], int, int]) -> None:
        self.asked.append(question)

    def recv(self) -> dict[str, list]:
        prompt, count, chunk = self.asked[-1]
        shift = self.shift if chunk < 64 else 0
        tokens = [token + shift for token in range(len(prompt), len(prompt) + count)]
        distances = [{token: 0.0, token + 100: self.margin, token + 200: self.margin} for token in tokens]
        return {"tokens": tokens, "logprobs": [-1.0] * count, "distances": distances}


def answer(reply: list[int], max_tokens: int = 4) -> dict[str, Any]:
    names = {"number": 3, "is_session": False, "tokens": PROMPT, "max_tokens": max_tokens}
    return names | {"reply": reply, "logprobs": [-1.0] * len(reply)}


@pytest.mark.parametrize(("reply", "ties"), [([3, 4, 5, 6], 0), ([3, 4], 0), ([], 0), ([3, 104, 5, 206], 2)])
def test_full_kvs_tokens_are_right_up_to_ties(reply: list[int], ties: int) -> None:
    """Answers that were broken off are compared, too."""
    judge = Judge(FullKV(), 0.5, 64)
    judge.compare(answer(reply))
    assert (judge.num_wrong, judge.num_ties, judge.num_tokens) == (0, ties, len(reply))


@pytest.mark.parametrize(
    ("reply", "margin"),
    [
        ([3, 104, 5, 6], 0.75),  # among the best tokens, but not close
        ([3, 9, 5, 6], 0.25),  # another token
        ([3, 104, 9], 0.25),  # after a tie
        ([9], 0.25),
    ],
)
def test_other_tokens_are_wrong(reply: list[int], margin: float) -> None:
    judge = Judge(FullKV(margin), 0.5, 64)
    judge.compare(answer(reply))
    assert judge.num_wrong == len(judge.wrong) == 1
    assert judge.wrong[0]["got"] == reply[judge.wrong[0]["position"]] != judge.wrong[0]["expected"]


def test_full_kv_with_other_chunks_shows_a_tie() -> None:
    """However far its two best tokens are apart with its own chunks."""
    judge = Judge(FullKV(margin=3.0, shift=500), 0.5, 64)
    judge.compare(answer([3, 504, 5, 6]))
    assert (judge.num_wrong, judge.num_ties, judge.num_shown) == (0, 1, 1)
    judge.compare(answer([3, 505, 5, 6]))
    assert judge.num_wrong == 1


def test_full_kv_is_asked_once() -> None:
    full = FullKV()
    judge = Judge(full, 0.5, 64)
    for reply in ([3, 4, 5, 6], [3, 4]):
        judge.compare(answer(reply))
    assert full.asked == [(PROMPT, 4, 64)]


def finished(comparisons: Comparisons) -> None:
    deadline = time.monotonic() + 60
    while len(comparisons):
        assert time.monotonic() < deadline
        comparisons.collect(1.0)
    comparisons.close()


def test_judges_compare_side_by_side() -> None:
    """Each answer is compared once, and every judge's findings count."""
    judges = [Judge(FullKV(), 0.5, 64) for _ in range(3)]
    comparisons = Comparisons(judges)
    for _ in range(20):
        comparisons.add(answer([3, 104, 5, 6]))
        comparisons.add(answer([3, 9, 5, 6]))
    finished(comparisons)
    found = verdict(judges)
    assert (found["compared_answers"], found["compared_tokens"], found["ties"]) == (40, 160, 20)
    assert found["wrong_tokens"] == 20 and found["widest_tie"] == 0.25
    row = summary([{"minute": 0.0, "rss_mib": {"engine": 1.0}, "own_mib": {"engine": 1.0}}], judges, None)
    assert {wrong["got"] for wrong in row["wrong"]} == {9}


def test_as_many_answers_at_a_time_as_judges() -> None:
    meet = Barrier(3, timeout=60)

    class Together(FullKV):
        def recv(self) -> dict[str, list]:
            meet.wait()
            return super().recv()

    judges = [Judge(Together(), 0.5, 64) for _ in range(3)]
    comparisons = Comparisons(judges)
    for _ in range(3):
        comparisons.add(answer([3, 4, 5, 6]))
    finished(comparisons)
    assert [judge.num_answers for judge in judges] == [1, 1, 1]


class Ended(FullKV):
    """An engine that has ended."""

    def send(self, question: tuple[list[int], int, int]) -> None:
        raise BrokenPipeError


def test_the_end_of_a_judges_engine_is_told() -> None:
    """No answer counts that was not compared, and a healthy judge does not go on alone."""
    judges = [Judge(FullKV(), 0.5, 64), Judge(Ended(), 0.5, 64)]
    comparisons = Comparisons(judges)
    for _ in range(40):
        comparisons.add(answer([3, 4, 5, 6]))
    with pytest.raises((BrokenPipeError, EOFError)):
        finished(comparisons)
    comparisons.close()
    found = verdict(judges)
    assert judges[1].num_answers == 0 and found["compared_answers"] + len(comparisons) >= 40 > found["compared_answers"]
    assert found["compared_tokens"] == 4 * found["compared_answers"]


def test_no_answer_is_compared_after_a_failure() -> None:
    class FailsOnce(FullKV):
        def send(self, question: tuple[list[int], int, int]) -> None:
            super().send(question)
            if len(self.asked) == 1:
                raise BrokenPipeError

    judge = Judge(FailsOnce(), 0.5, 64)
    comparisons = Comparisons([judge])
    for _ in range(5):
        comparisons.add(answer([3, 4, 5, 6]))
    wait(comparisons._open, timeout=60)
    assert judge.num_answers == 0 and len(comparisons) == 5
    comparisons.close()


def test_answers_that_wait_are_dropped_at_the_end() -> None:
    """A judge that is busy ends its comparison."""
    begun, leave = Event(), Event()

    class Busy(FullKV):
        def recv(self) -> dict[str, list]:
            begun.set()
            assert leave.wait(60)
            return super().recv()

    judge = Judge(Busy(), 0.5, 64)
    comparisons = Comparisons([judge])
    for _ in range(3):
        comparisons.add(answer([3, 4, 5, 6]))
    comparisons.collect()
    assert len(comparisons) == 3
    begun.wait(60)
    closing = Thread(target=comparisons.close)
    closing.start()
    while not all(each.cancelled() or each.running() for each in comparisons._open):
        assert closing.is_alive()
    leave.set()
    closing.join(60)
    assert judge.num_answers == 1


def test_the_slope_is_that_of_the_time_after_warm_up() -> None:
    minutes = [float(minute) for minute in range(60)]
    growing = [1000 + 500 * min(minute, 20) + 0.5 * minute for minute in minutes]
    assert slope_per_hour(minutes, growing) == pytest.approx(30.0)
    assert slope_per_hour(minutes[:21], growing[:21]) is None


def teeth(minute: float) -> float:
    """MiB of a cache that fills in seven minutes and is then emptied."""
    return 100 * (minute % 7) / 7


def noise(minute: float) -> float:
    """MiB between 0 and 10."""
    return random.Random(str(minute)).uniform(0, 10)


@pytest.mark.parametrize(
    ("series", "total", "expected"),
    [
        (lambda minute: 0.0, 240, True),
        (noise, 240, True),
        (noise, 20, True),
        (teeth, 240, True),
        (lambda minute: 600 * min(minute / 60, 1), 240, True),  # warm-up
        (lambda minute: -40 * minute / 60, 240, True),
        (lambda minute: 25 * minute / 60, 240, False),
        (lambda minute: noise(minute) + 25 * minute / 60, 240, False),
        (lambda minute: teeth(minute) + 25 * minute / 60, 240, False),
        (lambda minute: 3 * minute, 20, False),
        (lambda minute: 600 * min(minute / 8, 1), 20, True),  # warm-up
        (lambda minute: 50 * minute, 8, None),  # nothing but warm-up
        (lambda minute: 0.0, 12, None),  # too few samples
    ],
)
def test_memory_that_grows_is_a_leak(series: Callable[[float], float], total: int, expected: bool | None) -> None:
    minutes = [minute / 2 for minute in range(2 * total)]
    samples = [
        {"minute": minute, "own_mib": {"engine": 900 + series(minute)}, "rss_mib": {"engine": 1000 - minute}}
        for minute in minutes
    ]
    assert summary(samples, [Judge(FullKV(), 0.5, 64)], None)["is_flat"] is expected


def make_row(slope: float, end: dict[str, Any] | None, wrong_rows: int = 0, wrong_tokens: int = 0) -> dict[str, Any]:
    judge = Judge(FullKV(), 0.5, 64)
    judge.num_wrong = wrong_tokens
    samples = [
        {"minute": minute, "rss_mib": {"engine": 1.0}, "own_mib": {"engine": 900 + slope * minute / 60}}
        for minute in range(90)
    ]
    return summary([sample | {"wrong_rows": wrong_rows} for sample in samples], [judge], end)


def test_a_clean_soak_is_flat_and_leaves_nothing() -> None:
    nothing = {"device_blocks_used": 0, "host_blocks_used": 0, "drafts": {"drafted": 7}}
    assert is_clean(make_row(2.0, nothing))
    assert make_row(2.0, nothing)["own_mib_per_hour"] == pytest.approx(2.0)
    assert not is_clean(make_row(40.0, nothing))
    assert not is_clean(make_row(2.0, None))
    assert not is_clean(make_row(2.0, nothing | {"host_blocks_used": 1}))
    assert not is_clean(make_row(2.0, nothing, wrong_rows=1))
    assert not is_clean(make_row(2.0, nothing, wrong_tokens=1))


@pytest.mark.parametrize("device", Device)
def test_blocks_are_read_from_the_tier_because_the_transfer_buffer_is_smaller(device: Device) -> None:
    options = HiSparseConfig.model_validate(connector_options(device, 0.16, "/tier", 0.2, drafts=0))
    assert options.tier_buffer_bytes(0.16 * 2**30) < 0.2 * 2**30


SHOWN = -1  # a token that only the output processor of `Engine` knows


class Engine:
    """Stands for vLLM's `LLMEngine`: keeps what it gets.

    Attributes:
        prompts: request id and prompt of each request and of each turn of a session, in order.
        aborted: ids of aborted requests.
        ended: ids of sessions that were ended.
    """

    def __init__(self):
        self.prompts: list[tuple[str, list[int]]] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []
        self.input_processor = SimpleNamespace(process_inputs=self._process, assign_request_id=self._assign)
        self.output_processor = SimpleNamespace(add_request=self._show)
        self.engine_core = SimpleNamespace(add_request=self._add)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any, priority: int) -> None:
        self.prompts.append((name, prompt["prompt_token_ids"]))

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def reset_prefix_cache(self, **_: bool) -> None:
        raise RuntimeError("a session waits")

    def _process(self, name: str, prompt: dict[str, list[int]], params: Any, resumable: bool, **_: Any) -> Any:
        return SimpleNamespace(request_id=name, prompt_token_ids=prompt["prompt_token_ids"], resumable=resumable)

    def _assign(self, request: Any) -> None:
        request.request_id = f"{request.request_id}-internal"

    def _show(self, request: Any, *_: Any) -> None:
        request.prompt_token_ids.append(SHOWN)  # vLLM's output processor appends later turns to this list

    def _add(self, request: Any) -> None:
        if request.resumable:
            self.prompts.append((request.external_req_id, request.prompt_token_ids))
        else:
            self.ended.append(request.external_req_id)


def make_output(name: str, reply: list[int], finish_reason: str | None) -> Any:
    """A part of a request's answer."""
    logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in reply]
    best = SimpleNamespace(token_ids=reply, logprobs=logprobs, finish_reason=finish_reason)
    return SimpleNamespace(request_id=name, outputs=[best])


def finish(clients: Clients, name: str, reply: list[int]) -> None:
    """The engine answers a request."""
    clients.receive([make_output(name, reply, "length")])


@pytest.fixture
def engine() -> Engine:
    return Engine()


def make_clients(engine: Engine, answers: list[dict], max_sessions: int, seed: int = 0) -> Clients:
    return Clients(engine, Lengths((20, 40), (3, 9), (2, 5)), 6, max_sessions, seed, answers.append)


def test_clients_keep_the_engine_full_and_go_on_from_its_answers(engine: Engine) -> None:
    answers: list[dict] = []
    clients = make_clients(engine, answers, max_sessions=3)
    sent: dict[str, list[int]] = {}
    for step in range(400):
        clients.act()
        new, engine.prompts = engine.prompts, []
        assert all(SHOWN not in tokens for _, tokens in new)
        sent |= dict(new)
        live = [name for name in sent if name not in engine.aborted]
        name = live[step % len(live)]
        finish(clients, name, [1000 + step, 2000 + step])
        del sent[name]
    kinds = {(each["is_session"], len(each["tokens"]) > 55) for each in answers}
    assert {(False, True), (True, True), (False, False)} <= kinds
    assert clients.counts["aborted"] > 0 and clients.counts["turns"] > 50
    for each in answers:  # a session has forgotten the last token of an answer, a new request has all of them
        later = [token for token in each["tokens"] if token >= 1000]
        assert all(token < 2000 for token in later) if each["is_session"] else len(later) % 2 == 0


def test_clients_tell_what_they_keep(engine: Engine) -> None:
    clients = make_clients(engine, [], max_sessions=0)
    assert clients.kept() == {"kept_conversations": 0, "kept_tokens": 0}
    clients.act()
    prompts = dict(engine.prompts)
    assert clients.kept() == {"kept_conversations": 6, "kept_tokens": sum(map(len, prompts.values()))}
    conversation = next(iter(prompts))
    clients.receive([make_output(conversation, [1, 2], None)])
    assert clients.kept()["kept_tokens"] == sum(map(len, prompts.values())) + 2 * 2


def test_clients_that_stop_end_their_sessions(engine: Engine) -> None:
    clients = make_clients(engine, [], max_sessions=6)
    while clients.counts["sessions"] < 2:
        clients.act()
        new, engine.prompts = engine.prompts, []
        for name, _ in new:
            finish(clients, name, [1, 2])
    clients.stop()
    for name, _ in engine.prompts:
        finish(clients, name, [1, 2])
    assert len(set(engine.ended)) == len(engine.ended) >= 1
    engine.prompts, num_ended = [], len(engine.ended)
    clients.act()
    clients.stop()
    assert not engine.prompts and len(engine.ended) == num_ended


def test_float32_tells_how_much_less_likely_tokens_are() -> None:
    logprobs = {7: SimpleNamespace(logprob=-1.5), 3: SimpleNamespace(logprob=-1.25), 9: SimpleNamespace(logprob=-3.0)}
    assert distances(logprobs) == {7: 0.25, 3: 0.0, 9: 1.75}

"""Features of a request give full KV's answers: each on a DSA model whose rows are swapped in.

Prompts are longer than the hot buffers, so that every decode step copies rows.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from conftest import MODELS, assert_same_but_rounding, make_prompt
from feature_servers import MAX_MODEL_LEN, MAX_NUM_SEQS, Pair, num_cached
from kv_events import CachedPrefixes
from safetensors import safe_open
from servers import REQUEST_TIMEOUT_S, Server, completion, tokens_of, wait_for, wait_started
from test_pd import BLOCK, assert_same

from tools.harness.deployment import MODEL_NAME
from tools.harness.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

MODEL = "dsv32"
NUM_HOST_BLOCKS = 33  # two requests of the longest kind
HOST_BLOCK_BYTES = BLOCK * 4 * (576 * 4 + 132)  # 4 layers, fp32 rows and indexer keys
OPTIONS = {"host_pool_gib": NUM_HOST_BLOCKS * HOST_BLOCK_BYTES / 2**30, "device_buffer_size": 320}
NUM_TOKENS = 450  # of most prompts: more than are hot, in one chunk
WHOLE_BLOCKS = NUM_TOKENS // BLOCK * BLOCK
LONG = 60  # generated tokens of a request that something happens to
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def event_ports() -> list[int]:
    """Two ports: one publishes KV cache events, the other repeats them to those who ask."""
    return free_ports(2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, event_ports: list[int]) -> Iterator[Pair]:
    args = ["--enable-prompt-embeds", "--scheduling-policy", "priority", "--enable-scale-out"]  # the latter for routers
    # NOTE: without `*`, vLLM's publisher would connect to the port.
    endpoint, replay_endpoint = (f"tcp://*:{port}" for port in event_ports)
    events = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
    with ProcessGroup() as group:
        hot_args = ["--kv-events-config", json.dumps(events)]
        yield Pair(group, tmp_path_factory.mktemp("logs"), MODEL, OPTIONS, args, hot_args)


@pytest.fixture(autouse=True)
def leaves_nothing(pair: Pair) -> Iterator[None]:
    yield
    pair.hot.wait_empty()


def assert_close(ours: list[float | None], full: list[float | None]) -> None:
    assert len(ours) == len(full)
    for one, other in zip(ours, full, strict=True):
        assert one == other or abs(one - other) <= TOLERANCE


def test_logprobs_of_the_best_tokens(pair: Pair):
    prompt = make_prompt(NUM_TOKENS, seed=20)
    hot, full = pair.ask(lambda server: server.complete(prompt, 12, logprobs=5)["choices"][0]["logprobs"])
    assert hot["tokens"] == full["tokens"]
    for ours, theirs in zip(hot["top_logprobs"], full["top_logprobs"], strict=True):
        assert len(ours) >= 5 and ours.keys() == theirs.keys()
        assert_close(list(ours.values()), [theirs[token] for token in ours])


def test_prompt_logprobs(pair: Pair):
    """Logprobs are computed for the whole prompt, although its prefix is cached."""
    prompt = make_prompt(NUM_TOKENS, seed=21)
    pair.hot.complete(prompt)
    hot, full = pair.ask(lambda server: server.complete(prompt, prompt_logprobs=2))
    assert_same(hot, full)
    assert num_cached(hot) == 0
    ours, theirs = (reply["choices"][0]["prompt_logprobs"] for reply in (hot, full))
    assert len(ours) == len(theirs) == NUM_TOKENS and ours[0] is theirs[0] is None
    for token, one, other in zip(prompt[1:], ours[1:], theirs[1:], strict=True):
        assert_close([one[str(token)]["logprob"]], [other[str(token)]["logprob"]])


def test_echo(pair: Pair):
    prompt = make_prompt(NUM_TOKENS, seed=22)
    hot, full = pair.ask(lambda server: server.complete(prompt, 6, echo=True, logprobs=1)["choices"][0])
    assert hot["text"] == full["text"]
    assert hot["logprobs"]["tokens"] == full["logprobs"]["tokens"] and len(hot["logprobs"]["tokens"]) == NUM_TOKENS + 6
    assert_close(hot["logprobs"]["token_logprobs"], full["logprobs"]["token_logprobs"])


def test_n_samples_share_a_prompt(pair: Pair):
    """Each from the best token alone, at a temperature: all are full KV's greedy text."""
    prompt = make_prompt(NUM_TOKENS, seed=23)
    reply = pair.hot.complete(prompt, 12, n=3, temperature=1.0, top_k=1)
    full = completion(pair.full.complete(prompt, 12))
    assert len(reply["choices"]) == 3
    ours = [completion({"choices": [choice]}) for choice in reply["choices"]]
    assert_same_but_rounding([{**one, "logprobs": full["logprobs"]} for one in ours], [full] * 3)


@pytest.mark.slow
def test_seeded_samples(pair: Pair):
    """NOTE: one at a time: stock vLLM's CPU engine ends if a seeded request's prompt takes more than one step."""
    prompt = make_prompt(NUM_TOKENS, seed=24)

    def sample(server: Server) -> list[list[int]]:
        return [tokens_of(server.complete(prompt, 10, temperature=0.7, seed=seed))[0] for seed in (1, 2, 3)]

    hot, full = pair.ask(sample)
    assert hot == full
    assert len(set(map(tuple, hot))) > 1, "the samples are to differ"


@pytest.mark.slow
def test_beam_search(pair: Pair):
    """Every step is a request of its own for each beam, whose prefix the cache has."""
    prompt = make_prompt(NUM_TOKENS, seed=25)
    found = pair.hot.metric("prefix_cache_hits")
    hot, full = pair.ask(lambda server: beams(server.complete(prompt, 6, use_beam_search=True, n=3)))
    assert len(hot) == 3 and hot == full
    assert pair.hot.metric("prefix_cache_hits") > found


def beams(reply: dict) -> list[str]:
    return [choice["text"] for choice in reply["choices"]]


def test_min_tokens(pair: Pair):
    """The first token of the reply would end it, and may not before six."""
    prompt = make_prompt(NUM_TOKENS, seed=26)
    first = tokens_of(pair.full.complete(prompt, 1))[0]
    ends: dict[str, Any] = {"stop_token_ids": first, "ignore_eos": False}
    assert len(tokens_of(pair.hot.complete(prompt, 12, **ends))[0]) == 1
    hot, full = pair.ask(lambda server: server.complete(make_prompt(NUM_TOKENS, seed=26), 12, min_tokens=6, **ends))
    assert_same_but_rounding([completion(hot)], [completion(full)])
    assert len(tokens_of(hot)[0]) >= 6


def test_stop_strings(pair: Pair):
    prompt = make_prompt(NUM_TOKENS, seed=27)
    text = pair.full.complete(prompt, 16)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    hot, full = pair.ask(lambda server: server.complete(prompt, 16, stop=[stop])["choices"][0])
    assert hot["finish_reason"] == full["finish_reason"] == "stop"
    assert hot["stop_reason"] == stop and hot["text"] == full["text"] == text[: text.index(stop)]


def test_max_tokens_of_one(pair: Pair):
    """A prompt that never decodes; its blocks are cached, and the next request goes on from them."""
    prompt = make_prompt(NUM_TOKENS, seed=28)
    hot, full = pair.ask(lambda server: server.complete(prompt, 1))
    assert_same(hot, full)
    hot, full = pair.ask(lambda server: server.complete(prompt, 8))
    assert num_cached(hot) == WHOLE_BLOCKS
    assert_same_but_rounding([completion(hot)], [completion(full)])


@pytest.mark.parametrize("num_left", [1, pytest.param(65, marks=pytest.mark.slow)])
def test_max_model_len_is_used_to_the_last_token(pair: Pair, num_left: int):
    """A request that asks for more tokens than are left ends with the last one that is."""
    prompt = make_prompt(MAX_MODEL_LEN - num_left, seed=29)
    hot, full = pair.ask(lambda server: server.complete(prompt, num_left + 1))
    assert_same_but_rounding([completion(hot)], [completion(full)])
    assert len(tokens_of(hot)[0]) == num_left
    assert hot["choices"][0]["finish_reason"] == "length"
    assert pair.hot.complete(make_prompt(MAX_MODEL_LEN, seed=29))["error"]["code"] == 400


def test_cache_salt_keeps_prefixes_apart(pair: Pair):
    """A prompt is found again with its own salt alone: on the device, in the host pool and in the tier."""
    prompt, salts = make_prompt(NUM_TOKENS, seed=30), [{}, {"cache_salt": "one"}, {"cache_salt": "other"}]
    full = completion(pair.full.complete(prompt))
    for salt in salts[:2]:
        for is_known in (False, True):
            reply = pair.hot.complete(prompt, **salt)
            assert_same_but_rounding([completion(reply)], [full])
            assert num_cached(reply) == (WHOLE_BLOCKS if is_known else 0)
    pair.hot.forget()
    loaded = pair.hot.metric("hisparse_tier_loaded_blocks")
    assert num_cached(pair.hot.complete(prompt, **salts[2])) == 0
    assert pair.hot.metric("hisparse_tier_loaded_blocks") == loaded
    reply = pair.hot.complete(prompt, **salts[1])
    assert_same_but_rounding([completion(reply)], [full])
    assert num_cached(reply) == WHOLE_BLOCKS
    wait_for(lambda: pair.hot.metric("hisparse_tier_loaded_blocks") == loaded + WHOLE_BLOCKS // BLOCK)


def embeddings(prompt: list[int]) -> str:
    """The prompt's token embeddings as the API takes them."""
    (path,) = (MODELS / MODEL).glob("*.safetensors")
    with safe_open(path, "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight").float()
    with io.BytesIO() as buffer:
        torch.save(table[torch.tensor(prompt)].clone(), buffer)
        return base64.b64encode(buffer.getvalue()).decode()


def test_a_router_that_follows_events_knows_what_is_cached(pair: Pair, event_ports: list[int]):
    """A prompt's prefix after it was computed, after a reset, and after it came back from the tier."""
    prompt, other = make_prompt(NUM_TOKENS, seed=43), make_prompt(BLOCK, seed=44)

    def is_known(num_tokens: int) -> bool:
        return CachedPrefixes.replay(event_ports[1]).num_tokens(prompt, BLOCK) == num_tokens

    pair.hot.complete(prompt)
    wait_for(lambda: is_known(WHOLE_BLOCKS))
    assert num_cached(pair.hot.complete(prompt)) == WHOLE_BLOCKS
    pair.hot.forget()
    pair.hot.complete(other)  # events are published with a step
    wait_for(lambda: is_known(0))
    assert num_cached(pair.hot.complete(prompt)) == WHOLE_BLOCKS
    wait_for(lambda: is_known(WHOLE_BLOCKS))


@pytest.mark.slow
def test_vllm_router_sends_prompts_to_the_instance_that_has_them(
    pair: Pair, event_ports: list[int], tmp_path: Path
) -> None:
    """The router counts each prompt whose prefix it knows from events; the other instance has no prefix cache."""
    port, prometheus_port = free_ports(2)
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", LOOPBACK, "--port", str(port)]
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(prometheus_port), "--policy", "kv_aware"]
    command += ["--worker-urls", pair.full.url, pair.hot.url, "--worker-startup-check-interval", "1"]
    for option, event_port in zip(("--kv-event-source", "--kv-event-replay-source"), event_ports, strict=True):
        command += [option, f"{pair.hot.url}=tcp://{LOOPBACK}:{event_port}"]
    command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", MODEL_NAME]
    url = f"http://{LOOPBACK}:{port}"

    def ask(url: str, number: int) -> int:
        text = " ".join(f"word {number} {index}" for index in range(60))
        body = {"model": MODEL_NAME, "prompt": text, "max_tokens": 2}
        reply = requests.post(f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
        assert reply.ok, reply.text
        return num_cached(reply.json())

    def num_known() -> int:
        text = requests.get(f"http://{LOOPBACK}:{prometheus_port}/metrics", timeout=REQUEST_TIMEOUT_S).text
        found = re.findall(r'^vllm_router_kv_placement_lookups_total\{result="hit"\} (\d+)$', text, re.MULTILINE)
        return sum(map(int, found))

    numbers = itertools.count()

    def follows() -> bool:
        """A subscriber misses what is published before it has subscribed, so each attempt has another prompt."""
        number = next(numbers)
        ask(pair.hot.url, number)
        ask(url, number)
        return num_known() > 0

    with ProcessGroup() as group:
        group.start(EngineProcess("router", command, tmp_path / "router.log", health_url=f"{url}/readiness"))
        wait_started(group)
        wait_for(follows)
        before, new = num_known(), [next(numbers) for _ in range(3)]
        assert [ask(pair.hot.url, number) for number in new] == [0] * len(new)
        wait_for(lambda: ask(url, new[-1]) >= BLOCK)
        assert all(ask(url, number) >= BLOCK for number in new)
        assert num_known() >= before + len(new) + 1


@pytest.mark.slow
def test_prompt_embeds_are_found_again_by_their_values(pair: Pair):
    """Two prompts of one length: in the caches and in the tier, each finds its own KV and none finds the other's."""
    prompts = [make_prompt(NUM_TOKENS, seed=seed) for seed in (31, 32)]
    bodies = [{"prompt_embeds": embeddings(prompt)} for prompt in prompts]
    full = [completion(pair.full.complete(None, **body)) for body in bodies]
    tokens = [completion(pair.full.complete(prompt)) for prompt in prompts]
    assert_same_but_rounding(full, tokens)
    assert full[0]["tokens"] != full[1]["tokens"]
    cached = []
    for forgets in (False, False, True):
        if forgets:
            pair.hot.forget()
        replies = [pair.hot.complete(None, **body) for body in bodies]
        assert_same_but_rounding(list(map(completion, replies)), full)
        cached.append(list(map(num_cached, replies)))
    assert cached == [[0, 0], [WHOLE_BLOCKS] * 2, [WHOLE_BLOCKS] * 2]


@pytest.mark.slow
def test_priority_decides_who_waits(pair: Pair):
    """All seats are taken, and one becomes free: of two that wait, the later and more urgent one gets it."""
    first, *others, urgent, later = (make_prompt(330 + index, seed=33) for index in range(MAX_NUM_SEQS + 2))
    max_tokens, hot = 8, pair.hot  # few, because full KV's next tokens are near ties
    ended: list[int] = []

    def complete(prompt: list[int], priority: int) -> dict:
        reply = hot.complete(prompt, max_tokens, priority=priority)
        ended.append(priority)
        return reply

    full = [completion(pair.full.complete(prompt, max_tokens)) for prompt in (urgent, later)]
    with hot.running(others, 2 * LONG), hot.running([first], LONG) as streams, ThreadPoolExecutor() as executor:
        calls = [executor.submit(complete, later, 2)]
        wait_for(lambda: hot.metric("num_requests_waiting") == 1)
        calls.insert(0, executor.submit(complete, urgent, 1))
        wait_for(lambda: hot.metric("num_requests_waiting") == 2)
        assert not streams[0].done(), "all seats were to be taken"
        assert_same_but_rounding([completion(call.result()) for call in calls], full)
    assert ended == [1, 2]


@pytest.mark.slow
def test_priority_decides_who_is_preempted(pair: Pair):
    """The host pool becomes full: the request that came first makes room until a more urgent one has ended."""
    hot, max_tokens = pair.hot, 100
    # 10 blocks, and 11 each, which are 12 after 15 tokens: more than the host pool has.
    first, *urgent = make_prompt(630, seed=34), make_prompt(690, seed=34), make_prompt(690, seed=35)
    full = [completion(pair.full.complete(prompt, max_tokens)) for prompt in (first, *urgent)]
    preempted, delivered = hot.metric("num_preemptions"), []
    with ThreadPoolExecutor() as executor:
        stream = executor.submit(hot.stream, first, max_tokens, lambda: delivered.append(None))
        wait_for(lambda: delivered)
        calls = [executor.submit(hot.complete, prompt, max_tokens, priority=-1) for prompt in urgent]
        wait_for(lambda: hot.metric("num_preemptions") > preempted)
        before = len(delivered)
        wait([stream, *calls], return_when=FIRST_COMPLETED)
        assert len(delivered) - before < max_tokens // 5, "it ran on"
        assert_same_but_rounding([completion(call.result()) for call in calls], full[1:])
    assert_texts([stream], full[:1], max_tokens)


def in_flight(pair: Pair, seed: int) -> tuple[list[list[int]], list[dict]]:
    """Two prompts that generate for a while, and full KV's completions."""
    prompts = [make_prompt(NUM_TOKENS + 10 * index, seed=seed) for index in range(2)]
    return prompts, [completion(pair.full.complete(prompt, LONG)) for prompt in prompts]


def assert_texts(streams: list[Future], full: list[dict], max_tokens: int = LONG) -> None:
    """The streams delivered full KV's tokens, up to ties."""
    for stream, expected in zip(streams, full, strict=True):
        tokens, error = stream.result()
        assert not error and len(tokens) == max_tokens
        assert_same_but_rounding([{**expected, "tokens": tokens}], [expected])


def num_recomputed(pair: Pair) -> float:
    """Tokens that preempted requests had to compute again, or got from the tier."""
    loaded = pair.hot.metric("hisparse_tier_loaded_blocks") * BLOCK
    return pair.hot.metric("hisparse_recomputed_tokens") + loaded


@pytest.mark.slow
def test_pause_and_keep(pair: Pair):
    """Requests in flight stop and go on where they were; what arrives meanwhile waits."""
    prompts, full = in_flight(pair, seed=35)
    late = make_prompt(NUM_TOKENS, seed=36)
    with ThreadPoolExecutor() as executor, pair.hot.running(prompts, LONG) as streams:
        with pair.hot.stopped("pause", "resume", mode="keep"):
            assert pair.hot.get("is_paused") == {"is_paused": True}
            arrived = executor.submit(pair.hot.complete, late)
            expected = completion(pair.full.complete(late))  # takes as long as its answer would
            assert not any(future.done() for future in (*streams, arrived))
        assert_same_but_rounding([completion(arrived.result())], [expected])
    assert_texts(streams, full)


@pytest.mark.slow
def test_pause_and_wait(pair: Pair):
    """Requests in flight end first, then the caches are emptied."""
    prompts, full = in_flight(pair, seed=37)
    with pair.hot.running(prompts, LONG) as streams, pair.hot.stopped("pause", "resume", mode="wait"):
        assert pair.hot.metric("num_requests_running") == 0
    assert_texts(streams, full)
    assert_found_in_the_tier_alone(pair, prompts[0], full[0])


@pytest.mark.slow
def test_pause_and_abort(pair: Pair):
    """Requests in flight end at once with what they have, and the caches are emptied."""
    prompts, full = in_flight(pair, seed=38)
    with pair.hot.running(prompts, LONG) as streams, pair.hot.stopped("pause", "resume", mode="abort"):
        assert pair.hot.get("is_paused") == {"is_paused": True}
    for stream, expected in zip(streams, full, strict=True):
        tokens, error = stream.result()
        assert not error and 0 < len(tokens) < LONG
        assert tokens == expected["tokens"][: len(tokens)]
    assert_found_in_the_tier_alone(pair, prompts[0], full[0])


def assert_found_in_the_tier_alone(pair: Pair, prompt: list[int], full: dict) -> None:
    """The caches of device and host are empty: the prompt's blocks come back from the tier."""
    loaded = pair.hot.metric("hisparse_tier_loaded_blocks")
    assert_same_but_rounding([completion(pair.hot.complete(prompt, LONG))], [full])
    assert pair.hot.metric("hisparse_tier_loaded_blocks") == loaded + len(prompt) // BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_and_wake_up(pair: Pair, level: int):
    """A CPU gives no memory back, but vLLM does the rest: requests in flight are kept, and from level 1 on the caches
    are emptied: the requests are computed again."""
    prompts, full = in_flight(pair, seed=39 + level)
    before = num_recomputed(pair)
    with pair.hot.running(prompts, LONG) as streams:
        with pair.hot.stopped("sleep", "wake_up", level=level, mode="keep"):
            assert pair.hot.get("is_sleeping") == {"is_sleeping": True}
            pair.full.complete(prompts[0])  # takes as long as a few of their tokens would
            assert not any(stream.done() for stream in streams)
        assert pair.hot.get("is_sleeping") == {"is_sleeping": False}
    assert_texts(streams, full)
    assert num_recomputed(pair) - before >= (len(prompts) * NUM_TOKENS if level else 0)


@pytest.mark.slow
def test_reset_prefix_cache_in_flight(pair: Pair):
    """Running requests hold on to their blocks, and vLLM says that it did not reset; or it has them computed again."""
    prompts, full = in_flight(pair, seed=42)
    before, recomputed = pair.hot.metric("num_preemptions"), num_recomputed(pair)
    with pair.hot.running(prompts, LONG) as streams:
        assert not pair.hot.post("reset_prefix_cache", reset_external=True)["success"]
        assert pair.hot.metric("num_preemptions") == before
        assert pair.hot.post("reset_prefix_cache", reset_running_requests=True, reset_external=True)["success"]
    assert_texts(streams, full)
    assert pair.hot.metric("num_preemptions") == before + len(prompts)
    assert num_recomputed(pair) - recomputed >= len(prompts) * NUM_TOKENS, "they found what was to be forgotten"

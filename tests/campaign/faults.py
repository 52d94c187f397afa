"""Faults of real engines: what is lost, and whether later answers are still full KV's."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .cluster import Cluster, differs, make_prompt

PROMPT_TOKENS, NUM_TOKENS = 4000, 12  # of a request whose transfer is disturbed
LOAD_PROMPTS = 40  # many more tokens than the host pool holds
REMOTE_CLIENTS, LOCAL_CLIENTS = 4, 12  # local ones alone overfill it: the prefill engine cannot keep up with both
MAX_DISCONNECT_CHUNKS = 6

Advance = Callable[[], None]


@dataclass
class Fault:
    """A row of the result.

    Attributes:
        times: kills, answered requests or disconnects.
        lost_blocks: blocks of a surviving engine that did not come back.
        wrong_tokens: answers whose tokens are not full KV's.
        unanswered: requests that ended without an answer although both engines lived; None, as below: not looked at.
        seconds: time for which the host pool was watched, after it was full.
        full_share: share of these seconds in which it had no empty block and requests were waiting.
        refusing_share: share in which it had just refused one. The others wait behind the prompt that is computed.
        least_used_blocks, num_blocks: fewest used blocks in these seconds, and blocks of the host pool.
        preemptions: requests that lost their blocks.
    """

    fault: str
    times: int = 0
    lost_blocks: int = 0
    wrong_tokens: int = 0
    unanswered: int | None = None
    seconds: int | None = None
    full_share: float | None = None
    refusing_share: float | None = None
    least_used_blocks: int | None = None
    num_blocks: int | None = None
    preemptions: int | None = None


def killed(victim: str, cluster: Cluster, num_points: int, advance: Advance) -> Fault:
    """Kill an engine at points that are spread over a transfer and the first tokens after it."""
    fault = Fault(f"{victim} killed during a transfer")
    survivor = {"prefill": "decode", "decode": "prefill"}[victim]
    seconds = _transfer_seconds(cluster)
    for index in range(num_points):
        prompt = make_prompt(PROMPT_TOKENS, seed=index)
        reply = _kill_during(cluster, victim, prompt, 1.2 * seconds * index / max(num_points - 1, 1))
        fault.lost_blocks += cluster.lost_blocks(survivor)
        cluster.restart(victim)
        full = cluster.full_kv(prompt, NUM_TOKENS)
        later = cluster.ask(prompt, NUM_TOKENS, cluster.transfer(prompt))
        fault.wrong_tokens += (reply is not None and differs(reply, full)) + (later is None or differs(later, full))
        fault.times += 1
        advance()
    return fault


def _kill_during(cluster: Cluster, victim: str, prompt: list[int], delay_s: float) -> dict[str, Any] | None:
    """The answer to a request whose transfer is disturbed, or None."""
    transfer = cluster.transfer(prompt)
    with ThreadPoolExecutor(1) as executor:
        reply = executor.submit(cluster.ask, prompt, NUM_TOKENS, transfer)
        time.sleep(delay_s)
        cluster.kill(victim)
        return reply.result()


def _transfer_seconds(cluster: Cluster) -> float:
    """Return the seconds from the second request, when both engines know each other, to its first token."""
    for seed in (-1, -2):
        prompt = make_prompt(PROMPT_TOKENS, seed)
        transfer = cluster.transfer(prompt)
        started = time.monotonic()
        cluster.ask(prompt, 1, transfer)
        seconds = time.monotonic() - started
    return seconds


def host_pool_full(cluster: Cluster, seconds: float, advance: Advance) -> Fault:
    """More requests than the host pool holds, for that long after it is full; `advance` is called every second."""
    end, samples, preemptions = threading.Event(), [], cluster.num_preemptions()
    num_clients = REMOTE_CLIENTS + LOCAL_CLIENTS
    with ThreadPoolExecutor(num_clients) as executor:
        clients = [executor.submit(_load, cluster, seed, seed < REMOTE_CLIENTS, end) for seed in range(num_clients)]
        try:
            _wait_full(cluster, clients)
            deadline = time.monotonic() + seconds
            while not samples or time.monotonic() < deadline:
                samples.append(cluster.host_pool())
                advance()
                time.sleep(1)
        finally:
            end.set()
        replies = [reply for client in clients for reply in client.result()]
    fault = Fault("host pool full", len(replies), seconds=round(seconds))
    fault.preemptions = cluster.num_preemptions() - preemptions
    fault.full_share = _share(sample.num_empty == 0 and sample.num_queued > 0 for sample in samples)
    fault.refusing_share = _share(sample.num_refused > 0 for sample in samples)
    fault.least_used_blocks = min(sample.num_used for sample in samples)
    fault.num_blocks = samples[0].num_blocks
    fault.lost_blocks = cluster.lost_blocks("decode") + cluster.lost_blocks("prefill")
    # NOTE: not during the load: full KV comes from the prefill engine, which takes one request at a time.
    full = {index: cluster.full_kv(*_load_request(index)) for index in {index for index, _ in replies}}
    fault.unanswered = sum(reply is None for _, reply in replies)
    fault.wrong_tokens = sum(reply is not None and differs(reply, full[index]) for index, reply in replies)
    return fault


def _share(values: Iterable[bool]) -> float:
    values = list(values)
    return round(sum(values) / len(values), 3)


def _wait_full(cluster: Cluster, clients: list[Future]) -> None:
    """Wait until the host pool cannot take some request; a client that ends meanwhile has failed."""
    while not cluster.host_pool().num_refused:
        for client in clients:
            if client.done():
                client.result()
        time.sleep(0.2)


def _load(
    cluster: Cluster, seed: int, is_remote: bool, end: threading.Event
) -> list[tuple[int, dict[str, Any] | None]]:
    """One client, whose prompts come by transfer or not: index of the request and reply, until the end."""
    rng, replies = random.Random(seed), []
    while not end.is_set():
        index = rng.randrange(LOAD_PROMPTS)
        prompt, num_tokens = _load_request(index)
        transfer = cluster.transfer(prompt) if is_remote else None
        replies.append((index, cluster.ask(prompt, num_tokens, transfer)))
    return replies


def _load_request(index: int) -> tuple[list[int], int]:
    """Prompt and number of tokens to generate; long enough for blocks to be added while it decodes."""
    return make_prompt(1200 + 37 * index, seed=7), 100


def clients_disconnect(cluster: Cluster, times: int, advance: Advance) -> Fault:
    """Clients that leave at once, during the transfer, or in the middle of the stream."""
    fault, rng = Fault("clients disconnect"), random.Random(0)
    for index in range(times):
        prompt = make_prompt(1500 + index, seed=8)
        transfer = cluster.transfer(prompt) if rng.random() < 0.7 else None
        cluster.leave(prompt, transfer, rng.randrange(MAX_DISCONNECT_CHUNKS))
        fault.times += 1
        advance()
    fault.lost_blocks = cluster.lost_blocks("decode") + cluster.lost_blocks("prefill")
    for index in (0, times - 1):
        prompt = make_prompt(1500 + index, seed=8)
        reply = cluster.ask(prompt, NUM_TOKENS, cluster.transfer(prompt))
        fault.wrong_tokens += reply is None or differs(reply, cluster.full_kv(prompt, NUM_TOKENS))
    return fault

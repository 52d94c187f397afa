"""Prefill and decode apart: stock vLLM with NIXL on one side, the host pool on the other, real servers in between."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import requests
from conftest import MODELS, assert_same_but_rounding, make_prompt
from forks import forked
from servers import DO_PREFILL, START_TIMEOUT_S, Server, completion, is_error, tokens_of, wait_for, wait_started

from tools.harness.deployment import MODEL_NAME, PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 4096
MODEL = "glm52"  # layers share indexers; tests/e2e/test_cluster.py has one per layer
BLOCK, ROW_BYTES = 64, 4 * 576 * 4  # of all layers
NUM_HOST_BLOCKS = 66  # of the decode server: few enough for four requests to outgrow them
NUM_DEVICE_BLOCKS = 1000  # of a decode server: enough for a prompt of 1,500 tokens as a whole, or for several at least
MAX_NUM_SEQS = {"prefill": "4", "decode": "8", "recompute": "1"}
OPTIONS = {"host_pool_gib": 0.25, "device_buffer_size": 320, "log_request_stats": True}
BUFFERED = {**OPTIONS, "import_buffer_gib": 6 * BLOCK * ROW_BYTES / 2**30}  # two parts of three blocks
SMALL_POOL = {**OPTIONS, "host_pool_gib": NUM_HOST_BLOCKS * BLOCK * (ROW_BYTES + 132) / 2**30}
TOLERANCE = 1e-4
# Several prompts are computed before the first one is fetched: whatever is fetched after its lease may be another's.
PREFILL = {**PREFILL_CONNECTOR, "kv_connector_extra_config": {"kv_lease_duration": START_TIMEOUT_S}}


class DecodeServer(Server):
    """A server that must hold no block once its requests have ended."""

    def wait_empty(self) -> None:
        """Wait until no request holds a block in either pool: an engine's last report, before it is idle, says so."""
        assert self.complete(make_prompt(3), 2)["choices"]  # what came before it is under way
        wait_for(lambda: self.metric("hisparse_host_blocks_used") == self.metric("num_requests_running") == 0)
        assert self.metric("hisparse_host_blocks_used") == 0
        assert self.metric("hisparse_requests_waiting_for_host_memory") == 0
        assert self.metric("kv_cache_usage_perc") == 0


def assert_same(reply: dict, expected: dict) -> None:
    (tokens, logprobs), (full_tokens, full_logprobs) = tokens_of(reply), tokens_of(expected)
    assert tokens == full_tokens
    assert max(abs(a - b) for a, b in zip(logprobs, full_logprobs, strict=True)) <= TOLERANCE


class Cluster:
    """A prefill server and two decode servers, one for each of vLLM's policies for failed loads.

    Main KV comes into the second one through an import buffer, on the CPU a piece of host memory. All have the same
    port for NIXL's side channel, as by default: the prefill server alone listens there.
    """

    def __init__(self, group: ProcessGroup, log_dir: Path):
        self.group, self.log_dir, self.side_port = group, log_dir, free_ports(1)[0]
        self.prefill = self.start("prefill", PREFILL, 0)
        self.decode = self.start("decode", hisparse_connector(**SMALL_POOL), 1)
        recompute = {**hisparse_connector(**BUFFERED), "kv_load_failure_policy": "recompute"}
        self.recompute = self.start("recompute", recompute, 1)
        wait_started(group)

    def start(self, name: str, connector: dict, core: int) -> DecodeServer:
        (port,) = free_ports(1)
        args = ["--max-num-seqs", MAX_NUM_SEQS[name], "--max-num-batched-tokens", "512"]
        if name == "prefill":
            args.append("--no-enable-prefix-caching")  # it is the reference too
        else:
            args += ["--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", str(NUM_DEVICE_BLOCKS)]
        process = vllm_engine(name, MODELS / MODEL, self.log_dir, port, connector, self.side_port, [core], args)
        return DecodeServer(self.group.start(forked(process)), f"http://{LOOPBACK}:{port}")

    def prefilled(self, prompt: list[int]) -> dict:
        """Transfer parameters of a prompt that the prefill server has computed."""
        return self.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]

    def references(self, prompts: Iterable[list[int]], max_tokens: Iterable[int]) -> list[dict]:
        """Completions of the prefill server, which computes them together."""
        with ThreadPoolExecutor() as executor:
            return list(map(completion, executor.map(self.prefill.complete, prompts, max_tokens)))

    def kill_prefill(self) -> None:
        self.prefill.process.send_signal(signal.SIGKILL)
        wait_for(self.prefill.process.is_gone)

    def start_prefill_again(self) -> None:
        """Start the prefill engine again with the same command, and so on the same ports."""
        self.prefill.process.start()
        wait_started(self.group)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ProcessGroup() as group:
        yield Cluster(group, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, pytest.param(1201, marks=pytest.mark.smoke)])
def test_prompt_lengths(cluster: Cluster, num_tokens: int):
    prompt = make_prompt(num_tokens, seed=1)
    names = [f"hisparse_transfer_{name}" for name in ("bytes_to_host", "time_seconds_count", "time_seconds_sum")]
    before = list(map(cluster.decode.metric, names))
    transfer, start = cluster.prefilled(prompt), time.monotonic()
    reply = cluster.decode.complete(prompt, transfer=transfer)
    end = time.monotonic()
    assert_same(reply, cluster.prefill.complete(prompt))
    num_blocks = -(-num_tokens // 64)
    grown = [cluster.decode.metric(name) - old for name, old in zip(names, before, strict=True)]
    received, num_transfers, seconds = grown
    assert received == num_blocks * 64 * 576 * 4 * 4  # rows of 576 floats, 4 layers
    assert num_transfers == 1 and 0 < seconds < end - start
    cluster.decode.wait_empty()


@pytest.mark.smoke
def test_concurrent_requests(cluster: Cluster):
    prompts = [make_prompt(400 + 111 * i, seed=2) for i in range(5)]

    def serve(prompt: list[int]) -> dict:
        return cluster.decode.complete(prompt, 12, cluster.prefilled(prompt))

    with ThreadPoolExecutor(len(prompts)) as executor:
        replies = list(executor.map(serve, prompts))
    assert_same_but_rounding(list(map(completion, replies)), cluster.references(prompts, [12] * len(prompts)))
    assert cluster.decode.metric("hisparse_cache_misses") > 0
    cluster.decode.wait_empty()


def test_next_turn_pulls_only_what_is_new(cluster: Cluster):
    first = make_prompt(1000, seed=3)
    reply = cluster.decode.complete(first, 30, cluster.prefilled(first))
    prompt = first + tokens_of(reply)[0] + make_prompt(200, seed=4)
    before = cluster.decode.metric("hisparse_transfer_bytes_to_host")
    reply = cluster.decode.complete(prompt, transfer=cluster.prefilled(prompt))
    assert_same(reply, cluster.prefill.complete(prompt))
    pulled = (cluster.decode.metric("hisparse_transfer_bytes_to_host") - before) / (64 * 576 * 4 * 4)
    assert pulled == 20 - 16, "1230 tokens are 20 blocks, 16 of them are in the host prefix cache"
    cluster.decode.wait_empty()


@pytest.mark.slow
def test_samples_leave_nothing_on_the_prefill_side(cluster: Cluster):
    """The prefill side computes every sample; the decode side pulls one, and the lease of the others is long."""
    prompt, held = make_prompt(300, seed=14), cluster.prefill.metric("kv_cache_usage_perc")
    samples = {"n": 3, "temperature": 1, "top_k": 1}  # greedy, which vLLM allows for one sample only
    transfer = cluster.prefill.complete(prompt, 1, dict(DO_PREFILL), **samples)["kv_transfer_params"]
    choices = cluster.decode.complete(prompt, 6, transfer, **samples)["choices"]
    expected = tokens_of(cluster.prefill.complete(prompt, 6))[0]
    assert [choice["token_ids"] for choice in choices] == [expected] * 3

    def is_as_before() -> bool:
        cluster.prefill.complete(make_prompt(2), 1)  # an engine without requests takes no messages
        return cluster.prefill.metric("kv_cache_usage_perc") == held

    wait_for(is_as_before)
    cluster.decode.wait_empty()


def test_client_disconnects(cluster: Cluster):
    """Clients that leave in the middle of the stream, and right after they asked."""
    for num_chunks in (3, 0):
        prompt = make_prompt(1500 + num_chunks, seed=5)
        transfer = cluster.prefilled(prompt)
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        body["kv_transfer_params"] = transfer
        with requests.post(f"{cluster.decode.url}/v1/completions", json=body, stream=True, timeout=60) as stream:
            lines = stream.iter_lines()
            for _ in range(num_chunks):
                next(lines)
        cluster.decode.wait_empty()


def test_incomplete_transfer_parameters_are_computed_here(cluster: Cluster):
    prompt = make_prompt(300, seed=6)
    reply = cluster.decode.complete(prompt, transfer={"do_remote_prefill": True, "remote_host": LOOPBACK})
    assert_same(reply, cluster.prefill.complete(prompt))


@pytest.mark.slow
def test_malformed_transfer_parameters_are_computed_here(cluster: Cluster):
    """Whatever a client makes of them, the engine and its prefill instance's listener go on."""
    prompt = make_prompt(310, seed=6)
    expected = cluster.prefill.complete(prompt)
    refused = cluster.recompute.metric("hisparse_transfers_refused")
    changes = [
        {"remote_block_ids": 7},
        {"remote_block_ids": [[1], 5]},
        {"remote_block_ids": [[1]]},
        {"remote_engine_id": ["e"]},
        {"remote_port": "x"},
        {"remote_num_tokens": -1},
        {"tp_size": 7, "remote_engine_id": "another"},
        {"pp_size": 2, "remote_engine_id": "another"},
        {"remote_block_ids": [[2**24] * 5]},  # well-formed, and no block of the prefill instance
    ]
    for change in changes:
        reply = cluster.recompute.complete(prompt, transfer={**cluster.prefilled(prompt), **change})
        assert_same_but_rounding([completion(reply)], [completion(expected)])
    cluster.recompute.wait_empty()
    assert cluster.recompute.metric("hisparse_transfers_refused") - refused == len(changes) - 1
    fresh = make_prompt(320, seed=6)
    before = cluster.recompute.metric("hisparse_transfer_bytes_to_host")
    assert_same(cluster.recompute.complete(fresh, transfer=cluster.prefilled(fresh)), cluster.prefill.complete(fresh))
    assert cluster.recompute.metric("hisparse_transfer_bytes_to_host") > before


def test_prompt_longer_than_max_model_len(cluster: Cluster):
    reply = cluster.decode.complete(make_prompt(9000))
    assert reply["error"]["code"] == 400


@pytest.mark.slow
def test_preempted_requests_resume(cluster: Cluster):
    """Four prompts arrive by transfer and outgrow the host pool: one is preempted, and nothing is pulled twice."""
    # 16 blocks, and 17 after so many tokens that all have been admitted by then.
    prompts, max_tokens = [make_prompt(961 + 5 * i, seed=10) for i in range(4)], 120
    expected = cluster.references(prompts, [max_tokens] * len(prompts))
    names = ("num_preemptions", "hisparse_resumed_requests", "hisparse_transfer_bytes_to_host")
    before = [cluster.decode.metric(name) for name in names]
    calls = with_tokens(prompts, max_tokens, list(map(cluster.prefilled, prompts)))
    with ThreadPoolExecutor(len(prompts)) as executor:
        futures = [executor.submit(cluster.decode.complete, *call) for call in calls]
        assert_same_but_rounding([completion(future.result()) for future in futures], expected)
    preempted, resumed, received = (cluster.decode.metric(name) - was for name, was in zip(names, before, strict=True))
    assert preempted >= resumed >= 1
    assert received == 4 * 16 * BLOCK * ROW_BYTES
    cluster.decode.wait_empty()


@pytest.mark.slow
def test_lent_blocks_come_back_while_prompts_arrive(cluster: Cluster):
    """One request is hot as a whole; blocks that it gives back are written by transfers of others."""
    decode, lengths, max_tokens = cluster.decode, (1400, 700, 720, 740), (150, 24, 24, 24)
    prompts = [make_prompt(length, seed=12) for length in lengths]
    expected = cluster.references(prompts, max_tokens)
    calls = list(zip(prompts, max_tokens, map(cluster.prefilled, prompts), strict=True))
    before = decode.metric("hisparse_hot_rows_taken_back")
    with ThreadPoolExecutor(len(calls)) as executor:
        first = executor.submit(decode.complete, *calls[0])
        wait_for(lambda: first.done() or decode.metric("hisparse_hot_rows_lent") > 900)
        others = [executor.submit(decode.complete, *call) for call in calls[1:]]
        assert not first.done(), "it was to run on while the others arrive"
        assert_same_but_rounding([completion(future.result()) for future in (first, *others)], expected)
    assert decode.metric("hisparse_hot_rows_taken_back") > before
    decode.wait_empty()


def with_tokens(prompts: list[list[int]], max_tokens: int, transfers: list[dict]) -> list[tuple]:
    return [(prompt, max_tokens, transfer) for prompt, transfer in zip(prompts, transfers, strict=True)]


@pytest.mark.slow
def test_prefill_engine_that_nobody_met_is_gone(cluster: Cluster):
    """The handshake fails, the request ends or is computed here, others go on."""
    prompt = make_prompt(500, seed=8)
    gone = {"remote_engine_id": "gone", "remote_port": free_ports(1)[0]}
    expected, transfer = cluster.prefill.complete(prompt), {**cluster.prefilled(prompt), **gone}
    assert is_error(cluster.decode.complete(prompt, transfer=transfer))
    assert_same(cluster.recompute.complete(prompt, transfer=transfer), expected)
    for server in (cluster.decode, cluster.recompute):
        server.wait_empty()


@pytest.mark.slow
def test_prefill_engine_is_stopped_and_goes_on(cluster: Cluster):
    """Requests whose KV it has wait for it, others do not."""
    prompt, other = make_prompt(900, seed=14), make_prompt(200, seed=14)
    expected, full = cluster.prefill.complete(prompt), cluster.prefill.complete(other)
    transfer = cluster.prefilled(prompt)
    cluster.prefill.process.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor() as executor:
            waiting = executor.submit(cluster.decode.complete, prompt, transfer=transfer)
            assert_same(cluster.decode.complete(other), full)
            assert not waiting.done()
            cluster.prefill.process.send_signal(signal.SIGCONT)
            assert_same_but_rounding([completion(waiting.result())], [completion(expected)])
    finally:
        cluster.prefill.process.send_signal(signal.SIGCONT)
    cluster.decode.wait_empty()


@pytest.mark.slow
def test_prefill_engine_dies_before_during_and_after_transfers(cluster: Cluster):
    """Killed while several pulls run: what was pulled is decoded; the rest is computed again, with the same tokens, or
    ends with an error. So does a prompt that was computed and that nobody has begun to pull."""
    prompts, late = [make_prompt(1500 + i, seed=9) for i in range(4)], make_prompt(1000, seed=7)
    expected = [cluster.prefill.complete(prompt, 20) for prompt in [*prompts, late]]
    *transfers, late_transfer = map(cluster.prefilled, [*prompts, late])
    servers = [cluster.recompute, cluster.decode] * 2
    received = [server.metric("hisparse_transfer_bytes_to_host") for server in servers[:2]]
    with ThreadPoolExecutor(len(prompts)) as executor:
        calls = zip(servers, prompts, transfers, strict=True)
        futures = [executor.submit(server.complete, prompt, 20, transfer) for server, prompt, transfer in calls]
        for server, before in zip(servers, received, strict=False):
            wait_for(partial(server.has_counted, "hisparse_transfer_bytes_to_host", before))
        cluster.kill_prefill()
        replies = [future.result() for future in futures]
    late_replies = [server.complete(late, 20, late_transfer) for server in servers[:2]]
    for server, reply, full in zip([*servers, servers[0]], [*replies, late_replies[0]], expected, strict=True):
        if server is cluster.recompute:
            assert_same(reply, full)
        elif not is_error(reply):
            assert_same_but_rounding([completion(reply)], [completion(full)])
    assert is_error(late_replies[1])
    assert cluster.decode.metric("hisparse_transfer_failures") >= 1
    for server in servers[:2]:
        server.wait_empty()


@pytest.mark.slow
def test_prefill_engine_restarts_on_the_same_ports(cluster: Cluster):
    """The new one is asked for what it has computed, and not for what the killed one had."""
    prompts = [make_prompt(700, seed=seed) for seed in (15, 16)]
    if cluster.prefill.process.is_gone():
        cluster.start_prefill_again()
    old = cluster.prefilled(prompts[0])
    cluster.kill_prefill()
    cluster.start_prefill_again()
    expected = [cluster.prefill.complete(prompt) for prompt in prompts]
    for server in (cluster.decode, cluster.recompute):
        before = server.metric("hisparse_transfer_bytes_to_host")
        reply = server.complete(prompts[1], transfer=cluster.prefilled(prompts[1]))
        assert_same(reply, expected[1])
        assert server.has_counted("hisparse_transfer_bytes_to_host", before)
    assert is_error(cluster.decode.complete(prompts[0], transfer=old))
    assert_same(cluster.recompute.complete(prompts[0], transfer=old), expected[0])
    for server in (cluster.decode, cluster.recompute):
        server.wait_empty()

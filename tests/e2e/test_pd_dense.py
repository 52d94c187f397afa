"""Prefill and decode apart for dense models: stock vLLM sends KV, the decode side represents it as it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import MODELS, assert_same_but_rounding, make_prompt
from forks import forked
from servers import DO_PREFILL, completion, is_error, tokens_of, wait_started
from test_pd import DecodeServer, assert_same

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

EVERYTHING = {"host_pool_gib": 0.25, "top_k": 4096, "device_buffer_size": 4096}
TOKEN_BYTES = 2 * 2 * 32 * 4  # one layer: key and value, KV heads, elements, fp32
BLOCK = 128
BUFFER = {"import_buffer_gib": 4 * 4 * BLOCK * TOKEN_BYTES / 2**30}  # of four blocks
# Two full-KV layers, which NIXL pulls to the device; none, so that everything goes to the host, through a buffer.
DECODERS = {"quest": 2, "cluster_kv": 4}


class Cluster:
    """A prefill server, and a decode server per algorithm."""

    def __init__(self, group: ProcessGroup, log_dir: Path):
        self.group, self.log_dir = group, log_dir
        self.prefill = self.start("prefill", PREFILL_CONNECTOR, 0)
        self.small_blocks = self.start("small_blocks", PREFILL_CONNECTOR, 0, "--block-size", "32")
        everything_on_host = {"full_kv_layers": [], "algorithm_options": {"update_interval": 8}}
        options = {"quest": {}, "cluster_kv": everything_on_host | BUFFER}
        self.decode = {
            name: self.start(name, hisparse_connector(algorithm=name, **EVERYTHING, **options[name]), 1)
            for name in DECODERS
        }
        wait_started(group)

    def start(self, name: str, connector: dict, core: int, *more_args: str) -> DecodeServer:
        port, side_port = free_ports(2)
        args = ["--max-num-seqs", "8" if name in DECODERS else "1", "--max-num-batched-tokens", "512", *more_args]
        if name not in DECODERS:
            args.append("--no-enable-prefix-caching")  # it is the reference too
        process = vllm_engine(name, MODELS / "llama", self.log_dir, port, connector, side_port, [core], args)
        return DecodeServer(self.group.start(forked(process)), f"http://{LOOPBACK}:{port}")

    def prefilled(self, prompt: list[int]) -> dict:
        """Transfer parameters of a prompt that the prefill server has computed."""
        return self.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ProcessGroup() as group:
        yield Cluster(group, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("num_tokens", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 127, 128)), 129, 1201])
@pytest.mark.parametrize("name", DECODERS)
def test_prompt_lengths(cluster: Cluster, name: str, num_tokens: int):
    prompt, decode = make_prompt(num_tokens, seed=1), cluster.decode[name]
    names = [f"hisparse_transfer_bytes_{way}" for way in ("to_host", "to_device", "through_buffer")]
    before = [decode.metric(metric) for metric in names]
    reply = decode.complete(prompt, 20, cluster.prefilled(prompt))
    assert_same(reply, cluster.prefill.complete(prompt, 20))
    received = [decode.metric(metric) - was for metric, was in zip(names, before, strict=True)]
    layer_bytes = -(-num_tokens // BLOCK) * BLOCK * TOKEN_BYTES
    to_host = DECODERS[name] * layer_bytes
    assert received[:2] == [to_host, (4 - DECODERS[name]) * layer_bytes]
    decode.wait_empty()
    through_buffer = decode.metric("hisparse_transfer_bytes_through_buffer") - before[2]
    assert through_buffer == (to_host if name == "cluster_kv" else 0)


@pytest.mark.parametrize("name", ["cluster_kv", pytest.param("quest", marks=pytest.mark.slow)])
def test_concurrent_requests(cluster: Cluster, name: str):
    prompts = [make_prompt(700 + 111 * i, seed=2) for i in range(5)]

    def serve(prompt: list[int]) -> dict:
        return cluster.decode[name].complete(prompt, 12, cluster.prefilled(prompt))

    with ThreadPoolExecutor(len(prompts)) as executor:
        replies = list(executor.map(serve, prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_same_but_rounding([completion(reply)], [completion(cluster.prefill.complete(prompt, 12))])
    cluster.decode[name].wait_empty()


@pytest.mark.parametrize("name", ["quest", pytest.param("cluster_kv", marks=pytest.mark.slow)])
def test_next_turn_pulls_only_what_is_new(cluster: Cluster, name: str):
    first, decode = make_prompt(1000, seed=3), cluster.decode[name]
    reply = decode.complete(first, 30, cluster.prefilled(first))
    prompt = first + tokens_of(reply)[0] + make_prompt(200, seed=4)
    before = decode.metric("hisparse_transfer_bytes_to_host")
    reply = decode.complete(prompt, transfer=cluster.prefilled(prompt))
    assert_same(reply, cluster.prefill.complete(prompt))
    pulled = (decode.metric("hisparse_transfer_bytes_to_host") - before) / (BLOCK * TOKEN_BYTES * DECODERS[name])
    assert pulled == 10 - 8, "1230 tokens are 10 blocks, 8 of them are in the host prefix cache"
    decode.wait_empty()


@pytest.mark.parametrize("name", ["quest", pytest.param("cluster_kv", marks=pytest.mark.slow)])
def test_block_sizes_differ(cluster: Cluster, name: str):
    """One token is one block on both sides, and the pull ends with an error; the engine and other requests go on."""
    prompt, decode = make_prompt(1, seed=9), cluster.decode[name]
    transfer = cluster.small_blocks.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
    failures = decode.metric("hisparse_transfer_failures")
    assert is_error(decode.complete(prompt, 8, transfer))
    good = make_prompt(200, seed=9)
    assert_same(decode.complete(good, 8, cluster.prefilled(good)), cluster.prefill.complete(good, 8))
    decode.wait_empty()
    assert decode.metric("hisparse_transfer_failures") == failures + 1


def test_a_longer_prompt_in_blocks_of_another_size_is_computed_here(cluster: Cluster):
    """The log says at start-up what prefill instances need, and then what is wrong."""
    prompt, decode = make_prompt(300, seed=10), cluster.decode["quest"]
    transfer = cluster.small_blocks.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
    refused = decode.metric("hisparse_transfers_refused")
    assert_same(decode.complete(prompt, 8, transfer), cluster.prefill.complete(prompt, 8))
    assert decode.metric("hisparse_transfers_refused") == refused + 1
    log = (cluster.log_dir / "quest.log").read_text()
    assert "--block-size is not set; blocks have 128 tokens" in log
    assert "3 of 128 tokens each; start both sides with the same --block-size" in log

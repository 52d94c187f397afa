"""Prefill and decode apart with indexer keys in 4 bits: stock vLLM sends keys in 8 bits, which land on the host.

The reference is full KV that computes a prompt with keys in 8 bits, as the prefill side does, and its last token and
later ones, which the decode side computes, with all keys rounded to 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import MODELS, OfflineEngine, assert_same_but_rounding, engine_args, make_prompt
from forks import forked
from servers import DO_PREFILL, completion, tokens_of, wait_started
from test_pd import DecodeServer

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

MODEL = "glm52"  # layers share indexers
NUM_KEY_LAYERS, NUM_LAYERS = 2, 4
OPTIONS = {"host_pool_gib": 0.25, "device_buffer_size": 320, "indexer_key_dtype": "fp4"}
NUM_DEVICE_BLOCKS = 1000
LENGTHS = [1, 63, 64, 65, 700, 1201]
NUM_NEW = 12


class Cluster:
    """A stock prefill server and a decode server with keys in 4 bits."""

    def __init__(self, group: ProcessGroup, log_dir: Path):
        self.group, self.log_dir = group, log_dir
        self.prefill = self._start("prefill", PREFILL_CONNECTOR, ["--no-enable-prefix-caching"])
        blocks = ["--num-gpu-blocks-override", str(NUM_DEVICE_BLOCKS)]
        self.decode = self._start("decode", hisparse_connector(**OPTIONS), blocks)
        wait_started(group)

    def _start(self, name: str, connector: dict[str, Any], args: list[str]) -> DecodeServer:
        port, side_port = free_ports(2)
        args = ["--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--max-model-len", "2048", *args]
        process = vllm_engine(name, MODELS / MODEL, self.log_dir, port, connector, side_port, [0], args)
        return DecodeServer(self.group.start(forked(process)), f"http://{LOOPBACK}:{port}")

    def serve(self, prompt: list[int]) -> dict[str, Any]:
        transfer = self.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
        return self.decode.complete(prompt, NUM_NEW, transfer)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ProcessGroup() as group:
        yield Cluster(group, tmp_path_factory.mktemp("logs"))


@pytest.fixture
def received_reference(tmp_path_factory, shared_result):
    """Completions of the full-KV engine, one prompt after another."""

    def completions(prompts: list[list[int]]) -> list[dict[str, Any]]:
        args = engine_args(MODEL, enable_prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=2048)

        def compute() -> list[dict[str, Any]]:
            with OfflineEngine(tmp_path_factory.mktemp("reference"), args, receives_keys=True) as engine:
                phase = {"prompts": prompts, "max_tokens": NUM_NEW, "last_token_alone": True}
                return engine.run(phase)["completions"]

        return shared_result(f"received {MODEL} {hash(str(prompts))}", compute)

    return completions


def test_tokens_are_those_of_full_kv_with_such_keys(cluster, received_reference):
    prompts = [make_prompt(length, seed=21) for length in LENGTHS]
    before = cluster.decode.metric("hisparse_transfer_bytes_to_host")
    with ThreadPoolExecutor(4) as executor:
        replies = list(executor.map(cluster.serve, prompts))
    expected = received_reference(prompts)
    assert_same_but_rounding(list(map(completion, replies)), expected)
    wide = [tokens_of(cluster.prefill.complete(prompt, NUM_NEW))[1] for prompt in prompts]
    assert wide != [each["logprobs"] for each in expected], "keys in 4 bits select what keys in 8 bits do"
    num_blocks = sum(-(-length // 64) for length in LENGTHS)
    received = cluster.decode.metric("hisparse_transfer_bytes_to_host") - before
    assert received == num_blocks * 64 * (NUM_LAYERS * 576 * 4 + NUM_KEY_LAYERS * 132)
    assert cluster.decode.metric("hisparse_transfer_bytes_to_device") == 0
    assert cluster.decode.metric("hisparse_cache_misses") > 0
    assert cluster.decode.metric("hisparse_transfers_refused") == 0
    cluster.decode.wait_empty()


def test_keys_of_a_received_prefix_are_found_on_the_host(cluster, received_reference):
    """The next turn pulls only what is new; so many others came between that the device has lost the keys."""
    first = make_prompt(640, seed=22)
    reply = cluster.serve(first)
    for seed in range(30, 36):
        cluster.serve(make_prompt(1500, seed=seed))
    prompt = first + make_prompt(200, seed=23)
    before = cluster.decode.metric("hisparse_transfer_bytes_to_host")
    again = cluster.serve(prompt)
    assert_same_but_rounding([completion(reply), completion(again)], received_reference([first, prompt]))
    num_blocks = (cluster.decode.metric("hisparse_transfer_bytes_to_host") - before) / 64
    assert num_blocks / (NUM_LAYERS * 576 * 4 + NUM_KEY_LAYERS * 132) == 14 - 10
    cluster.decode.wait_empty()

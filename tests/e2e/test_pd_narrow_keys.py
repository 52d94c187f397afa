"""Prefill and decode apart with indexer keys in 4 bits: stock vLLM sends keys in 8 bits, which land on the host.

The reference is full KV that computes a prompt with keys in 8 bits, as the prefill side does, and its last token and
later ones, which the decode side computes, with all keys rounded to 4 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import MODELS, OfflineEngine, assert_same_but_rounding, engine_args, make_prompt
from forks import forked
from servers import DO_PREFILL, completion, tokens_of, wait_for, wait_started
from test_mtp import CODE_MODEL, DRAFTS, HOST_BLOCK_BYTES, SMALLEST_BUFFER, counts, source
from test_pd import DecodeServer

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = "glm52"  # layers share indexers
NUM_KEY_LAYERS, NUM_LAYERS = 2, 4
OPTIONS = {"host_pool_gib": 0.25, "device_buffer_size": 320, "indexer_key_dtype": "fp4"}
NUM_DEVICE_BLOCKS = 1000
BLOCK_BYTES = 64 * (NUM_LAYERS * 576 * 4 + NUM_KEY_LAYERS * 132)
BUFFER = {"import_buffer_gib": 4 * BLOCK_BYTES / 2**30}
LENGTHS = [1, 63, 64, 65, 700, 1201]
NUM_NEW = 12


class Cluster:
    """A stock prefill server and a decode server with keys in 4 bits.

    Args:
        group: its processes.
        log_dir: directory of their logs.
        model: directory of the model.
        options: more options of the plugin.
        args: arguments of both servers.
        decode_args: arguments of the decode server.
        prefill_layout: VLLM_KV_CACHE_LAYOUT of the prefill server; None: vLLM's choice.
    """

    def __init__(
        self,
        group: ProcessGroup,
        log_dir: Path,
        model: Path = MODELS / MODEL,
        options: dict[str, Any] | None = None,
        args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        prefill_layout: str | None = None,
    ):
        self.group, self.log_dir, self.model, self.args = group, log_dir, model, args
        self.prefill = self._start("prefill", PREFILL_CONNECTOR, ["--no-enable-prefix-caching"], prefill_layout)
        blocks = ["--num-gpu-blocks-override", str(NUM_DEVICE_BLOCKS)]
        connector = hisparse_connector(**{**OPTIONS, **(options or {})})
        self.decode = self._start("decode", connector, [*blocks, *decode_args])
        wait_started(group)

    def _start(self, name: str, connector: dict[str, Any], args: list[str], layout: str | None = None) -> DecodeServer:
        port, side_port = free_ports(2)
        args = ["--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--max-model-len", "2048", *self.args, *args]
        process = vllm_engine(name, self.model, self.log_dir, port, connector, side_port, [0], args)
        if layout is not None:
            process.env["VLLM_KV_CACHE_LAYOUT"] = layout
        return DecodeServer(self.group.start(forked(process)), f"http://{LOOPBACK}:{port}")

    def serve(self, prompt: list[int], num_new: int = NUM_NEW) -> dict[str, Any]:
        transfer = self.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
        return self.decode.complete(prompt, num_new, transfer)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ProcessGroup() as group:
        yield Cluster(group, tmp_path_factory.mktemp("logs"))


@pytest.fixture
def received_reference(tmp_path_factory, shared_result):
    """Completions of the full-KV engine, one prompt after another."""

    def completions(prompts: list[list[int]], model: str = MODEL, num_new: int = NUM_NEW) -> list[dict[str, Any]]:
        sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 2048, "max_model_len": 2048}
        args = engine_args(model, enable_prefix_caching=False, **sizes)

        def compute() -> list[dict[str, Any]]:
            with OfflineEngine(tmp_path_factory.mktemp("reference"), args, receives_keys=True) as engine:
                phase = {"prompts": prompts, "max_tokens": num_new, "last_token_alone": True}
                return engine.run(phase)["completions"]

        return shared_result(f"received {model} {num_new} {hash(str(prompts))}", compute)

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
    assert received == num_blocks * BLOCK_BYTES
    assert cluster.decode.metric("hisparse_transfer_bytes_to_device") == 0
    assert cluster.decode.metric("hisparse_cache_misses") > 0
    assert cluster.decode.metric("hisparse_transfers_refused") == 0
    cluster.decode.wait_empty()


@pytest.mark.slow
def test_keys_come_through_an_import_buffer(tmp_path, received_reference):
    """They lie behind main KV in every block of the prefill side."""
    prompts = [make_prompt(length, seed=21) for length in LENGTHS]
    with ProcessGroup() as group:
        cluster = Cluster(group, tmp_path, options=BUFFER, prefill_layout="BLHNC")
        with ThreadPoolExecutor(4) as executor:
            replies = list(executor.map(cluster.serve, prompts))
        cluster.decode.wait_empty()
        names = ["hisparse_transfer_bytes_to_host", "hisparse_transfer_bytes_through_buffer"]
        received = [cluster.decode.metric(name) for name in names]
    assert_same_but_rounding(list(map(completion, replies)), received_reference(prompts))
    assert received == [sum(-(-length // 64) for length in LENGTHS) * BLOCK_BYTES] * 2


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
    assert cluster.decode.metric("hisparse_transfer_bytes_to_host") - before == (14 - 10) * BLOCK_BYTES
    cluster.decode.wait_empty()


@pytest.mark.parametrize("layout", [pytest.param("LBHNC", marks=pytest.mark.slow), "BLHNC"])
def test_draft_layers_are_received_on_the_host_too(tmp_path, received_reference, layout):
    """The decode side drafts as well as the prefill side, which has the draft layer's rows of the prompt at once.

    They come through an import buffer, with main KV and keys.
    """
    drafts, lengths = ["--speculative-config", json.dumps(DRAFTS)], (65, 700, 1100)
    prompts = [source(length, seed) for seed, length in enumerate(lengths, 1)]
    with ProcessGroup() as group:
        options = {"device_buffer_size": SMALLEST_BUFFER, "import_buffer_gib": 4 * HOST_BLOCK_BYTES / 2**30}
        cluster = Cluster(group, tmp_path, CODE_MODEL, options, drafts, prefill_layout=layout)
        replies = [completion(cluster.serve(prompt, 32)) for prompt in prompts]
        received = cluster.decode.metric("hisparse_transfer_bytes_to_host")
        through_buffer = cluster.decode.metric("hisparse_transfer_bytes_through_buffer")
        for prompt in prompts:
            cluster.prefill.complete(prompt, 32)
        computed_rate, received_rate = (
            accepted / drafted for accepted, drafted in map(counts, (cluster.prefill, cluster.decode))
        )
        cluster.decode.wait_empty()
    assert_same_but_rounding(replies, received_reference(prompts, str(CODE_MODEL), 32))
    assert received == through_buffer == sum(-(-length // 64) for length in lengths) * HOST_BLOCK_BYTES
    assert received_rate == pytest.approx(computed_rate, abs=0.1) and computed_rate > 0.4


@pytest.mark.parametrize("num_prefill_ranks", [1, 2])
def test_rank_0_receives_for_all_ranks(tmp_path, received_reference, num_prefill_ranks):
    """Every rank restores its keys from the pool that all share, and no rank of the prefill side keeps blocks."""
    prompts = [make_prompt(length, seed=24) for length in (65, 1201)]
    ranks = {"prefill_tp_size": num_prefill_ranks, **BUFFER}
    args = ["--tensor-parallel-size", str(num_prefill_ranks)]
    with ProcessGroup() as group:
        cluster = Cluster(group, tmp_path, options=ranks, args=args, decode_args=["--tensor-parallel-size", "2"])
        replies = [completion(cluster.serve(prompt)) for prompt in prompts]
        cluster.decode.wait_empty()
        through_buffer = cluster.decode.metric("hisparse_transfer_bytes_through_buffer")
        wait_for(lambda: cluster.prefill.metric("kv_cache_usage_perc") == 0)
        assert cluster.prefill.metric("kv_cache_usage_perc") == 0
    assert_same_but_rounding(replies, received_reference(prompts))
    assert through_buffer == sum(-(-length // 64) for length in (65, 1201)) * BLOCK_BYTES

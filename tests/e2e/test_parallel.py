"""Tensor and data parallel engines: same tokens as full KV over as many ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from conftest import (
    MODELS,
    assert_pools_empty,
    assert_same,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)
from forks import forked
from servers import DO_PREFILL, START_TIMEOUT_S, completion, wait_for, wait_started
from test_pd import DecodeServer

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS, MAX_TOKENS = [65, 300, 901, 1500], 16
HOST_BLOCK_BYTES = 64 * 4 * (576 * 4 + 132)  # 64 tokens, 4 layers, fp32 rows and indexer keys
EVERYTHING = {"algorithm": "quest", "top_k": 4096, "device_buffer_size": 4096}


def phase(seed: int = 0) -> dict:
    return {"prompts": [make_prompt(length, seed) for length in LENGTHS], "max_tokens": MAX_TOKENS}


@pytest.mark.parametrize(("model", "options"), [("dsv32", {}), ("llama", EVERYTHING)])
def test_tensor_parallel(run, model, options):
    """Evicted rows of a DSA model come back from the pool that all ranks share; each rank of a dense model has its KV
    heads in its own, from which a later request's prefix comes back."""
    (full,) = run(engine_args(model, tensor_parallel_size=2, enable_prefix_caching=False), [phase()])
    first, again = run(hot_args(model, options, tensor_parallel_size=2), [phase(), phase()])
    assert_same(first["completions"], full["completions"])
    assert_same_but_rounding(again["completions"], full["completions"])
    assert all(each["num_cached_tokens"] > 0 for each in again["completions"][1:])
    assert_pools_empty(again)
    first_rank, second_rank = again["shared_memory"]
    assert first_rank == second_rank
    assert (first_rank is not None) == (model == "dsv32")


def test_ranks_share_one_pool_of_the_size_asked_for(run, reference):
    """Two requests grow past it: one is preempted, on every rank, and resumes with what is left."""
    lengths, max_tokens = [500, 510], 150  # 8 blocks each at admission, 11 at the end
    options = {"host_pool_gib": 18 * HOST_BLOCK_BYTES / 2**30}
    (record,) = run(
        hot_args(options=options, max_model_len=1024, tensor_parallel_size=2),
        [{"prompts": [make_prompt(length) for length in lengths], "max_tokens": max_tokens}],
    )
    assert_same_but_rounding(record["completions"], reference(lengths, max_tokens))
    assert_pools_empty(record)
    assert record["peaks"]["host_blocks_used"] == 18
    assert record["counters"]["resumed_requests"] >= 1
    assert record["counters"]["recomputed_tokens"] < 512


class Cluster:
    """A prefill server and a decode server with two ranks."""

    def __init__(self, group: ProcessGroup, log_dir: Path, model: str, num_prefill_ranks: int, options: dict):
        self.group, self.log_dir, self.model = group, log_dir, model
        args = ["--no-enable-prefix-caching", "--max-num-seqs", "1"]  # it is the reference, too
        patient = {**PREFILL_CONNECTOR, "kv_connector_extra_config": {"kv_lease_duration": START_TIMEOUT_S}}
        self.prefill = self.start("prefill", patient, num_prefill_ranks, args)
        self.decode = self.start("decode", hisparse_connector(host_pool_gib=0.25, **options), 2)
        wait_started(group)

    def start(self, name: str, connector: dict, num_ranks: int, args: Sequence[str] = ()) -> DecodeServer:
        port, side_port = free_ports(2)
        args = ["--max-num-batched-tokens", "512", "--tensor-parallel-size", str(num_ranks), *args]
        process = vllm_engine(name, MODELS / self.model, self.log_dir, port, connector, side_port, [0], args)
        return DecodeServer(self.group.start(forked(process)), f"http://{LOOPBACK}:{port}")


@pytest.mark.parametrize(
    ("model", "num_prefill_ranks", "options", "bytes_per_token"),
    [
        ("dsv32", 1, {"device_buffer_size": 320, "prefill_tp_size": 1}, 4 * 576 * 4),
        ("dsv32", 2, {"device_buffer_size": 320}, 4 * 576 * 4),
        ("llama", 2, EVERYTHING, 2 * 2 * 2 * 32 * 4),
    ],
)
def test_prompts_from_a_prefill_instance(tmp_path, model, num_prefill_ranks, options, bytes_per_token):
    """Whole rows of an MLA model from any number of ranks, KV heads from as many."""
    with ProcessGroup() as group:
        cluster = Cluster(group, tmp_path, model, num_prefill_ranks, options)
        for length in (65, 2001):
            prompt = make_prompt(length, seed=1)
            transfer = cluster.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
            before = cluster.decode.metric("hisparse_transfer_bytes_to_host")
            reply = cluster.decode.complete(prompt, 12, transfer)
            assert_same_but_rounding([completion(reply)], [completion(cluster.prefill.complete(prompt, 12))])
            received = cluster.decode.metric("hisparse_transfer_bytes_to_host") - before
            block = 64 if model == "dsv32" else 128
            assert received == -(-length // block) * block * bytes_per_token
        cluster.decode.wait_empty()
        names = ("hisparse_transfers", "hisparse_transfer_time_seconds_count")
        assert [cluster.decode.metric(name) for name in names] == [2, 2], "not one per rank"


def test_kv_heads_of_another_number_of_ranks_are_computed_here(tmp_path):
    with ProcessGroup() as group:
        cluster = Cluster(group, tmp_path, "llama", 1, EVERYTHING)
        prompt = make_prompt(300, seed=1)
        transfer = cluster.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
        reply = cluster.decode.complete(prompt, 12, transfer)
        assert_same_but_rounding([completion(reply)], [completion(cluster.prefill.complete(prompt, 12))])
        assert cluster.decode.metric("hisparse_transfer_bytes_to_host") == 0
        assert "tp_size: got 1, expected 2" in (tmp_path / "decode.log").read_text()


def test_data_parallel(tmp_path, reference):
    """Every rank has a host pool of its own, and decodes over hot rows; with a budget of everything, none is missed.

    NOTE: not of a model with experts, which vLLM's CPU platform cannot exchange between ranks.
    """
    (port,) = free_ports(1)
    connector = hisparse_connector(host_pool_gib=0.25, **EVERYTHING) | {"kv_role": "kv_both"}
    args = ["--max-num-batched-tokens", "512", "--data-parallel-size", "2", "--max-num-seqs", "8"]
    with ProcessGroup() as group:
        process = vllm_engine("engine", MODELS / "llama", tmp_path, port, connector, 0, [0], args)
        process.env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        server = DecodeServer(group.start(process), f"http://{LOOPBACK}:{port}")
        wait_started(group)
        with ThreadPoolExecutor(len(LENGTHS)) as executor:
            replies = list(executor.map(lambda length: server.complete(make_prompt(length), MAX_TOKENS), LENGTHS))
        assert_same_but_rounding(list(map(completion, replies)), reference(LENGTHS, MAX_TOKENS, "llama"))
        wait_for(lambda: ranks_with_hits(server) == {"0", "1"})
        server.wait_empty()


def ranks_with_hits(server: DecodeServer) -> set[str]:
    samples = requests.get(f"{server.url}/metrics", timeout=30).text
    hits = re.findall(r'^vllm:hisparse_cache_hits_total{engine="(.)".*} (\S+)$', samples, re.MULTILINE)
    return {engine for engine, count in hits if float(count) > 0}

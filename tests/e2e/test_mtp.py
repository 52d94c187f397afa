"""A layer that drafts (MTP) beside hot buffers: full KV's tokens, and as many accepted drafts as with full KV."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    SCHEDULERS,
    TOP_K,
    OfflineEngine,
    assert_pools_empty,
    assert_same_but_rounding,
    engine_args,
    hot_args,
)
from forks import forked
from servers import DO_PREFILL, START_TIMEOUT_S, Server, completion, tokens_of, wait_started
from tokenizers import Tokenizer

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

CODE_MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "code-dsa"  # trained, with a draft layer
NUM_DRAFTS = 2
SMALLEST_BUFFER = (1 + NUM_DRAFTS) * TOP_K
DRAFTS = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
LENGTHS = [3, 63, 300, SMALLEST_BUFFER - 6, SMALLEST_BUFFER + 1, 1200]
MAX_TOKENS = 24
MODEL_ARGS = {"max_model_len": 2048, "max_num_seqs": 6}
HOST_BLOCK_BYTES = 64 * (9 * 576 * 4 + 9 * 132)  # 64 tokens, 9 layers, fp32 rows and indexer keys


def source(num_tokens: int, seed: int = 0) -> list[int]:
    """Source code, which the model was trained on."""
    tokenizer = Tokenizer.from_file(str(CODE_MODEL / "tokenizer.json"))
    ids = tokenizer.encode(Path(argparse.__file__).read_text()).ids
    return ids[3000 * seed :][:num_tokens]


PHASE = {"prompts": list(map(source, LENGTHS)), "max_tokens": MAX_TOKENS}


def full(**overrides) -> dict:
    return engine_args(str(CODE_MODEL), **MODEL_ARGS, enable_prefix_caching=False, **overrides)


def hot(options: dict | None = None, **overrides) -> dict:
    options = {"device_buffer_size": SMALLEST_BUFFER, "elastic": False, **(options or {})}
    drafts = {"speculative_config": DRAFTS, "disable_log_stats": False}
    return hot_args(str(CODE_MODEL), options, **{**MODEL_ARGS, **drafts, **overrides})


def rate(record: dict) -> float:
    return record["drafts"]["accepted"] / record["drafts"]["drafted"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory, shared_result) -> list:
    """Full KV's completions without drafts, and how many drafts it accepts."""

    def compute() -> list:
        with OfflineEngine(tmp_path_factory.mktemp("full"), full()) as engine:
            completions = engine.run(PHASE)["completions"]
        args = full(speculative_config=DRAFTS, disable_log_stats=False)
        with OfflineEngine(tmp_path_factory.mktemp("drafts"), args) as engine:
            return [completions, rate(engine.run(PHASE))]

    return shared_result("mtp", compute)


@pytest.mark.parametrize(
    ("elastic", "is_async"),
    [pytest.param(False, False, marks=pytest.mark.slow), pytest.param(True, True, marks=pytest.mark.smoke)],
)
def test_full_kvs_tokens(run, expected, elastic: bool, is_async: bool):
    completions, accepted = expected
    engine = hot({"elastic": elastic}, enable_prefix_caching=False)
    record = run(engine, [PHASE], async_scheduling=is_async)[0]
    assert record["scheduler"] == SCHEDULERS[is_async]
    assert_same_but_rounding(record["completions"], completions)
    assert_pools_empty(record)
    assert rate(record) == pytest.approx(accepted, abs=0.05) and accepted > 0.4
    assert record["counters"]["cache_hits"] > record["counters"]["cache_misses"] > 0


@pytest.mark.slow
def test_indexer_keys_in_4_bits(run, tmp_path_factory, shared_result, expected):
    """The draft layer keeps keys in 8 bits and drafts as well; verified tokens are those of keys in 4 bits."""

    def compute() -> list:
        with OfflineEngine(tmp_path_factory.mktemp("narrow"), full(), narrow_keys=True) as engine:
            return engine.run(PHASE)["completions"]

    narrow = shared_result("mtp, keys in 4 bits", compute)
    record = run(hot({"indexer_key_dtype": "fp4", "elastic": True}), [PHASE], async_scheduling=True)[0]
    assert_same_but_rounding(record["completions"], narrow)
    assert_pools_empty(record)
    completions, accepted = expected
    assert [each["logprobs"] for each in narrow] != [each["logprobs"] for each in completions]
    assert rate(record) == pytest.approx(accepted, abs=0.08)


@pytest.mark.slow
def test_conversations_find_the_draft_layers_rows_again(start, expected):
    """The host pool has the draft layer's rows, so drafts of the next turn are as good as after a computation."""
    engine, (completions, _) = start(hot(), async_scheduling=True), expected
    first = engine.run(PHASE)
    assert_same_but_rounding(first["completions"], completions)
    turns = [prompt + done["tokens"] for prompt, done in zip(PHASE["prompts"], first["completions"], strict=True)]
    again = {"prompts": turns, "max_tokens": MAX_TOKENS}
    found = engine.run({**again, "forgets": False})
    assert sum(done["num_cached_tokens"] for done in found["completions"]) > sum(LENGTHS) * 0.8
    args = full(speculative_config=DRAFTS, disable_log_stats=False)
    with OfflineEngine(engine.log_path.parent, args) as reference:
        computed = reference.run(again)
    assert_same_but_rounding(found["completions"], computed["completions"])
    accepted, drafted = (found["drafts"][name] - first["drafts"][name] for name in ("accepted", "drafted"))
    assert accepted / drafted == pytest.approx(rate(computed), abs=0.08)
    assert_pools_empty(found)


def test_preempted_requests_go_on_where_they_were(run, expected):
    completions, accepted = expected
    chosen = [LENGTHS.index(length) for length in (SMALLEST_BUFFER - 6, SMALLEST_BUFFER + 1)]
    pool = {"host_pool_gib": 25 * HOST_BLOCK_BYTES / 2**30}  # 12 and 13 blocks at admission, 13 each at the end
    phase = {"prompts": [PHASE["prompts"][index] for index in chosen], "max_tokens": MAX_TOKENS}
    record = run(hot(pool, max_model_len=1100), [phase], async_scheduling=True)[0]
    assert_same_but_rounding(record["completions"], [completions[index] for index in chosen])
    assert_pools_empty(record)
    assert record["counters"]["resumed_requests"] >= 1
    assert rate(record) > accepted - 0.25


class Cluster:
    """A prefill server and a decode server, both with the draft layer."""

    def __init__(self, group: ProcessGroup, log_dir: Path):
        self.group, self.log_dir = group, log_dir
        prefill = {**PREFILL_CONNECTOR, "kv_connector_extra_config": {"kv_lease_duration": START_TIMEOUT_S}}
        self.prefill = self.start("prefill", prefill, 0, "--no-enable-prefix-caching")
        options = {"host_pool_gib": 0.25, "device_buffer_size": SMALLEST_BUFFER}
        self.decode = self.start("decode", hisparse_connector(**options), 1)
        wait_started(group)

    def start(self, name: str, connector: dict, core: int, *args: str) -> Server:
        port, side_port = free_ports(2)
        args = [*args, "--max-model-len", "2048", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"]
        args += ["--speculative-config", json.dumps(DRAFTS)]
        process = vllm_engine(name, CODE_MODEL, self.log_dir, port, connector, side_port, [core], args)
        return Server(self.group.start(forked(process)), f"http://{LOOPBACK}:{port}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ProcessGroup() as group:
        yield Cluster(group, tmp_path_factory.mktemp("logs"))


@pytest.mark.slow
def test_the_draft_layers_rows_are_transferred(cluster: Cluster):
    """NIXL brings them with the indexer keys: the decode side drafts as if it had computed the prompt."""
    servers, lengths = (cluster.prefill, cluster.decode), (65, 700, 1100)
    before = [counts(server) for server in servers]
    for seed, length in enumerate(lengths, 1):
        prompt = source(length, seed)
        transfer = cluster.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
        reply = cluster.decode.complete(prompt, 32, transfer)
        expected = cluster.prefill.complete(prompt, 32)
        assert_same_but_rounding([completion(reply)], [completion(expected)])
        assert len(tokens_of(reply)[0]) == 32
    assert cluster.decode.metric("hisparse_transfers_refused") == 0
    num_tokens = sum(-(-length // 64) * 64 for length in lengths)
    row_bytes = 9 * 132 + 576 * 4  # keys of nine indexers, and the draft layer's rows
    assert cluster.decode.metric("hisparse_transfer_bytes_to_device") == num_tokens * row_bytes
    computed, received = (
        accepted / drafted
        for accepted, drafted in (
            [now - then for now, then in zip(counts(server), start, strict=True)]
            for server, start in zip(servers, before, strict=True)
        )
    )
    assert received == pytest.approx(computed, abs=0.1) and computed > 0.4


def counts(server: Server) -> list[float]:
    return [server.metric(f"spec_decode_num_{kind}_tokens") for kind in ("accepted", "draft")]

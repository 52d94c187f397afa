"""Main KV comes through an import buffer that is smaller than a prompt, from prefill instances of both block layouts.

Indexer keys come directly, all layers of a block together where the prefill instance has them side by side. On the CPU,
the buffer is host memory; all else is as on a GPU. tests/e2e/test_pd.py ends such transfers in other ways.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import MODELS, assert_same_but_rounding, make_prompt
from forks import forked
from servers import DO_PREFILL, Server, completion, tokens_of, wait_for, wait_started
from test_pd import BLOCK, BUFFERED, PREFILL, DecodeServer, assert_same

from tools.harness.deployment import hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

NUM_LAYERS = 4
ROW_BYTES = NUM_LAYERS * 576 * 4
LAYOUTS = {"layers": "LBHNC", "blocks": "BLHNC"}  # what is outermost in a prefill server's memory -> vLLM's name


class Cluster:
    """A prefill server of each layout, and a decode server."""

    def __init__(self, group: ProcessGroup, log_dir: Path):
        self.group, self.log_dir = group, log_dir
        self.prefill = {name: self.start(name, PREFILL, layout) for name, layout in LAYOUTS.items()}
        decode = self.start("decode", hisparse_connector(**BUFFERED))
        self.decode = DecodeServer(decode.process, decode.url)
        wait_started(group)

    def start(self, name: str, connector: dict, layout: str | None = None) -> Server:
        port, side_port = free_ports(2)
        args = ["--max-num-batched-tokens", "512", *(["--no-enable-prefix-caching"] if layout else [])]
        process = vllm_engine(name, MODELS / "dsv32", self.log_dir, port, connector, side_port, [0], args)
        if layout is not None:
            process.env["VLLM_KV_CACHE_LAYOUT"] = layout
        return Server(self.group.start(forked(process)), f"http://{LOOPBACK}:{port}")

    def prefilled(self, name: str, prompt: list[int]) -> dict:
        """Transfer parameters of a prompt that a prefill server has computed."""
        return self.prefill[name].complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]

    def received(self) -> list[float]:
        """Bytes that have come to the host, and those that have come through the buffer."""
        names = ("hisparse_transfer_bytes_to_host", "hisparse_transfer_bytes_through_buffer")
        return [self.decode.metric(name) for name in names]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ProcessGroup() as group:
        yield Cluster(group, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("num_tokens", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 65)), 1201])
@pytest.mark.parametrize("name", LAYOUTS)
def test_prompt_lengths(cluster: Cluster, name: str, num_tokens: int) -> None:
    prompt, before = make_prompt(num_tokens, seed=1 + list(LAYOUTS).index(name)), cluster.received()
    pieces = cluster.decode.metric("nixl_num_descriptors_sum")
    reply = cluster.decode.complete(prompt, 20, cluster.prefilled(name, prompt))
    assert_same(reply, cluster.prefill[name].complete(prompt, 20))
    cluster.decode.wait_empty()
    num_blocks = -(-num_tokens // BLOCK)
    num_bytes, num_pieces = num_blocks * BLOCK * ROW_BYTES, cluster.decode.metric("nixl_num_descriptors_sum") - pieces
    assert [now - was for now, was in zip(cluster.received(), before, strict=True)] == [num_bytes, num_bytes]
    if name == "blocks":
        assert num_pieces <= 2 * num_blocks, "main KV of a block is a piece, and so are its keys"
    else:
        assert num_pieces >= NUM_LAYERS * num_blocks, "keys of a layer lie alone"


@pytest.mark.slow
def test_prompts_share_the_buffer(cluster: Cluster) -> None:
    prompts, before = [make_prompt(700 + 111 * i, seed=7) for i in range(6)], cluster.received()
    num_transfers = cluster.decode.metric("hisparse_transfer_time_seconds_count")
    names = list(LAYOUTS) * 3

    def serve(name: str, prompt: list[int]) -> dict:
        return cluster.decode.complete(prompt, 12, cluster.prefilled(name, prompt))

    with ThreadPoolExecutor(len(prompts)) as executor:
        replies = list(executor.map(serve, names, prompts))
    expected = [
        completion(cluster.prefill[name].complete(prompt, 12)) for name, prompt in zip(names, prompts, strict=True)
    ]
    assert_same_but_rounding(list(map(completion, replies)), expected)
    cluster.decode.wait_empty()
    to_host, through_buffer = (now - was for now, was in zip(cluster.received(), before, strict=True))
    assert to_host == through_buffer == sum(-(-len(prompt) // BLOCK) for prompt in prompts) * BLOCK * ROW_BYTES
    assert cluster.decode.metric("hisparse_transfers_waiting_for_buffer") == 0
    num_transfers = cluster.decode.metric("hisparse_transfer_time_seconds_count") - num_transfers
    assert num_transfers == len(prompts), "not one per read"


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_next_turn_pulls_only_what_is_new(cluster: Cluster, name: str) -> None:
    first = make_prompt(1000, seed=13 + list(LAYOUTS).index(name))
    reply = cluster.decode.complete(first, 30, cluster.prefilled(name, first))
    prompt = first + tokens_of(reply)[0] + make_prompt(200, seed=4)
    before = cluster.received()
    reply = cluster.decode.complete(prompt, transfer=cluster.prefilled(name, prompt))
    assert_same_but_rounding([completion(reply)], [completion(cluster.prefill[name].complete(prompt))])
    cluster.decode.wait_empty()
    pulled = [(now - was) / (BLOCK * ROW_BYTES) for now, was in zip(cluster.received(), before, strict=True)]
    assert pulled == [4, 4], "1230 tokens are 20 blocks, 16 of them are in the host prefix cache"


@pytest.mark.slow
def test_prompts_are_read_past_parts_that_are_stuck(cluster: Cluster) -> None:
    """Both prefill servers are stopped while they are read, so a third prompt goes straight into the host pool."""
    names, num_tokens = ["layers", "blocks", "layers"], 700
    for seed, name in enumerate(LAYOUTS):  # both are connected, so each of them gets one of the two parts
        cluster.decode.complete(first := make_prompt(100, seed=20 + seed), 1, cluster.prefilled(name, first))
    prompts = [make_prompt(num_tokens, seed=30 + index) for index in range(3)]
    expected = [
        completion(cluster.prefill[name].complete(prompt, 12)) for name, prompt in zip(names, prompts, strict=True)
    ]
    transfers, before = list(map(cluster.prefilled, names, prompts)), cluster.received()
    stopped = [server.process for server in cluster.prefill.values()]
    try:
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(len(prompts)) as executor:
            replies = executor.map(cluster.decode.complete, prompts, [12] * 3, transfers)
            warning, log = "prompts that find no part of it are read without it", cluster.decode.process.log_path
            wait_for(lambda: warning in log.read_text())
            for process in stopped:
                process.send_signal(signal.SIGCONT)
            assert_same_but_rounding(list(map(completion, replies)), expected)
    finally:
        for process in stopped:
            process.send_signal(signal.SIGCONT)
    cluster.decode.wait_empty()
    to_host, through_buffer = (now - was for now, was in zip(cluster.received(), before, strict=True))
    num_blocks = -(-num_tokens // BLOCK)
    assert [to_host, through_buffer] == [count * num_blocks * BLOCK * ROW_BYTES for count in (3, 2)]

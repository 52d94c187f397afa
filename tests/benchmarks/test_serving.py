"""The benchmarks under load without engines: options, connectors, gauges, conversations."""

from __future__ import annotations

import asyncio
import random
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import typer

from benchmarks.full_depth import System
from benchmarks.pd_load import decode_connector, span
from benchmarks.serving import Device, Gauges, Sizes, make_model
from benchmarks.turns import Shape, connector, converse, percentiles
from tools.harness.openai_client import Completion

SIZES = Sizes(Device.gpu, 16, 8, 1024, 40_000, 32, 2.5, 12.0, 4096, 0.87)


def test_lengths_are_a_range() -> None:
    assert span("4096:32768") == (4096, 32768)
    assert span("300") == (300, 300)
    with pytest.raises(typer.BadParameter, match="got '4K:8K', expected <shortest>:<longest>"):
        span("4K:8K")


def test_decode_engines_pull_from_the_prefill_engine() -> None:
    assert decode_connector(System.full, SIZES)["kv_connector"] == "NixlConnector"
    ours = decode_connector(System.ours, SIZES)
    assert (ours["kv_connector"], ours["kv_role"]) == ("HiSparseHostConnector", "kv_consumer")
    native = decode_connector(System.vllm_native, SIZES)["kv_connector_extra_config"]["connectors"]
    assert [each["kv_connector"] for each in native] == ["HiSparseConnector", "NixlConnector"]
    assert native[0]["kv_connector_extra_config"] == {"host_pool_gib": 12.0}


def test_each_system_has_the_same_host_memory() -> None:
    options = {system: connector(system, SIZES)["kv_connector_extra_config"] for system in System}
    assert options[System.ours]["host_pool_gib"] == options[System.vllm_native]["host_pool_gib"] == 12.0
    assert options[System.full]["cpu_bytes_to_use"] == 12 * 2**30


def test_the_tokenizer_of_a_model_gives_back_the_ids_of_its_words(tmp_path: Path) -> None:
    """The load generator makes a text of random ids, and the server must get as many tokens as it was to get."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(make_model(tmp_path, SIZES)))
    ids = [*range(3, 3000), 129279]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    assert (tokenizer.vocab_size, tokenizer.all_special_ids) == (129280, [0, 1, 2])


class Answers(BaseHTTPRequestHandler):
    """A server whose gauge falls and whose counter grows with every look at its metrics."""

    looks = 0

    def do_GET(self) -> None:
        type(self).looks += 1
        lines = ["# TYPE vllm:running gauge", f"vllm:running {100 - self.looks}"]
        lines += ["# TYPE vllm:ended counter", f"vllm:ended_total {10 * self.looks}", ""]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\n".join(lines).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_gauges_keep_the_largest_value_and_the_growth() -> None:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with Gauges(f"http://127.0.0.1:{server.server_port}") as gauges:
            pass
        assert gauges.peak("running") == 98  # the first look is before the block
        assert gauges.growth("ended_total") == 10
        assert gauges.peak("other") is gauges.growth("other") is None
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Client:
    """Answers with tokens of its own, and keeps the prompts."""

    def __init__(self):
        self.prompts: list[list[int]] = []

    async def complete(self, url: str, tokens: list[int], max_tokens: int) -> Completion:
        self.prompts.append(list(tokens))
        return Completion(token_ids=[len(self.prompts)] * max_tokens)


def test_a_turn_goes_on_from_the_answer_before_it() -> None:
    client, shape = Client(), Shape(first=50, question=7, answer=3, turns=3)
    answers = asyncio.run(converse(client, "url", shape, seed=4))
    first, second, third = client.prompts
    assert first == random.Random(4).choices(range(3, 500), k=50)
    assert second[:53] == [*first, 1, 1, 1] and len(second) == 60
    assert third[:63] == [*second, 2, 2, 2] and len(third) == 70
    assert len(answers) == 3 and shape.longest() == 73


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles("ttft", [0.1, 0.2, 0.3]) == {"ttft_ms_p50": 200.0, "ttft_ms_p99": pytest.approx(298.0)}

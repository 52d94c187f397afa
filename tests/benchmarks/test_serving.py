"""The benchmarks under load without engines: options, connectors, gauges, conversations."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import typer
from servers import wait_for
from typer.testing import CliRunner

from benchmarks import pd_load, turns
from benchmarks.full_depth import System
from benchmarks.pd_load import (
    Breaker,
    Fault,
    answers,
    decode_connector,
    left,
    make_router,
    measured,
    span,
    transfer_speed,
)
from benchmarks.serving import (
    Attempts,
    Device,
    Gauges,
    Sizes,
    log_directory,
    make_model,
    server,
    ucx_variables,
    wait_healthy,
)
from benchmarks.turns import Shape, connector, converse, percentiles
from tools.harness.openai_client import Completion
from tools.harness.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

OUR_BYTES = ["hisparse_transfer_bytes_to_host_total", "hisparse_transfer_bytes_to_device_total"]
TURN_COLUMNS = "tokens_per_s", "first_ttft_ms_p50", "ttft_ms_p50", "tpot_ms_p50", "turn_ms_p50", "prefix_hit_rate"
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
    assert [each["kv_connector"] for each in native] == ["NixlConnector", "HiSparseConnector"]  # as vLLM documents it
    assert native[1]["kv_connector_extra_config"] == {"host_pool_gib": 12.0}


@pytest.mark.parametrize(
    ("system", "seconds", "counters"),
    [
        (System.ours, "hisparse_transfer_time_seconds", OUR_BYTES),
        (System.full, "nixl_xfer_time_seconds", ["nixl_bytes_transferred_sum"]),
        (System.vllm_native, "nixl_xfer_time_seconds", ["nixl_bytes_transferred_sum"]),
    ],
)
def test_time_and_speed_of_transfers(system: System, seconds: str, counters: list[str]) -> None:
    """Only the case's own count, by the system's metrics."""
    before = {f"vllm:{name}": 5e9 for name in counters} | {f"vllm:{seconds}_sum": 7.5, f"vllm:{seconds}_count": 3.0}
    latest = {name: value + 1.25e9 for name, value in before.items()}
    latest |= {f"vllm:{seconds}_sum": 8.0, f"vllm:{seconds}_count": 10.0}
    gauges = Gauges("url", before=before, latest=latest)
    speed = 1.25 * len(counters) / 0.5
    assert transfer_speed(system, gauges) == {"transfer_ms_mean": 71.43, "transfer_gb_per_s": speed}
    assert gauges.mean_ms(seconds.removesuffix("_seconds")) == 71.43
    nothing = dict.fromkeys(("transfer_ms_mean", "transfer_gb_per_s"))
    assert transfer_speed(system, Gauges("url", before=before, latest=before)) == nothing
    assert transfer_speed(system, Gauges("url")) == transfer_speed(system, None) == nothing


def test_each_system_has_the_same_host_memory() -> None:
    options = {system: connector(system, SIZES)["kv_connector_extra_config"] for system in System}
    assert options[System.ours]["host_pool_gib"] == options[System.vllm_native]["host_pool_gib"] == 12.0
    assert options[System.full] == {"cpu_bytes_to_use": 12 * 2**30, "offload_prompt_only": False}


@pytest.mark.parametrize(("visible", "expected"), [(None, "1"), ("2,3", "3"), ("GPU-a,GPU-b,", "GPU-b")])
def test_a_server_takes_a_gpu_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, expected: str
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    process, _ = server("decode", tmp_path, SIZES, tmp_path, 1, None, [])
    assert process.env["CUDA_VISIBLE_DEVICES"] == expected


def test_a_server_on_a_gpu_that_this_process_may_not_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(typer.BadParameter, match="got CUDA_VISIBLE_DEVICES=2, expected 2 GPUs or more"):
        server("decode", tmp_path, SIZES, tmp_path, 1, None, [])


def test_ucx_goes_through_shared_memory_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("UCX_RCACHE_MAX_UNRELEASED", raising=False)  # vLLM sets it when it is imported
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("UCX_RMA_PPLN_ENABLE", "n")
    monkeypatch.setenv("UCX_TLS", "rc")
    expected = {"UCX_RMA_PPLN_ENABLE": "n", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "UCX_TLS": "rc"}
    assert ucx_variables() == expected
    env = server("decode", tmp_path, SIZES, tmp_path, 0, None, [])[0].env
    assert {name: env.get(name) for name in expected} == expected


def test_logs_are_where_they_were_asked_for_while_a_run_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert log_directory(stack, tmp_path / "logs") == tmp_path / "logs"
        own = log_directory(stack, None)
        assert (tmp_path / "logs").is_dir() and own.is_dir()
    assert (tmp_path / "logs").is_dir() and not own.exists()


@pytest.mark.long
def test_the_tokenizer_of_a_model_gives_back_the_ids_of_its_words(tmp_path: Path) -> None:
    """The load generator makes a text of random ids, and the server must get as many tokens as it was to get."""
    from transformers import AutoTokenizer
    from vllm.tokenizers.hf import get_cached_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(make_model(tmp_path, SIZES)))
    ids = [*range(3, 3000), 129279]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    assert (tokenizer.vocab_size, tokenizer.all_special_ids) == (129280, [0, 1, 2])
    text = tokenizer.decode(range(100_000, 129_280))
    assert len(text) < 29_280 * get_cached_tokenizer(tokenizer).max_chars_per_token  # else the server refuses it


class Answers(BaseHTTPRequestHandler):
    """A server whose gauge falls and whose counter grows with every look at its metrics."""

    looks = 0

    def do_GET(self) -> None:
        type(self).looks += 1
        lines = ["# TYPE vllm:running gauge", f"vllm:running {100 - self.looks}"]
        lines += ["# TYPE vllm:ended counter", f"vllm:ended_total {10 * self.looks}"]
        lines += ["# TYPE vllm:wait_seconds histogram", 'vllm:wait_seconds_bucket{le="+Inf"} 1']
        lines += [f"vllm:wait_seconds_count {4 * self.looks}", f"vllm:wait_seconds_sum {self.looks}", ""]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\n".join(lines).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.long
def test_gauges_keep_the_largest_value_and_the_growth() -> None:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with Gauges(f"http://127.0.0.1:{server.server_port}") as gauges:
            pass
        assert gauges.peak("running") == 98  # the first look is before the block
        assert gauges.growth("ended_total") == 10
        assert gauges.mean_ms("wait") == 250  # a second more of four requests more
        assert gauges.peak("other") is gauges.growth("other") is gauges.mean_ms("other") is None
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


@pytest.mark.long
def test_before_a_case_there_are_short_conversations_with_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time does not count, and the first turn's not as a turn's."""
    shape, prompts, pauses = Shape(first=5000, question=7, answer=30, turns=9), [], [0.2, 0.01]

    async def converse(_client: Any, _url: str, shape: Shape, seed: int) -> list[Completion]:
        prompts.append((shape, seed))
        await asyncio.sleep(pauses[len(prompts) > 3])
        answer = Completion(token_ids=[1] * shape.answer, first_token_s=0.1, total_s=0.2)
        return [replace(answer, total_s=9.0), *[answer] * (shape.turns - 1)]

    gauges = SimpleNamespace(peak=lambda _: 0, growth=lambda _: 0, mean_ms=lambda _: 0.0)
    monkeypatch.setattr(turns, "Gauges", lambda _url: nullcontext(gauges))
    monkeypatch.setattr(turns, "converse", converse)
    row = turns.measure(turns.System.full, "url", shape, 3, 60)
    assert [each for each, _ in prompts] == [Shape(4000, 7, 24, 3)] * 3 + [shape] * 3
    assert len({seed for _, seed in prompts}) == 6
    assert row["tokens_per_s"] > 3 * 9 * 30 / 0.2
    assert row["turn_ms_p50"] == row["turn_ms_p99"] == 200


def test_a_case_that_takes_too_long_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async def converse(_client: Any, _url: str, shape: Shape, _seed: int) -> list[Completion]:
        await asyncio.sleep(60 * (shape.first > turns.WARM_UP_TOKENS))
        return []

    growth = {"generation_tokens_total": 5000, "prompt_tokens_total": 40_000, "prefix_cache_hits_total": 7}.get
    monkeypatch.setattr(turns, "Gauges", lambda _url: nullcontext(SimpleNamespace(growth=growth)))
    monkeypatch.setattr(turns, "converse", converse)
    expected = "not finished after 0.1 s, expected 810 tokens, got generation_tokens 5000, prompt_tokens 40000, "
    expected += "prefix_cache_hits 7, num_preemptions None"
    with pytest.raises(TimeoutError, match=expected):
        turns.measure(turns.System.full, "url", Shape(first=5000, question=7, answer=30, turns=9), 3, 0.1)


def test_a_warm_up_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def converse(*_: Any) -> list[Completion]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(turns, "converse", converse)
    expected = r"warm-up of 3 conversations, 3 turns each: not finished after 0.1 s. Raise --case-timeout-s, or lower "
    with pytest.raises(TimeoutError, match=expected):
        turns.measure(turns.System.full, "url", Shape(first=5000, question=7, answer=30, turns=9), 3, 0.1)


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles("ttft", [0.1, 0.2, 0.3]) == {"ttft_ms_p50": 200.0, "ttft_ms_p99": pytest.approx(298.0)}


ENGINE = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Engine(BaseHTTPRequestHandler):
    '''Finishes two requests between two looks at its metrics.'''

    looks = 0

    def do_GET(self):
        type(self).looks += self.path == "/metrics"
        lines = ["# TYPE vllm:request_success counter", f"vllm:request_success_total {2 * self.looks}"]
        lines += ["# TYPE vllm:num_requests_running gauge", "vllm:num_requests_running 3"]
        lines += ["# TYPE vllm:num_requests_waiting gauge", "vllm:num_requests_waiting 2", ""]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\\n".join(lines).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"choices": [{"index": 0, "text": "a"}], "kv_transfer_params": {"remote_engine_id": "e"}}')

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
"""


class Pair:
    """A decode engine that only counts, and comes back if told so."""

    def __init__(self, directory: Path, comes_back: bool = True):
        (port,) = free_ports(1)
        self.url, self._comes_back = f"http://{LOOPBACK}:{port}", comes_back
        command = [sys.executable, "-c", ENGINE, str(port)]
        self.engine = EngineProcess("decode", command, directory / "decode.log", health_url=f"{self.url}/health")

    def restart(self) -> None:
        if not self._comes_back:
            raise RuntimeError("decode is not healthy")
        self.engine.start()
        wait_healthy(self.engine, 30)


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    with ProcessGroup() as group:
        yield group


def started(pair: Pair, group: ProcessGroup) -> Pair:
    wait_healthy(group.start(pair.engine), 30)
    return pair


@pytest.mark.long
@pytest.mark.parametrize(("fault", "exit_code"), [(Fault.kill, -signal.SIGKILL), (Fault.drain, -signal.SIGTERM)])
def test_an_engine_ends_in_the_middle_and_comes_back(
    tmp_path: Path, group: ProcessGroup, fault: Fault, exit_code: int
) -> None:
    pair = started(Pair(tmp_path), group)
    first = pair.engine.pid
    breaker = Breaker(pair, fault, 10)
    wait_for(lambda: pair.engine.pid != first)
    outcome = breaker.wait()
    assert (outcome["in_flight_at_fault"], outcome["exit_code"]) == (5, exit_code)
    assert 0 <= outcome["ended_after_s"] <= outcome["back_after_s"]
    assert pair.engine.pid != first and pair.engine.is_healthy()


@pytest.mark.long
def test_an_engine_that_does_not_come_back_ends_the_run(tmp_path: Path, group: ProcessGroup) -> None:
    pair = started(Pair(tmp_path, comes_back=False), group)
    breaker = Breaker(pair, Fault.kill, 10)
    wait_for(pair.engine.is_gone)
    with pytest.raises(RuntimeError, match="decode is not healthy"):
        measured(Attempts(), "ours, 8 clients", breaker.wait, Fault.kill)


@pytest.mark.long
def test_a_fault_that_came_too_late_ends_the_run(tmp_path: Path, group: ProcessGroup) -> None:
    breaker = Breaker(started(Pair(tmp_path), group), Fault.kill, 10_000)
    with pytest.raises(RuntimeError, match="requests finished under load, expected 4002 before a fault"):
        measured(Attempts(), "ours, 8 clients", breaker.wait, Fault.kill)


def test_without_a_fault_other_cases_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict:
        raise RuntimeError("a reason")

    attempts = Attempts()
    assert measured(attempts, "ours, 8 clients", fail, None) is None
    assert "ours, 8 clients: RuntimeError: a reason" in capsys.readouterr().err
    assert measured(attempts, "full, 8 clients", lambda: {"tokens_per_s": 1}, None) == {"tokens_per_s": 1}
    with pytest.raises(typer.Exit) as exit_info:
        attempts.end()
    assert exit_info.value.exit_code == 1
    assert capsys.readouterr().err == "Failed: ours, 8 clients\n"
    Attempts().end()


class Mortal(EngineProcess):
    """Says one word, and then nothing until it is killed."""

    def __init__(self, name: str, directory: Path):
        program = "import time; print('the last word'); time.sleep(60)"
        super().__init__(name, [sys.executable, "-c", program], directory / f"{name}.log")

    def is_healthy(self) -> bool:
        return super().is_healthy() and bool(self.log_tail())

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        wait_for(self.is_gone)


@pytest.mark.long
@pytest.mark.parametrize("dies_in_a_case", [False, True])
def test_an_engine_that_dies_is_named_with_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies_in_a_case: bool
) -> None:
    """The run ends with an exit code, and the row of the case before is kept."""
    engine = Mortal("full", tmp_path)

    def measure(_system: System, _url: str, _shape: Shape, concurrency: int, _timeout_s: float) -> dict[str, Any]:
        if dies_in_a_case == (concurrency == 32):
            engine.kill()
        if concurrency == 32:
            raise requests.ConnectionError("refused")
        return dict.fromkeys(TURN_COLUMNS, 1)

    monkeypatch.setattr(turns, "server", lambda *_: (engine, "url"))
    monkeypatch.setattr(turns, "measure", measure)
    output = tmp_path / "turns.json"
    args = ["--device", "cpu", "--system", "full", "--concurrency", "8", "--concurrency", "32"]
    result = CliRunner().invoke(turns.app, [*args, "--logs", str(tmp_path), "--output", str(output)])
    assert result.exit_code == 1, result.output
    message = "full, 32 conversations: RuntimeError: full has ended with exit code -9; the end of its log:\n"
    assert f"{message}the last word\n" in result.output
    assert "Failed: full, 32 conversations\n" in result.output
    assert [row["concurrency"] for row in json.loads(output.read_text())["rows"]] == [8]


@pytest.mark.long
@pytest.mark.parametrize("name", ["prefill", "decode-full", "router-full"])
def test_every_process_of_a_pair_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    processes = {each: Mortal(each, tmp_path) for each in ("prefill", "decode-full", "router-full")}
    prefill, engine, router = processes.values()

    def pair(group: ProcessGroup, system: System, *_: object) -> SimpleNamespace:
        for process in (engine, router):
            wait_healthy(group.start(process), 30)
        return SimpleNamespace(system=system, engine=engine, router=router, wait=lambda: None)

    def measure(*_: object) -> dict[str, Any]:
        processes[name].kill()
        return dict.fromkeys(("tokens_per_s", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99", "running_max", "failed"), 1)

    monkeypatch.setattr(pd_load, "server", lambda *_: (prefill, "url"))
    monkeypatch.setattr(pd_load, "Pair", pair)
    monkeypatch.setattr(pd_load, "measure", measure)
    output = tmp_path / "pd_load.json"
    args = ["--device", "cpu", "--system", "full", "--concurrency", "8", "--concurrency", "16"]
    result = CliRunner().invoke(pd_load.app, [*args, "--logs", str(tmp_path), "--output", str(output)])
    assert result.exit_code == 1, result.output
    message = f"full, 16 clients: RuntimeError: {name} has ended with exit code -9; the end of its log:\nthe last word"
    assert message in result.output
    assert [row["concurrency"] for row in json.loads(output.read_text())["rows"]] == [8]


@pytest.mark.parametrize(("fails", "exit_code"), [(True, 1), (False, 0)])
def test_a_run_whose_case_fails_ends_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool, exit_code: int
) -> None:
    """The rows of other cases are kept."""

    def measure(_system: System, _url: str, _shape: Shape, concurrency: int, timeout_s: float) -> dict[str, Any]:
        if fails and concurrency == 32:
            raise TimeoutError(f"not finished after {timeout_s:g} s")
        return dict.fromkeys(TURN_COLUMNS, 1)

    engine = EngineProcess("full", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "full.log")
    monkeypatch.setattr(engine, "is_healthy", lambda: True)
    monkeypatch.setattr(turns, "server", lambda *_: (engine, "url"))
    monkeypatch.setattr(turns, "measure", measure)
    args = ["--device", "cpu", "--system", "full", "--concurrency", "32", "--concurrency", "8", "--case-timeout-s", "9"]
    output = tmp_path / "turns.json"
    result = CliRunner().invoke(turns.app, [*args, "--logs", str(tmp_path), "--output", str(output)])
    assert result.exit_code == exit_code, result.output
    assert ("full, 32 conversations: TimeoutError: not finished after 9 s" in result.output) == fails
    rows = json.loads(output.read_text())["rows"]
    assert [row["concurrency"] for row in rows] == ([8] if fails else [32, 8])


def test_a_run_whose_engine_does_not_start_ends_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other engine is measured."""

    def pair(_group: ProcessGroup, system: System, *_: object) -> SimpleNamespace:
        def wait() -> None:
            if system == System.vllm_native:
                raise RuntimeError("decode-vllm_native is not healthy")

        engine = SimpleNamespace(
            name=f"decode-{system}", is_healthy=lambda: system == System.full, exit_code=1, log_tail=list
        )
        return SimpleNamespace(system=system, engine=engine, router=engine, wait=wait)

    columns = ("tokens_per_s", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99", "running_max", "failed")
    prefill = EngineProcess("prefill", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "prefill.log")
    monkeypatch.setattr(pd_load, "server", lambda *_: (prefill, "url"))
    monkeypatch.setattr(pd_load, "wait_healthy", lambda *_: None)
    monkeypatch.setattr(pd_load, "Pair", pair)
    monkeypatch.setattr(pd_load, "measure", lambda *_: dict.fromkeys(columns, 1))
    args = ["--device", "cpu", "--system", "vllm_native", "--system", "full", "--concurrency", "8"]
    output = tmp_path / "pd_load.json"
    result = CliRunner().invoke(pd_load.app, [*args, "--logs", str(tmp_path), "--output", str(output)])
    assert result.exit_code == 1, result.output
    assert "vllm_native, 8 clients: RuntimeError: decode-vllm_native has ended with exit code 1" in result.output
    assert "Failed: start of vllm_native; vllm_native, 8 clients\n" in result.output
    assert [row["system"] for row in json.loads(output.read_text())["rows"]] == ["full"]


@pytest.mark.slow
@pytest.mark.e2e
def test_the_router_leaves_out_a_dead_engine_and_takes_it_back(tmp_path: Path, group: ProcessGroup) -> None:
    pytest.importorskip("vllm_router", reason="vllm-router is not installed")
    prefill, decode = (started(Pair(tmp_path / name), group) for name in ("prefill", "decode"))
    router, url = make_router("router", tmp_path, prefill.url, decode.url)
    wait_healthy(group.start(router), 60)
    assert answers(url)
    decode.engine.send_signal(signal.SIGKILL)
    body = {"model": "tiny", "prompt": [5, 6, 7]}
    wait_for(lambda: "No available workers" in requests.post(f"{url}/v1/completions", json=body, timeout=20).text)
    decode.restart()
    assert answers(url)


@pytest.mark.long
def test_servers_that_are_gone_cost_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.pd_load.SETTLE_TIMEOUT_S", 0.5)
    url = f"http://{LOOPBACK}:{free_ports(1)[0]}"
    assert not answers(url)
    assert left(url) is None

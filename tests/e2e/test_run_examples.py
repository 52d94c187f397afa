"""Examples that need no GPU, as a user runs them: real engines of tiny models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from servers import START_TIMEOUT_S, Server, wait_for

from tools.harness.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python`, `vllm-router`


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Runs a script with DEVICE=cpu until its server is healthy on the port of the environment."""
    with ProcessGroup() as group:

        def run(script: str, port: int, **environment: str) -> EngineProcess:
            env = {"DEVICE": "cpu", "PATH": PROGRAMS, "PORT": str(port), "VLLM_LOGGING_LEVEL": "INFO", **environment}
            url = f"http://{LOOPBACK}:{port}/health"
            process = EngineProcess(script, [str(EXAMPLES / script)], tmp_path / "log", env=env, health_url=url)
            group.start(process)
            group.wait_healthy(START_TIMEOUT_S)
            process.calm_polling_threads()
            return process

        yield run


def complete(port: int, num_tokens: int) -> str:
    """The text that follows a prompt of so many words."""
    body = {"prompt": "row " * num_tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = requests.post(f"http://{LOOPBACK}:{port}/v1/completions", json=body, timeout=180)
    assert reply.ok, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 8
    return reply.json()["choices"][0]["text"]


def test_single_instance_under_load(start) -> None:
    """The load generator's requests are served from hot buffers."""
    (port,) = free_ports(1)
    process = start("single_instance.sh", port)
    server = Server(process, f"http://{LOOPBACK}:{port}")
    environment = {**os.environ, "DEVICE": "cpu", "PATH": PROGRAMS, "PORT": str(port)}
    command = [EXAMPLES / "benchmark.sh", "--num-prompts", "3"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Successful requests:                     3" in result.stdout
    assert server.metric("hisparse_cache_hits") > 0
    assert server.metric("hisparse_device_to_host_bytes") > 0


def test_prefill_decode(start) -> None:
    """A prompt's KV comes from the prefill instance, and a signal ends all three processes."""
    port, prefill, decode, *ports = free_ports(5)
    names = ("PREFILL_SIDE_CHANNEL", "PROMETHEUS_PORT")
    environment = {name: str(free) for name, free in zip(names, ports, strict=True)}
    process = start("prefill_decode.sh", port, PREFILL_PORT=str(prefill), DECODE_PORT=str(decode), **environment)
    text = complete(port, 700)
    server = Server(process, f"http://{LOOPBACK}:{decode}")
    wait_for(lambda: server.metric("hisparse_transfers") == 1)
    assert server.metric("hisparse_transfer_bytes_to_host") > 0
    assert complete(prefill, 700) == text, "stock vLLM with full KV"
    os.kill(process.pid, signal.SIGTERM)
    wait_for(process.is_gone)


def test_own_algorithm(start, tmp_path: Path) -> None:
    """Hot buffers of a dense model hold what the algorithm of the folder selects."""
    (port,) = free_ports(1)
    process = start("own_algorithm.sh", port)
    assert "HiSparse: mean_page" in process.log_path.read_text()
    complete(port, 700)
    server = Server(process, f"http://{LOOPBACK}:{port}")
    wait_for(lambda: server.metric("hisparse_cache_hits") > 0)

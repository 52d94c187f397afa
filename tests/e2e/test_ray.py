"""`serve run deploy/ray/serve-cpu.yaml` on a Ray cluster of this machine: one prefill and two decode replicas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml
from conftest import MODELS, assert_same_but_rounding, make_prompt
from servers import Server, completion, tokens_of
from test_cluster import complete_or_error, is_error, wait_for

from vllm_hisparse.cli.processes import (
    LOOPBACK,
    EngineProcess,
    ProcessGroup,
    calm_polling_threads,
    free_ports,
)

pytest.importorskip("ray.serve.llm", reason="Ray is not installed: pip install 'vllm-hisparse[ray]'")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif("RAY_TESTS" not in os.environ, reason="takes many minutes on two cores: set RAY_TESTS=1"),
]

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "ray" / "serve-cpu.yaml"
SERVE = str(Path(sys.executable).parent / "serve")
START_TIMEOUT_S = 300
NUM_TOKENS = 60
LENGTHS = [300, 901, 1500]
NUM_ENGINES, STARTED = 3, b"Started vLLM engine."
DECODE = "ray::ServeReplica:hisparse:Decode:tiny"
CLIENT_ENV = {**os.environ, "RAY_AUTH_MODE": "token"}  # the cluster that `serve run` starts wants its token


@dataclass
class RayApp(Server):
    """The running application and its configuration file."""

    config: Path

    def replicas(self, title: str) -> list[psutil.Process]:
        """Actor processes of a role."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if cmdline(child).startswith(title)]

    def calm(self) -> None:
        """Lower the priority of NIXL's polling threads, which would take half of a small machine."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for group_id in {os.getpgid(child.pid) for child in children if "EngineCore" in cmdline(child)}:
            calm_polling_threads(group_id)

    def stream(
        self, prompt: list[int], max_tokens: int, on_token: Callable[[], Any] = lambda: None
    ) -> tuple[list[int], str]:
        """Token ids of a streamed completion, and the error that ended it ("" for none)."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        tokens: list[int] = []
        try:
            with requests.post(f"{self.url}/v1/completions", json=body, stream=True, timeout=180) as reply:
                for line in reply.iter_lines():
                    data = line.decode().removeprefix("data: ")
                    if data == "[DONE]":
                        return tokens, ""
                    event = json.loads(data) if data else {"choices": []}
                    if "error" in event:
                        return tokens, str(event["error"])
                    on_token()
                    tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
        except requests.RequestException as error:
            return tokens, str(error)
        return tokens, "the stream ended without [DONE]"


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def expected(reference: Callable) -> list[dict[str, Any]]:
    """Completions of the full-KV engine, which would be slow beside three others."""
    return reference(LENGTHS, 12)


@pytest.fixture(scope="module")
def app(expected: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayApp]:
    directory = tmp_path_factory.mktemp("ray")
    config = yaml.safe_load(CONFIG.read_text())
    (port,) = free_ports(1)
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["model_source"] = str(MODELS / "dsv32")
    path = directory / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    url = f"http://{LOOPBACK}:{port}"
    command = [SERVE, "run", str(path)]
    # Every replica's lines in the log; no niceness, which starves the engines beside other work.
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_worker_niceness": "0"}
    process = EngineProcess("serve", command, directory / "serve.log", env=env)
    with ProcessGroup(grace_s=40) as group:
        group.start(process)
        # NOTE: the ingress answers before the engines are loaded, and NIXL's polling threads starve `serve status`.
        wait_for(lambda: group.check() or process.log_path.read_bytes().count(STARTED) == NUM_ENGINES, START_TIMEOUT_S)
        ray_app = RayApp(process, url, path)
        ray_app.calm()
        yield ray_app


def test_tokens_of_the_full_kv_engine(app: RayApp, expected: list[dict[str, Any]]):
    prompts = [make_prompt(length) for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as executor:
        replies = list(executor.map(lambda prompt: app.complete(prompt, 12), prompts))
    assert_same_but_rounding(list(map(completion, replies)), expected)
    assert app.stream(prompts[0], 12) == (tokens_of(replies[0])[0], "")


def test_bad_requests_get_vllms_errors(app: RayApp):
    assert app.complete(make_prompt(5000))["error"]["code"] == 400
    reply = requests.post(f"{app.url}/v1/completions", json={"model": "other", "prompt": "a"}, timeout=60)
    assert reply.status_code == 404


def start_streams(app: RayApp, executor: ThreadPoolExecutor, prompts: list[list[int]]) -> list[Future]:
    """Streams of `NUM_TOKENS` tokens; returns once all of them have started."""
    started = [threading.Event() for _ in prompts]
    jobs = zip(prompts, started, strict=True)
    futures = [executor.submit(app.stream, prompt, NUM_TOKENS, event.set) for prompt, event in jobs]
    wait_for(lambda: all(event.is_set() for event in started), timeout_s=90)
    return futures


def test_a_decode_replica_is_killed(app: RayApp):
    """Its clients are told, the others get all their tokens, and a new replica takes its place."""
    assert len(app.replicas(DECODE)) == 2
    victim = app.replicas(DECODE)[0]
    engine = victim.children(recursive=True)
    with ThreadPoolExecutor() as executor:
        futures = start_streams(app, executor, [make_prompt(300 + index, seed=3) for index in range(4)])
        victim.kill()
        outcomes = [future.result() for future in futures]
    told = [error for _, error in outcomes if error]
    assert told and len(told) < len(outcomes), [(len(tokens), error) for tokens, error in outcomes]
    assert all(len(tokens) == NUM_TOKENS for tokens, error in outcomes if not error)
    wait_for(lambda: not any(process.is_running() for process in engine), timeout_s=60)
    wait_for(lambda: len(app.replicas(DECODE)) == 2, timeout_s=120)
    replies = [complete_or_error(app, make_prompt(60 + index, seed=4), 4) for index in range(4)]
    assert not any(map(is_error, replies))


def test_a_new_configuration_loses_no_request(app: RayApp):
    """The old decode replicas finish what they have before they go away."""
    old = app.replicas(DECODE)
    config = yaml.safe_load(app.config.read_text())
    config["applications"][0]["args"]["decode"]["replicas"] = {"min": 1, "max": 1}
    app.config.write_text(yaml.safe_dump(config))
    with ThreadPoolExecutor() as executor:
        futures = start_streams(app, executor, [make_prompt(300 + index, seed=5) for index in range(4)])
        subprocess.run([SERVE, "deploy", str(app.config)], check=True, timeout=60, capture_output=True, env=CLIENT_ENV)
        outcomes = [future.result() for future in futures]
    assert [(len(tokens), error) for tokens, error in outcomes] == [(NUM_TOKENS, "")] * 4
    wait_for(lambda: not any(process.is_running() for process in old), timeout_s=180)
    assert not is_error(complete_or_error(app, make_prompt(60, seed=6), 4))

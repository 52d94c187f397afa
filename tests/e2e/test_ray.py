"""`serve run deploy/ray/serve-cpu.yaml` on a Ray cluster of this machine: one prefill and two decode replicas.

The tests follow one cluster through its life: each one starts where the one before it stopped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
    pytest.mark.slow,
]

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "ray" / "serve-cpu.yaml"
SERVE = str(Path(sys.executable).parent / "serve")
START_TIMEOUT_S = 300
SETTLE_TIMEOUT_S = 180
END_TIMEOUT_S = 60  # an engine that starts imports vLLM before it looks after its parent
REPORT_S = 6.0  # until Ray has exported a gauge and forgotten it again
NUM_TOKENS = 60
NUM_LONG_TOKENS = 600  # well within longest_request_s
LENGTHS = [300, 901, 1500]
STARTED = re.compile(rb"pid=(\d+)\).*Started vLLM engine\.$", re.MULTILINE)  # the replica that says so
SHRINKS = b"Downscaling Deployment(name='Decode:tiny'"
DECODE, PREFILL = "ray::ServeReplica:hisparse:Decode:tiny", "ray::ServeReplica:hisparse:Prefill:tiny"
LEASE_S = 12  # kv_lease_s of the configuration
METRICS_TARGETS = Path("/tmp/ray/prom_metrics_service_discovery.json")
LOGS = Path("/tmp/ray/session_latest/logs")
CLIENT_ENV = {**os.environ, "RAY_AUTH_MODE": "token"}  # the cluster that `serve run` starts wants its token
CLUSTER_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # every replica's lines in the log
    "RAY_worker_niceness": "0",  # it starves the engines beside other work
    "RAY_metrics_report_interval_ms": "2000",  # gauges last twice as long
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}


@dataclass
class RayApp(Server):
    """The running application and its configuration file."""

    config: Path

    def replicas(self, title: str) -> list[psutil.Process]:
        """Actor processes of a role."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if cmdline(child).startswith(title)]

    def are_ready(self, title: str, count: int) -> bool:
        """Whether a role has that many replicas, and all of them have started their engines."""
        assert self.process.exit_code is None
        started = {int(pid) for pid in STARTED.findall(self.process.log_path.read_bytes())}
        replicas = {replica.pid for replica in self.replicas(title)}
        return len(replicas) == count and replicas <= started

    def wait_ready(self, num_decode: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for a prefill replica and that many decode replicas, and for the first answer; keep them calm."""
        # NOTE: the ingress answers before the engines are loaded, and NIXL's polling threads starve `serve status`.
        for title, count in ((PREFILL, 1), (DECODE, num_decode)):
            wait_for(partial(self.are_ready, title, count), timeout_s)
        self.calm()
        wait_for(lambda: not is_error(complete_or_error(self, make_prompt(60), 4)), timeout_s)

    def num_shrinks(self) -> int:
        return self.process.log_path.read_bytes().count(SHRINKS)

    def calm(self) -> None:
        """Lower the priority of NIXL's polling threads, which would take half of a small machine."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for group_id in {os.getpgid(child.pid) for child in children if "EngineCore" in cmdline(child)}:
            calm_polling_threads(group_id)

    def metric_of(self, replica: psutil.Process, name: str) -> float | None:
        """A replica's metric as Ray exports it; None before its first report, and seconds after the last of a gauge."""
        (log,) = LOGS.glob(f"python-core-worker-*_{replica.pid}.log")
        worker = log.name.removeprefix("python-core-worker-").partition("_")[0]
        targets = [address for group in json.loads(METRICS_TARGETS.read_text()) for address in group["targets"]]
        text = "\n".join(requests.get(f"http://{address}/metrics", timeout=30).text for address in targets)
        samples = re.findall(rf'^ray_vllm_{name}{{.*WorkerId="{worker}".*}} (\S+)$', text, re.MULTILINE)
        return sum(map(float, samples)) if samples else None

    def deploy(self, **decode: Any) -> None:
        """`serve deploy` with other options for the decode role."""
        config = yaml.safe_load(self.config.read_text())
        config["applications"][0]["args"]["decode"] |= decode
        self.config.write_text(yaml.safe_dump(config))
        command = [SERVE, "deploy", str(self.config)]
        subprocess.run(command, check=True, timeout=START_TIMEOUT_S, capture_output=True, env=CLIENT_ENV)


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
    process = EngineProcess("serve", [SERVE, "run", str(path)], directory / "serve.log", env=CLUSTER_ENV)
    with ProcessGroup(grace_s=40) as group:
        ray_app = RayApp(group.start(process), f"http://{LOOPBACK}:{port}", path)
        ray_app.wait_ready(num_decode=2)
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
    wait_for(lambda: all(event.is_set() for event in started), SETTLE_TIMEOUT_S)
    return futures


def engine_of(replica: psutil.Process) -> psutil.Process:
    (engine,) = [child for child in replica.children() if "EngineCore" in cmdline(child)]
    return engine


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def stir(app: RayApp) -> None:
    """Small requests, without which Ray forgets the gauges of an idle engine."""
    with ThreadPoolExecutor() as executor:
        prompts = [make_prompt(10 + index, seed=4) for index in range(4)]
        replies = list(executor.map(lambda prompt: complete_or_error(app, prompt, 4), prompts))
    assert not any(map(is_error, replies))


def wait_stirred(app: RayApp, title: str, name: str, limit: float) -> float:
    """Wait until every replica of a role has reported at most `limit`; returns the largest of these values.

    NOTE: each one in its own time: a report lasts four seconds, and asking for it can take as long on a busy machine.
    """
    replicas, values = app.replicas(title), {}
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while any(values.get(replica, limit + 1) > limit for replica in replicas):
        assert time.monotonic() < deadline, f"{name} last reported: {[values.get(replica) for replica in replicas]}"
        stir(app)
        watched_until = time.monotonic() + REPORT_S
        while time.monotonic() < watched_until:
            reported = {replica: app.metric_of(replica, name) for replica in replicas}
            values |= {
                replica: min(value, values.get(replica, value))
                for replica, value in reported.items()
                if value is not None
            }
    return max(values.values())


def test_a_decode_replica_is_killed(app: RayApp):
    """Its clients are told, the others get all their tokens; no process of it and no block for it remains."""
    victim, _ = app.replicas(DECODE)
    (prefill,) = app.replicas(PREFILL)
    processes = [victim, *victim.children(recursive=True)]
    idle_usage = wait_stirred(app, PREFILL, "kv_cache_usage_perc", 1)
    num_computed = app.metric_of(prefill, "request_success_total")
    with ThreadPoolExecutor() as executor:
        # What a stopped engine asks for is computed by the prefill replica and never fetched.
        engine_of(victim).suspend()
        futures = [executor.submit(app.stream, make_prompt(300 + index, seed=3), NUM_TOKENS) for index in range(6)]
        try:
            wait_for(lambda: app.metric_of(prefill, "request_success_total") == num_computed + 6, SETTLE_TIMEOUT_S)
        finally:
            victim.kill()
        outcomes = [future.result() for future in futures]
    told = [error for _, error in outcomes if error]
    assert told and len(told) < len(outcomes), [(len(tokens), error) for tokens, error in outcomes]
    assert all(len(tokens) == NUM_TOKENS for tokens, error in outcomes if not error)
    wait_for(lambda: all(map(is_gone, processes)), END_TIMEOUT_S)
    app.wait_ready(num_decode=2)
    wait_stirred(app, PREFILL, "kv_cache_usage_perc", idle_usage)
    assert app.metric_of(prefill, "nixl_num_kv_expired_reqs_total") > 0


def test_a_prefill_replica_is_killed(app: RayApp):
    """Decode replicas finish what they have or tell their clients, and give every block back."""
    (victim,) = app.replicas(PREFILL)
    processes = [victim, *victim.children(recursive=True)]
    with ThreadPoolExecutor() as executor:
        futures = start_streams(app, executor, [make_prompt(300 + index, seed=3) for index in range(2)])

        def is_seen_at_work() -> bool:
            if all(future.done() for future in futures[2:]):  # none yet, or all between two reports of the metric
                seeds = range(len(futures), len(futures) + 6)  # prompts that no prefix cache has
                futures.extend(executor.submit(app.stream, make_prompt(1500, seed), NUM_TOKENS) for seed in seeds)
            return (app.metric_of(victim, "num_requests_running") or 0) > 0

        wait_for(is_seen_at_work, SETTLE_TIMEOUT_S)
        victim.kill()
        outcomes = [future.result() for future in futures]
    assert all(error or len(tokens) == NUM_TOKENS for tokens, error in outcomes)
    assert not any(error for _, error in outcomes[:2]), "these had their KV"
    wait_for(lambda: all(map(is_gone, processes)), END_TIMEOUT_S)
    app.wait_ready(num_decode=2)
    wait_stirred(app, DECODE, "hisparse_host_blocks_used", 0)
    wait_stirred(app, DECODE, "kv_cache_usage_perc", 0)


def test_a_new_configuration_loses_no_request(app: RayApp):
    """The old replicas finish what they have before they go away."""
    old = [*app.replicas(DECODE), *app.replicas(PREFILL)]
    scaling = {"min": 1, "max": 2, "target_ongoing_requests": 2, "upscale_delay_s": 1, "downscale_delay_s": 15}
    with ThreadPoolExecutor() as executor:
        futures = start_streams(app, executor, [make_prompt(300 + index, seed=5) for index in range(4)])
        app.deploy(replicas=scaling)
        outcomes = [future.result() for future in futures]
    assert [(len(tokens), error) for tokens, error in outcomes] == [(NUM_TOKENS, "")] * 4
    wait_for(lambda: all(map(is_gone, old)), START_TIMEOUT_S)
    app.wait_ready(num_decode=1)


def test_decode_scales_with_the_load(app: RayApp):
    """Under load a second decode replica starts; after it one goes away, once its requests are finished."""
    assert len(app.replicas(DECODE)) == 1
    enough, shrinks = threading.Event(), threading.Event()

    def client(length: int, num_tokens: int, end: threading.Event) -> list[tuple[int, str]]:
        """One stream after the other; the last one is under way when the end is announced."""
        outcomes = []
        while not end.is_set():
            tokens, error = app.stream(make_prompt(length, seed=6), num_tokens)
            outcomes.append((len(tokens), error))
        return outcomes

    with ThreadPoolExecutor() as executor:
        # Long answers: with short ones, requests wait for the prefill role while the new engine loads.
        many = [executor.submit(client, 300 + index, NUM_LONG_TOKENS, enough) for index in range(6)]
        try:
            app.wait_ready(num_decode=2)
            grown, num_shrinks = app.replicas(DECODE), app.num_shrinks()
        finally:
            enough.set()
        # As many as one replica is meant to have, one on each: the router prefers the idle one.
        few = [executor.submit(client, 400 + index, NUM_LONG_TOKENS, shrinks) for index in range(2)]
        try:
            wait_for(lambda: app.num_shrinks() > num_shrinks, SETTLE_TIMEOUT_S)
        finally:
            shrinks.set()
    assert {outcome for future in many for outcome in future.result()} == {(NUM_LONG_TOKENS, "")}
    assert {outcome for future in few for outcome in future.result()} == {(NUM_LONG_TOKENS, "")}
    wait_for(lambda: sum(map(is_gone, grown)) == 1, SETTLE_TIMEOUT_S)
    assert not is_error(complete_or_error(app, make_prompt(60, seed=6), 4))


def test_engines_end_with_their_replica_when_the_raylet_is_gone(app: RayApp):
    """Nobody is left to kill what a replica leaves behind: the engines notice by themselves."""
    children = psutil.Process(app.process.pid).children(recursive=True)
    (raylet,) = [child for child in children if cmdline(child).partition(" ")[0].endswith("/raylet")]
    replicas = [*app.replicas(DECODE), *app.replicas(PREFILL)]
    engines = [process for replica in replicas for process in replica.children(recursive=True)]
    raylet.kill()
    for replica in replicas:
        replica.kill()
    wait_for(lambda: all(map(is_gone, engines)), END_TIMEOUT_S)

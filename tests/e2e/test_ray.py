"""`serve run deploy/ray/serve-cpu.yaml` on a Ray cluster of this machine: one prefill and two decode replicas.

The tests follow one cluster through its life: each one starts where the one before it stopped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml
from conftest import MODELS, assert_same_but_rounding, make_prompt
from servers import REQUEST_TIMEOUT_S, Server, completion, tokens_of
from test_cluster import complete_or_error, is_error, wait_for

from tools.harness.processes import ANSI_CODE, LOOPBACK, EngineProcess, ProcessGroup, free_ports

pytest.importorskip("ray.serve.llm", reason="Ray is not installed: pip install 'vllm-hisparse[ray]'")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]

HERE = Path(__file__).parent
CONFIG = HERE.parent.parent / "deploy" / "ray" / "serve-cpu.yaml"
SERVE = str(Path(sys.executable).parent / "serve")
START_TIMEOUT_S = 600
SETTLE_TIMEOUT_S = 300
LONGEST_REQUEST_S = 300  # no replica that finishes its requests is killed
END_TIMEOUT_S = 180  # an engine that starts imports vLLM before it looks after its parent
COMMAND_TIMEOUT_S, NUM_ATTEMPTS = 300, 3
REPORT_S = 6.0  # until Ray has exported a gauge and forgotten it again
NUM_TOKENS = 60
NUM_LONG_TOKENS = 300
LENGTHS = [300, 901, 1500]
DASHBOARD = re.compile(r"View the dashboard at (http://\S+)")
ACCEPTED = "Sent deploy request successfully"
STARTED = re.compile(rb"pid=(\d+)\).*Started vLLM engine\.$", re.MULTILINE)  # the replica that says so
SHRINKS = b"Downscaling Deployment(name='Decode:tiny'"
DECODE, PREFILL = "ray::ServeReplica:hisparse:Decode:tiny", "ray::ServeReplica:hisparse:Prefill:tiny"
LEASE_S = 12  # kv_lease_s of the configuration
METRICS_TARGETS = Path("/tmp/ray/prom_metrics_service_discovery.json")
LOGS = Path("/tmp/ray/session_latest/logs")
CLUSTER_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # every replica's lines in the log
    "RAY_worker_niceness": "0",  # it starves the engines beside other work
    "RAY_metrics_report_interval_ms": "2000",  # gauges last twice as long
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}
SCALING = {"min": 1, "max": 2, "target_ongoing_requests": 3, "upscale_delay_s": 1, "downscale_delay_s": 15}


@dataclass
class RayApp(Server):
    """The running application, its configuration file, and the configuration that the cluster has accepted."""

    config: Path
    accepted: str
    stream_timeout_s = START_TIMEOUT_S  # requests wait for a role that has no replica

    def replicas(self, title: str) -> list[psutil.Process]:
        """Actor processes of a role."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if cmdline(child).startswith(title)]

    def are_ready(self, title: str, count: int) -> bool:
        """True if a role has that many replicas and all of them have started their engines."""
        assert self.process.exit_code is None, "`serve run` has ended"
        started = {int(pid) for pid in STARTED.findall(self.process.log_path.read_bytes())}
        replicas = {replica.pid for replica in self.replicas(title)}
        return len(replicas) == count and replicas <= started

    def wait_ready(self, num_decode: int) -> None:
        """Wait for a prefill replica and that many decode replicas, and for the first answer."""
        # NOTE: the ingress answers before the engines are loaded.
        for title, count in ((PREFILL, 1), (DECODE, num_decode)):
            wait_for(partial(self.are_ready, title, count), START_TIMEOUT_S)
        wait_for(lambda: not is_error(complete_or_error(self, make_prompt(60), 4)), START_TIMEOUT_S)

    def num_shrinks(self) -> int:
        return self.process.log_path.read_bytes().count(SHRINKS)

    def metric_of(self, replica: psutil.Process, name: str) -> float | None:
        """A replica's metric as Ray exports it; None before its first report, and seconds after the last of a gauge."""
        (log,) = LOGS.glob(f"python-core-worker-*_{replica.pid}.log")
        worker = log.name.removeprefix("python-core-worker-").partition("_")[0]
        targets = [address for group in json.loads(METRICS_TARGETS.read_text()) for address in group["targets"]]
        text = "\n".join(map(metrics_at, targets))
        samples = re.findall(rf'^ray_vllm_{name}{{.*WorkerId="{worker}".*}} (\S+)$', text, re.MULTILINE)
        return sum(map(float, samples)) if samples else None

    def deploy(self, **decode: Any) -> None:
        """Other options for the decode role, unless the cluster has them; returns once it has accepted them."""
        config = yaml.safe_load(self.config.read_text())
        config["applications"][0]["args"]["decode"] |= decode
        text = yaml.safe_dump(config)
        self.config.write_text(text)
        if text == self.accepted:
            return
        # NOTE: Ray's client waits for an answer without limit; the same configuration once more changes nothing.
        for attempt in range(NUM_ATTEMPTS):
            if self.command(f"deploy-{attempt}", ["deploy", str(self.config)], ACCEPTED):
                self.accepted = text
                return
        raise AssertionError(f"not accepted in {NUM_ATTEMPTS} attempts")

    def command(self, name: str, arguments: list[str], expected: str) -> bool:
        """Run `serve` until it has printed what is expected, or ends; returns whether it has printed it.

        NOTE: what it does after that, as any Python process at its end, takes long on a busy machine.
        """
        (dashboard,) = DASHBOARD.findall("\n".join(lines_of(self.process.log_path)))
        env = {"RAY_AUTH_MODE": "token", "RAY_DASHBOARD_ADDRESS": dashboard, "PYTHONFAULTHANDLER": "1"}
        log_path = self.config.with_name(f"{name}.log")
        with ProcessGroup() as group:
            command = group.start(EngineProcess(name, [SERVE, *arguments], log_path, env=env))
            try:
                wait_for(lambda: expected in log_path.read_text() or command.exit_code is not None, COMMAND_TIMEOUT_S)
            except AssertionError:
                command.send_signal(signal.SIGABRT)  # has it print where it waits
                wait_for(command.is_gone)
        return expected in log_path.read_text()

    def describe(self) -> str:
        """The state of the cluster for the message of a failed test."""
        with suppress(AssertionError, ValueError):
            self.command("status", ["status"], "\0")
        controller = [line for line in lines_of(self.process.log_path) if "ServeController" in line]
        parts = ["the controller:", *controller[-20:]]
        for path in (*sorted(self.config.parent.glob("*.log")), LOGS / "dashboard_ServeHead.log"):
            parts += [f"end of {path}:", *lines_of(path)[-20:]]
        return "\n".join(parts)


def lines_of(path: Path) -> list[str]:
    return ANSI_CODE.sub("", path.read_text(errors="replace")).splitlines() if path.exists() else []


def metrics_at(address: str) -> str:
    """Return the metrics that an address exports; nothing if it refuses the connection.

    NOTE: Ray's dashboard starts without its metrics if another process has its fixed port, but still names the address.
    """
    try:
        return requests.get(f"http://{address}/metrics", timeout=90).text
    except requests.ConnectionError:
        return ""


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def expected(reference: Callable) -> list[dict[str, Any]]:
    """Completions of the full-KV engine, which would be slow beside three others."""
    return reference(LENGTHS, 12)


def calm_plugin(directory: Path) -> str:
    """A plugin for vLLM's processes, in which it makes sleep what waits; returns the path where they find it.

    NOTE: engines that spin leave a command like `serve deploy` a fiftieth of a core: they yield it all the time.
    """
    distribution = directory / "calm_engines-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Name: calm-engines\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text("[vllm.general_plugins]\ncalm = forks:sleep_while_waiting\n")
    return os.pathsep.join((str(directory), str(HERE), os.environ.get("PYTHONPATH", "")))


@pytest.fixture(scope="module")
def app(expected: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayApp]:
    directory = tmp_path_factory.mktemp("ray")
    config = yaml.safe_load(CONFIG.read_text())
    (port,) = free_ports(1)
    config["http_options"]["port"] = port
    args = config["applications"][0]["args"]
    args |= {"model_source": str(MODELS / "dsv32"), "longest_request_s": LONGEST_REQUEST_S}
    path = directory / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    env = {**CLUSTER_ENV, "PYTHONPATH": calm_plugin(directory)}
    process = EngineProcess("serve", [SERVE, "run", str(path)], directory / "serve.log", env=env)
    with ProcessGroup(grace_s=40) as group:
        ray_app = RayApp(group.start(process), f"http://{LOOPBACK}:{port}", path, path.read_text())
        try:
            ray_app.wait_ready(num_decode=2)
        except AssertionError as error:
            error.add_note(ray_app.describe())
            raise
        yield ray_app


def test_tokens_of_the_full_kv_engine(app: RayApp, expected: list[dict[str, Any]]):
    prompts = [make_prompt(length) for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as executor:
        replies = list(executor.map(lambda prompt: app.complete(prompt, 12), prompts))
    assert_same_but_rounding(list(map(completion, replies)), expected)
    assert app.stream(prompts[0], 12) == (tokens_of(replies[0])[0], "")


def test_bad_requests_get_vllms_errors(app: RayApp):
    assert app.complete(make_prompt(5000))["error"]["code"] == 400
    body = {"model": "other", "prompt": "a"}
    reply = requests.post(f"{app.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
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
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stir(app: RayApp) -> None:
    """Small requests, without which Ray forgets the gauges of an idle engine."""
    with ThreadPoolExecutor() as executor:
        prompts = [make_prompt(10 + index, seed=4) for index in range(4)]
        replies = list(executor.map(lambda prompt: complete_or_error(app, prompt, 4), prompts))
    assert not any(map(is_error, replies)), replies


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
    app.wait_ready(num_decode=2)
    victim, _ = app.replicas(DECODE)
    (prefill,) = app.replicas(PREFILL)
    processes = [victim, *victim.children(recursive=True)]
    idle_usage = wait_stirred(app, PREFILL, "kv_cache_usage_perc", 1)

    def num_computed() -> float:
        return app.metric_of(prefill, "request_success_total") or 0

    num_before = num_computed()
    with ThreadPoolExecutor() as executor:
        # The prefill replica computes the prompts of a stopped engine, which never fetches them.
        engine_of(victim).suspend()
        futures = [executor.submit(app.stream, make_prompt(300 + index, seed=3), NUM_TOKENS) for index in range(6)]
        try:
            wait_for(lambda: num_computed() >= num_before + 6, SETTLE_TIMEOUT_S)
        finally:
            victim.kill()
        outcomes = [future.result() for future in futures]
    told = [error for _, error in outcomes if error]
    assert told and len(told) < len(outcomes), [(len(tokens), error) for tokens, error in outcomes]
    assert all(len(tokens) == NUM_TOKENS for tokens, error in outcomes if not error)
    wait_for(lambda: all(map(is_gone, processes)), END_TIMEOUT_S)
    app.wait_ready(num_decode=2)
    wait_stirred(app, PREFILL, "kv_cache_usage_perc", idle_usage)
    wait_for(lambda: (app.metric_of(prefill, "nixl_num_kv_expired_reqs_total") or 0) > 0, SETTLE_TIMEOUT_S)


def test_a_prefill_replica_is_killed(app: RayApp):
    """Decode replicas finish what they have or tell their clients, and give every block back."""
    app.wait_ready(num_decode=2)
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


def stream_until(end: threading.Event, app: RayApp, prompt: list[int], num_tokens: int) -> set[tuple[int, str]]:
    """One stream after the other, the last one under way when the end is announced; their lengths and errors."""
    outcomes = set()
    while not end.is_set():
        tokens, error = app.stream(prompt, num_tokens)
        outcomes.add((len(tokens), error))
        if error:
            break
    return outcomes


def test_a_new_configuration_loses_no_request(app: RayApp):
    """The old replicas finish what they have before they go away."""
    app.wait_ready(num_decode=2)
    old, gone = [*app.replicas(DECODE), *app.replicas(PREFILL)], threading.Event()
    with ThreadPoolExecutor() as executor:
        prompts = [make_prompt(300 + index, seed=5) for index in range(2)]
        streams = [executor.submit(stream_until, gone, app, prompt, NUM_TOKENS) for prompt in prompts]
        try:
            app.deploy(replicas=SCALING)
            wait_for(lambda: all(map(is_gone, old)), START_TIMEOUT_S)
        finally:
            gone.set()
    assert set().union(*(future.result() for future in streams)) == {(NUM_TOKENS, "")}
    app.wait_ready(num_decode=1)


def test_decode_scales_with_the_load(app: RayApp):
    """Under load a second decode replica starts; after it one goes away, once its requests are finished."""
    app.deploy(replicas=SCALING)
    app.wait_ready(num_decode=1)  # a second one, if there was load before, goes away without it
    enough, shrinks = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as executor:
        # Long answers: with short ones, requests wait for the prefill role while the new engine loads.
        prompts = [make_prompt(300 + index, seed=6) for index in range(6)]
        streams = [executor.submit(stream_until, enough, app, prompt, NUM_LONG_TOKENS) for prompt in prompts]
        try:
            app.wait_ready(num_decode=2)
            grown, num_shrinks = app.replicas(DECODE), app.num_shrinks()
        finally:
            enough.set()
        # Fewer than one replica is meant to have, one on each: the router prefers the idle one.
        prompts = [make_prompt(400 + index, seed=6) for index in range(2)]
        streams += [executor.submit(stream_until, shrinks, app, prompt, NUM_LONG_TOKENS) for prompt in prompts]
        try:
            wait_for(lambda: app.num_shrinks() > num_shrinks, SETTLE_TIMEOUT_S)
        finally:
            shrinks.set()
    assert set().union(*(future.result() for future in streams)) == {(NUM_LONG_TOKENS, "")}
    wait_for(lambda: sum(map(is_gone, grown)) == 1, SETTLE_TIMEOUT_S)
    assert not is_error(complete_or_error(app, make_prompt(60, seed=6), 4))


def test_engines_end_with_their_replica_when_the_raylet_is_gone(app: RayApp):
    """Engines end by themselves if no raylet is left to kill the processes of a replica."""
    children = psutil.Process(app.process.pid).children(recursive=True)
    (raylet,) = [child for child in children if cmdline(child).partition(" ")[0].endswith("/raylet")]
    replicas = [*app.replicas(DECODE), *app.replicas(PREFILL)]
    engines = [process for replica in replicas for process in replica.children(recursive=True)]
    assert engines
    raylet.kill()
    for replica in replicas:
        with suppress(psutil.NoSuchProcess):  # it ends with the raylet
            replica.kill()
    try:
        wait_for(lambda: all(map(is_gone, engines)), END_TIMEOUT_S)
    except AssertionError as error:
        error.add_note(f"left: {[process for process in engines if not is_gone(process)]}")
        raise

"""A prefill server and two decode servers behind the router, with the options that the chart gives it.

One decode server has a tier, the other verifies drafts.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import yaml
from conftest import MODELS, assert_same_but_rounding, make_prompt
from forks import forked
from servers import Server, completion, is_error, wait_for, wait_started
from test_pd import DecodeServer

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
LEASE_S = 12
DRAIN_S = 60  # longestRequestSeconds of the chart
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}')
METRIC = re.compile(r"\b(vllm:[a-z_]+)")


@dataclass
class Cluster:
    prefill: Server
    decodes: list[DecodeServer]
    router: Server

    @property
    def engines(self) -> list[Server]:
        return [self.prefill, *self.decodes]


def chart_router_args() -> list[str]:
    """The router's arguments in the chart's CPU rendering, without addresses and service discovery."""
    documents = yaml.safe_load_all((DEPLOY / "helm" / "rendered" / "cpu.yaml").read_text())
    (router,) = [
        doc for doc in documents if doc["kind"] == "Deployment" and doc["metadata"]["name"].endswith("-router")
    ]
    args = router["spec"]["template"]["spec"]["containers"][0]["args"]
    own = ("--host", "--port", "--prometheus", "--service-discovery", "--prefill-selector", "--decode-selector", "app.")
    return [arg for arg in args if not arg.startswith(own)]


def decode_connector(lease: dict, options: dict) -> dict:
    connector = hisparse_connector(host_pool_gib=0.25, **options, **lease)
    return {**connector, "kv_load_failure_policy": "recompute"}


def start_engine(
    group: ProcessGroup, log_dir: Path, name: str, connector: dict, core: int, args: Sequence[str] = ()
) -> Server:
    port, side_port = free_ports(2)
    args = ["--max-num-batched-tokens", "512", "--shutdown-timeout", str(DRAIN_S), *args]
    if name == "prefill":
        args += ["--no-enable-prefix-caching", "--max-num-seqs", "1"]  # it is the reference too
    process = vllm_engine(name, MODELS / "dsv32", log_dir, port, connector, side_port, [core], args)
    server = Server if name == "prefill" else DecodeServer
    return server(group.start(forked(process)), f"http://{LOOPBACK}:{port}")


def start_router(group: ProcessGroup, log_dir: Path, prefill: Server, decodes: list[Server]) -> Server:
    port, prometheus_port = free_ports(2)
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", LOOPBACK, "--port", str(port)]
    command += ["--prometheus-port", str(prometheus_port), "--worker-startup-check-interval", "1", *chart_router_args()]
    command += ["--prefill", prefill.url, *(word for decode in decodes for word in ("--decode", decode.url))]
    url = f"http://{LOOPBACK}:{port}"
    process = EngineProcess("router", command, log_dir / "router.log", health_url=f"{url}/readiness")
    return Server(group.start(process), url)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log_dir = tmp_path_factory.mktemp("logs")
    lease = {"kv_lease_duration": LEASE_S}
    with ProcessGroup() as group:
        prefill = start_engine(group, log_dir, "prefill", {**PREFILL_CONNECTOR, "kv_connector_extra_config": lease}, 0)
        # NOTE: engines without tiers do not export the metrics of tiers, which the dashboard shows.
        disk = {"type": "fs", "path": str(log_dir / "tier"), "quota_gib": 0.1}
        tiered, drafting = {"device_buffer_size": 320, "tiers": [disk]}, {"device_buffer_size": 768}
        decodes = [
            start_engine(group, log_dir, "tiered", decode_connector(lease, tiered), 1),
            start_engine(group, log_dir, "drafting", decode_connector(lease, drafting), 1, DRAFTS),
        ]
        wait_started(group)
        router = start_router(group, log_dir, prefill, decodes)
        wait_started(group)
        yield Cluster(prefill, decodes, router)


def exported(server: Server) -> set[str]:
    """Names of a server's samples."""
    return set(METRIC.findall(requests.get(f"{server.url}/metrics", timeout=30).text))


def named_metrics() -> dict[str, set[str]]:
    """Metrics that the files for operators name, by file."""
    paths = [*(DEPLOY / "grafana").glob("*.*"), DEPLOY / "helm" / "rendered" / "production.yaml"]
    text = {path.name: path.read_text().replace("\\n", " ") for path in paths if path.name != "prometheus.yaml"}
    return {name: set(METRIC.findall(content)) for name, content in text.items()}


def test_dashboard_and_alerts_name_exported_metrics(cluster: Cluster):
    assert cluster.router.complete(make_prompt(300, seed=1))["choices"]
    known = set().union(*(exported(server) for server in cluster.engines))
    named = named_metrics()
    assert all(named.values()) and len(named) == 3
    for name, metrics in named.items():
        assert metrics - known == set(), f"{name} names metrics that no engine exports"


def test_router_probes_of_the_chart(cluster: Cluster):
    for path in ("readiness", "liveness", "health"):
        assert requests.get(f"{cluster.router.url}/{path}", timeout=10).status_code == 200


def complete_all(server: Server, prompts: list[list[int]], max_tokens: int) -> list[dict]:
    with ThreadPoolExecutor(len(prompts)) as executor:
        return list(executor.map(lambda prompt: server.complete(prompt, max_tokens), prompts))


@pytest.mark.slow
def test_requests_spread_over_the_decode_servers(cluster: Cluster):
    before = [decode.metric("request_success") for decode in cluster.decodes]
    prompts = [make_prompt(300 + index, seed=2) for index in range(6)]
    replies = complete_all(cluster.router, prompts, 8)
    served = [decode.metric("request_success") - old for decode, old in zip(cluster.decodes, before, strict=True)]
    assert sum(served) == len(prompts) and min(served) == len(prompts) // 2
    expected = [cluster.prefill.complete(prompt, 8) for prompt in prompts]
    assert_same_but_rounding(list(map(completion, replies)), list(map(completion, expected)))
    _, drafting = cluster.decodes
    assert drafting.metric("spec_decode_num_draft_tokens") > 0


def completions(reply: dict) -> list[dict]:
    return [completion({"choices": [choice]}) for choice in reply["choices"]]


def counted(cluster: Cluster, *names: str) -> list[float]:
    """Sums over the decode servers, once they have nothing to do."""
    for decode in cluster.decodes:
        decode.wait_empty()
    return [sum(decode.metric(name) for decode in cluster.decodes) for name in names]


@pytest.mark.slow
def test_prompts_and_samples_of_one_request(cluster: Cluster):
    """The router forwards all of them with the transfer of the first prompt; nobody else may decode over its KV."""
    prompts = [make_prompt(400, seed=seed) for seed in (6, 7, 8)]  # more than are hot
    full = [completion(cluster.prefill.complete(prompt, 12)) for prompt in prompts]
    names = ("hisparse_transfers", "hisparse_transfers_refused")
    before = counted(cluster, *names)
    assert_same_but_rounding(completions(cluster.router.complete(prompts[:2], 12)), full[:2])
    transfers, refused = (now - was for now, was in zip(counted(cluster, *names), before, strict=True))
    assert (transfers, refused) == (1, 1)
    # NOTE: vLLM wants one sample where the temperature is 0.
    samples = cluster.router.complete(prompts[2], 12, n=2, temperature=1, top_k=1)
    assert_same_but_rounding(completions(samples), [full[2]] * 2)
    transfers, refused = (now - was for now, was in zip(counted(cluster, *names), before, strict=True))
    assert (transfers, refused) == (2, 2)
    for server in (*cluster.decodes, cluster.router):
        again = [completion(server.complete(prompt, 12)) for prompt in prompts]
        assert_same_but_rounding(again, full)
    wait_for(lambda: cluster.prefill.complete(make_prompt(3), 1) and cluster.prefill.metric("kv_cache_usage_perc") == 0)


@pytest.mark.slow
def test_one_decode_server_is_killed(cluster: Cluster):
    """Its requests end with an error or are computed again; the rest, and all that come later, are answered."""
    lost, kept = cluster.decodes
    prompts = [make_prompt(300 + index, seed=3) for index in range(6)]
    with ThreadPoolExecutor(len(prompts)) as executor:
        futures = [executor.submit(complete_or_error, cluster.router, p, 100) for p in prompts]
        wait_for(lambda: lost.metric("num_requests_running") + lost.metric("num_requests_waiting") > 0, 90)
        lost.process.send_signal(signal.SIGKILL)
        replies = [future.result() for future in futures]
    answered = [reply for reply in replies if not is_error(reply)]
    assert len(answered) == len(prompts) // 2, "each server had half of them"
    assert all(len(reply["choices"][0]["token_ids"]) == 100 for reply in answered)
    # NOTE: in P/D mode the router asks a dead engine until its health checks fail.
    readiness = f"{cluster.router.url}/readiness"
    wait_for(lambda: requests.get(readiness, timeout=10).json()["decode"]["healthy"] == 1, timeout_s=60)
    assert not any(is_error(reply) for reply in complete_errors(cluster.router, 8))
    kept.wait_empty()
    wait_for(lambda: cluster.prefill.complete(make_prompt(3), 1) and cluster.prefill.metric("kv_cache_usage_perc") == 0)


def test_a_decode_server_drains(cluster: Cluster):
    """Running requests get all their tokens after SIGTERM, which Kubernetes sends only to the first process."""
    _, leaving = cluster.decodes
    prompts = [make_prompt(300 + index, seed=5) for index in range(4)]
    started = [threading.Event() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as executor:
        jobs = zip(prompts, started, strict=True)
        futures = [executor.submit(cluster.router.stream, prompt, 100, event.set) for prompt, event in jobs]
        wait_for(lambda: all(event.is_set() for event in started), 90)  # the last has 99 tokens to come
        os.kill(leaving.process.pid, signal.SIGTERM)
        outcomes = [future.result() for future in futures]
    assert [(len(tokens), error) for tokens, error in outcomes] == [(100, "")] * len(prompts)
    wait_for(leaving.process.is_gone, DRAIN_S)


def complete_or_error(server: Server, prompt: list[int], max_tokens: int) -> dict:
    try:
        return server.complete(prompt, max_tokens)
    except (requests.RequestException, ValueError) as error:  # a broken connection, or a plain-text error
        return {"error": str(error)}


def complete_errors(server: Server, count: int) -> list[dict]:
    return [complete_or_error(server, make_prompt(40 + index, seed=4), 2) for index in range(count)]

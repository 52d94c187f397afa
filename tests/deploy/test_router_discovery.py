"""The chart's router, with its own arguments, finds pods through a Kubernetes API of three pods made up here."""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
import yaml
from servers import wait_for

from tools.harness.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

pytest.importorskip("vllm_router", reason="vllm-router is not installed")
pytestmark = pytest.mark.e2e

RENDERED = Path(__file__).parent.parent.parent / "deploy" / "helm" / "rendered"
PODS = {"127.0.0.2": "prefill", "127.0.0.3": "decode", "127.0.0.4": "decode", "127.0.0.5": "router"}
ENGINES = [address for address, component in PODS.items() if component != "router"]
SETTLE_S = 60


class JsonHandler(BaseHTTPRequestHandler):
    """Answers with JSON, without a log."""

    protocol_version = "HTTP/1.1"

    def reply(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Nothing."""


class KubernetesHandler(JsonHandler):
    """Lists the pods; a watch sees no change until a pod begins to end."""

    ending = threading.Event()

    def do_GET(self) -> None:
        if "watch=" in self.path:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if self.ending.wait(SETTLE_S):
                event = json.dumps({"type": "MODIFIED", "object": ending_pod()}).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                time.sleep(SETTLE_S)
            return
        assert self.path.startswith("/api/v1/namespaces/serving/pods")
        items = [pod(address, component) for address, component in PODS.items()]
        self.reply({"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": items})


class EngineHandler(JsonHandler):
    """Healthy, and notes who got which part of a request."""

    served: list[tuple[str, bool]] = []  # (pod, whether it was asked for a prefill)
    decodes: dict[str, str] = {}  # first word of a prompt -> the pod that decoded it
    together = threading.Barrier(1)  # decodes that run at the same time
    args: dict[str, list[str]] = {}  # pod -> arguments of its engine

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/v1/completions/render":
            if "--enable-scale-out" not in self.args[self.server.server_address[0]]:  # as in vLLM
                self.send_error(403)
                return
            self.reply([{"token_ids": [zlib.crc32(word.encode()) for word in body["prompt"].split()]}])
            return
        if self.path == "/v1/completions":
            prefill, address = body["kv_transfer_params"].get("do_remote_decode", False), self.server.server_address[0]
            self.served.append((address, prefill))
            if not prefill:
                self.decodes[body["prompt"].split()[0]] = address
                self.together.wait(SETTLE_S)
        self.reply({"id": "x", "choices": [{"index": 0, "text": "a"}], "kv_transfer_params": {"remote_engine_id": "e"}})


def pod(address: str, component: str) -> dict:
    deployment = deployments()[f"hisparse-{component}"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    status = {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}
    metadata = {"name": f"pod-{address}", "namespace": "serving", "uid": address, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": status}


def ending_pod() -> dict:
    """The last decode pod in the time between `kubectl delete` and its end: running and ready still."""
    address = [address for address, component in PODS.items() if component == "decode"][-1]
    body = pod(address, "decode")
    deletion = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 990, "resourceVersion": "2"}
    return {**body, "metadata": {**body["metadata"], **deletion}}


def deployments(rendering: str = "default") -> dict[str, dict]:
    documents = [doc for doc in yaml.safe_load_all((RENDERED / f"{rendering}.yaml").read_text()) if doc]
    return {doc["metadata"]["name"]: doc for doc in documents if doc["kind"] == "Deployment"}


def engine_args(rendering: str, component: str) -> list[str]:
    pod_spec = deployments(rendering)[f"hisparse-{component}"]["spec"]["template"]["spec"]
    return next(each for each in pod_spec["containers"] if "--served-model-name" in " ".join(each["args"]))["args"]


@contextmanager
def serving(address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> Iterator[None]:
    server = ThreadingHTTPServer((address, port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()


def router_process(directory: Path, rendering: str, port: int, api_port: int, engine_port: int) -> EngineProcess:
    (metrics_port,) = free_ports(1)
    own = {"--host": LOOPBACK, "--port": port, "--prometheus-host": LOOPBACK, "--prometheus-port": metrics_port}
    own["--service-discovery-port"] = engine_port
    args = deployments(rendering)["hisparse-router"]["spec"]["template"]["spec"]["containers"][0]["args"]
    kept = [arg for arg in args if arg.partition("=")[0] not in own]
    kubeconfig = directory / "kubeconfig"
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    cluster = {"name": "c", "cluster": {"server": f"http://{LOOPBACK}:{api_port}"}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [context]}
    kubeconfig.write_text(yaml.safe_dump({**config, "clusters": [cluster], "users": [{"name": "u", "user": {}}]}))
    command = [
        sys.executable,
        "-m",
        "vllm_router.launch_router",
        *kept,
        *(f"{key}={value}" for key, value in own.items()),
    ]
    url = f"http://{LOOPBACK}:{port}/readiness"
    return EngineProcess("router", command, directory / "log", env={"KUBECONFIG": str(kubeconfig)}, health_url=url)


@pytest.fixture
def router_port(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """The router's port; it has found all pods. A parameter names the rendering."""
    port, api_port, engine_port = free_ports(3)
    rendering = getattr(request, "param", "default")
    EngineHandler.served.clear()
    EngineHandler.args = {address: engine_args(rendering, PODS[address]) for address in ENGINES}
    KubernetesHandler.ending.clear()
    with (
        serving(LOOPBACK, api_port, KubernetesHandler),
        serving(ENGINES[0], engine_port, EngineHandler),
        serving(ENGINES[1], engine_port, EngineHandler),
        serving(ENGINES[2], engine_port, EngineHandler),
        ProcessGroup(grace_s=1) as group,
    ):
        group.start(router_process(tmp_path, rendering, port, api_port, engine_port))
        group.wait_healthy(SETTLE_S)
        wait_for(lambda: ready_engines(port) == (1, 2), SETTLE_S)
        yield port


def ready_engines(port: int) -> tuple[int, int]:
    """Return the number of prefill and decode pods that the router has found healthy."""
    ready = requests.get(f"http://{LOOPBACK}:{port}/readiness", timeout=10).json()
    return ready["prefill"]["healthy"], ready["decode"]["healthy"]


def send_requests(port: int) -> None:
    for _ in range(20):
        body = {"model": "m", "prompt": "a", "max_tokens": 2}
        reply = requests.post(f"http://{LOOPBACK}:{port}/v1/completions", json=body, timeout=20)
        assert reply.status_code == 200, reply.text


def test_router_finds_the_pods_of_each_role(router_port: int):
    send_requests(router_port)
    assert {address for address, prefill in EngineHandler.served if prefill} == {ENGINES[0]}
    assert {address for address, prefill in EngineHandler.served if not prefill} == set(ENGINES[1:])


@pytest.mark.slow
def test_router_sends_nothing_to_a_pod_that_ends(router_port: int):
    """A pod gets no requests as soon as its deletion begins, which is long before vLLM gets SIGTERM."""
    KubernetesHandler.ending.set()
    wait_for(lambda: ready_engines(router_port) == (1, 1), SETTLE_S)
    send_requests(router_port)
    assert {address for address, prefill in EngineHandler.served if not prefill} == {ENGINES[1]}


def decodes_of(port: int, prompts: list[str]) -> dict[str, str]:
    """Who decodes each of several prompts that run at the same time."""
    EngineHandler.decodes.clear()
    EngineHandler.together = threading.Barrier(len(prompts))

    def send(prompt: str) -> requests.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": 2}
        return requests.post(f"http://{LOOPBACK}:{port}/v1/completions", json=body, timeout=SETTLE_S)

    try:
        with ThreadPoolExecutor(len(prompts)) as executor:
            assert all(reply.status_code == 200 for reply in executor.map(send, prompts))
    finally:
        EngineHandler.together = threading.Barrier(1)
    return dict(EngineHandler.decodes)


@pytest.mark.slow
@pytest.mark.parametrize("router_port", ["tiers"], indirect=True)
def test_a_conversation_returns_to_its_decode_pod(router_port: int):
    """Its local disk has the KV of the turns before; new conversations go to both pods."""
    turns = [" ".join(f"{index}-{word}" for word in range(100)) for index in range(12)]
    first = decodes_of(router_port, turns)
    assert set(first.values()) == set(ENGINES[1:]) and len(first) == len(turns)
    for _ in range(2):
        turns = [f"{turn} and {len(turn)} more" for turn in reversed(turns)]
        assert decodes_of(router_port, turns) == first

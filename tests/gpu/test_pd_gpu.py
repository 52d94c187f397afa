"""Prefill and decode apart on the GPU: main KV goes from device memory into the decode side's pinned host memory."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_same_but_ties, differences, make_prompt
from servers import DO_PREFILL, Server, completion

from vllm_hisparse.cli.deployment import MODEL_NAME, PREFILL_CONNECTOR, hisparse_connector
from vllm_hisparse.cli.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

START_TIMEOUT_S = 400
NUM_LAYERS = 4
ROW_BYTES = {"auto": 1152, "fp8": 656}
LENGTHS = [1, 63, 64, 65, 2049, 4097, 12000, 32000]
OPTIONS = {"host_pool_gib": 4.0, "device_buffer_size": 4096}


class Pair:
    """A stock prefill server, which is the full-KV reference too, and a decode server on the same device."""

    def __init__(self, group: ProcessGroup, directory: Path, model: Path, kv_dtype: str):
        self.kv_dtype = kv_dtype
        args = ["--kv-cache-dtype", kv_dtype, "--attention-backend", "FLASHMLA_SPARSE", "--max-model-len", "33024"]
        args += ["--hf-overrides", json.dumps({"max_position_embeddings": 1 << 18}), "--gpu-memory-utilization", "0.1"]
        args += ["--kv-cache-memory-bytes", str(1 << 30), "--dtype", "bfloat16", "--max-num-seqs", "8"]
        args += ["--attention-config", json.dumps({"sparse_mla_force_mqa": True})]
        self.args = ["--model", str(model), *args]
        self.prefill = self.start(group, directory, "prefill", PREFILL_CONNECTOR, ["--no-enable-prefix-caching"])
        self.decode = self.start(group, directory, "decode", hisparse_connector(**OPTIONS), [])
        group.wait_healthy(START_TIMEOUT_S)

    def start(self, group: ProcessGroup, directory: Path, name: str, connector: dict, args: list[str]) -> Server:
        port, side_port = free_ports(2)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", MODEL_NAME]
        command += ["--host", LOOPBACK, "--port", str(port), "--kv-transfer-config", json.dumps(connector), *self.args]
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        log = directory / f"{self.kv_dtype}_{name}.log"
        url = f"http://{LOOPBACK}:{port}"
        process = EngineProcess(name, [*command, *args], log, env=env, health_url=f"{url}/health")
        return Server(group.start(process), url)

    def prefilled(self, prompt: list[int]) -> dict:
        return self.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_hisparse.cli.tiny_model import make_model

    directory = tmp_path_factory.mktemp("models") / "dsv32"
    return make_model("dsv32", directory, num_layers=NUM_LAYERS, num_heads=64, index_n_heads=64, index_topk=2048)


@pytest.fixture(scope="module", params=list(ROW_BYTES))
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = Path(os.environ.get("HISPARSE_TEST_REPORT") or tmp_path_factory.mktemp("logs"))
    with ProcessGroup() as group:
        yield Pair(group, directory, model, request.param)


class DeviceMemory:
    """The most device memory in use while it watches, in bytes, over what was in use before."""

    def __enter__(self) -> DeviceMemory:
        import pynvml

        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.before, self.peak, self._done = self.used(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._done.set()
        self._thread.join()

    @property
    def transient(self) -> int:
        return max(self.peak - self.before, 0)

    def used(self) -> int:
        import pynvml

        return pynvml.nvmlDeviceGetMemoryInfo(self._handle).used

    def _watch(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, self.used())
            time.sleep(0.002)


def test_imported_prompts_give_the_same_tokens(pair: Pair) -> None:
    row_bytes, replies, expected = ROW_BYTES[pair.kv_dtype], [], []
    for length in LENGTHS:
        prompt = make_prompt(length, seed=1)
        before = pair.decode.metric("hisparse_transfer_bytes_to_host")
        replies.append(completion(pair.decode.complete(prompt, 64, pair.prefilled(prompt))))
        expected.append(completion(pair.prefill.complete(prompt, 64)))
        received = pair.decode.metric("hisparse_transfer_bytes_to_host") - before
        assert received == -(-length // 64) * 64 * row_bytes * NUM_LAYERS
    found = differences(replies, expected)
    report(f"pd_{pair.kv_dtype}", [{"length": length, **one} for length, one in zip(LENGTHS, found, strict=True)])
    assert_same_but_ties(replies, expected)


def test_an_import_takes_no_device_memory(pair: Pair) -> None:
    """The main KV of a 32K prompt is 147 MiB in bf16 and 84 MiB in fp8: device memory must not grow by that."""
    warm, prompt = make_prompt(32001, seed=2), make_prompt(32000, seed=2)
    pair.decode.complete(warm, 2, pair.prefilled(warm))
    transfer = pair.prefilled(prompt)
    with DeviceMemory() as memory:
        assert pair.decode.complete(prompt, 2, transfer)["choices"]
    prompt_bytes = 32000 * ROW_BYTES[pair.kv_dtype] * NUM_LAYERS
    report(f"pd_memory_{pair.kv_dtype}", {"transient_bytes": memory.transient, "prompt_bytes": prompt_bytes})
    assert memory.transient < prompt_bytes // 8


def report(name: str, content: Any) -> None:
    """Write what was found to the folder of HISPARSE_TEST_REPORT, where that is set."""
    folder = os.environ.get("HISPARSE_TEST_REPORT")
    if folder:
        (Path(folder) / f"{name}.json").write_text(json.dumps(content, indent=1))

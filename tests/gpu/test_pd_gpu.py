"""Prefill and decode apart on the GPU: main KV goes from device memory into the decode side's pinned host memory.

The reference is the prefill server, which is stock vLLM. With indexer keys in 4 bits on the decode side, the reference
is an engine with full KV. It computes a prompt with keys in 8 bits, as the prefill side does. For the prompt's last
token and all later tokens, which the decode side computes, it rounds all keys to 4 bits.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    ENVIRONMENT,
    WITHOUT_MULTICAST,
    EngineRun,
    assert_same_but_ties,
    differences,
    engine_args,
    make_prompt,
)
from servers import DO_PREFILL, Server, completion

from tools.harness.deployment import MODEL_NAME, PREFILL_CONNECTOR, hisparse_connector
from tools.harness.processes import LOOPBACK, EngineProcess, ProcessGroup, free_ports

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

START_TIMEOUT_S = 400
# Where many engines share a GPU, a long prompt takes a while to arrive. After its lease, it would be computed locally.
PREFILL = {**PREFILL_CONNECTOR, "kv_connector_extra_config": {"kv_lease_duration": START_TIMEOUT_S}}
OFFLINE_ONLY = ("PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING")  # variables that only engines without a server need
NUM_NEW = 64  # tokens of an answer
NUM_LAYERS = 4


@dataclass(frozen=True)
class Case:
    """A model on both sides.

    Attributes:
        model, sizes: of `make_model`.
        args: of both servers.
        options: of the connector on the decode side.
        token_bytes: one token's KV that goes to the host, of all ranks; with indexer keys if they are in 4 bits.
        lengths: of the prompts.
        num_ranks: tensor parallel ranks of each side, the first on the first device.
        block_size: tokens of a block.
        prefill_layout: VLLM_KV_CACHE_LAYOUT of the prefill side; None: vLLM's choice.
    """

    model: str
    sizes: dict[str, int]
    args: tuple[str, ...]
    options: dict[str, Any]
    token_bytes: int
    lengths: tuple[int, ...]
    num_ranks: int = 1
    block_size: int = 64
    prefill_layout: str | None = None

    @property
    def has_narrow_keys(self) -> bool:
        """True if the decode side has indexer keys in 4 bits, which it makes from keys in 8 bits on the host."""
        return self.options.get("indexer_key_dtype") == "fp4"


DSA_SIZES = {"num_heads": 64, "index_n_heads": 64, "index_topk": 2048}
DSA_ARGS = ("--attention-backend", "FLASHMLA_SPARSE", "--attention-config", json.dumps({"sparse_mla_force_mqa": True}))
FP8_ARGS = (*DSA_ARGS, "--kv-cache-dtype", "fp8")
MTP_ARGS = (*FP8_ARGS, "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2}))
MTP_OPTIONS = {"device_buffer_size": 3 * 2048}
DSA_LENGTHS = (1, 63, 64, 65, 2049, 4097, 12000, 32000)
NARROW_LENGTHS = (1, 63, 64, 65, 2049, 4097, 8193, 12000)
DENSE_BACKEND = ("--attention-backend", "FLASH_ATTN")
DENSE_ARGS = (*DENSE_BACKEND, "--block-size", "64")
DENSE_OPTIONS = {"algorithm": "quest", "top_k": 16384, "device_buffer_size": 16384}
DENSE_TOKEN = 2 * 4 * 2 * 32 * 2  # layers without dense ones, KV heads, key and value, elements, bf16
DENSE_LENGTHS = (1, 15, 16, 65, 1000, 8000, 16000)
BUFFER, MANAGED = {"import_buffer_gib": 1 / 32}, {"host_pool_memory": "managed"}
CASES = {
    "auto": Case("dsv32", DSA_SIZES, DSA_ARGS, {}, 1152 * NUM_LAYERS, DSA_LENGTHS),
    "fp8": Case("dsv32", DSA_SIZES, FP8_ARGS, {}, 656 * NUM_LAYERS, DSA_LENGTHS),
    "fp8_mtp": Case("dsv32", {**DSA_SIZES, "draft_layers": 1}, MTP_ARGS, MTP_OPTIONS, 656 * NUM_LAYERS, DSA_LENGTHS),
    # A prompt of 32,000 tokens is larger than the buffer. Blocks are read layer by layer, or all layers together.
    "buffer": Case("dsv32", DSA_SIZES, FP8_ARGS, BUFFER, 656 * NUM_LAYERS, DSA_LENGTHS),
    "buffer_blocks": Case("dsv32", DSA_SIZES, FP8_ARGS, BUFFER, 656 * NUM_LAYERS, DSA_LENGTHS, prefill_layout="BLHNC"),
    "narrow_keys": Case(
        "dsv32", DSA_SIZES, FP8_ARGS, {"indexer_key_dtype": "fp4"}, (656 + 132) * NUM_LAYERS, NARROW_LENGTHS
    ),
    "buffer_narrow_keys": Case(
        "dsv32",
        DSA_SIZES,
        FP8_ARGS,
        {**BUFFER, "indexer_key_dtype": "fp4"},
        (656 + 132) * NUM_LAYERS,
        NARROW_LENGTHS,
        prefill_layout="BLHNC",
    ),
    "managed": Case("dsv32", DSA_SIZES, FP8_ARGS, MANAGED, 656 * NUM_LAYERS, DSA_LENGTHS),
    "managed_buffer": Case("dsv32", DSA_SIZES, FP8_ARGS, {**MANAGED, **BUFFER}, 656 * NUM_LAYERS, DSA_LENGTHS),
    "hyv4": Case("hyv4", {**DSA_SIZES, "num_heads": 32}, FP8_ARGS, {}, 656 * NUM_LAYERS, DSA_LENGTHS),
    "llama": Case("llama", {"num_heads": 16}, DENSE_ARGS, DENSE_OPTIONS, DENSE_TOKEN, DENSE_LENGTHS),
    "llama_large_blocks": Case(
        "llama",
        {"num_heads": 16},
        (*DENSE_BACKEND, "--block-size", "256"),
        DENSE_OPTIONS,
        DENSE_TOKEN,
        (1, 255, 256, 257, 1000, 8000, 16000),
        block_size=256,
    ),
    "minimax_m3": Case(
        "minimax_m3",
        {"num_heads": 64, "index_topk": 2048},
        (),
        {"algorithm": "msa"},
        2048 * (NUM_LAYERS - 2),  # two layers keep their KV on the device
        (1, 127, 128, 129, 2049, 4097, 12000),
        block_size=128,
    ),
    "auto_tp2": Case("dsv32", DSA_SIZES, DSA_ARGS, {}, 1152 * NUM_LAYERS, DSA_LENGTHS, num_ranks=2),
    "llama_tp2": Case("llama", {"num_heads": 16}, DENSE_ARGS, DENSE_OPTIONS, DENSE_TOKEN, DENSE_LENGTHS, num_ranks=2),
}


class Pair:
    """A stock prefill server, which is the full-KV reference too, and a decode server on the same devices."""

    def __init__(self, group: ProcessGroup, directory: Path, model: Path, name: str):
        self.name, self.case, self.model, self.directory = name, CASES[name], model, directory
        args = ["--max-model-len", "33024", "--gpu-memory-utilization", "0.1", "--dtype", "bfloat16"]
        args += ["--hf-overrides", json.dumps({"max_position_embeddings": 1 << 18}), "--max-num-seqs", "8"]
        args += ["--kernel-config", json.dumps({"enable_flashinfer_autotune": False})]
        args += ["--kv-cache-memory-bytes", str(1 << 30), "--tensor-parallel-size", str(self.case.num_ranks)]
        args += ["--compilation-config", json.dumps(WITHOUT_MULTICAST)] if self.case.num_ranks > 1 else []
        self.args = ["--model", str(model), *args, *self.case.args]
        options = {"host_pool_gib": 4.0, "device_buffer_size": 4096, **self.case.options}
        self.prefill = self.start(group, "prefill", PREFILL, ["--no-enable-prefix-caching"])
        self.decode = self.start(group, "decode", hisparse_connector(**options), [])
        group.wait_healthy(START_TIMEOUT_S)

    def start(self, group: ProcessGroup, name: str, connector: dict, args: list[str]) -> Server:
        port, side_port = free_ports(2)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", MODEL_NAME]
        command += ["--host", LOOPBACK, "--port", str(port), "--kv-transfer-config", json.dumps(connector), *self.args]
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        env |= {name: value for name, value in ENVIRONMENT.items() if name not in OFFLINE_ONLY}
        if name == "prefill" and self.case.prefill_layout:
            env["VLLM_KV_CACHE_LAYOUT"] = self.case.prefill_layout
        log = self.log(name)
        url = f"http://{LOOPBACK}:{port}"
        process = EngineProcess(name, [*command, *args], log, env=env, health_url=f"{url}/health")
        return Server(group.start(process), url)

    def log(self, name: str) -> Path:
        return self.directory / f"{self.name}_{name}.log"

    def warnings(self) -> str:
        """Return the latest warnings and errors of the decode server."""
        lines = self.log("decode").read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if " WARNING " in line or " ERROR " in line][-20:])

    def prefilled(self, prompt: list[int]) -> dict:
        return self.prefill.complete(prompt, 1, dict(DO_PREFILL))["kv_transfer_params"]


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    from vllm_hisparse.cli.tiny_model import make_model

    case = CASES[request.param]
    if torch.cuda.device_count() < case.num_ranks:
        pytest.skip(f"needs {case.num_ranks} CUDA devices")
    model = make_model(case.model, tmp_path_factory.mktemp("models") / "model", num_layers=NUM_LAYERS, **case.sizes)
    directory = Path(os.environ.get("HISPARSE_TEST_REPORT") or tmp_path_factory.mktemp("logs"))
    with ProcessGroup() as group:
        yield Pair(group, directory, model, request.param)


class DeviceMemory:
    """The most memory of the first visible device in use while it watches, in bytes, over what was in use before."""

    def __enter__(self) -> DeviceMemory:
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
        return torch.cuda.device_memory_used(0)  # NOTE: by NVML, which counts all processes

    def _watch(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, self.used())
            time.sleep(0.002)


def start_narrow_reference(model: Path, prompts: list[list[int]], directory: Path) -> EngineRun:
    """Start an engine with full KV that selects as a decode side with keys in 4 bits does."""
    # Two steps for each prompt, one of them for its last token.
    sizes = {"max_num_batched_tokens": 16384, "enforce_eager": True}
    engine = engine_args(model, kv_cache_dtype="fp8", attention_config={"backend": "FLASHMLA_SPARSE"}, **sizes)
    phase = {"prompts": prompts, "max_tokens": NUM_NEW, "last_token_alone": True}
    return EngineRun.start(directory, "narrow_reference", engine, [phase], receives_keys=True)


def test_imported_prompts_give_the_same_tokens(pair: Pair, tmp_path: Path) -> None:
    lengths = pair.case.lengths
    prompts = [make_prompt(length, seed=1) for length in lengths]
    narrow = start_narrow_reference(pair.model, prompts, tmp_path) if pair.case.has_narrow_keys else None
    replies, stock, seconds = [], [], [0.0]
    for length, prompt in zip(lengths, prompts, strict=True):
        before = pair.decode.metric("hisparse_transfer_bytes_to_host")
        replies.append(completion(pair.decode.complete(prompt, NUM_NEW, pair.prefilled(prompt))))
        stock.append(completion(pair.prefill.complete(prompt, NUM_NEW)))
        received = pair.decode.metric("hisparse_transfer_bytes_to_host") - before
        expected_bytes = -(-length // pair.case.block_size) * pair.case.block_size * pair.case.token_bytes
        assert received == expected_bytes, pair.warnings()
        seconds.append(pair.decode.metric("hisparse_transfer_time_seconds_sum"))
    through_buffer = pair.decode.metric("hisparse_transfer_bytes_through_buffer")
    has_buffer = "import_buffer_gib" in pair.case.options
    assert through_buffer == (pair.decode.metric("hisparse_transfer_bytes_to_host") if has_buffer else 0)
    if narrow:
        assert pair.decode.metric("hisparse_transfer_bytes_to_device") == 0
    expected = narrow.phases()[0]["completions"] if narrow else stock
    found = differences(replies, expected)
    took = [round(after - before, 3) for before, after in itertools.pairwise(seconds)]
    rows = zip(lengths, took, found, strict=True)
    report(f"pd_{pair.name}", [{"length": length, "transfer_s": each, **one} for length, each, one in rows])
    if narrow:
        report(f"pd_{pair.name}_8_bits", differences(stock, expected))
    assert_same_but_ties(replies, expected)


def test_an_import_takes_no_device_memory(pair: Pair) -> None:
    """The main KV of a 32K prompt is 147 MiB in bf16 and 84 MiB in fp8: device memory must not grow by that."""
    if pair.case.model != "dsv32":
        pytest.skip("the KV of full-KV layers does go to the device")
    warm, prompt = make_prompt(32001, seed=2), make_prompt(32000, seed=2)
    pair.decode.complete(warm, 2, pair.prefilled(warm))
    transfer, before = pair.prefilled(prompt), pair.decode.metric("hisparse_transfer_bytes_to_host")
    with DeviceMemory() as memory:
        assert pair.decode.complete(prompt, 2, transfer)["choices"]
    assert pair.decode.metric("hisparse_transfer_bytes_to_host") > before, pair.warnings()
    prompt_bytes = 32000 * pair.case.token_bytes
    report(f"pd_memory_{pair.name}", {"transient_bytes": memory.transient, "prompt_bytes": prompt_bytes})
    assert memory.transient < prompt_bytes // 8


def report(name: str, content: Any) -> None:
    """Write what was found to the folder of HISPARSE_TEST_REPORT, where that is set."""
    folder = os.environ.get("HISPARSE_TEST_REPORT")
    if folder:
        (Path(folder) / f"{name}.json").write_text(json.dumps(content, indent=1))

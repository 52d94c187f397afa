"""Servers of the benchmarks under load: one engine per system, its metrics, and vLLM's load generator.

On a GPU, models have the sizes of `benchmarks.full_depth`, dummy weights and a tokenizer of words; decode steps select
the positions that `benchmarks.forced_selections` gives. On the CPU platform, they are tiny and select by themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import requests
import typer

from benchmarks.full_depth import V32, ModelName, write_config
from tools.harness.deployment import MODEL_NAME, vllm_engine
from tools.harness.processes import LOOPBACK, EngineProcess, free_ports

ROOT = Path(__file__).parents[1]
TINY_MODEL = ROOT / "build" / "models" / "dsv32"
SAMPLE_S = 0.25
METRICS_TIMEOUT_S = 20
HEALTH_TIMEOUT_S = 10.0  # seconds in which an engine answers before a case
DISCONNECTED = requests.RequestException
# Transfers between GPUs of a host without RDMA (docs/deployment.md); variables of this process come before these.
ONE_HOST = {"UCX_RMA_PPLN_ENABLE": "y", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}

Device = StrEnum("Device", ["cpu", "gpu"])


@dataclass(frozen=True)
class Sizes:
    """A model and its memory, the same for all systems.

    Attributes:
        device: platform of the engines.
        layers: layers of DeepSeek-V3.2's size, on a GPU.
        experts: experts of a layer.
        expert_size: hidden size of an expert.
        max_model_len: tokens of the longest request.
        max_num_seqs: requests of a step.
        device_kv_gib: device memory for KV of an engine that decodes.
        host_pool_gib: host memory for KV.
        device_buffer_size: hot rows per request and layer.
        overlap: probability that a position stays in a selection for a step.
    """

    device: Device
    layers: int
    experts: int
    expert_size: int
    max_model_len: int
    max_num_seqs: int
    device_kv_gib: float
    host_pool_gib: float
    device_buffer_size: int
    overlap: float

    def described(self) -> dict[str, Any]:
        """Columns of a row."""
        if self.device == Device.cpu:
            return {"model": "tiny dsv32", "layers": 4, "device_kv_gib": self.device_kv_gib}
        names = ("layers", "experts", "device_kv_gib", "host_pool_gib", "device_buffer_size", "overlap")
        return {"model": "DeepSeek-V3.2, dummy weights", **{name: getattr(self, name) for name in names}}


def make_model(path: Path, sizes: Sizes) -> Path:
    """Write a model's configuration and its tokenizer, which has a word for each id; returns its directory."""
    if sizes.device == Device.cpu:
        return TINY_MODEL
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    write_config(path, ModelName.deepseek, sizes.layers, sizes.experts, sizes.expert_size, 1, has_drafts=False)
    # NOTE: vLLM refuses a text with more characters than tokens of the longest prompt times characters of the longest
    # word. The load generator puts a space between words, so one name is longer than these. No name begins a word.
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unknown>"}
    words = [*names.values(), *(f"w{index}" for index in range(len(names), V32["vocab_size"]))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=names["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
    return path


def server(
    name: str,
    model: Path,
    sizes: Sizes,
    log_dir: Path,
    gpu: int,
    connector: dict[str, Any] | None,
    args: list[str],
    forces_selections: bool = True,
) -> tuple[EngineProcess, str]:
    """Return vLLM's OpenAI server, not started, and its base URL.

    Args:
        name: name of the process and its log.
        model: directory of the model.
        sizes: sizes of model and memory.
        log_dir: directory of the log.
        gpu: index of its GPU among those that this process may use.
        connector: `--kv-transfer-config`; None: no KV transfer.
        args: more options.
        forces_selections: true for an engine that decodes.
    """
    port, side_port = free_ports(2)
    common = ["--max-num-seqs", str(sizes.max_num_seqs), "--enable-prompt-tokens-details"]
    if sizes.device == Device.cpu:
        common += ["--max-model-len", str(sizes.max_model_len), "--max-num-batched-tokens", "512"]
        memory = ["--kv-cache-memory-bytes", str(int(sizes.device_kv_gib * 2**30))]
        process = vllm_engine(name, model, log_dir, port, connector, side_port, [0, 1], [*common, *memory, *args])
        process.env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        process.env["OMP_NUM_THREADS"] = "1"
        return process, f"http://{LOOPBACK}:{port}"
    batches = sorted({1, 2, 4, *range(8, sizes.max_num_seqs + 1, 8), sizes.max_num_seqs})
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": batches}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--host", LOOPBACK, "--port", str(port), *common]
    command += ["--load-format", "dummy", "--dtype", "bfloat16", "--kv-cache-dtype", "fp8", "--seed", "0"]
    command += ["--max-model-len", str(sizes.max_model_len), "--gpu-memory-utilization", "0.3"]
    command += ["--compilation-config", json.dumps(graphs), "--disable-uvicorn-access-log"]
    command += ["--kernel-config", json.dumps({"enable_flashinfer_autotune": False})]
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    if forces_selections:
        command += ["--worker-extension-cls", "benchmarks.forced_selections.ForcedSelectionsExtension"]
    env = ucx_variables() | {"CUDA_VISIBLE_DEVICES": visible_gpu(gpu), "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK}
    env |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it is compiled for a minute, and tokens are greedy
    url = f"http://{LOOPBACK}:{port}"
    return EngineProcess(name, [*command, *args], log_dir / f"{name}.log", env=env, health_url=f"{url}/health"), url


def visible_gpu(index: int) -> str:
    """Name a GPU, for `CUDA_VISIBLE_DEVICES` of another process, by its index among those that this process may use.

    Raises:
        BadParameter: there are fewer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    names = [name for name in visible.split(",") if name]
    if index >= len(names):
        raise typer.BadParameter(f"got CUDA_VISIBLE_DEVICES={visible}, expected {index + 1} GPUs or more")
    return names[index]


def ucx_variables() -> dict[str, str]:
    """UCX's variables of servers on a GPU: those of this process, else the ones for a host without RDMA."""
    return ONE_HOST | {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")}


def kv_bytes(gib: float) -> list[str]:
    return ["--kv-cache-memory-bytes", str(int(gib * 2**30))]


def force_selections(url: str, sizes: Sizes) -> None:
    """Let a server's decode steps keep a share of their selections."""
    if sizes.device == Device.gpu:
        body = {"method": "use_independent", "args": [sizes.overlap]}
        requests.post(f"{url}/collective_rpc", json=body, timeout=60).raise_for_status()


def metrics(url: str) -> dict[str, float]:
    """Samples of a server's metrics by name, summed over their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(requests.get(f"{url}/metrics", timeout=METRICS_TIMEOUT_S).text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


@dataclass
class Gauges:
    """The largest values of a server's gauges, and how much its counters and histograms grew, while a block runs.

    Attributes:
        url: base URL of the server.
        peaks: largest values by name.
        before: first values by name.
        latest: last values by name.
    """

    url: str
    peaks: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.before = self.latest = metrics(self.url)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()

    def peak(self, name: str) -> int | None:
        """The largest value of a gauge; None if the server does not export it."""
        value = self.peaks.get(f"vllm:{name}")
        return None if value is None else round(value)

    def growth(self, name: str) -> int | None:
        """How much a counter grew; None if the server does not export it."""
        added = self.added(name)
        return None if added is None else round(added)

    def added(self, name: str) -> float | None:
        """How much a sum of any values grew, such as seconds; None if the server does not export it."""
        name = f"vllm:{name}"
        return self.latest[name] - self.before.get(name, 0.0) if name in self.latest else None

    def mean_ms(self, name: str) -> float | None:
        """Mean of what a histogram of seconds observed, in milliseconds; None if it observed nothing."""
        seconds, number = (self.added(f"{name}_seconds_{column}") or 0.0 for column in ("sum", "count"))
        return round(1e3 * seconds / number, 2) if number else None

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        try:
            self.latest = metrics(self.url)
        except DISCONNECTED:  # it was killed
            return
        for name, value in self.latest.items():
            self.peaks[name] = max(value, self.peaks.get(name, 0.0))


def bench_serve(url: str, model: Path, log: Path, options: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run vLLM's load generator with random prompts in a process of its own; returns its result.

    Args:
        url: base URL of the server or router.
        model: directory with the tokenizer.
        log: file that gets what it prints.
        options: options of `vllm bench serve`, without dashes in front.
        timeout_s: seconds after which it is killed.

    Raises:
        RuntimeError: it failed.
    """
    result = log.with_suffix(".result.json")
    common = {"backend": "openai", "base-url": url, "endpoint": "/v1/completions", "dataset-name": "random"}
    common |= {"model": MODEL_NAME, "tokenizer": str(model), "temperature": 0, "percentile-metrics": "ttft,tpot,itl"}
    common |= {"metric-percentiles": "50,99", "result-dir": str(result.parent), "result-filename": result.name}
    # NOTE: `vllm bench serve` needs a distribution named vllm; the CPU wheel has another name.
    program = "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser()"
    program += "; serve.add_cli_args(parser); serve.main(parser.parse_args())"
    command = [sys.executable, "-c", program, "--ignore-eos", "--save-result", "--disable-tqdm"]
    command += [part for name, value in (common | options).items() for part in (f"--{name}", str(value))]
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=timeout_s, check=False).returncode
    if code or not result.is_file():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        raise RuntimeError(f"vllm bench serve ended with exit code {code}:\n{tail}")
    return json.loads(result.read_text())


def log_directory(stack: ExitStack, logs: Path | None) -> Path:
    """Return the directory of a run's logs: the one that was asked for, else one that ends with the stack."""
    if logs is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory()))
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def wait_healthy(process: EngineProcess, timeout_s: float) -> None:
    """Wait until a process is healthy.

    Raises:
        RuntimeError: it has ended, or takes longer; the message has the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    while not process.is_healthy():
        if process.exit_code is not None:
            state = f"has ended with exit code {process.exit_code}"
        elif time.monotonic() > deadline:
            state = f"is not healthy after {timeout_s:g} s"
        else:
            time.sleep(0.5)
            continue
        raise RuntimeError("\n".join([f"{process.name} {state}; the end of its log:", *process.log_tail()]))


@contextmanager
def needed(engines: Sequence[EngineProcess]) -> Iterator[None]:
    """A block that needs engines.

    Raises:
        RuntimeError: an engine is not healthy, before the block or after an error in it.
    """
    for engine in engines:
        wait_healthy(engine, HEALTH_TIMEOUT_S)
    try:
        yield
    except Exception:
        for engine in engines:  # if one has ended, the error in the block follows from it
            wait_healthy(engine, HEALTH_TIMEOUT_S)
        raise


@dataclass
class Attempts:
    """Work of several systems: if one's fails, the others go on, and the run ends with exit code 1.

    Attributes:
        failed: names of the work that failed.
    """

    failed: list[str] = field(default_factory=list)

    def run(self, what: str, work: Callable[[], Any], engines: Sequence[EngineProcess] = ()) -> Any:
        """Return the result of some work; None, with a message, if it fails.

        Args:
            what: name of the work.
            work: does it.
            engines: engines that it needs. If one of them has ended, before the work or meanwhile, the work has failed,
                and the message has the end of the engine's log.
        """
        try:
            with needed(engines):
                return work()
        except Exception as error:  # whatever one system's processes do
            typer.echo(f"{what}: {type(error).__name__}: {error}", err=True)
            self.failed.append(what)
            return None

    def end(self) -> None:
        """End the run.

        Raises:
            Exit: some work failed; the exit code is 1.
        """
        if self.failed:
            typer.echo(f"Failed: {'; '.join(self.failed)}", err=True)
            raise typer.Exit(1)

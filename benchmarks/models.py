"""Does every model over every back end give stock vLLM's tokens, and what does a request of 128K tokens take?

    python -m benchmarks.models run

A row of the result file is one model over one back end. Two engines with a tiny model of the same class answer the
same prompts greedily, in two turns: stock vLLM, and the plugin, whose selection leaves out nothing in a dense model and
is the model's own in a DSA model. The bytes are computed from the sizes of the real model. Each row is written when it
is there; a second run adds the rows that the file lacks, if the file is of the same commit and the same versions.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import RESULTS, commit, gpu_hardware, show, versions, write_result
from vllm_hisparse.cli.plan.memory import KVMemory, System
from vllm_hisparse.cli.plan.models import ModelShape
from vllm_hisparse.cli.tiny_model import make_model

LONG = 1 << 17  # tokens of the request whose bytes are computed
DENSE_TOP_K = 2048
VOCABULARY = range(3, 500)
LENGTHS = {"cuda": (1, 15, 17, 500, 1100, 3900, 6001), "cpu": (1, 17, 129, 777, 1100)}  # of prompts, in tokens
MAX_TOKENS = {"cuda": 64, "cpu": 12}
EVERYTHING = {"cuda": 8192, "cpu": 2048}  # tokens of a selection that leaves nothing out
TURN = 41  # tokens of a question in the second turn

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Model:
    """A model that the plugin hosts.

    Attributes:
        name: name of the real model, a preset of `vllm-hisparse plan`.
        variant: variant of the tiny model that runs.
        num_heads: heads of the tiny model.
    """

    name: str
    variant: str
    num_heads: int = 16

    @property
    def is_dsa(self) -> bool:
        return ModelShape.load(self.name).is_dsa


@dataclass(frozen=True)
class Case:
    """A row of the result file.

    Attributes:
        model: name of the model.
        backend: name of vLLM's back end, with the version of FlashAttention where there are several.
        kv_dtype: `--kv-cache-dtype`.
    """

    model: str
    backend: str
    kv_dtype: str


MODELS = (
    Model("DeepSeek-V3.2", "dsv32"),
    Model("GLM-5", "glm"),
    Model("GLM-5.2", "glm52"),
    Model("GLM-5.3", "glm53"),
    Model("HY-V4", "hyv4"),
    Model("Llama-3.1-8B", "llama"),
    Model("Qwen3-8B", "qwen3"),
    Model("Qwen3-30B-A3B", "qwen3_moe"),
    Model("Qwen2-57B-A14B", "qwen2_moe", num_heads=8),
    Model("Mixtral-8x7B", "mixtral"),
    Model("GLM-4.5", "glm4_moe"),
    Model("ERNIE-4.5-21B-A3B", "ernie45_moe"),
)
BY_NAME = {model.name: model for model in MODELS}
ATTENTION: dict[str, dict[str, Any]] = {  # back end on CUDA -> `attention_config`
    "FLASHMLA_SPARSE": {"backend": "FLASHMLA_SPARSE"},
    "FLASH_ATTN_MLA_SPARSE": {"backend": "FLASH_ATTN_MLA_SPARSE"},
    "FLASHINFER_MLA_SPARSE_SM90": {"backend": "FLASHINFER_MLA_SPARSE_SM90"},
    "FLASH_ATTN 3": {"backend": "FLASH_ATTN", "flash_attn_version": 3},
    "FLASH_ATTN 2": {"backend": "FLASH_ATTN", "flash_attn_version": 2},
    "FLASH_ATTN 4": {"backend": "FLASH_ATTN", "flash_attn_version": 4},
    "TRITON_ATTN": {"backend": "TRITON_ATTN"},
    "FLASHINFER": {"backend": "FLASHINFER"},
}


def cases(device: str) -> list[Case]:
    """All rows on `cpu` or `cuda`: every model over the back end that vLLM takes first, one of each kind over all."""
    if device == "cpu":
        return [Case(model.name, "HISPARSE_MLA_CPU" if model.is_dsa else "CPU_ATTN", "auto") for model in MODELS]
    found = []
    for model in MODELS:
        found.append(Case(model.name, *(("FLASHMLA_SPARSE", "fp8") if model.is_dsa else ("FLASH_ATTN 3", "bfloat16"))))
    found += [Case("DeepSeek-V3.2", name, "bfloat16") for name in ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")]
    found.append(Case("DeepSeek-V3.2", "FLASHINFER_MLA_SPARSE_SM90", "fp8"))
    found += [Case("Llama-3.1-8B", name, "bfloat16") for name in ("TRITON_ATTN", "FLASH_ATTN 2", "FLASH_ATTN 4")]
    found.append(Case("Qwen3-8B", "FLASHINFER", "bfloat16"))  # it has no heads as small as the tiny Llama's
    found += [Case("Llama-3.1-8B", name, "fp8") for name in ("FLASH_ATTN 3", "TRITON_ATTN")]
    return found


def prompts(device: str, turn: int) -> list[list[int]]:
    """Prompts of random tokens; those of the second turn begin like those of the first."""
    seeded = [(random.Random(length), length) for length in LENGTHS[device]]
    first = [(generator, generator.choices(VOCABULARY, k=length)) for generator, length in seeded]
    if turn == 0:
        return [prompt for _, prompt in first]
    return [prompt + generator.choices(VOCABULARY, k=TURN) for generator, prompt in first]


def engine_args(case: Case, folder: Path, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `vllm.LLM` for stock vLLM and for the plugin."""
    model = BY_NAME[case.model]
    path = make_model(model.variant, folder / model.variant, num_heads=model.num_heads if device == "cuda" else 8)
    stock: dict[str, Any] = {
        "model": str(path),
        "max_model_len": EVERYTHING[device],
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048 if device == "cuda" else 256,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": (2 << 30) if device == "cuda" else (256 << 20),
        "gpu_memory_utilization": 0.05,  # vLLM only checks that so much is free
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "kv_cache_dtype": case.kv_dtype,
        "seed": 0,
    }
    if device == "cuda":
        # NOTE: as hot buffers do, stock vLLM takes the sparse kernels for prompts of every length.
        stock["attention_config"] = {**ATTENTION[case.backend], "sparse_mla_force_mqa": True}
    else:
        stock["enforce_eager"] = True
    options: dict[str, Any] = {"host_pool_gib": 2.0 if device == "cuda" else 0.5}
    if not model.is_dsa:
        size = EVERYTHING[device]
        options |= {"algorithm": "quest", "top_k": size, "device_buffer_size": size}
    transfer = {"kv_connector": "HiSparseHostConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    return stock, {**stock, "kv_transfer_config": transfer}


def answer(engine: dict[str, Any], device: str, log: Path) -> list[dict[str, Any]]:
    """Complete all prompts greedily; called in a process of its own.

    Returns:
        One record per completion: `tokens`, and `margins`, by how much the logprob of the best token was above that of
        the second best.
    """
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    llm, found = LLM(**engine), []
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS[device], ignore_eos=True, logprobs=2)
    for turn in range(2):
        asked = [{"prompt_token_ids": prompt} for prompt in prompts(device, turn)]
        found += [_completion(output.outputs[0]) for output in llm.generate(asked, sampling, use_tqdm=False)]
    return found


def _completion(output: Any) -> dict[str, Any]:
    best = [sorted((each.logprob for each in step.values()), reverse=True) for step in output.logprobs]
    return {"tokens": list(output.token_ids), "margins": [first - second for first, second, *_ in best]}


def compare(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the tokens of all completions up to where two part.

    Returns:
        `same_tokens`; `compared_tokens`, all of stock vLLM; and `widest_tie`, the largest margin of stock vLLM's best
        token where two completions part, None if none does.
    """
    same, margins = 0, []
    for own, full in zip(ours, stock, strict=True):
        common = sum(1 for _ in takewhile(bool, map(int.__eq__, own["tokens"], full["tokens"])))
        same += common
        margins += full["margins"][common : common + 1] if common < len(full["tokens"]) else []
    total = sum(len(full["tokens"]) for full in stock)
    widest = round(max(margins), 4) if margins else None
    return {"same_tokens": same, "compared_tokens": total, "widest_tie": widest}


def long_request(case: Case) -> dict[str, int]:
    """Bytes on the GPU of a request of 131,072 tokens of the real model, without tensor parallelism."""
    model = ModelShape.load(case.model, "bfloat16" if case.kv_dtype == "auto" else case.kv_dtype)
    top_k = model.top_k or DENSE_TOP_K
    memory = KVMemory(model, 0, 0, 1, 2 * top_k, top_k)
    device, full = (memory.request_bytes(system, LONG)[0] for system in (System.plugin, System.full))
    return {"device_bytes_128k": device, "full_bytes_128k": full}


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process, forked from one that has imported vLLM and nothing else.

    Raises:
        RuntimeError: the process has failed.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["vllm", "vllm.v1.engine.llm_engine"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(send, function, arguments))
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} has failed") from None
    finally:
        process.join()


def _send_result(send: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    send.send(function(*arguments))


def run_case(case: Case, folder: Path, device: str, gpu: str, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Run both engines of a row; `pool` limits the engines that run at a time."""
    names = ["stock", "ours"]
    logs = [folder / f"{case.model}_{case.backend}_{case.kv_dtype}_{name}.log".replace(" ", "_") for name in names]
    engines = engine_args(case, folder, device)
    started = [
        pool.submit(in_a_process, answer, engine, device, log) for engine, log in zip(engines, logs, strict=True)
    ]
    found = []
    for each, log in zip(started, logs, strict=True):
        try:
            found.append(each.result())
        except RuntimeError as error:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:]) if log.exists() else ""
            raise RuntimeError(f"{case}: {error}\n{tail}") from None
    stock, ours = found
    return {**asdict(case), "gpu": gpu, **compare(ours, stock), **long_request(case)}


def earlier(path: Path) -> dict[Case, dict[str, Any]]:
    """Rows of a result file of this commit and these versions."""
    record = json.loads(path.read_text()) if path.exists() else {}
    is_same = record.get("commit") == commit() and record.get("versions") == versions()
    names = Case.__dataclass_fields__
    return {Case(**{name: row[name] for name in names}): row for row in record["rows"]} if is_same else {}


def results(
    chosen: list[Case], folder: Path, device: str, gpu: str, max_engines: int
) -> Iterator[tuple[Case, Future[dict[str, Any]]]]:
    """Yield each row when it and those before it have ended; engines of several rows run side by side."""
    for variant in {BY_NAME[case.model] for case in chosen}:
        engine_args(next(case for case in chosen if BY_NAME[case.model] == variant), folder, device)  # writes the model
    with ThreadPoolExecutor(max_engines) as engines, ThreadPoolExecutor(max(1, max_engines // 2)) as rows:
        started = {case: rows.submit(run_case, case, folder, device, gpu, engines) for case in chosen}
        yield from started.items()


@app.callback()
def main() -> None:
    """Models and back ends beside stock vLLM."""


@app.command()
def run(
    ctx: typer.Context,
    model: Annotated[list[str] | None, typer.Option(help="Real model; repeatable; default: all.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Back end; repeatable; default: all.")] = None,
    max_engines: Annotated[int, typer.Option(min=1, help="Engines at a time; a GPU of 80 GB has room for 8.")] = 4,
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' logs; default: none are kept.")] = None,
    output: Annotated[Path | None, typer.Option(help="Result file; default: by GPU.")] = None,
) -> None:
    """Run the rows that the result file lacks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = gpu_hardware() if device == "cuda" else None
    gpu = str(hardware["gpu"]).split()[1].lower() if hardware else "cpu"
    path, every = output or RESULTS / gpu / "models.json", cases(device)
    rows = earlier(path)
    wanted = [
        case for case in every if case.model in (model or BY_NAME) and case.backend in (backend or [case.backend])
    ]
    if not wanted:
        names = ", ".join(dict.fromkeys(f"{case.model} over {case.backend}" for case in every))
        raise typer.BadParameter(f"no such row; rows are {names}")
    failures = []
    with TemporaryDirectory() as temporary:
        folder = logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case, row in results([case for case in wanted if case not in rows], folder, device, gpu, max_engines):
            try:
                rows[case] = row.result()
            except RuntimeError as error:
                failures.append(str(error))
                typer.echo(error, err=True)
                continue
            write_result(path, ctx, "benchmarks.models", [rows[each] for each in every if each in rows], hardware)
    if rows:
        show("Models and back ends", [rows[each] for each in every if each in rows])
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    app()

"""Does every model over every back end give stock vLLM's tokens, and what does a request of 128K tokens take?

    python -m benchmarks.models --release benchmarks/results/h200/release_0.33.0.json

A row of the table is one model over one back end. The tokens are those that a GPU test has compared, from the result
file of `benchmarks.release`: stock vLLM and the plugin answer the same prompts with a tiny model of the same class. In
a dense model, the plugin selects all rows; a model with indexers selects itself. The bytes are computed from the sizes
of the real model. A row whose test has not passed is left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import KV_LORA_RANK, ROPE_DIM, command, show
from vllm_hisparse.cli.plan.memory import KVMemory, System
from vllm_hisparse.cli.plan.models import ModelShape
from vllm_hisparse.layout import mla_row_bytes

LONG = 1 << 17  # tokens of the request whose bytes are computed
DENSE_TOP_K = 2048

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        model: name of the real model: a preset of `vllm-hisparse plan`, or a key of `LANGUAGE_MODELS`.
        backend: name of vLLM's back end, with the version of FlashAttention where there are several.
        kv_dtype: `--kv-cache-dtype`.
    """

    model: str
    backend: str
    kv_dtype: str


VARIANTS = {  # model -> variant of the tiny model that runs
    "DeepSeek-V3.2": "dsv32",
    "GLM-5": "glm",
    "GLM-5.2": "glm52",
    "GLM-5.3": "glm53",
    "HY-V4": "hyv4",
    "MiniMax-M3": "minimax_m3",
    "Llama-3.1-8B": "llama",
    "Qwen3-8B": "qwen3",
    "Qwen3-30B-A3B": "qwen3_moe",
    "Qwen2-57B-A14B": "qwen2_moe",
    "Mixtral-8x7B": "mixtral",
    "GLM-4.5": "glm4_moe",
    "ERNIE-4.5-21B-A3B": "ernie45_moe",
    "Qwen2.5-VL-7B": "qwen25_vl",
    "Qwen3-VL-8B": "qwen3_vl",
    "Qwen3-VL-30B-A3B": "qwen3_vl_moe",
    "GLM-4.1V-9B": "glm4v",
}
LANGUAGE_MODELS = {  # model that takes images -> preset of `vllm-hisparse plan` whose KV it has
    "Qwen2.5-VL-7B": "Qwen2.5-7B",
    "Qwen3-VL-8B": "Qwen3-8B",
    "Qwen3-VL-30B-A3B": "Qwen3-30B-A3B",
    "GLM-4.1V-9B": "GLM-4-9B",
}
ATTENTION: dict[str, dict[str, Any]] = {  # back end that a user can choose -> `attention_config`
    "FLASHMLA_SPARSE": {"backend": "FLASHMLA_SPARSE"},
    "FLASH_ATTN_MLA_SPARSE": {"backend": "FLASH_ATTN_MLA_SPARSE"},
    "FLASHINFER_MLA_SPARSE_SM90": {"backend": "FLASHINFER_MLA_SPARSE_SM90"},
    "FLASH_ATTN 3": {"backend": "FLASH_ATTN", "flash_attn_version": 3},
    "FLASH_ATTN 2": {"backend": "FLASH_ATTN", "flash_attn_version": 2},
    "FLASH_ATTN 4": {"backend": "FLASH_ATTN", "flash_attn_version": 4},
    "TRITON_ATTN": {"backend": "TRITON_ATTN"},
    "FLASHINFER": {"backend": "FLASHINFER"},
}
DSA, DENSE = "tests/gpu/test_engine_parity.py::", "tests/gpu/test_dense_parity.py::"
TESTS = {  # row -> test that compares its tokens
    Case("DeepSeek-V3.2", "FLASHMLA_SPARSE", "fp8"): f"{DSA}test_parity_with_cuda_graphs[fp8]",
    Case("DeepSeek-V3.2", "FLASHMLA_SPARSE", "bfloat16"): f"{DSA}test_parity_with_cuda_graphs[bf16_flashmla]",
    Case("DeepSeek-V3.2", "FLASH_ATTN_MLA_SPARSE", "bfloat16"): f"{DSA}test_parity_with_cuda_graphs[bf16_flash_attn]",
    Case("DeepSeek-V3.2", "FLASHINFER_MLA_SPARSE_SM90", "fp8"): (
        f"{DSA}test_parity_with_cuda_graphs[flashinfer_sm90_e4m3]"
    ),
    Case("DeepSeek-V3.2", "FLASHINFER_MLA_SPARSE_SM90", "bfloat16"): (
        f"{DSA}test_parity_with_cuda_graphs[flashinfer_sm90_16bit]"
    ),
    Case("GLM-5", "FLASHMLA_SPARSE", "fp8"): f"{DSA}test_glm_architectures_eager[fp8-glm]",
    Case("GLM-5.2", "FLASHMLA_SPARSE", "fp8"): f"{DSA}test_shared_indexers_with_cuda_graphs[fp8]",
    Case("GLM-5.3", "FLASHMLA_SPARSE", "fp8"): f"{DSA}test_glm_architectures_eager[fp8-glm53]",
    Case("HY-V4", "FLASHMLA_SPARSE", "fp8"): "tests/gpu/test_hyv4_parity.py::test_parity_with_cuda_graphs[fp8]",
    Case("MiniMax-M3", "MINIMAX_M3_SPARSE", "bfloat16"): (
        "tests/gpu/test_minimax_m3_parity.py::test_parity_with_cuda_graphs[bf16]"
    ),
    Case("Llama-3.1-8B", "FLASH_ATTN 3", "bfloat16"): f"{DENSE}test_budget_of_everything_is_full_attention[quest]",
    Case("Llama-3.1-8B", "FLASH_ATTN 2", "bfloat16"): f"{DENSE}test_other_backends[fa2]",
    Case("Llama-3.1-8B", "FLASH_ATTN 4", "bfloat16"): f"{DENSE}test_other_backends[fa4]",
    Case("Llama-3.1-8B", "TRITON_ATTN", "bfloat16"): f"{DENSE}test_other_backends[triton]",
    Case("Llama-3.1-8B", "FLASH_ATTN 3", "fp8"): f"{DENSE}test_kv_in_fp8[FLASH_ATTN]",
    Case("Llama-3.1-8B", "TRITON_ATTN", "fp8"): f"{DENSE}test_kv_in_fp8[TRITON_ATTN]",
    Case("Qwen3-8B", "FLASHINFER", "bfloat16"): f"{DENSE}test_other_backends[flashinfer]",
    **{
        Case(model, "FLASH_ATTN 3", "bfloat16"): f"{DENSE}test_other_models[{VARIANTS[model]}]"
        for model in ("Qwen3-8B", "Qwen3-30B-A3B", "Qwen2-57B-A14B", "Mixtral-8x7B", "GLM-4.5", "ERNIE-4.5-21B-A3B")
    },
    **{
        Case(model, "FLASH_ATTN 3", "bfloat16"): f"tests/gpu/test_image_parity.py::test_images[{VARIANTS[model]}]"
        for model in LANGUAGE_MODELS
    },
}


def table(release: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows whose tests have passed.

    Args:
        release: result file of `benchmarks.release`.

    Returns:
        Rows in the order of `TESTS`: the model, the back end and the dtype; `gpu`, in lower case; `same_tokens`, the
        tokens of all answers up to where two part; `compared_tokens`, all of stock vLLM's; `widest_tie`, the largest
        margin of stock vLLM's best token where two answers part, None if none does; the bytes of `long_request`; and
        `commit`, where rows of the release are of several.
    """
    gpu, compared = str(release["hardware"]["gpu"]).split()[1].lower(), {}
    for part in release["rows"]:
        others = {line.rpartition(": ")[0] for line in part["not_passed"]}
        commit = {"commit": part["commit"]} if "commit" in part else {}
        for each in part.get("comparisons", []):
            if each["test"].rpartition("::")[2] not in others:
                compared[each["test"]] = each | commit
    rows = []
    for case, test in TESTS.items():
        if test in compared:
            found = compared[test]
            counts = {"same_tokens": found["same_tokens"], "compared_tokens": found["tokens"]}
            counts["widest_tie"] = found["widest_tie"]
            commit = {"commit": found["commit"]} if "commit" in found else {}
            rows.append({**asdict(case), "gpu": gpu, **counts, **long_request(case), **commit})
    return rows


def long_request(case: Case) -> dict[str, int]:
    """Bytes on the GPU of a request of 131,072 tokens of the real model, without tensor parallelism."""
    model = ModelShape.load(LANGUAGE_MODELS.get(case.model, case.model), case.kv_dtype)
    if case.backend.startswith("FLASHINFER_MLA") and case.kv_dtype == "fp8":  # rows without scales
        model = replace(model, row_bytes=mla_row_bytes(KV_LORA_RANK, ROPE_DIM, 1))
    top_k = model.top_k or DENSE_TOP_K
    memory = KVMemory(model, 0, 0, 1, 2 * top_k, top_k)
    device, full = (memory.request_bytes(system, LONG)[0] for system in (System.plugin, System.full))
    return {"device_bytes_128k": device, "full_bytes_128k": full}


@app.command()
def main(
    ctx: typer.Context,
    release: Annotated[Path, typer.Option(help="Result file of benchmarks.release.")],
    output: Annotated[Path | None, typer.Option(help="Result file; default: models.json beside the other.")] = None,
) -> None:
    """Write the table of models and back ends."""
    found = json.loads(release.read_text())
    rows = table(found)
    provenance = {name: found[name] for name in ("commit", "date", "hardware", "versions")}
    result = {"command": command(ctx, "benchmarks.models"), **provenance, "rows": rows}
    (output or release.with_name("models.json")).write_text(json.dumps(result, indent=2) + "\n")
    if rows:
        show("Models and back ends", rows)
    done = {Case(row["model"], row["backend"], row["kv_dtype"]) for row in rows}
    for case, test in TESTS.items():
        if case not in done:
            typer.echo(f"{case.model} over {case.backend} in {case.kv_dtype} has no row, because {test} has not passed")


if __name__ == "__main__":
    app()

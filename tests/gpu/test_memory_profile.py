"""Engines that start as `vllm serve` does by default: vLLM measures what a model needs before there is a KV cache.

It captures CUDA graphs once before there is a connector, and again when hot buffers have their storage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineRun, assert_pools_empty, assert_same_but_ties, engine_args, hot_args, make_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PHASE = {"prompts": [make_prompt(length) for length in (1, 65, 2500, 6000)], "max_tokens": 32}
DEVICE_SHARE, LARGE_DEVICE_SHARE = 0.3, 0.8
DSA_SIZES = {"num_heads": 64, "index_n_heads": 64, "index_topk": 2048}
GENERIC_CLASS = {"architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 1 << 18}
EVERYTHING = {"algorithm": "quest", "top_k": 8192, "device_buffer_size": 8192}
# Model and its sizes, options of the connector, engine arguments, and those of the reference alone.
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fused": ("dsv32", DSA_SIZES, {}, {}, {}),
    # NOTE: vLLM 0.32 cannot run what torch 2.13 compiles of its generic class; the reference is not compiled.
    "generic": ("dsv32", DSA_SIZES, {}, {"hf_overrides": GENERIC_CLASS}, {"enforce_eager": True}),
    "dense": ("llama", {"num_heads": 16}, EVERYTHING, {"hf_overrides": {}}, {}),
}
COMMON = {"max_model_len": 8192, "max_num_batched_tokens": 2048}
LLAMA_8B = {**COMMON, "hf_overrides": {}, "max_num_seqs": 4}
SHORT_PHASE = {"prompts": [make_prompt(length) for length in (1, 65, 2500)], "max_tokens": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from vllm_hisparse.cli.tiny_model import make_model

    directory = tmp_path_factory.mktemp("models")
    return {
        name: make_model(model, directory / name, num_layers=4, **sizes) for name, (model, sizes, *_) in CASES.items()
    }


@pytest.fixture(scope="module")
def references(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Full KV; these engines have ended when the others measure the device's free memory."""
    directory = tmp_path_factory.mktemp("references")
    started = {
        name: EngineRun.start(directory, name, engine_args(models[name], **COMMON, **arguments, **reference), [PHASE])
        for name, (_, _, _, arguments, reference) in CASES.items()
    }
    return {name: run.phases()[0] for name, run in started.items()}


@pytest.mark.parametrize("name", list(CASES))
def test_vllm_sizes_the_kv_cache(
    models: dict[str, Path], references: dict[str, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    _, _, options, arguments, _ = CASES[name]
    engine = hot_args(models[name], options, **COMMON, **arguments)
    del engine["kv_cache_memory_bytes"]
    record = EngineRun.start(tmp_path, name, {**engine, "gpu_memory_utilization": DEVICE_SHARE}, [PHASE]).phases()[0]
    assert_same_but_ties(record["completions"], references[name]["completions"])
    assert_pools_empty(record)


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the layers and KV heads of Llama-3.1-8B."""
    from vllm_hisparse.cli import tiny_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_model.VARIANTS, "llama", {**tiny_model.VARIANTS["llama"], "head_dim": 128})
        return tiny_model.make_model("llama", tmp_path_factory.mktemp("llama_8b"), num_layers=32, num_heads=32)


@pytest.fixture(scope="module")
def llama_8b_reference(llama_8b: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Full KV's completions, not compiled because that takes longest."""
    engine = engine_args(llama_8b, **LLAMA_8B, enforce_eager=True)
    return EngineRun.start(tmp_path_factory.mktemp("reference"), "full", engine, [SHORT_PHASE]).phases()[0][
        "completions"
    ]


@pytest.mark.parametrize(("algorithm", "options"), [("pq_cache", {"full_kv_layers": []}), ("quest", {})])
def test_residency_bytes_of_llama_8b(
    llama_8b: Path, llama_8b_reference: list[dict[str, Any]], tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    """An engine with most of the device starts: its residency is a small share of its KV cache, and vLLM leaves room
    for it."""
    everything = {"algorithm": algorithm, "top_k": 4096, "device_buffer_size": 4096, "host_pool_gib": 4.0, **options}
    engine = hot_args(llama_8b, everything, **LLAMA_8B)
    del engine["kv_cache_memory_bytes"]
    engine["gpu_memory_utilization"] = LARGE_DEVICE_SHARE
    record = EngineRun.start(tmp_path, algorithm, engine, [SHORT_PHASE]).phases()[0]
    assert_same_but_ties(record["completions"], llama_8b_reference)
    assert_pools_empty(record)

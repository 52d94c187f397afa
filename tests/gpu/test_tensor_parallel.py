"""Two ranks on two GPUs give the tokens of full KV on two GPUs, from one host pool or from one for each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import (
    WITHOUT_MULTICAST,
    EngineRun,
    assert_pools_empty,
    assert_same_but_ties,
    engine_args,
    hot_args,
    make_prompt,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

PHASE = {"prompts": [make_prompt(length) for length in (1, 65, 2049, 4097, 8000, 12000)], "max_tokens": 64}
QUEST = {"algorithm": "quest", "top_k": 16384, "device_buffer_size": 16384}
RANKS = {"max_model_len": 16384, "tensor_parallel_size": 2, "compilation_config": WITHOUT_MULTICAST}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dsv32": ({"num_heads": 64, "index_n_heads": 64, "index_topk": 2048}, {}, {}),
    "llama": ({"num_heads": 16}, QUEST, {"attention_config": {"backend": "FLASH_ATTN"}}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """All engines side by side."""
    from vllm_hisparse.cli.tiny_model import make_model

    directory, started = tmp_path_factory.mktemp("runs"), {}
    for name, (sizes, options, arguments) in MODELS.items():
        model = make_model(name, directory / name, num_layers=4, **sizes)
        for kind, engine in (
            ("full", engine_args(model, **RANKS, **arguments)),
            ("hot", hot_args(model, options, **RANKS, **arguments)),
        ):
            started[f"{name}_{kind}"] = EngineRun.start(directory, f"{name}_{kind}", engine, [PHASE])
    return started


@pytest.mark.parametrize("name", MODELS)
def test_parity_with_cuda_graphs(runs: dict[str, EngineRun], name: str) -> None:
    full, record = (runs[f"{name}_{kind}"].phases()[0] for kind in ("full", "hot"))
    assert_same_but_ties(record["completions"], full["completions"])
    assert_pools_empty(record)
    first_rank, second_rank = record["shared_memory"]
    assert first_rank == second_rank
    assert (first_rank is not None) == (name == "dsv32")

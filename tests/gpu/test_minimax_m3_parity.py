"""MiniMax-M3 on the GPU: full KV's tokens over blocks that the model selects for each KV head.

Full KV is stock vLLM, whose indexer and kernels select and attend. A copy of the model that selects fewer blocks shows
that a lost selection would be seen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    EngineRun,
    assert_not_the_same,
    assert_pools_empty,
    assert_same_but_ties,
    differences,
    engine_args,
    hot_args,
    make_prompt,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_LAYERS, NUM_FULL, NUM_KV_HEADS, BLOCK, TOP_K, DEVICE_BUFFER_SIZE = 6, 2, 4, 128, 2048, 4096
LENGTHS = [1, 15, 127, 129, 700, 2047, 2049, 3500, 4097, 6000, 9000, 12000]
PHASE = {"prompts": [make_prompt(length, seed) for seed in range(2) for length in LENGTHS], "max_tokens": 64}
ROW_CHECK = {"row_check": {"every": 40, "corrupt": False}}
FIXED = {"elastic": False}  # the device has room for all sequences as a whole, and then nothing is missed
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_hisparse.cli.tiny_model import make_model

    sizes = {"num_layers": NUM_LAYERS, "num_heads": 16 * NUM_KV_HEADS, "index_topk": TOP_K}
    return make_model("minimax_m3", tmp_path_factory.mktemp("models") / "minimax_m3", **sizes)


@pytest.fixture(scope="module")
def fewer_blocks(model: Path) -> Path:
    copy = Path(shutil.copytree(model, model.with_name("fewer_blocks")))
    config = json.loads((copy / "config.json").read_text())
    config["sparse_attention_config"]["sparse_topk_blocks"] = 4
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def hot(model: Path, options: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    return hot_args(model, {"algorithm": "msa", **(options or {})}, **overrides)


@pytest.mark.parametrize("key_dtype", ["bf16", "fp8"])
def test_parity_with_cuda_graphs(model: Path, fewer_blocks: Path, tmp_path: Path, key_dtype: str) -> None:
    options = {"attention_config": {"indexer_kv_dtype": key_dtype}, "max_num_seqs": len(PHASE["prompts"])}
    chunks = {"max_num_batched_tokens": 4096}
    started = {
        "full": EngineRun.start(tmp_path, "full", engine_args(model, **options), [PHASE]),
        "hot": EngineRun.start(tmp_path, "hot", hot(model, FIXED, **options), [PHASE], **ROW_CHECK),
        "chunks": EngineRun.start(tmp_path, "chunks", engine_args(model, **options, **chunks), [PHASE]),
        "fewer_blocks": EngineRun.start(tmp_path, "fewer_blocks", engine_args(fewer_blocks, **options), [PHASE]),
    }
    found = {name: run.phases()[0] for name, run in started.items()}
    full, ours = found["full"]["completions"], found["hot"]
    assert_same_but_ties(ours["completions"], full, found["chunks"]["completions"])
    assert_pools_empty(ours)
    assert ours["counters"]["cache_misses"] > 0
    assert ours["wrong_rows"] == 0 < ours["checked_rows"]
    assert_not_the_same(found["fewer_blocks"]["completions"], full)
    num_same = sum(request["same"] for request in differences(found["fewer_blocks"]["completions"], full))
    assert num_same < 0.8 * sum(request["same"] for request in differences(ours["completions"], full))


def test_without_cuda_graphs_and_with_small_chunks(model: Path, tmp_path: Path) -> None:
    """Chunks that end inside blocks, beside requests that decode; several groups of staged histories in a step."""
    options = {"enforce_eager": True, "max_num_batched_tokens": 2100, "max_num_seqs": len(PHASE["prompts"])}
    started = {
        "full": EngineRun.start(tmp_path, "full", engine_args(model, **options), [PHASE]),
        "hot": EngineRun.start(tmp_path, "hot", hot(model, max_model_len=13000, **options), [PHASE], **ROW_CHECK),
    }
    full, ours = (started[name].phases()[0] for name in ("full", "hot"))
    assert_same_but_ties(ours["completions"], full["completions"])
    assert_pools_empty(ours)
    assert ours["wrong_rows"] == 0 < ours["checked_rows"]


def test_preemption_and_prefix_reuse(model: Path, tmp_path: Path) -> None:
    """A device pool too small for all requests; then a second turn of each, served from the host's prefix cache."""
    from vllm_hisparse.layout import MSA_UNIT, KVLayout

    lengths = range(5000, 5600, 100)  # longer than the buffer
    first = {"prompts": [make_prompt(length) for length in lengths], "max_tokens": 200}
    again = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": 32}
    row, num_sparse = NUM_KV_HEADS * 512, NUM_LAYERS - NUM_FULL
    sizes = num_sparse, num_sparse, BLOCK, MSA_UNIT, NUM_KV_HEADS
    layout = KVLayout(row, 256, *sizes, full_kv_row_bytes=NUM_FULL * row)
    five = [layout.num_hot_blocks(DEVICE_BUFFER_SIZE) + layout.num_blocks(length) for length in lengths][:5]
    shared = {"enable_prefix_caching": True, "max_num_seqs": 8}
    hot_engine = hot(model, num_gpu_blocks_override=sum(five) + 4, **shared)  # the five grow by seven blocks
    started = {
        "hot": EngineRun.start(tmp_path, "hot", hot_engine, [first, again], **ROW_CHECK),
        "full": EngineRun.start(tmp_path, "full", engine_args(model, **shared), [first, again]),
    }
    full, ours = started["full"].phases(), started["hot"].phases()
    for record, expected in zip(ours, full, strict=True):
        assert_same_but_ties(record["completions"], expected["completions"])
        assert_pools_empty(record)
    assert ours[1]["counters"]["resumed_requests"] >= 1
    assert min(done["num_cached_tokens"] for done in ours[1]["completions"]) >= 4992
    assert ours[1]["counters"]["host_prefix_tokens"] > 0
    assert ours[1]["wrong_rows"] == 0


def test_drafts_with_cuda_graphs(model: Path, tmp_path: Path) -> None:
    """Full KV's tokens without drafts; most of the drafts are rejected."""
    options = {"max_num_seqs": len(PHASE["prompts"])}
    drafts = {"speculative_config": NGRAM, "disable_log_stats": False}
    hot_engine = hot(model, {"device_buffer_size": 3 * TOP_K, **FIXED}, **options, **drafts)
    started = {
        "full": EngineRun.start(tmp_path, "full", engine_args(model, **options), [PHASE]),
        "drafts": EngineRun.start(tmp_path, "drafts", engine_args(model, **options, **drafts), [PHASE]),
        "hot": EngineRun.start(tmp_path, "hot", hot_engine, [PHASE], **ROW_CHECK),
    }
    found = {name: run.phases()[0] for name, run in started.items()}
    ours = found["hot"]
    assert_same_but_ties(ours["completions"], found["full"]["completions"], found["drafts"]["completions"])
    assert_pools_empty(ours)
    assert ours["wrong_rows"] == 0 < ours["checked_rows"]
    assert ours["counters"]["cache_misses"] > 0 and ours["drafts"]["drafted"] > 0

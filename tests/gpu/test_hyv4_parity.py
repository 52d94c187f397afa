"""HY-V4 on the GPU: full KV's tokens with attention sinks, shared indexers, a draft layer and layers of full attention.

Full KV is stock vLLM, whose layers have a FlashMLA backend of the model's own. A copy of the model whose sinks take
nothing shows that their loss would be seen.
"""

from __future__ import annotations

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

NUM_LAYERS, NUM_INDEXERS, TOP_K, DEVICE_BUFFER_SIZE = 6, 3, 2048, 4096
SIZES = {"num_layers": NUM_LAYERS, "num_heads": 32, "index_n_heads": 32, "index_topk": TOP_K}
LENGTHS = [1, 65, 700, 2047, 2049, 3500, 4097, 6000, 9000, 12000]
PHASE = {"prompts": [make_prompt(length, seed) for seed in range(2) for length in LENGTHS], "max_tokens": 64}
ROW_CHECK = {"row_check": {"every": 40, "corrupt": False}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "disable_log_stats": False}


def make(variant: str, directory: Path, **sizes: Any) -> Path:
    from vllm_hisparse.cli.tiny_model import make_model

    return make_model(variant, directory / variant, **SIZES | sizes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("hyv4", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def without_sinks(model: Path) -> Path:
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(model, model.with_name("without_sinks")))
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("learnable_sink_param"):
            tensor.fill_(-1e4)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_parity_with_cuda_graphs(model: Path, without_sinks: Path, tmp_path: Path, kv_cache_dtype: str) -> None:
    options = {"kv_cache_dtype": kv_cache_dtype, "max_num_seqs": len(PHASE["prompts"])}
    started = {
        "full": EngineRun.start(tmp_path, "full", engine_args(model, **options), [PHASE]),
        "hot": EngineRun.start(tmp_path, "hot", hot_args(model, {"elastic": False}, **options), [PHASE], **ROW_CHECK),
        "chunks": EngineRun.start(
            tmp_path, "chunks", engine_args(model, max_num_batched_tokens=4096, **options), [PHASE]
        ),
        "without_sinks": EngineRun.start(tmp_path, "without_sinks", engine_args(without_sinks, **options), [PHASE]),
    }
    found = {name: run.phases()[0] for name, run in started.items()}
    full, hot = found["full"]["completions"], found["hot"]
    assert_same_but_ties(hot["completions"], full, found["chunks"]["completions"])
    assert_pools_empty(hot)
    assert hot["counters"]["cache_misses"] > 0
    assert hot["wrong_rows"] == 0 < hot["checked_rows"]
    assert_not_the_same(found["without_sinks"]["completions"], full)
    num_same = sum(request["same"] for request in differences(found["without_sinks"]["completions"], full))
    assert num_same < 0.5 * sum(request["same"] for request in differences(hot["completions"], full))


def test_preemption_and_prefix_reuse(model: Path, tmp_path: Path) -> None:
    """A device pool too small for all requests; then a second turn of each, served from the host's prefix cache."""
    from vllm_hisparse.layout import KVLayout, indexer_row_bytes, mla_row_bytes

    lengths = range(5000, 5600, 100)  # longer than the buffer
    first = {"prompts": [make_prompt(length) for length in lengths], "max_tokens": 96}
    again = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": 32}
    layout = KVLayout(mla_row_bytes(512, 64, 2), indexer_row_bytes(128), NUM_LAYERS, NUM_INDEXERS)
    five = [layout.num_hot_blocks(DEVICE_BUFFER_SIZE) + layout.num_blocks(length) for length in lengths][:5]
    shared = {"enable_prefix_caching": True, "max_num_seqs": 8}
    hot_engine = hot_args(model, num_gpu_blocks_override=sum(five) + 6, **shared)  # each grows by two blocks
    started = {
        "hot": EngineRun.start(tmp_path, "hot", hot_engine, [first, again], **ROW_CHECK),
        "full": EngineRun.start(tmp_path, "full", engine_args(model, **shared), [first, again]),
    }
    full, hot = started["full"].phases(), started["hot"].phases()
    for ours, expected in zip(hot, full, strict=True):
        assert_same_but_ties(ours["completions"], expected["completions"])
        assert_pools_empty(ours)
    assert hot[1]["counters"]["resumed_requests"] >= 1
    assert min(done["num_cached_tokens"] for done in hot[1]["completions"]) >= 4992
    assert hot[1]["wrong_rows"] == 0


def test_a_layer_of_full_attention(tmp_path: Path) -> None:
    """Its KV stays on the device, and comes back from the host with a second turn.

    NOTE: in bf16 alone: vLLM gives every layer after the first sparse one the format of sparse layers, if it is fp8.
    """
    mixed = make("hyv4_mixed", tmp_path)
    first = {"prompts": [make_prompt(length) for length in (65, 2500, 5000, 7000)], "max_tokens": 48}
    again = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": 32}
    again["forgets"] = "device"
    options = {"enable_prefix_caching": True}
    started = {
        "hot": EngineRun.start(tmp_path, "hot", hot_args(mixed, **options), [first, again], **ROW_CHECK),
        "full": EngineRun.start(tmp_path, "full", engine_args(mixed, **options), [first, again]),
    }
    full, hot = started["full"].phases(), started["hot"].phases()
    for ours, expected in zip(hot, full, strict=True):
        assert_same_but_ties(ours["completions"], expected["completions"])
        assert_pools_empty(ours)
    assert hot[1]["counters"]["host_prefix_tokens"] > 0
    assert hot[1]["wrong_rows"] == 0


def test_a_draft_layer_with_cuda_graphs(tmp_path: Path) -> None:
    """Full KV's tokens without drafts, most of which are rejected."""
    model = make("hyv4", tmp_path, draft_layers=1)
    options = {"kv_cache_dtype": "fp8", "max_num_seqs": len(PHASE["prompts"])}
    hot_engine = hot_args(model, {"device_buffer_size": 3 * TOP_K}, **options, **MTP)
    started = {
        "full": EngineRun.start(tmp_path, "full", engine_args(model, **options), [PHASE]),
        "drafts": EngineRun.start(tmp_path, "drafts", engine_args(model, **options, **MTP), [PHASE]),
        "hot": EngineRun.start(tmp_path, "hot", hot_engine, [PHASE], **ROW_CHECK),
    }
    found = {name: run.phases()[0] for name, run in started.items()}
    hot = found["hot"]
    assert_same_but_ties(hot["completions"], found["full"]["completions"], found["drafts"]["completions"])
    assert_pools_empty(hot)
    assert hot["wrong_rows"] == 0 < hot["checked_rows"]
    rates = [run["drafts"]["accepted"] / run["drafts"]["drafted"] for run in (hot, found["drafts"])]
    assert rates[0] == pytest.approx(rates[1], abs=0.05)

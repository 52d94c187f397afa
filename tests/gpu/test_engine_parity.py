"""The same greedy tokens as full-KV vLLM on the GPU: kernels, CUDA graphs, chunked prefill, preemption, prefix reuse.

Both engines choose the same tokens but for ties: the order in which a kernel adds up a selection, and the batches of a
step, change the last bits of bf16 logits. Full KV with another chunk size differs from full KV in the same way; the
report of a run shows both. Rows in the hot buffer are compared with the host pool byte by byte.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineRun, assert_pools_empty, assert_same_but_ties, differences, engine_args, hot_args, make_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [1, 63, 64, 65, 2047, 2048, 2049, 4094, 4097, 6000, 8191, 12000, 16384, 20001, 26000, 32000]
MORE_LENGTHS = [100, 300, 700, 1500, 2500, 3000, 3500, 4500, 5000, 5500, 7000, 9000]
MAX_TOKENS = 128
PHASE = {"prompts": [make_prompt(length) for length in LENGTHS + MORE_LENGTHS], "max_tokens": MAX_TOKENS}
NUM_REQUESTS = len(LENGTHS + MORE_LENGTHS)
ROW_CHECK = {"every": 40, "corrupt": False}
GENERIC_CLASS = {"architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 1 << 18}
BACKENDS: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8", "attention_config": {"backend": "FLASHMLA_SPARSE"}},
    "bf16_flashmla": {"attention_config": {"backend": "FLASHMLA_SPARSE"}},
    "bf16_flash_attn": {"attention_config": {"backend": "FLASH_ATTN_MLA_SPARSE"}},
    "bf16_generic": {"attention_config": {"backend": "FLASHMLA_SPARSE"}, "hf_overrides": GENERIC_CLASS},
    "fp8_generic": {
        "kv_cache_dtype": "fp8",
        "attention_config": {"backend": "FLASHMLA_SPARSE"},
        "hf_overrides": GENERIC_CLASS,
    },
    "flashinfer_sm90_e4m3": {
        "kv_cache_dtype": "fp8",
        "attention_config": {"backend": "FLASHINFER_MLA_SPARSE_SM90"},
    },
    "flashinfer_sm90_16bit": {"attention_config": {"backend": "FLASHINFER_MLA_SPARSE_SM90"}},
}
SM100 = {
    "trtllm_e4m3": {"kv_cache_dtype": "fp8", "attention_config": {"backend": "FLASHINFER_MLA_SPARSE"}},
    "trtllm_16bit": {"attention_config": {"backend": "FLASHINFER_MLA_SPARSE"}},
    "flash_attn_4": {"attention_config": {"backend": "FLASH_ATTN_MLA_SPARSE_FA4"}},  # from vLLM 0.33 on
}
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10:
    BACKENDS |= SM100
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
# NOTE: vLLM 0.32 cannot run what torch 2.13 compiles of its generic class; the reference is not compiled.
REFERENCES = {name: {"enforce_eager": True} for name in BACKENDS if name.endswith("_generic")}


def backend(name: str) -> dict[str, Any]:
    """Engine arguments of a backend; a fresh copy, because `engine_args` takes them apart."""
    return json.loads(json.dumps(BACKENDS[name]))


SIZES = {"num_layers": 4, "num_heads": 64, "index_n_heads": 64, "index_topk": 2048}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_hisparse.cli.tiny_model import make_model

    return make_model("dsv32", tmp_path_factory.mktemp("models") / "dsv32", **SIZES)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with a draft layer of random weights, most of whose drafts are rejected."""
    from vllm_hisparse.cli.tiny_model import make_model

    return make_model("dsv32", tmp_path_factory.mktemp("models") / "dsv32-mtp", **SIZES, draft_layers=1)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """Full KV and hot buffers for every backend under test, and full KV with smaller chunks, all side by side."""
    directory, started = tmp_path_factory.mktemp("runs"), {}
    tests = [item for item in request.session.items if "runs" in item.fixturenames and "name" in item.callspec.params]
    for name in dict.fromkeys(item.callspec.params["name"] for item in tests):
        reference, sizes = REFERENCES.get(name, {}), {"max_num_seqs": NUM_REQUESTS}
        kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "full": (engine_args(model, **sizes, **reference, **backend(name)), {}),
            "hot": (hot_args(model, **sizes, **backend(name)), {"row_check": ROW_CHECK}),
            "chunks": (engine_args(model, max_num_batched_tokens=4096, **sizes, **reference, **backend(name)), {}),
        }
        for kind, (engine, options) in kinds.items():
            label = f"{name}_{kind}"
            started[label] = EngineRun.start(directory, label, engine, [PHASE], **options)
    return started


@pytest.mark.parametrize("name", list(BACKENDS))
def test_parity_with_cuda_graphs(runs: dict[str, EngineRun], name: str) -> None:
    full, hot, chunks = (runs[f"{name}_{kind}"].phases()[0] for kind in ("full", "hot", "chunks"))
    report(name, {"hot": hot, "chunks": chunks}, full)
    assert_same_but_ties(hot["completions"], full["completions"], chunks["completions"])
    assert_pools_empty(hot)
    assert hot["counters"]["cache_misses"] > 0
    assert hot["checked_rows"] > 0
    assert hot["wrong_rows"] == 0


@pytest.mark.parametrize("name", ["fp8", "bf16_flash_attn"])
def test_both_forms_of_a_step(model: Path, tmp_path: Path, name: str) -> None:
    """28 requests decode in microbatches, or as a whole as soon as misses are known; graphs of both are replayed."""
    check_both_forms(model, tmp_path, name, {})


@pytest.mark.parametrize("name", ["fp8", "bf16_flash_attn"])
def test_layers_with_different_numbers_of_rows(model: Path, tmp_path: Path, name: str) -> None:
    """The same with layers that have more or fewer hot rows than others, whose ages are looked at."""
    # NOTE: without lent blocks, so that requests evict rows.
    rows = {"rows_by_layer": [0.6, 1.4, 0.8, 1.2], "log_rows_by_layer": True, "elastic": False}
    check_both_forms(model, tmp_path, name, rows)


def check_both_forms(model: Path, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Compare a divided step and a whole one with full KV.

    Args:
        model, tmp_path: model and folder of all engines.
        name: a backend.
        options: other options of the engines with hot buffers.
    """
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, NUM_REQUESTS]}
    sizes = {"max_num_seqs": NUM_REQUESTS, "compilation_config": graphs}
    started = {"full": EngineRun.start(tmp_path, "full", engine_args(model, **sizes, **backend(name)), [PHASE])}
    for form, min_copied_bytes in (("divided", 0), ("whole", 1e15)):
        engine = hot_args(model, options, **sizes, **backend(name))
        checks = {"row_check": ROW_CHECK, "min_copied_bytes": min_copied_bytes}
        started[form] = EngineRun.start(tmp_path, form, engine, [PHASE], **checks)
    full, divided, whole = (run.phases()[0] for run in started.values())
    report("_".join(["forms", name, *options]), {"divided": divided, "whole": whole}, full)
    for found in (divided, whole):
        assert_same_but_ties(found["completions"], full["completions"])
        assert_pools_empty(found)
        assert found["counters"]["cache_misses"] > 0 and found["checked_rows"] > 0 and found["wrong_rows"] == 0
    assert divided["replayed"]["whole"] == 0 < divided["replayed"]["divided"]
    assert whole["replayed"]["whole"] > MAX_TOKENS // 2


def test_a_wrong_row_is_found(model: Path, tmp_path: Path) -> None:
    phase = {"prompts": [make_prompt(3000)], "max_tokens": 12}
    row_check = {"every": 8, "corrupt": True}
    engine = hot_args(model, enforce_eager=True)
    record = EngineRun.start(tmp_path, "corrupt", engine, [phase], row_check=row_check).phases()[0]
    assert record["wrong_rows"] == 1


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_preemption_and_prefix_reuse(model: Path, draft_model: Path, tmp_path: Path, num_drafts: int) -> None:
    """A device pool too small for all requests; then a second turn of each, served from the host's prefix cache."""
    shortest = 6400 if num_drafts else 5000  # longer than the buffer
    first = {"prompts": [make_prompt(length) for length in range(shortest, shortest + 600, 100)], "max_tokens": 96}
    again = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": 32}
    shared = {"enable_prefix_caching": True, "max_num_seqs": 8}
    # Five requests fit when they start: each has 586 blocks of hot rows, or 246 that are wider with a draft layer, and
    # all together 409 blocks of indexer keys, or 518. They grow by two each.
    if num_drafts:
        mtp = {"method": "mtp", "num_speculative_tokens": num_drafts}
        drafts = {"speculative_config": mtp, "disable_log_stats": False}
        rows = {"device_buffer_size": (1 + num_drafts) * 2048}
        engine = hot_args(draft_model, rows, num_gpu_blocks_override=5 * 246 + 518 + 6, **drafts, **shared)
    else:
        engine = hot_args(model, num_gpu_blocks_override=5 * 586 + 409 + 6, **shared)
    reference = engine_args(draft_model if num_drafts else model, **shared)
    started = {
        "hot": EngineRun.start(tmp_path, "hot", engine, [first, again], row_check=ROW_CHECK),
        "full": EngineRun.start(tmp_path, "full", reference, [first, again]),
    }
    full, hot = started["full"].phases(), started["hot"].phases()
    suffix = "_mtp" if num_drafts else ""
    report(f"preemption{suffix}", {"hot": hot[0]}, full[0])
    report(f"prefix_reuse{suffix}", {"hot": hot[1]}, full[1])
    # NOTE: the mean of both turns, because six requests may part from full KV after few tokens.
    ours, expected = ([done for record in records for done in record["completions"]] for records in (hot, full))
    assert_same_but_ties(ours, expected)
    for record in hot:
        assert_pools_empty(record)
    assert hot[1]["counters"]["resumed_requests"] >= 1
    assert hot[1]["counters"]["host_prefix_tokens"] > 0
    assert min(done["num_cached_tokens"] for done in hot[1]["completions"]) >= 4992
    assert hot[1]["wrong_rows"] == 0


@pytest.mark.parametrize("name", ["glm", "glm52", "glm53"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_glm_architectures_eager(tmp_path: Path, name: str, kv_cache_dtype: str) -> None:
    """GLM-5.2's and GLM-5.3's layers share indexers."""
    from vllm_hisparse.cli.tiny_model import make_model

    glm = make_model(name, tmp_path / name, num_layers=6, num_heads=64, index_n_heads=32, index_topk=2048)
    phase = {"prompts": [make_prompt(length) for length in (1, 65, 2500, 5000, 9000, 12000)], "max_tokens": 64}
    options = {"enforce_eager": True, "kv_cache_dtype": kv_cache_dtype}
    full = EngineRun.start(tmp_path, "full", engine_args(glm, **options), [phase])
    hot = EngineRun.start(tmp_path, "hot", hot_args(glm, **options), [phase], row_check=ROW_CHECK)
    expected, got = full.phases()[0], hot.phases()[0]
    report(f"{name}_{kv_cache_dtype}", {"hot": got}, expected)
    assert_same_but_ties(got["completions"], expected["completions"])
    assert got["wrong_rows"] == 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_shared_indexers_with_cuda_graphs(tmp_path: Path, kv_cache_dtype: str) -> None:
    """Rows of layers without an indexer travel while the layer that selects attends."""
    from vllm_hisparse.cli.tiny_model import make_model

    glm = make_model("glm52", tmp_path / "glm52", num_layers=6, num_heads=64, index_n_heads=32, index_topk=2048)
    phase = {"prompts": [make_prompt(length, seed) for seed in range(2) for length in MORE_LENGTHS], "max_tokens": 64}
    options = {"kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 24}
    full = EngineRun.start(tmp_path, "full", engine_args(glm, **options), [phase])
    # Buffers of a fixed size evict rows: the device has room for all rows of all requests.
    hot = EngineRun.start(tmp_path, "hot", hot_args(glm, {"elastic": False}, **options), [phase], row_check=ROW_CHECK)
    expected, got = full.phases()[0], hot.phases()[0]
    report(f"glm52_graphs_{kv_cache_dtype}", {"hot": got}, expected)
    assert_same_but_ties(got["completions"], expected["completions"])
    assert got["counters"]["cache_misses"] > 0
    assert got["wrong_rows"] == 0


def test_one_request_at_a_time(model: Path, tmp_path: Path) -> None:
    """vLLM warms up with one request of the whole token budget, longer than any real one; then everything fits."""
    phase = {"prompts": [make_prompt(length) for length in (65, 3000)], "max_tokens": 64}
    options = {"max_num_seqs": 1, "max_model_len": 4000, "max_num_batched_tokens": 8192}
    full = EngineRun.start(tmp_path, "full", engine_args(model, **options), [phase])
    hot = EngineRun.start(tmp_path, "hot", hot_args(model, **options), [phase], row_check=ROW_CHECK)
    expected, got = full.phases()[0], hot.phases()[0]
    report("one_request", {"hot": got}, expected)
    assert_same_but_ties(got["completions"], expected["completions"])
    assert got["wrong_rows"] == got["counters"]["cache_misses"] == 0


def repeating(num_tokens: int) -> list[int]:
    """A prompt in which drafts are found; the model's replies follow some of them."""
    pattern = make_prompt(17, num_tokens)
    return (pattern * (num_tokens // len(pattern) + 1))[:num_tokens]


@pytest.mark.parametrize("name", ["fp8", "bf16_flashmla", "bf16_flash_attn"])
def test_drafts_with_cuda_graphs(model: Path, tmp_path: Path, name: str) -> None:
    """Full KV's tokens without drafts, and its rate of accepted ones."""
    lengths = [1, 63, 2049, 4097, 8190, 8193, 9000, 12000, 16384, 20001]
    phase = {"prompts": [*map(repeating, lengths), *map(make_prompt, lengths)], "max_tokens": 96}
    options, drafts = {"max_num_seqs": 20}, {"speculative_config": NGRAM, "disable_log_stats": False}
    rows = {"device_buffer_size": 4 * 2048}
    engines = {
        "full": (engine_args(model, **options, **backend(name)), {}),
        "full_drafts": (engine_args(model, **options, **drafts, **backend(name)), {}),
        "hot": (hot_args(model, rows, **options, **drafts, **backend(name)), {"row_check": ROW_CHECK}),
    }
    started = {kind: EngineRun.start(tmp_path, kind, args, [phase], **rest) for kind, (args, rest) in engines.items()}
    full, full_drafts, hot = (started[kind].phases()[0] for kind in engines)
    report(f"ngram_{name}", {"hot": hot, "full_drafts": full_drafts}, full)
    assert_same_but_ties(hot["completions"], full["completions"], full_drafts["completions"])
    assert_pools_empty(hot)
    assert hot["counters"]["cache_misses"] > 0
    assert hot["wrong_rows"] == 0 < hot["checked_rows"]
    rates = [run["drafts"]["accepted"] / run["drafts"]["drafted"] for run in (hot, full_drafts)]
    assert rates[0] == pytest.approx(rates[1], abs=0.08) and rates[0] > 0


@pytest.mark.parametrize("name", ["fp8", "bf16_flashmla", "bf16_flash_attn"])
def test_a_draft_layer_with_cuda_graphs(draft_model: Path, tmp_path: Path, name: str) -> None:
    check_draft_layer(draft_model, tmp_path, name, f"mtp_{name}")


@pytest.mark.parametrize("variant", ["glm", "glm52"])
def test_a_draft_layer_of_glm_with_cuda_graphs(tmp_path: Path, variant: str) -> None:
    """GLM-5.2's layers share indexers; its draft layer has its own."""
    from vllm_hisparse.cli.tiny_model import make_model

    sizes = {"num_layers": 6, "num_heads": 64, "index_n_heads": 32, "index_topk": 2048, "draft_layers": 1}
    check_draft_layer(make_model(variant, tmp_path / variant, **sizes), tmp_path, "fp8", f"mtp_{variant}")


def check_draft_layer(draft_model: Path, tmp_path: Path, name: str, label: str) -> None:
    """Full KV's tokens without drafts, most of which are rejected."""
    lengths = [1, 63, 2049, 4090, 6142, 6145, 9000, 12000]
    phase = {"prompts": [make_prompt(length, seed) for seed in range(4) for length in lengths], "max_tokens": 64}
    options = {"max_num_seqs": 32}
    mtp = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "disable_log_stats": False}
    engines = {
        "full": (engine_args(draft_model, **options, **backend(name)), {}),
        "full_drafts": (engine_args(draft_model, **options, **mtp, **backend(name)), {}),
        "hot": (hot_args(draft_model, {"device_buffer_size": 6144}, **options, **mtp, **backend(name)), ROW_CHECK),
    }
    started = {
        kind: EngineRun.start(tmp_path, kind, args, [phase], **({"row_check": check} if check else {}))
        for kind, (args, check) in engines.items()
    }
    full, full_drafts, hot = (started[kind].phases()[0] for kind in engines)
    report(label, {"hot": hot, "full_drafts": full_drafts}, full)
    assert_same_but_ties(hot["completions"], full["completions"], full_drafts["completions"])
    assert_pools_empty(hot)
    assert hot["wrong_rows"] == 0 < hot["checked_rows"]
    rates = [run["drafts"]["accepted"] / run["drafts"]["drafted"] for run in (hot, full_drafts)]
    assert rates[0] == pytest.approx(rates[1], abs=0.05)


@pytest.mark.parametrize("name", ["fp8", "bf16_flash_attn", "bf16_generic"])
def test_indexer_keys_in_4_bits(model: Path, tmp_path: Path, name: str) -> None:
    """Tokens of full KV whose indexer rounds keys to 4 bits."""
    check_narrow_keys(model, tmp_path, name, f"narrow_{name}", {})


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_indexer_keys_in_4_bits_with_drafts(model: Path, tmp_path: Path, num_drafts: int) -> None:
    drafts = {"speculative_config": NGRAM | {"num_speculative_tokens": num_drafts}, "disable_log_stats": False}
    check_narrow_keys(model, tmp_path, "fp8", f"narrow_drafts_{num_drafts}", drafts)


def check_narrow_keys(model: Path, tmp_path: Path, name: str, label: str, drafts: dict[str, Any]) -> None:
    lengths = [1, 63, 2049, 4097, 8190, 8193, 9000, 12000, 20001]
    phase = {"prompts": [*map(repeating, lengths), *map(make_prompt, lengths)], "max_tokens": 64}
    options = {"indexer_key_dtype": "fp4", "device_buffer_size": 4 * 2048}
    reference = engine_args(model, max_num_seqs=18, enforce_eager=True, **backend(name))
    engine = hot_args(model, options, max_num_seqs=18, **drafts, **backend(name))
    full = EngineRun.start(tmp_path, "full", reference, [phase], narrow_keys=True)
    hot = EngineRun.start(tmp_path, "hot", engine, [phase], row_check=ROW_CHECK)
    expected, got = full.phases()[0], hot.phases()[0]
    report(label, {"hot": got}, expected)
    assert_same_but_ties(got["completions"], expected["completions"])
    assert_pools_empty(got)
    assert got["counters"]["cache_misses"] > 0
    assert got["wrong_rows"] == 0 < got["checked_rows"]


def test_indexer_keys_in_4_bits_after_preemption_and_from_the_host(model: Path, tmp_path: Path) -> None:
    """Keys go to the host in 8 bits and come back."""
    first = {"prompts": [make_prompt(length) for length in range(5000, 5600, 100)], "max_tokens": 96}
    again = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": 32}
    shared = {"enable_prefix_caching": True, "max_num_seqs": 8}
    # Five requests fit when they start, as above: hot blocks have four rows here instead of seven.
    engine = hot_args(model, {"indexer_key_dtype": "fp4"}, num_gpu_blocks_override=5 * 1025 + 409 + 6, **shared)
    reference = engine_args(model, enforce_eager=True, **shared)
    started = {
        "hot": EngineRun.start(tmp_path, "hot", engine, [first, again], row_check=ROW_CHECK),
        "full": EngineRun.start(tmp_path, "full", reference, [first, again], narrow_keys=True),
    }
    full, hot = started["full"].phases(), started["hot"].phases()
    for ours, expected in zip(hot, full, strict=True):
        assert_same_but_ties(ours["completions"], expected["completions"])
        assert_pools_empty(ours)
    assert hot[1]["counters"]["host_prefix_tokens"] > 0
    assert hot[1]["wrong_rows"] == 0


def report(name: str, runs: dict[str, dict[str, Any]], full: dict[str, Any]) -> None:
    """Write how far the runs agree with full KV to the folder of HISPARSE_TEST_REPORT, where that is set."""
    folder = os.environ.get("HISPARSE_TEST_REPORT")
    if folder:
        found = {kind: differences(record["completions"], full["completions"]) for kind, record in runs.items()}
        counters = {kind: record.get("counters") for kind, record in runs.items()}
        (Path(folder) / f"{name}.json").write_text(json.dumps({"requests": found, "counters": counters}, indent=1))

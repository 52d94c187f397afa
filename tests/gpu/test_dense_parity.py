"""Dense models on the GPU: an algorithm that may select every token gives full KV's tokens, whatever brought the KV.

Quest and StreamingLLM, which select pages, run in CUDA graphs. ClusterKV, which clusters while requests decode, runs
without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import make_draft_model
from engines import EngineRun, assert_pools_empty, assert_same_but_ties, engine_args, hot_args, make_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EVERYTHING = {"token": 4096, "page": 8192}
LENGTHS = {"token": [1, 15, 16, 17, 500, 1100, 3900], "page": [1, 15, 16, 17, 500, 1100, 3900, 6001, 8000]}
MAX_TOKENS = 64
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "quest": ("page", {}),
    "streaming_llm": ("page", {}),
    "cluster_kv": ("token", {"algorithm_options": {"update_interval": 32, "clusters_per_update": 2}}),
    "pq_cache": ("token", {"full_kv_layers": [1]}),
    "oracle": ("token", {}),
}
OTHER_VARIANTS = ("qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "ernie45_moe")
VARIANTS = ("llama", *OTHER_VARIANTS)


def arguments(**overrides: Any) -> dict[str, Any]:
    base = {"attention_config": {"backend": "FLASH_ATTN"}, "max_model_len": 8192, "hf_overrides": {}}
    return {**base, "max_num_batched_tokens": 2048, **overrides}


def phases(kind: str) -> list[dict[str, Any]]:
    """Prompts, and a second turn of each."""
    first = [make_prompt(length) for length in LENGTHS[kind]]
    second = [prompt + make_prompt(41, 7) for prompt in first]
    return [{"prompts": first, "max_tokens": MAX_TOKENS}, {"prompts": second, "max_tokens": 24}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from vllm_hisparse.cli.tiny_model import make_model

    directory = tmp_path_factory.mktemp("models")
    num_heads = {"qwen2_moe": 8}  # its head size follows
    return {name: make_model(name, directory / name, num_heads=num_heads.get(name, 16)) for name in VARIANTS}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """All engines side by side."""
    directory, started = tmp_path_factory.mktemp("runs"), {}
    caching = {"enable_prefix_caching": True}
    for kind in EVERYTHING:
        engine = arguments_of(models["llama"], **caching)
        started[f"full_{kind}"] = EngineRun.start(directory, f"full_{kind}", engine, phases(kind))
    for name, (kind, options) in ALGORITHMS.items():
        size = EVERYTHING[kind]
        extra = {"algorithm": name, "top_k": size, "device_buffer_size": size, **options}
        engine = hot_args(models["llama"], extra, **arguments(**caching))
        started[name] = EngineRun.start(directory, name, engine, phases(kind))
    return started


def arguments_of(model: Path, **overrides: Any) -> dict[str, Any]:
    return engine_args(model, **arguments(**overrides))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_budget_of_everything_is_full_attention(runs: dict[str, EngineRun], algorithm: str) -> None:
    """Tokens are those of full KV with chunked prefill, CUDA graphs if possible, and again from the prefix cache."""
    kind = ALGORITHMS[algorithm][0]
    for full, record in zip(runs[f"full_{kind}"].phases(), runs[algorithm].phases(), strict=True):
        assert_same_but_ties(record["completions"], full["completions"])
        assert_pools_empty(record)
    assert min(done["num_cached_tokens"] for done in record["completions"][4:]) > 0


@pytest.mark.parametrize("variant", OTHER_VARIANTS)
def test_other_models(models: dict[str, Path], tmp_path: Path, variant: str) -> None:
    """A budget of everything over the layers of other model classes, in CUDA graphs."""
    size, all_phases = EVERYTHING["page"], phases("page")
    options = {"algorithm": "quest", "top_k": size, "device_buffer_size": size}
    caching = {"enable_prefix_caching": True}
    full = EngineRun.start(tmp_path, "full", arguments_of(models[variant], **caching), all_phases)
    hot = EngineRun.start(tmp_path, "hot", hot_args(models[variant], options, **arguments(**caching)), all_phases)
    for expected, record in zip(full.phases(), hot.phases(), strict=True):
        assert_same_but_ties(record["completions"], expected["completions"])
        assert_pools_empty(record)


OTHER_BACKENDS: dict[str, dict[str, Any]] = {
    "triton": {"backend": "TRITON_ATTN"},
    "fa2": {"backend": "FLASH_ATTN", "flash_attn_version": 2},
    "fa4": {"backend": "FLASH_ATTN", "flash_attn_version": 4},
    "flashinfer": {"backend": "FLASHINFER"},
}
BACKEND_ENGINES = {
    "triton": ("quest", "oracle", "quest_drafts"),
    "fa2": ("quest",),
    "fa4": ("quest", "oracle"),
    "flashinfer": ("quest", "quest_drafts"),
}
BACKEND_MODELS = {"flashinfer": "qwen3"}  # vLLM's backend has no heads of 32 elements; default: llama


@pytest.mark.parametrize("backend", OTHER_BACKENDS)
def test_other_backends(models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """Give the stock backend's tokens with a budget of everything: pages, single tokens, CUDA graphs, a second turn."""
    from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason

    version = OTHER_BACKENDS[backend].get("flash_attn_version")
    if version is not None and (reason := fa_version_unsupported_reason(version)):
        pytest.skip(reason)
    model = models[BACKEND_MODELS.get(backend, "llama")]
    compare_with_stock(model, tmp_path, BACKEND_ENGINES[backend], attention_config=OTHER_BACKENDS[backend])


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_kv_in_fp8(models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """Give stock vLLM's tokens over KV in fp8: pages, single tokens, drafts, CUDA graphs, a second turn."""
    options = {"attention_config": {"backend": backend}, "kv_cache_dtype": "fp8"}
    compare_with_stock(models["llama"], tmp_path, ("quest", "oracle", "quest_drafts"), **options)


def compare_with_stock(model: Path, folder: Path, engines: tuple[str, ...], **options: Any) -> None:
    """Compare engines with a budget of everything with a stock engine.

    Args:
        model, folder: model and folder of all engines.
        engines: names of algorithms, with `_drafts` where the engine drafts.
        options: engine arguments of all.
    """
    shared = {"enable_prefix_caching": True, **options}
    lengths = LENGTHS["page"][:-1]
    started = {"full": EngineRun.start(folder, "full", arguments_of(model, **shared), two_turns(lengths))}
    fitting = {}
    for name in engines:
        is_drafting = name.endswith("_drafts")
        algorithm = name.removesuffix("_drafts")
        kind, algorithm_options = ALGORITHMS[algorithm]
        size, drafting = EVERYTHING[kind], DRAFTS if is_drafting else {}
        fitting[name] = [length for length in lengths if length < size - 2 * MAX_TOKENS - 41]
        buffer = (4 if is_drafting else 1) * size
        extra = {"algorithm": algorithm, "top_k": size, "device_buffer_size": buffer, **algorithm_options}
        engine = hot_args(model, extra, **arguments(**shared, **drafting))
        started[name] = EngineRun.start(folder, name, engine, two_turns(fitting[name]))
    full = started["full"].phases()
    for name, lengths_of in fitting.items():
        for expected, record in zip(full, started[name].phases(), strict=True):
            assert_same_but_ties(record["completions"], expected["completions"][: len(lengths_of)])
            assert_pools_empty(record)
            assert not name.endswith("_drafts") or record["drafts"]["accepted"] > 0
        assert sum(done["num_cached_tokens"] for done in record["completions"]) > 0


def two_turns(lengths: list[int]) -> list[dict[str, Any]]:
    """Prompts of these lengths in ascending order, and a second turn of each."""
    first = list(map(repeating, lengths))
    second = [prompt + make_prompt(41, 7) for prompt in first]
    return [{"prompts": first, "max_tokens": MAX_TOKENS}, {"prompts": second, "max_tokens": 24}]


def test_evicted_units_come_back(models: dict[str, Path], tmp_path: Path) -> None:
    """A buffer no larger than the selection gives the tokens of one that holds everything; Qwen3, in CUDA graphs."""
    phase = {"prompts": [make_prompt(length) for length in (64, 777, 6000)], "max_tokens": 80}
    options = {"algorithm": "quest", "top_k": 512, "elastic": False}
    started = [
        EngineRun.start(
            tmp_path,
            f"buffer_{size}",
            hot_args(models["qwen3"], {**options, "device_buffer_size": size}, **arguments()),
            [phase],
        )
        for size in (512, 8192)
    ]
    small, large = (run.phases()[0] for run in started)
    assert_same_but_ties(small["completions"], large["completions"])
    assert small["counters"]["cache_misses"] > large["counters"]["cache_misses"]


def test_a_buffer_grows_and_shrinks_in_one_requests_life(models: dict[str, Path], tmp_path: Path) -> None:
    """The tokens of a buffer that never changes; two requests arrive, to which the first one gives blocks."""
    phase = {
        "prompts": [make_prompt(length) for length in (6000, 5800, 5900)],
        "max_tokens": 200,
        "arrive_after": [0, 40, 40],
        "abort_after": [None, 100, 100],
    }
    options = {"algorithm": "quest", "top_k": 512, "device_buffer_size": 512}
    elastic, fixed = (
        EngineRun.start(
            tmp_path,
            f"elastic_{is_elastic}",
            hot_args(models["llama"], {**options, "elastic": is_elastic}, **arguments(num_gpu_blocks_override=700)),
            [phase],
            row_check={"every": 7, "corrupt": False},
        )
        for is_elastic in (True, False)
    )
    elastic, fixed = (run.phases()[0] for run in (elastic, fixed))
    assert_same_but_ties(elastic["completions"][:1], fixed["completions"][:1])
    assert_pools_empty(elastic)
    assert elastic["checked_rows"] > 0 and elastic["wrong_rows"] == fixed["wrong_rows"] == 0
    assert elastic["counters"]["hot_rows_taken_back"] > 0
    assert elastic["counters"]["cache_misses"] < fixed["counters"]["cache_misses"]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFTS = {"speculative_config": NGRAM, "disable_log_stats": False}


def repeating(num_tokens: int) -> list[int]:
    """A prompt in which drafts are found; the model's replies follow some of them."""
    pattern = make_prompt(17, num_tokens)
    return (pattern * (num_tokens // len(pattern) + 1))[:num_tokens]


def assert_some_are_rejected(record: dict[str, Any]) -> None:
    assert 0 < record["drafts"]["accepted"] < record["drafts"]["drafted"]


def rate(record: dict[str, Any]) -> float:
    return record["drafts"]["accepted"] / record["drafts"]["drafted"]


def draft_model(models: dict[str, Path], tmp_path: Path, method: str) -> dict[str, Any]:
    """Engine arguments with a draft model of a method."""
    model = make_draft_model(method, models["llama"], tmp_path / method)
    drafts = {"method": method, "model": str(model), "num_speculative_tokens": 3}
    return {"speculative_config": drafts, "disable_log_stats": False}


@pytest.mark.parametrize("algorithm", ["quest", "cluster_kv", "pq_cache", "oracle", "streaming_llm"])
def test_drafts_with_a_budget_of_everything(models: dict[str, Path], tmp_path: Path, algorithm: str) -> None:
    """Full KV's tokens without drafts, and its rate of accepted ones; in CUDA graphs where the algorithm can."""
    kind, options = ALGORITHMS[algorithm]
    size = {"token": 2048, "page": 8192}[kind]
    lengths = [length for length in (1, 15, 17, 500, 1100, 1900, 3900, 6001, 8000) if length < size - MAX_TOKENS]
    phase = {"prompts": [*map(repeating, lengths), *map(make_prompt, lengths)], "max_tokens": MAX_TOKENS}
    extra = {"algorithm": algorithm, "top_k": size, "device_buffer_size": 4 * size, **options}
    engines = {
        "full": arguments_of(models["llama"]),
        "full_drafts": arguments_of(models["llama"], **DRAFTS),
        "hot": hot_args(models["llama"], extra, **arguments(**DRAFTS)),
    }
    started = {name: EngineRun.start(tmp_path, name, engine, [phase]) for name, engine in engines.items()}
    full, full_drafts, hot = (started[name].phases()[0] for name in engines)
    assert_same_but_ties(hot["completions"], full["completions"], full_drafts["completions"])
    assert_pools_empty(hot)
    assert_some_are_rejected(hot)
    assert rate(hot) == pytest.approx(rate(full_drafts), abs=0.08)


@pytest.mark.parametrize(("algorithm", "method"), [("quest", "ngram"), ("pq_cache", "ngram"), ("quest", "eagle")])
def test_drafts_where_the_algorithm_selects(
    models: dict[str, Path], tmp_path: Path, algorithm: str, method: str
) -> None:
    """The algorithm's tokens without drafts, over prompts larger than the buffer, and again from the prefix cache."""
    drafts = DRAFTS if method == "ngram" else draft_model(models, tmp_path, method)
    lengths = [64, 777, 3000, 6000, 7000]
    first = {"prompts": list(map(repeating, lengths)), "max_tokens": MAX_TOKENS}
    second = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": MAX_TOKENS}
    extra = {"algorithm": algorithm, "top_k": 512, "device_buffer_size": 2048}
    started = {
        name: EngineRun.start(
            tmp_path,
            name,
            hot_args(models["llama"], extra, **arguments(enable_prefix_caching=True, **options)),
            [first, second],
        )
        for name, options in (("plain", {}), ("drafts", drafts))
    }
    for plain, record in zip(started["plain"].phases(), started["drafts"].phases(), strict=True):
        assert_same_but_ties(record["completions"], plain["completions"])
        assert_pools_empty(record)
        assert_some_are_rejected(record)
        assert record["counters"]["cache_misses"] > 0


@pytest.mark.parametrize(("method", "full_kv_layers"), [("eagle", [0, 1]), ("eagle", []), ("eagle3", [0, 1])])
def test_a_draft_models_drafts_are_as_good_as_with_full_kv(
    models: dict[str, Path], tmp_path: Path, method: str, full_kv_layers: list[int]
) -> None:
    """Drafts are as good as with full KV in CUDA graphs, and again from the prefix cache."""
    drafts, lengths = draft_model(models, tmp_path, method), LENGTHS["page"][:-1]
    first = {"prompts": [*map(repeating, lengths), *map(make_prompt, lengths)], "max_tokens": MAX_TOKENS}
    second = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": MAX_TOKENS}
    extra = {"algorithm": "quest", "top_k": 8192, "device_buffer_size": 32768, "full_kv_layers": full_kv_layers}
    engines = {
        "full": arguments_of(models["llama"]),
        "full_drafts": arguments_of(models["llama"], **drafts),
        "hot": hot_args(models["llama"], extra, **arguments(enable_prefix_caching=True, **drafts)),
    }
    started = {name: EngineRun.start(tmp_path, name, engine, [first, second]) for name, engine in engines.items()}
    for full, full_drafts, hot in zip(*(started[name].phases() for name in engines), strict=True):
        assert_same_but_ties(hot["completions"], full["completions"], full_drafts["completions"])
        assert_pools_empty(hot)
        assert_some_are_rejected(hot)
        assert rate(hot) == pytest.approx(rate(full_drafts), abs=0.05)
    assert sum(done["num_cached_tokens"] for done in hot["completions"]) > sum(lengths)


@pytest.mark.parametrize("drafts", [False, True])
def test_preempted_requests_resume(models: dict[str, Path], tmp_path: Path, drafts: bool) -> None:
    """The host pool runs out while requests decode."""
    phase = {"prompts": [repeating(length) for length in (2000, 2100, 2200)], "max_tokens": 200}
    options = DRAFTS if drafts else {}
    block_bytes = 16 * 4 * 2 * 4 * 32 * 2  # tokens, layers, key and value, KV heads, elements, bf16
    extra = {"algorithm": "quest", "top_k": 4096, "device_buffer_size": 4 * 4096 if drafts else 4096}
    engine = hot_args(
        models["llama"],
        {**extra, "host_pool_gib": 412 * block_bytes / 2**30},
        **arguments(max_model_len=4096, **options),
    )
    hot = EngineRun.start(tmp_path, "hot", engine, [phase])
    full = EngineRun.start(tmp_path, "full", arguments_of(models["llama"], max_model_len=4096), [phase])
    record = hot.phases()[0]
    assert_same_but_ties(record["completions"], full.phases()[0]["completions"])
    assert_pools_empty(record)
    assert record["counters"]["resumed_requests"] >= 1
    if drafts:
        assert_some_are_rejected(record)

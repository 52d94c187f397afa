"""Engines for the end-to-end tests: every one runs in a process of its own, the reference once per session."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MODELS = HERE.parent.parent / "build" / "models"
ENGINE_TIMEOUT_S = 500
VOCABULARY = range(3, 500)
MAX_MODEL_LEN = 4096
TOP_K = 256

# Mean logprob difference of a request where the engines cannot run the same batches: matrix products of other shapes
# round differently, and the indexer's fp8 keys, its cut at the top-k and the experts' routing turn the last bit into
# another choice, which a few tokens show. Full KV against full KV with another chunk size does so too (test_parity.py).
BATCHING_TOLERANCE = 0.05
TIE_MARGIN = 0.5  # between the two best tokens, for such a choice to swap them

BASE_ENGINE = {
    "max_model_len": MAX_MODEL_LEN,
    "enforce_eager": True,
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "seed": 0,
}


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt of its own for every (length, seed)."""
    return random.Random(num_tokens * 1000 + seed).choices(VOCABULARY, k=num_tokens)


def engine_args(model: str = "dsv32", **overrides: Any) -> dict[str, Any]:
    return {**BASE_ENGINE, "model": str(MODELS / model), **overrides}


def hot_args(model: str = "dsv32", options: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """Engine arguments with the connector on one instance."""
    extra = {"host_pool_gib": 0.5, "device_buffer_size": 320, **(options or {})}
    transfer = {
        "kv_connector": "HiSparseHostConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return engine_args(model, kv_transfer_config=transfer, **overrides)


def run_engine(
    tmp_path: Path, engine: dict[str, Any], phases: list[dict[str, Any]], in_process: bool = True, **options: Any
) -> list[dict[str, Any]]:
    """Run phases on one engine, with other options of `offline_engine.py`'s jobs; returns one record per phase."""
    job, result, log = tmp_path / "job.json", tmp_path / "result.json", tmp_path / "engine.log"
    job.write_text(json.dumps({"engine": engine, "phases": phases, **options}))
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",  # several engines share the cores; more threads than cores spin
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as stream:
        command = [sys.executable, str(HERE / "offline_engine.py"), str(job), str(result)]
        code = subprocess.call(command, stdout=stream, stderr=stream, env=environment, timeout=ENGINE_TIMEOUT_S)
    assert code == 0, "\n".join(log.read_text().splitlines()[-40:])
    return json.loads(result.read_text())["phases"]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`run_engine` in the test's own directory."""
    return lambda *args, **kwargs: run_engine(tmp_path, *args, **kwargs)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Completions of the full-KV engine: stock vLLM KV management, no connector. One engine run per set of prompts."""

    @cache
    def completions(lengths: tuple[int, ...], max_tokens: int, model: str, dtype: str) -> list[dict[str, Any]]:
        phase = {"prompts": [make_prompt(length) for length in lengths], "max_tokens": max_tokens}
        directory = tmp_path_factory.mktemp("reference")
        engine = engine_args(model, dtype=dtype, enable_prefix_caching=False)
        return run_engine(directory, engine, [phase])[0]["completions"]

    def lookup(lengths: list[int], max_tokens: int, model: str = "dsv32", dtype: str = "float32"):
        return completions(tuple(lengths), max_tokens, model, dtype)

    return lookup


def assert_same(got: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-4) -> None:
    """Identical greedy tokens, and every logprob within `tolerance`, request by request."""
    assert len(got) == len(expected)
    for index, (ours, full) in enumerate(zip(got, expected, strict=True)):
        assert ours["tokens"] == full["tokens"], f"request {index}"
        worst = max(abs(a - b) for a, b in zip(ours["logprobs"], full["logprobs"], strict=True))
        assert worst <= tolerance, f"request {index}: logprobs differ by {worst}"


def assert_same_but_rounding(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Identical greedy tokens up to a tie, and logprobs within `BATCHING_TOLERANCE` in the mean, request by request.

    After a tie another text follows, which is not compared. At most one request in five may meet one.
    """
    assert len(got) == len(expected)
    num_ties = 0
    for index, (ours, full) in enumerate(zip(got, expected, strict=True)):
        same = sum(1 for _ in takewhile(bool, map(int.__eq__, ours["tokens"], full["tokens"])))
        if same < len(full["tokens"]):
            num_ties += 1
            assert full["margins"][same] <= TIE_MARGIN, f"request {index}: token {same} differs and is no tie"
        pairs = zip(ours["logprobs"][:same], full["logprobs"][:same], strict=True)
        mean = sum(abs(a - b) for a, b in pairs) / max(same, 1)
        assert mean <= BATCHING_TOLERANCE, f"request {index}: logprobs differ by {mean} in the mean"
    assert num_ties <= len(got) // 5 + 1


def assert_pools_empty(record: dict[str, Any]) -> None:
    """Every block is back, in both pools and on the worker."""
    in_use = {name: value for name, value in record["pools"].items() if name != "host_blocks_cached"}
    assert in_use == dict.fromkeys(in_use, 0)
    assert record["worker_requests"] == 0

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

# Logprobs where the engines cannot run the same batches: matrix products of other shapes round differently, and the
# indexer's fp8 keys, its cut at the top-k and the experts' routing turn the last bit into another choice. Full KV
# against full KV with another chunk size differs as much (test_parity.py).
BATCHING_TOLERANCE = 0.2

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
    tmp_path: Path, engine: dict[str, Any], phases: list[dict[str, Any]], in_process: bool = True
) -> list[dict[str, Any]]:
    """Run phases on one engine; returns one record per phase."""
    job, result, log = tmp_path / "job.json", tmp_path / "result.json", tmp_path / "engine.log"
    job.write_text(json.dumps({"engine": engine, "phases": phases}))
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
    """Identical greedy tokens and logprobs within `tolerance`, request by request.

    A request may leave the expected tokens only at a tie: where the two best tokens of the full-KV engine are so close
    that the tolerance can swap them. What follows is another text and is not compared.
    """
    assert len(got) == len(expected)
    for index, (ours, full) in enumerate(zip(got, expected, strict=True)):
        same = sum(1 for _ in takewhile(bool, map(int.__eq__, ours["tokens"], full["tokens"])))
        if same < len(full["tokens"]):
            margin = full["margins"][same]
            assert margin <= 2 * tolerance, f"request {index}: token {same} differs and is no tie (margin {margin})"
        pairs = zip(ours["logprobs"][:same], full["logprobs"][:same], strict=True)
        worst = max((abs(a - b) for a, b in pairs), default=0.0)
        assert worst <= tolerance, f"request {index}: logprobs differ by {worst}"


def assert_pools_empty(record: dict[str, Any]) -> None:
    """Every block is back, in both pools and on the worker."""
    in_use = {name: value for name, value in record["pools"].items() if name != "host_blocks_cached"}
    assert in_use == dict.fromkeys(in_use, 0)
    assert record["worker_rows"] == 0

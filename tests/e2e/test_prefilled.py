"""Engines of `benchmarks.full_depth` on the CPU platform."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINE_TIMEOUT_S, MODELS
from forks import FORKS, begin, fork

pytestmark = pytest.mark.e2e

CASES = ("500x3:model", "mixedx600:model", "900x2+12:model")
JOB = {
    "model": str(MODELS / "dsv32"),
    "quantization": None,
    "kv_dtype": "bfloat16",
    "device_kv_gib": 0.03,
    "host_pool_gib": 0.25,
    "device_buffer_size": 512,
    "elastic": True,
    "drafts": 0,
    "tensor_parallel": 1,
    "data_parallel": 1,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "graph_sizes": [3],
    "forces_selections": False,
}


def measure(system: str, log_path: str, pipe: Connection) -> None:
    """In a forked process: rows of all cases, and how many requests are left."""
    begin(log_path, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from vllm import LLM

    from benchmarks.full_depth import Case, Loaded, System, engine_args

    args: dict[str, Any] = engine_args(System(system), JOB) | {"dtype": "float32", "enforce_eager": True}
    for name in ("compilation_config", "kernel_config"):
        del args[name]
    loaded = Loaded(LLM(**args), settle=6, steps=8, mixed_s=1.4, profiled=0)
    rows = [loaded.measure(Case.parse(text)) for text in CASES]
    pipe.send((rows, len(loaded.scheduler.requests)))


@pytest.mark.parametrize("system", ["full", "ours"])
def test_prompts_are_not_computed(tmp_path: Path, system: str) -> None:
    """Full KV and hot buffers decode from the first step on, what they are asked to, and leave nothing behind."""
    pipe, theirs = FORKS.Pipe()
    log = tmp_path / "engine.log"
    process = fork(measure, system, str(log), theirs)
    theirs.close()
    try:
        assert pipe.poll(ENGINE_TIMEOUT_S), log.read_text()[-3000:]
        rows, num_left = pipe.recv()
    except EOFError:
        raise AssertionError(log.read_text()[-3000:]) from None
    finally:
        process.kill()
        process.join()
    assert num_left == 0
    assert rows[0]["steps"] >= 8 and rows[0]["tokens_per_s"] > 0
    assert (rows[0]["hit_rate"] is None) == (system == "full")

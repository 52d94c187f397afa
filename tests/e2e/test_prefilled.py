"""Engines of `benchmarks.full_depth` on the CPU platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from conftest import ENGINE_TIMEOUT_S, MODELS

ENGINE = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
from benchmarks.full_depth import Case, Loaded, System, engine_args

if __name__ == "__main__":
    args = engine_args(System(sys.argv[1]), json.loads(sys.argv[2])) | {"dtype": "float32", "enforce_eager": True}
    for name in ("compilation_config", "kernel_config"):
        del args[name]
    loaded = Loaded(LLM(**args), settle=6, steps=8, mixed_s=1.4, profiled=0)
    rows = [loaded.measure(Case.parse(text)) for text in ("500x3:model", "mixedx600:model", "900x2+12:model")]
    print("ROWS", json.dumps([rows, len(loaded.scheduler.requests)]))
"""


def test_prompts_are_not_computed() -> None:
    """Full KV and hot buffers decode from the first step on, what they are asked to, and leave nothing behind."""
    job = {
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
    for system in ("full", "ours"):
        done = subprocess.run(
            [sys.executable, "-c", ENGINE, system, json.dumps(job)],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            timeout=ENGINE_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows, num_left = json.loads(next(line[5:] for line in done.stdout.splitlines() if line.startswith("ROWS ")))
        assert num_left == 0
        assert rows[0]["steps"] >= 8 and rows[0]["tokens_per_s"] > 0
        assert (rows[0]["hit_rate"] is None) == (system == "full")

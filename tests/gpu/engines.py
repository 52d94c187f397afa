"""Engines on the GPU for the tests: each runs in a process of its own; several run side by side on one device.

The processes are forked from one that has imported vLLM, which takes longer than all the rest of their start.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import traceback
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent / "e2e"), os.environ.get("PYTHONPATH", ""))),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is looked at
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled for minutes, and tokens are greedy
    "HF_HUB_OFFLINE": "1",
    # NOTE: both create NVLink multicast groups, which a host may forbid; FlashInfer's is compiled for minutes, too.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
# The same for the all-reduce that vLLM fuses with norms, where there are several ranks.
WITHOUT_MULTICAST: dict[str, Any] = {"pass_config": {"fuse_allreduce_rms": False}}
FORKS = multiprocessing.get_context("forkserver")
VOCABULARY = range(3, 500)
DEVICE_KV_BYTES = 2 << 30
HOST_POOL_GIB = 2.0
DEVICE_BUFFER_SIZE = 4096
START_TIMEOUT_S = 400
# Rounding moves a logprob by this much in the mean of a run's tokens; where the two best tokens are closer than a tie,
# it may swap them. Full KV with another chunk size differs from full KV by 0.03 at most, with ties of up to 0.4.
MEAN_TOLERANCE = 0.06
TIE_MARGIN = 0.75
MIN_SAME_SHARE = 0.4  # of the tokens that full KV with another chunk size has in common with full KV


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt of its own for every (length, seed)."""
    return random.Random(num_tokens * 1000 + seed).choices(VOCABULARY, k=num_tokens)


def engine_args(model: Path, **overrides: Any) -> dict[str, Any]:
    """A full-KV engine. Its prefill takes the same sparse kernels for every length, as hot buffers do."""
    attention = {"sparse_mla_force_mqa": True, **overrides.pop("attention_config", {})}
    args = {
        "model": str(model),
        "max_model_len": 33024,
        "dtype": "bfloat16",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": DEVICE_KV_BYTES,
        "gpu_memory_utilization": 0.1,
        "hf_overrides": {"max_position_embeddings": 1 << 18},
        "seed": 0,
        "kernel_config": {"enable_flashinfer_autotune": False},
        "attention_config": attention,
    }
    return {**args, **overrides}


def hot_args(model: Path, options: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """The same with the connector on one instance. Unless asked for, what runs together depends on no times."""
    sizes = {"host_pool_gib": HOST_POOL_GIB, "device_buffer_size": DEVICE_BUFFER_SIZE}
    extra = {**sizes, "admission": "off", **(options or {})}
    transfer = {
        "kv_connector": "HiSparseHostConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return engine_args(model, kv_transfer_config=transfer, **overrides)


@dataclass
class EngineRun:
    """An engine that works off its phases in the background."""

    process: BaseProcess
    log: Path
    result: Path

    @classmethod
    def start(
        cls,
        directory: Path,
        name: str,
        engine: dict[str, Any],
        phases: list[dict[str, Any]],
        **job_options: Any,
    ) -> EngineRun:
        """Start an engine; `job_options` as in tests/e2e/offline_engine.py."""
        job, result, log = (directory / f"{name}.{suffix}" for suffix in ("job.json", "result.json", "log"))
        job.write_text(json.dumps({"engine": engine, "phases": phases, **job_options}))
        FORKS.set_forkserver_preload(["gpu_engine_imports"])  # NOTE: here, because the end-to-end tests have others
        process = FORKS.Process(target=run_job, args=(job, result, log))
        with mock.patch.dict(os.environ, ENVIRONMENT):
            process.start()
        return cls(process, log, result)

    def phases(self) -> list[dict[str, Any]]:
        """Wait for the end; one record per phase."""
        self.process.join(START_TIMEOUT_S)
        if self.process.exitcode != 0:
            self.process.kill()
            reason = f"the engine's exit code is {self.process.exitcode} after {START_TIMEOUT_S} s at most"
            raise AssertionError("\n".join([reason, *self.log.read_text(errors="replace").splitlines()[-40:]]))
        return json.loads(self.result.read_text())["phases"]


def run_job(job: Path, result: Path, log: Path) -> None:
    """Run an engine in a forked process, with a log of its own."""
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    from offline_engine import main

    try:
        result.write_text(json.dumps(main(json.loads(job.read_text()))))
    except BaseException:
        traceback.print_exc()
        raise


def differences(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each request's equal tokens, mean logprob difference (0 without tokens), and margin where it parts."""
    found = []
    for ours, full in zip(got, expected, strict=True):
        same = sum(1 for _ in takewhile(bool, map(int.__eq__, ours["tokens"], full["tokens"])))
        pairs = zip(ours["logprobs"][:same], full["logprobs"][:same], strict=True)
        mean = sum(abs(a - b) for a, b in pairs) / max(same, 1)
        margin = full["margins"][same] if same < len(full["tokens"]) else None
        found.append({"same": same, "tokens": len(full["tokens"]), "mean_difference": mean, "margin": margin})
    return found


def assert_same_but_ties(
    got: list[dict[str, Any]], expected: list[dict[str, Any]], control: list[dict[str, Any]] | None = None
) -> None:
    """Identical greedy tokens up to a tie, and logprobs within rounding in the mean of all tokens up to there.

    Args:
        got, expected: completions.
        control: tokens of full KV with other chunks; `got` must not part from `expected` much earlier than these.
    """
    found = differences(got, expected)
    record_comparison(found)
    most = None if control is None else sum(request["same"] for request in differences(control, expected))
    check_differences(found, most)


def assert_not_the_same(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Tokens part where no tie is, or logprobs differ by more than rounding. The report does not count these tokens."""
    try:
        check_differences(differences(got, expected))
    except AssertionError:
        return
    raise AssertionError("tokens are the same up to ties")


def check_differences(found: list[dict[str, Any]], most: int | None = None) -> None:
    """Raise an AssertionError if requests part where no tie is, or differ by more than rounding up to there.

    Args:
        found: of `differences`.
        most: equal tokens of a control, of which the requests must have `MIN_SAME_SHARE`. None: no control.
    """
    for index, request in enumerate(found):
        assert request["margin"] is None or request["margin"] <= TIE_MARGIN, f"request {index}: {request}"
    num_same = sum(request["same"] for request in found)
    assert num_same > 0, "every request differs from its first token on"
    mean = sum(request["mean_difference"] * request["same"] for request in found) / num_same
    assert mean <= MEAN_TOLERANCE, f"logprobs differ by {mean} in the mean"
    if most is not None:
        assert num_same >= MIN_SAME_SHARE * most, f"{num_same} tokens are the same, {most} of the control's"


def record_comparison(found: list[dict[str, Any]]) -> None:
    """Add a line with the counts of a comparison to a file in the folder of HISPARSE_TEST_REPORT, where that is set."""
    folder = os.environ.get("HISPARSE_TEST_REPORT")
    if folder:
        parted = [request["margin"] for request in found if request["margin"] is not None]
        line = {
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0],
            "requests": len(found),
            "tokens": sum(request["tokens"] for request in found),
            "same_tokens": sum(request["same"] for request in found),
            "ties": sum(margin <= TIE_MARGIN for margin in parted),
            "widest_tie": max(parted, default=None),
        }
        with (Path(folder) / "comparisons.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def assert_pools_empty(record: dict[str, Any]) -> None:
    """Every block is back, in both pools and on the worker."""
    in_use = {name: value for name, value in record["pools"].items() if name != "host_blocks_cached"}
    assert in_use == dict.fromkeys(in_use, 0)
    assert record["worker_requests"] == 0

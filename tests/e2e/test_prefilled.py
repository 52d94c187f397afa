"""Engines of `benchmarks.full_depth` and `benchmarks.prefill` on the CPU platform."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINE_TIMEOUT_S, MODELS
from forks import FORKS, fork
from prefilled_engine import measure, time_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(("system", "options"), [("full", {}), ("ours", {}), ("ours", {"indexer_key_dtype": "fp4"})])
def test_prompts_are_not_computed(tmp_path: Path, system: str, options: dict[str, Any]) -> None:
    """Full KV and hot buffers decode from the first step on, what they are asked to, and leave nothing behind."""
    rows, num_left, host_memory = results_of(partial(measure, **options), system, tmp_path / "engine.log")
    assert num_left == 0 and host_memory == (None if system == "full" else "ordinary")
    assert rows[0]["steps"] >= 8 and rows[0]["tokens_per_s"] > 0
    assert (rows[0]["hit_rate"] is None) == (system == "full")


@pytest.mark.parametrize("system", ["full", "ours"])
def test_prompts_are_timed(tmp_path: Path, system: str) -> None:
    """A prompt's chunks are steps of their own; requests that decode beside it take a part of each."""
    (alone, beside), num_left = results_of(time_prompts, system, tmp_path / "engine.log")
    assert num_left == 0
    assert alone["num_steps"] == 4 and beside["num_steps"] >= 4
    assert alone["prompt_tokens_per_s"]["median"] == pytest.approx(1000 / alone["ttft_s"]["median"], rel=0.5)
    parts = {"schedule", "launch", "metadata", "attention"}
    hooks = {"scheduler: build_connector_meta", "worker: handle_preemptions", "blocks: allocate_new_blocks"}
    for row in (alone, beside):
        assert row["host_ms"].keys() >= (parts | hooks if system == "ours" else parts)
        assert any(name.startswith("worker: ") for name in row["host_ms"]) == (system == "ours")
        assert row["host_ms"]["attention"] <= row["host_ms"]["launch"]


def results_of(function: Callable[..., None], system: str, log: Path) -> Any:
    """Run a function of `prefilled_engine` in a forked process, and return what it sends."""
    pipe, theirs = FORKS.Pipe()
    process = fork(function, system, str(MODELS / "dsv32"), str(log), theirs)
    theirs.close()
    try:
        assert pipe.poll(ENGINE_TIMEOUT_S), log.read_text()[-3000:]
        return pipe.recv()
    except EOFError:
        raise AssertionError(log.read_text()[-3000:]) from None
    finally:
        process.kill()
        process.join()

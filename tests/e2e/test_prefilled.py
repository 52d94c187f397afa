"""Engines of `benchmarks.full_depth` on the CPU platform."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ENGINE_TIMEOUT_S, MODELS
from forks import FORKS, fork
from prefilled_engine import measure

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("system", ["full", "ours"])
def test_prompts_are_not_computed(tmp_path: Path, system: str) -> None:
    """Full KV and hot buffers decode from the first step on, what they are asked to, and leave nothing behind."""
    log, (pipe, theirs) = tmp_path / "engine.log", FORKS.Pipe()
    process = fork(measure, system, str(MODELS / "dsv32"), str(log), theirs)
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

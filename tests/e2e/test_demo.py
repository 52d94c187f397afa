"""`python -m tools.demo`, as a user runs it: real engines, and a model that answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.demo.__main__ import app

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "code-dsa"


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it writes its logs there
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # the statistics that it reads are logged all the same
    options = ["--requests", "2", "--max-tokens", "16", "--model-dir", str(MODEL), "--out", "demo.json"]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "2 of 2 requests got the same tokens as with full KV" in " ".join(result.output.split())
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["problems"] == []
    assert 0.5 < report["hit_rate"] < 1
    assert report["share_right"] > 0.2  # a model that knows nothing: 0
    assert all(request["hits"] + request["misses"] > 0 for request in report["requests"])
    assert not (tmp_path / "build" / "logs").exists()

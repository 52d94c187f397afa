"""`benchmarks.trained_drafts` without an engine: the model with more heads, the prompts, the turns of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import trained_drafts
from benchmarks.dsa_model import AttentionMode
from benchmarks.selections import load_model
from benchmarks.trained_drafts import MODEL, make_prompts, pad_heads


@pytest.mark.slow
def test_more_heads_compute_the_same(tmp_path: Path) -> None:
    """600 tokens are more than the 256 that a layer selects."""
    tokens = torch.tensor(make_prompts(MODEL, 600, 1))
    found = []
    for directory in (MODEL, pad_heads(MODEL, tmp_path, num_heads=8)):
        model = load_model(directory, torch.device("cpu"))
        with torch.no_grad():
            hidden, _ = model(tokens, AttentionMode.SPARSE)
            found.append((hidden, model.lm_head(hidden)))
    assert all(torch.allclose(one, other, atol=1e-3, rtol=1e-3) for one, other in zip(*found, strict=True))
    assert found[0][0].abs().mean() > 0.1


@pytest.mark.long
def test_prompts_are_different_windows() -> None:
    prompts = make_prompts(MODEL, 700, 5)
    assert [len(prompt) for prompt in prompts] == [700] * 5
    assert len({tuple(prompt) for prompt in prompts}) == 5


class FakeEngine:
    """An engine that notes what it is asked for."""

    asked: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, system: str, job: dict[str, Any], serve: object):
        self.name = (system, job["drafts"])

    def wait(self) -> None:
        self.asked.append(("wait", *self.name))

    def measure(self, case: Any) -> dict[str, Any]:
        self.asked.append(("measure", *self.name))
        return {"engine": self.name}

    def stop(self) -> None:
        self.asked.append(("stop", *self.name))


def test_no_engine_is_measured_while_another_one_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_drafts, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "asked", [])
    rows = list(trained_drafts.measure_all({}, [0, 2], [[1]], repeats=2))
    assert [row["engine"] for row in rows] == [("full", 0), ("ours", 0), ("full", 2), ("ours", 2)] * 2
    assert [what for what, *_ in FakeEngine.asked] == ["wait"] * 4 + ["measure"] * 8 + ["stop"] * 4

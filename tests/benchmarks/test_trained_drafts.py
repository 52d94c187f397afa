"""`benchmarks.trained_drafts` without an engine: the model with more heads, and the prompts."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.dsa_model import AttentionMode
from benchmarks.selections import load_model
from benchmarks.trained_drafts import MODEL, make_prompts, pad_heads


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


def test_prompts_are_different_windows() -> None:
    prompts = make_prompts(MODEL, 700, 5)
    assert [len(prompt) for prompt in prompts] == [700] * 5
    assert len({tuple(prompt) for prompt in prompts}) == 5

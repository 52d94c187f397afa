"""Figures of the quality benchmark on predictions made by hand, and what it asks of the model in torch."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.code_quality import Prediction, Window, differences, figures, in_torch  # noqa: E402
from benchmarks.dsa_model import AttentionMode, Model, Shape  # noqa: E402

NUM_TOKENS, REPEAT = 2000, 1900


def window(seed: int = 0) -> Window:
    return Window(np.random.default_rng(seed).integers(10, 99, NUM_TOKENS + 1), REPEAT)


def predicted(of: Window, is_right: np.ndarray, logprob: float = -1.0, margin: float = 1.0) -> Prediction:
    """The text's tokens where `is_right`, token 0 elsewhere."""
    size = NUM_TOKENS - 1
    greedy = np.where(is_right, of.tokens[1:-1], 0)
    return Prediction(np.full(size, logprob), greedy, np.full(size, margin))


def test_the_repetition_counts_for_the_look_up_alone() -> None:
    """Everything before the repetition is right, of the repetition what comes 48 tokens after its begin."""
    text, places = window(), np.arange(1, NUM_TOKENS)
    full = predicted(text, places > 0)
    row = figures([text], [predicted(text, places < REPEAT)], [full])
    assert (row["accuracy"], row["lookup_accuracy"], row["same_as_full_attention"]) == (1.0, 0.0, 1.0)
    row = figures([text], [predicted(text, places >= REPEAT + 48)], [full])
    assert (row["accuracy"], row["lookup_accuracy"], row["same_as_full_attention"]) == (0.0, 1.0, 0.0)
    row = figures([text], [predicted(text, places >= REPEAT + 49)], [full])
    assert row["lookup_accuracy"] < 1.0
    assert row["draft_acceptance"] is None


def test_perplexity_by_position() -> None:
    texts = [window(0), window(1)]
    found = [
        predicted(text, np.ones(NUM_TOKENS - 1, bool), logprob) for text, logprob in zip(texts, (-1, -3), strict=True)
    ]
    found[0].logprob[1024:] = -5.0
    row = figures(texts, found, found)
    assert row["perplexity_0_1024"] == pytest.approx(math.exp(2), abs=1e-3)
    assert row["perplexity_1024_4096"] == pytest.approx(math.exp(4), abs=1e-2)
    rest = REPEAT - 1 - 1024
    mean = (1024 * 1 + rest * 5 + (REPEAT - 1) * 3) / (2 * (REPEAT - 1))
    assert row["perplexity"] == pytest.approx(math.exp(mean), abs=1e-3)
    assert "perplexity_4096_16384" not in row


def test_differences_name_the_widest_tie() -> None:
    text, right = window(), np.ones(NUM_TOKENS - 1, bool)
    full, hot = predicted(text, right), predicted(text, right)
    assert differences([hot], [full])["widest_tie"] == 0
    hot.greedy[[3, 8]], hot.logprob[5], full.margin[[3, 8]] = 0, -1.5, (0.2, 0.1)
    found = differences([hot], [full])
    assert (found["other_greedy_tokens"], found["widest_tie"], found["logprob_difference_max"]) == (2, 0.2, 0.5)
    assert found["same_as_full_kv"] == round(1 - 2 / (NUM_TOKENS - 1), 6)


def test_predictions_in_torch() -> None:
    """Entry i is of token i + 1, and says whether the draft layer foresaw it one step earlier."""
    torch.manual_seed(0)
    model = Model(Shape(vocab_size=64, num_hidden_layers=2, hidden_size=64, intermediate_size=32, index_topk=8))
    tokens = np.random.default_rng(0).integers(0, 64, 40)
    found = in_torch(model, Window(tokens, 30), AttentionMode.SPARSE)
    given = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        hidden, _ = model(given[:, :-1], AttentionMode.SPARSE)
        logprobs = model.lm_head(hidden)[0].log_softmax(-1)
        drafts = model.lm_head(model.draft(hidden[:, :-1], given[:, 1:-1], AttentionMode.SPARSE)[0])[0].argmax(-1)
    assert len(found.logprob) == len(found.greedy) == 38
    for i in range(38):
        assert found.logprob[i] == pytest.approx(float(logprobs[i, tokens[i + 1]]), abs=1e-4)
        assert found.greedy[i] == logprobs[i].argmax()
        assert found.accepted[i] == (i > 0 and drafts[i - 1] == found.greedy[i])

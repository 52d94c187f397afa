"""The KV of layers that draft comes back from a tier with the rest: full KV's tokens, and as many accepted drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import (
    ENGINE_TIMEOUT_S,
    MODELS,
    assert_pools_empty,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)
from draft_models import make_draft_model
from test_dense_drafts import rate
from test_mtp import CODE_MODEL, DRAFTS, SMALLEST_BUFFER, source

pytestmark = pytest.mark.e2e

LENGTHS, MAX_TOKENS, MAX_MODEL_LEN = (270, 390), 24, 512
FILLER_LENGTH, NUM_FILLERS = 400, 3  # together more than a host pool holds


def mtp(_: Path) -> tuple[str, dict, dict]:
    """The trained DSA model with its own draft layer."""
    return str(CODE_MODEL), DRAFTS, {"device_buffer_size": SMALLEST_BUFFER, "host_pool_gib": 0.018}


def eagle(tmp_path: Path) -> tuple[str, dict, dict]:
    """A Llama with a draft model."""
    model = make_draft_model("eagle", MODELS / "llama", tmp_path / "eagle")
    drafts = {"method": "eagle", "model": str(model), "num_speculative_tokens": 3}
    options = {"algorithm": "quest", "top_k": 512, "device_buffer_size": 2048, "host_pool_gib": 0.01}
    return "llama", drafts, options


def repeating(num_tokens: int, seed: int = 0) -> list[int]:
    pattern = make_prompt(17, num_tokens + seed)
    return (pattern * (num_tokens // len(pattern) + 1))[:num_tokens]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "prompt"), [(mtp, source), pytest.param(eagle, repeating, marks=pytest.mark.slow)], ids=["mtp", "eagle"]
)
def test_drafts_are_as_good_after_a_tier(start, tmp_path: Path, setting: Callable, prompt: Callable) -> None:
    model, drafts, options = setting(tmp_path)
    tier = {"type": "fs", "path": str(tmp_path / "tier"), "quota_gib": 1.0, "num_threads": 2}
    drafting = {"max_model_len": MAX_MODEL_LEN, "speculative_config": drafts, "disable_log_stats": False}
    reference = start(engine_args(model, enable_prefix_caching=False, **drafting))
    engine = start(hot_args(model, {**options, "tiers": [tier], "tier_timeout_s": ENGINE_TIMEOUT_S}, **drafting))
    first = {"prompts": list(map(prompt, LENGTHS)), "max_tokens": MAX_TOKENS}
    expected, answered = reference.run(first), engine.run(first)
    assert_same_but_rounding(answered["completions"], expected["completions"])

    fillers = [prompt(FILLER_LENGTH, seed) for seed in range(1, NUM_FILLERS + 1)]
    before = engine.run({"prompts": fillers, "max_tokens": 3})  # of one token, few blocks would be kept
    pairs = zip(first["prompts"], expected["completions"], strict=True)
    turns = [tokens + done["tokens"] + prompt(21, 7) for tokens, done in pairs]
    second = {"prompts": turns, "max_tokens": MAX_TOKENS, "forgets": False}
    computed, loaded = reference.run(second), engine.run(second)
    assert_same_but_rounding(loaded["completions"], computed["completions"])
    assert min(done["num_cached_tokens"] for done in loaded["completions"]) > min(LENGTHS) - 128
    assert loaded["counters"]["tier_loaded_blocks"] > before["counters"].get("tier_loaded_blocks", 0)
    assert rate(loaded, before) == pytest.approx(rate(computed, expected), abs=0.03)
    assert_pools_empty(loaded)

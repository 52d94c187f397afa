"""An engine whose weights are replaced while it runs answers as full KV does with the new weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MAX_MODEL_LEN, MODELS, assert_pools_empty, assert_same, engine_args, hot_args, make_prompt
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def trained_further(model: Path, directory: Path) -> Path:
    """A copy of a model with other weights."""
    copied = Path(shutil.copytree(model, directory / "trained"))
    (path,) = copied.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(path)
    for weight in weights.values():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        weight += (0.5 * noise * weight.float().std()).to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})
    return copied


def test_weights_are_reloaded(run: Callable[..., list[dict]], tmp_path: Path) -> None:
    """NOTE: a DSA model has experts, whose weights stock vLLM damages when it reloads them on a CPU."""
    model = trained_further(MODELS / "llama", tmp_path)
    phase = {"prompts": [make_prompt(length) for length in (650, 330)], "max_tokens": 12}
    options = {"algorithm": "quest", "top_k": MAX_MODEL_LEN, "device_buffer_size": MAX_MODEL_LEN}
    renewed = phase | {"weights": str(model), "forgets": True}
    old, new = run(hot_args("llama", options), [phase, renewed])
    (full,) = run(engine_args(str(model), enable_prefix_caching=False), [phase])
    assert_same(new["completions"], full["completions"])
    assert all(
        one["tokens"] != other["tokens"] for one, other in zip(old["completions"], new["completions"], strict=True)
    )
    assert_pools_empty(new)

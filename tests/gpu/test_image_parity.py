"""Multimodal models with images on the GPU: Quest, which may select every page, gives full KV's tokens.

Positions have three axes (M-RoPE), the language model runs in CUDA graphs, and prefixes with images come back from the
host pool.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import (
    EngineRun,
    assert_pools_empty,
    assert_same_but_ties,
    differences,
    engine_args,
    hot_args,
    make_prompt,
)
from image_models import IMAGE_MODELS, NUM_PROMPT_TOKENS, PROMPTS, images, make_image_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KINDS = ("qwen25_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
BLOCK = 16  # tokens
MAX_TOKENS = 24
EVERYTHING = 1024  # tokens, and the longest sequence
NUM_HOST_BLOCKS = 104  # room for two turns, and too few for long replies to all prompts
DEVICE_KV_BYTES = 256 << 20
PHASES: list[dict[str, Any]] = [
    {"prompts": PROMPTS, "images": images(0), "max_tokens": MAX_TOKENS},
    {"prompts": [prompt + make_prompt(41, 7) for prompt in PROMPTS], "images": images(0), "max_tokens": MAX_TOKENS},
    {"prompts": PROMPTS, "images": images(100), "max_tokens": MAX_TOKENS},
    {"prompts": PROMPTS, "images": images(0), "max_tokens": 150},
]
FIRST, SECOND_TURN, OTHER_IMAGES, LONG_REPLIES = range(len(PHASES))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[EngineRun, EngineRun]]:
    """A full-KV engine without a prefix cache and a hot one, of every model, side by side."""
    directory, started = tmp_path_factory.mktemp("runs"), {}
    for kind in KINDS:
        model = make_image_model(kind, directory / kind)
        shared = {
            "attention_config": {"backend": "FLASH_ATTN"},
            "hf_overrides": {},
            "kv_cache_memory_bytes": DEVICE_KV_BYTES,
            "limit_mm_per_prompt": {"image": 2, "video": 0},
            "max_model_len": EVERYTHING,
            "max_num_batched_tokens": 512,
        }
        pool_bytes = NUM_HOST_BLOCKS * IMAGE_MODELS[kind].block_bytes(BLOCK, torch.bfloat16.itemsize)
        options = {"algorithm": "quest", "top_k": EVERYTHING, "device_buffer_size": EVERYTHING}
        options["host_pool_gib"] = pool_bytes / 2**30
        hot = hot_args(model, options, **shared, enable_prefix_caching=True)
        from_host = [phase | {"forgets": "device"} for phase in PHASES[1:]]
        started[kind] = (
            EngineRun.start(directory, f"{kind}_full", engine_args(model, **shared), PHASES),
            EngineRun.start(directory, f"{kind}_hot", hot, [PHASES[0], *from_host]),
        )
    return started


@pytest.mark.parametrize("kind", KINDS)
def test_images(runs: dict[str, tuple[EngineRun, EngineRun]], kind: str) -> None:
    """A second turn about the same images, other images behind the same text, and preemptions by long replies."""
    full, hot = (run.phases() for run in runs[kind])
    for expected, record in zip(full, hot, strict=True):
        assert_same_but_ties(record["completions"], expected["completions"])
        assert_pools_empty(record)
    replies, others = (full[phase]["completions"][1:] for phase in (FIRST, OTHER_IMAGES))
    num_same = sum(request["same"] for request in differences(others, replies))
    assert num_same <= len(replies) * MAX_TOKENS // 2, "images are to change the text"
    cached = [done["num_cached_tokens"] for done in hot[SECOND_TURN]["completions"]]
    assert cached == [num // BLOCK * BLOCK for num in NUM_PROMPT_TOKENS], "images are part of the cached prefix"
    assert hot[LONG_REPLIES]["counters"]["resumed_requests"] >= 1

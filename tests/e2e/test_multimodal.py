"""A multimodal model without its other modalities: stock vLLM's tokens with full attention, and a second turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import MODELS, assert_pools_empty, assert_same, engine_args, hot_args, make_prompt
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.e2e

LENGTHS = [1, 17, 129, 777]
EVERYTHING = 2048
AUDIO = {"model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2-Audio around the layers of the tiny Llama, with biases as Qwen2 has; no weights of an audio encoder.

    NOTE: models with images need torchvision, which a CPU build of vLLM does not bring.
    """
    source, folder = MODELS / "llama", tmp_path_factory.mktemp("qwen2_audio")
    text = json.loads((source / "config.json").read_text())
    text |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    wrapper = {"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio"}
    config = {**wrapper, "text_config": text, "audio_config": AUDIO, "audio_token_index": 100, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "WhisperFeatureExtractor"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    weights, generator = {}, torch.Generator().manual_seed(0)
    for name, weight in load_file(source / "model.safetensors").items():
        weights[f"language_model.{name}"] = weight
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = torch.randn(len(weight), generator=generator) * 0.1
            weights[f"language_model.{name.removesuffix('weight')}bias"] = bias.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_text_of_a_multimodal_model(run, model: Path):
    """Chunked prefill, a budget of everything, and prefixes that come back from the host pool."""
    first = {"prompts": [make_prompt(length) for length in LENGTHS], "max_tokens": 12}
    second = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": 12}
    options = {"algorithm": "quest", "top_k": EVERYTHING, "device_buffer_size": EVERYTHING}
    shared = {"max_model_len": EVERYTHING, "language_model_only": True}
    full = run(engine_args(str(model), **shared), [first, second])
    hot = run(hot_args(str(model), options, **shared), [first, second])
    for record, expected in zip(hot, full, strict=True):
        assert_same(record["completions"], expected["completions"])
        assert_pools_empty(record)
    assert hot[1]["completions"][-1]["num_cached_tokens"] > 0

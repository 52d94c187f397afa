"""Multimodal models over hot buffers: stock vLLM's tokens with full attention, for text alone and with images."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from conftest import (
    MODELS,
    OfflineEngine,
    assert_pools_empty,
    assert_same,
    assert_same_but_rounding,
    engine_args,
    hot_args,
    make_prompt,
)
from forks import forked
from image_models import (
    IMAGE_MODELS,
    NUM_PROMPT_TOKENS,
    PROMPTS,
    images,
    make_image,
    make_image_model,
    num_tokens_before_images,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from servers import DO_PREFILL, REQUEST_TIMEOUT_S, Server, wait_started

from tools.harness.deployment import MODEL_NAME, PREFILL_CONNECTOR, hisparse_connector, vllm_engine
from tools.harness.processes import LOOPBACK, ProcessGroup, free_ports

pytestmark = pytest.mark.e2e

LENGTHS = [1, 17, 129, 777]
EVERYTHING = 2048
QUEST = {"algorithm": "quest", "top_k": EVERYTHING, "device_buffer_size": EVERYTHING}
AUDIO = {"model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2}
BLOCK = 128  # tokens


@pytest.fixture(scope="module")
def audio_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2-Audio around the layers of the tiny Llama, with biases as Qwen2 has; no weights of an audio encoder."""
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


@pytest.mark.slow
def test_text_of_a_multimodal_model(run, audio_model: Path):
    """Chunked prefill, a budget of everything, and prefixes that come back from the host pool."""
    first = {"prompts": [make_prompt(length) for length in LENGTHS], "max_tokens": 12}
    second = {"prompts": [prompt + make_prompt(41, 7) for prompt in first["prompts"]], "max_tokens": 12}
    shared = {"max_model_len": EVERYTHING, "language_model_only": True}
    full = run(engine_args(str(audio_model), **shared), [first, second])
    hot = run(hot_args(str(audio_model), QUEST, **shared), [first, second])
    for record, expected in zip(hot, full, strict=True):
        assert_same(record["completions"], expected["completions"])
        assert_pools_empty(record)
    assert hot[1]["completions"][-1]["num_cached_tokens"] > 0


NEEDS_TORCHVISION = pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
KINDS = [
    "paddleocr_vl",
    *(
        pytest.param(kind, marks=[pytest.mark.slow, NEEDS_TORCHVISION])
        for kind in IMAGE_MODELS
        if kind != "paddleocr_vl"
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A class of models that take images: a vision model, and positions of time, height and width (M-RoPE).

    NOTE: all but PaddleOCR-VL need torchvision, which a CPU build of vLLM does not bring.
    """
    return request.param


@pytest.fixture(scope="module")
def image_model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(kind, tmp_path_factory.mktemp(kind))


def turns(first_replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A second turn about the same images, and the first turn with other images of the same sizes."""
    pairs = zip(PROMPTS, first_replies, strict=True)
    second = [prompt + reply["tokens"] + make_prompt(41, 7) for prompt, reply in pairs]
    return [
        {"prompts": second, "images": images(0), "max_tokens": 12},
        {"prompts": PROMPTS, "images": images(100), "max_tokens": 12},
    ]


def differ(first: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell if two replies differ by much more than what `assert_same` allows."""
    pairs = zip(first["logprobs"], other["logprobs"], strict=True)
    return first["tokens"] != other["tokens"] or max(abs(a - b) for a, b in pairs) > 0.01


@pytest.fixture(scope="module")
def full_kv_replies(image_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Replies of stock vLLM with nothing cached: to the first turn, to a second one, to other images, and long ones."""
    args = engine_args(str(image_model), max_model_len=EVERYTHING, enable_prefix_caching=False)
    first = {"prompts": PROMPTS, "images": images(0), "max_tokens": 12}
    with OfflineEngine(tmp_path_factory.mktemp("full"), args) as engine:
        replies = [engine.run(first)["completions"]]
        replies += [engine.run(phase)["completions"] for phase in turns(replies[0])]
        return [*replies, engine.run({**first, "max_tokens": 150})["completions"]]


def test_images(run, image_model: Path, full_kv_replies: list[list[dict[str, Any]]]):
    """Positions of three axes, a prefix with images from the host pool, and other images behind the same text."""
    args = hot_args(str(image_model), QUEST, max_model_len=EVERYTHING)
    first = {"prompts": PROMPTS, "images": images(0), "max_tokens": 12}
    after_first = [{**phase, "forgets": "device"} for phase in turns(full_kv_replies[0])]
    records = run(args, [first, *after_first])
    for record, expected in zip(records, full_kv_replies, strict=False):
        assert_same(record["completions"], expected)
        assert_pools_empty(record)
    alone, *with_image = zip(full_kv_replies[0], full_kv_replies[2], strict=True)
    assert not differ(*alone) and all(differ(*pair) for pair in with_image), "images are to change text"
    cached = [[reply["num_cached_tokens"] for reply in record["completions"]] for record in records]
    assert cached[1] == [num // BLOCK * BLOCK for num in NUM_PROMPT_TOKENS], "images are part of the cached prefix"
    before = [num_tokens_before_images(prompt) // BLOCK * BLOCK for prompt in PROMPTS]
    assert cached[2] == before == [256, BLOCK, BLOCK, 0], "no block with an image is another image's"


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_preempted_requests_with_images_resume(
    run, kind: str, image_model: Path, full_kv_replies: list[list[dict[str, Any]]], num_drafts: int
):
    """The host pool runs out while requests decode: one loses blocks, and continues with the same positions."""
    pool_bytes = 14 * IMAGE_MODELS[kind].block_bytes(BLOCK, 4)
    options = {"host_pool_gib": pool_bytes / 2**30, "device_buffer_size": EVERYTHING * (1 + num_drafts)}
    drafts: dict[str, Any] = {}
    if num_drafts:
        words = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        drafts["speculative_config"] = {"method": "ngram", "num_speculative_tokens": num_drafts, **words}
        drafts["disable_log_stats"] = False
    phase = {"prompts": PROMPTS, "images": images(0), "max_tokens": 150}
    (record,) = run(hot_args(str(image_model), {**QUEST, **options}, max_model_len=1024, **drafts), [phase])
    assert_same_but_rounding(record["completions"], full_kv_replies[3])
    assert_pools_empty(record)
    assert record["counters"]["resumed_requests"] >= 1
    assert not num_drafts or record["drafts"]["accepted"] > 0


def ask(server: Server, image: np.ndarray, transfer: dict[str, Any] | None = None, max_tokens: int = 20) -> Any:
    """The reply to a chat of a text and an image."""
    file = BytesIO()
    Image.fromarray(image).save(file, "PNG")
    url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    text = "The full cache of every running request lives in host memory, and a small hot buffer on the device. " * 12
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **({"kv_transfer_params": transfer} if transfer else {}),
    }
    return requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT_S).json()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paddleocr_vl"], indirect=True)
def test_images_of_a_prefill_decode_pair(kind: str, image_model: Path, tmp_path: Path):
    """The decode side gets the KV of images over NIXL, and computes positions of what it generates by itself."""
    with ProcessGroup() as group:
        servers = []
        for core, connector in enumerate((PREFILL_CONNECTOR, hisparse_connector(host_pool_gib=0.25, **QUEST))):
            port, side_port = free_ports(2)
            args = ["--max-num-batched-tokens", "512", "--no-enable-prefix-caching"]
            process = vllm_engine(f"side{core}", image_model, tmp_path, port, connector, side_port, [core], args)
            servers.append(Server(group.start(forked(process)), f"http://{LOOPBACK}:{port}"))
        wait_started(group)
        prefill, decode = servers
        replies = []
        for seed, size in enumerate([(9, 5), (9, 5), (3, 8)]):
            image = make_image(*size, seed)
            transfer = ask(prefill, image, DO_PREFILL, 1)["kv_transfer_params"]
            before = decode.metric("hisparse_transfer_bytes_to_host")
            reply, full = ask(decode, image, transfer), ask(prefill, image)
            replies.append(reply["choices"][0]["token_ids"])
            assert replies[-1] == full["choices"][0]["token_ids"]
            num_blocks = -(-full["usage"]["prompt_tokens"] // BLOCK)
            received = decode.metric("hisparse_transfer_bytes_to_host") - before
            assert received == num_blocks * IMAGE_MODELS[kind].block_bytes(BLOCK, 4) // 2, "Quest's layers, two of four"
        assert replies[0] != replies[1], "images are to change the text"

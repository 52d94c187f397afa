"""Writes tiny multimodal models with random weights, and makes images and prompts for them.

An image has a token for every 28 x 28 pixels. Its special tokens follow the vocabulary of the other tiny models. All
models but PaddleOCR-VL need torchvision, because their processors can read videos.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_hisparse.cli.tiny_model import (
    COMMON_CONFIG,
    EXPERT_GAIN,
    LOGIT_STD,
    RESIDUAL_GAIN,
    SCORE_STD,
    VOCAB_SIZE,
    write_tokenizer,
)

if TYPE_CHECKING:
    import torch

IMAGE, START, END, VIDEO, VIDEO_START, VIDEO_END = range(VOCAB_SIZE, VOCAB_SIZE + 6)
PATCH = 28  # pixels along each edge of what becomes one token
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 400 * 400}  # of an image; GLM-4V counts each pixel twice
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 4, 8, 2


@dataclass(frozen=True)
class ImageModel:
    """A class of models that take images.

    Attributes:
        name: name of transformers' classes, without `Config` and `ForConditionalGeneration`.
        processor: the same of the processor, without `Processor`.
        image_processor: the same of the image processor, without `ImageProcessor`.
        video_processor: the same of the video processor, without `VideoProcessor`; empty if there is none.
        vision: sizes of the vision model.
        rope: parameters of positions with three axes.
        tokens: name of a special token's id in the configuration -> the token as text; ids ascend from `IMAGE`.
        text: sizes of the language model other than the common ones.
        head_dim: elements of a head of the language model.
    """

    name: str
    processor: str
    image_processor: str
    video_processor: str
    vision: dict[str, Any]
    rope: dict[str, Any]
    tokens: dict[str, str]
    text: dict[str, Any] = field(default_factory=dict)
    head_dim: int = 32

    def block_bytes(self, block_size: int, element_bytes: int) -> int:
        """Bytes of a host block of `block_size` tokens: keys and values of all layers."""
        return block_size * NUM_LAYERS * 2 * NUM_KV_HEADS * self.head_dim * element_bytes


SECTIONS = {"mrope_section": [4, 6, 6]}  # pairs of elements that turn with time, height and width
INTERLEAVED = {"mrope_section": [8, 12, 12], "mrope_interleaved": True}
VISION = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "depth": 2, "patch_size": PATCH // 2}
MERGED_VISION = {**VISION, "out_hidden_size": COMMON_CONFIG["hidden_size"]}
QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_token_id": "<|video|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
QWEN2: dict[str, Any] = {
    "image_processor": "Qwen2VL",
    "video_processor": "Qwen2VL",
    "rope": SECTIONS,
    "tokens": QWEN_TOKENS,
}
QWEN3: dict[str, Any] = {
    "processor": "Qwen3VL",
    "image_processor": "Qwen2VL",
    "video_processor": "Qwen3VL",
    "vision": {**MERGED_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    "rope": INTERLEAVED,
    "tokens": QWEN_TOKENS,
    "head_dim": 64,
}
GLM: dict[str, Any] = {
    "processor": "Glm4v",
    "image_processor": "Glm4v",
    "video_processor": "Glm4v",
    "vision": {**MERGED_VISION, "image_size": 8 * PATCH},
    "rope": {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
    "tokens": GLM_TOKENS,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
IMAGE_MODELS = {
    "paddleocr_vl": ImageModel(
        "PaddleOCRVL",
        processor="PaddleOCRVL",
        image_processor="PaddleOCRVL",
        video_processor="",
        vision={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
        rope=SECTIONS,
        tokens={
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
        },
    ),
    "qwen2_vl": ImageModel(
        "Qwen2VL",
        processor="Qwen2VL",
        vision={"embed_dim": 128, "hidden_size": COMMON_CONFIG["hidden_size"], "mlp_ratio": 2, "num_heads": 2}
        | {"depth": 2, "patch_size": PATCH // 2},
        **QWEN2,
    ),
    "qwen25_vl": ImageModel(
        "Qwen2_5_VL", processor="Qwen2_5_VL", vision={**MERGED_VISION, "fullatt_block_indexes": [1]}, **QWEN2
    ),
    "qwen3_vl": ImageModel("Qwen3VL", **QWEN3),
    "qwen3_vl_moe": ImageModel("Qwen3VLMoe", text={**EXPERTS, "num_experts": 8, "norm_topk_prob": True}, **QWEN3),
    "glm4v": ImageModel("Glm4v", **GLM),
    "glm4v_moe": ImageModel("Glm4vMoe", text={**EXPERTS, "n_routed_experts": 8, "use_qk_norm": False}, **GLM),
}


def make_image_model(kind: str, folder: Path) -> Path:
    """Write configuration, weights, tokenizer and processor of a model of `IMAGE_MODELS`."""
    import torch
    import transformers

    model = IMAGE_MODELS[kind]
    names = ("hidden_size", "intermediate_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    text = {name: COMMON_CONFIG[name] for name in names} | {
        "vocab_size": VOCAB_SIZE + 8,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": model.head_dim,
        "pad_token_id": COMMON_CONFIG["eos_token_id"],
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **model.rope},
    }
    tokens = {name: IMAGE + index for index, name in enumerate(model.tokens)}
    sizes = {"text_config": {**text, **model.text}, "vision_config": model.vision, "tie_word_embeddings": False}
    config = getattr(transformers, f"{model.name}Config")(**sizes, **tokens)
    torch.manual_seed(0)
    weights = getattr(transformers, f"{model.name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, weight in weights.named_parameters():
            draw(name, weight)
    weights.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        transpose_experts(folder / "model.safetensors")
    write_processor(model, folder)
    return folder


def transpose_experts(path: Path) -> None:
    """Give the experts of Qwen3-VL-MoE the axes of its checkpoints: [experts, in, out].

    NOTE: transformers does so only when it saves what it has loaded.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    for name, weight in weights.items():
        hidden_axis = {"gate_up_proj": 1, "down_proj": 2}[name.rpartition(".")[2]] if ".experts." in name else None
        if hidden_axis is not None and weight.shape[hidden_axis] != COMMON_CONFIG["hidden_size"]:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, path, metadata={"format": "pt"})


def draw(name: str, weight: torch.Tensor) -> None:
    """Fill a weight with random numbers of a useful scale, as `cli/tiny_model.py` does.

    Attention adds more than there, so that images change the text. A norm keeps its ones, except those of queries and
    of what an MLP adds to the residual stream.
    """
    if weight.ndim == 1:
        scales = {"q_norm": SCORE_STD, "post_mlp": RESIDUAL_GAIN}
        if name.endswith("bias"):
            weight.normal_(std=0.1)
        elif scale := next((scale for part, scale in scales.items() if part in name), None):
            weight.fill_(scale)
        return
    gains = {
        "embed_tokens": weight.shape[1] ** 0.5,
        "q_proj": SCORE_STD,
        "experts.down_proj": EXPERT_GAIN,
        "down_proj": RESIDUAL_GAIN,
        "lm_head": LOGIT_STD,
    }
    gain = next((gain for part, gain in gains.items() if part in name), 1.0)
    fan_in = weight.shape[-1] if weight.ndim == 3 else weight[0].numel()  # experts are in one tensor
    weight.normal_(std=gain / fan_in**0.5)
    if "lm_head" in name:
        weight[IMAGE:] = 0.0  # greedy decoding never chooses these tokens


def write_processor(model: ImageModel, folder: Path) -> None:
    """Write the tokenizer of the tiny models with the special tokens of images, and the processor's settings."""
    from transformers import AutoTokenizer

    write_tokenizer(folder, COMMON_CONFIG["max_position_embeddings"])
    named = {name.removesuffix("_id"): token for name, token in model.tokens.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=named)
    ids = tokenizer.convert_tokens_to_ids(list(model.tokens.values()))
    assert ids == list(range(IMAGE, IMAGE + len(ids))), f"ids of special tokens are {ids}"
    tokenizer.save_pretrained(folder)
    settings = {"image_processor_type": f"{model.image_processor}ImageProcessor", "size": PIXELS}
    if model.video_processor:
        settings |= {"video_processor_type": f"{model.video_processor}VideoProcessor", "patch_size": PATCH // 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": f"{model.processor}Processor"}))


def make_image(columns: int, rows: int, seed: int) -> np.ndarray:
    """An image that becomes columns x rows tokens: [height, width, 3] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (rows * PATCH, columns * PATCH, 3), dtype=np.uint8)


def around(*texts: list[int]) -> list[int]:
    """A prompt with an image between each two texts."""
    first, *others = texts
    return first + [token for text in others for token in (START, IMAGE, END, *text)]


def make_text(num_tokens: int) -> list[int]:
    return Random(num_tokens).choices(range(3, 500), k=num_tokens)


SIZES = [[], [(9, 11)], [(8, 12), (10, 10)], [(7, 13)]]  # of the images of each prompt: columns, rows
PROMPTS = [  # text alone; an image behind text; two images; an image at the start
    make_text(300),
    around(make_text(150), make_text(60)),
    around(make_text(140), make_text(50), make_text(40)),
    around([], make_text(80)),
]
NUM_PROMPT_TOKENS = [
    len(prompt) + sum(columns * rows - 1 for columns, rows in sizes)
    for prompt, sizes in zip(PROMPTS, SIZES, strict=True)
]


def images(seed: int) -> list[list[tuple[int, int, int]]]:
    """Arguments of `make_image` for the images of each prompt."""
    return [[(*size, seed + index) for index, size in enumerate(sizes)] for sizes in SIZES]


def num_tokens_before_images(prompt: list[int]) -> int:
    """Tokens of a prompt before its first image."""
    return prompt.index(IMAGE) if IMAGE in prompt else len(prompt)

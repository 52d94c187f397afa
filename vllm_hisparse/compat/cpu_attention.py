"""vLLM's attention over full KV on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    import torch

RELEASES = ">=0.32"
VLLM = ("vllm._custom_ops", "vllm.v1.attention.backends.cpu_attn._get_attn_isa")


def cpu_kernels() -> ModuleType:
    """Return the module of vLLM's C++ kernels."""
    from vllm import _custom_ops

    return _custom_ops


def cpu_attention_isa(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """Return the kind of kernels that vLLM's CPU attention uses for full KV; it decides the order of a block's keys."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block_size, head_size)

"""Forced selections in vLLM's layers (`benchmarks.selection_kernel`).

This module is an extension of vLLM's worker (`worker_extension_cls`). The indexer runs as always; then a kernel, inside
the CUDA graph, overwrites its selection, in the same way for every system. The import of this module installs the
kernel, because vLLM imports a worker's extension before it loads the model.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import vllm.models.deepseek_v32.attention as deepseek_attention
from vllm.forward_context import get_forward_context

from benchmarks.kernel_profile import KernelProfile
from benchmarks.selection_kernel import forced


class ForcedSelectionsExtension(KernelProfile):
    """Methods of vLLM's worker, for `collective_rpc`."""

    @torch.inference_mode()
    def use_independent(self, overlap: float) -> None:
        forced().use_independent(overlap)

    @torch.inference_mode()
    def use_trace(self, positions: np.ndarray, num_prompt_tokens: int) -> None:
        forced().use_trace(positions, num_prompt_tokens)


def _install() -> None:
    """Have vLLM's attention layers write a forced selection after their indexer has run."""
    indexer, layer_of = deepseek_attention.sparse_attn_indexer, re.compile(r"layers\.(\d+)\.")

    def select(hidden_states: torch.Tensor, k_cache_prefix: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = indexer(hidden_states, k_cache_prefix, *args, **kwargs)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict) and metadata[k_cache_prefix].num_decodes:
            decode, layer = metadata[k_cache_prefix].decode, int(layer_of.search(k_cache_prefix)[1])
            # The first block of a request names it; block_table is [requests, blocks], or has as many rows as tokens.
            forced().write(args[11], decode.seq_lens.flatten(), decode.block_table[:, 0], layer)
        return out

    deepseek_attention.sparse_attn_indexer = select


_install()

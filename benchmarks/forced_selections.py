"""Selections that do not depend on the model: a trace or a random process gives the selection of each step.

This module is an extension of vLLM's worker (`worker_extension_cls`). The indexer runs as always; then a kernel, inside
the CUDA graph, overwrites its selection, in the same way for every system. The import of this module installs the
kernel, because vLLM imports a worker's extension before it loads the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import vllm.models.deepseek_v32.attention as deepseek_attention
from vllm.forward_context import get_forward_context
from vllm.triton_utils import tl, triton

from benchmarks.kernel_profile import KernelProfile

INDEPENDENT, TRACE = 0, 1
COLUMNS_PER_PROGRAM = 512
LONGEST_STAY = 32  # steps after which a position moves even if no coin has moved it
MAX_TRACE_ELEMENTS = 1 << 24
TRACE_LAYERS = 8  # of the traces in benchmarks/traces that engines recorded


@triton.jit
def _hash(value):
    """[...] uint32, mixed."""
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def _last_move(step, key, threshold, stay: tl.constexpr):
    """The last step, up to `step`, in which each column's coin fell below `threshold`."""
    found = key * 0 + step // stay * stay
    is_found = key < 0
    for back in range(stay):
        then = step - back
        coin = _hash(key.to(tl.uint32) * 0x9E3779B1 + then.to(tl.uint32) * 0x7FEB352D) >> 8
        moves = (coin < threshold) & ~is_found
        found = tl.where(moves, then, found)
        is_found = is_found | moves
    return found


@triton.jit
def _select(
    out, out_stride, top_k, seq_lens, tokens_per_name, names, names_stride, settings, trace, layer, trace_layers,
    columns: tl.constexpr, stay: tl.constexpr,
):  # fmt: skip
    """Write the selection of one token.

    settings: [6] int32: mode, threshold of the coins (of 2^24), the trace's requests, steps, top-k and prompt's tokens.
    """
    token, column = tl.program_id(0), tl.program_id(1) * columns + tl.arange(0, columns)
    request = token // tokens_per_name
    length = tl.load(seq_lens + token)
    name = tl.load(names + request.to(tl.int64) * names_stride)
    if tl.load(settings) == 0:
        key = ((name * 61 + layer) * 4096 + column) & 0x7FFFFFFF
        places = tl.maximum(length // 4096 * 4096 // top_k, 1)
        then = _last_move(length, key, tl.load(settings + 1), stay)
        draw = _hash(key.to(tl.uint32) * 0x27D4EB2F + then.to(tl.uint32) * 0x165667B1) >> 16
        position = column + (draw.to(tl.int32) * places >> 16) * top_k
    else:
        num_requests, num_steps = tl.load(settings + 2), tl.load(settings + 3)
        width, first = tl.load(settings + 4), tl.load(settings + 5)
        repeat = top_k // width
        step = tl.minimum(tl.maximum(length - first, 0), num_steps - 1)
        row = (((request % num_requests) * trace_layers + layer % trace_layers) * num_steps + step).to(tl.int64)
        held = tl.load(trace + row * width + column // repeat, mask=column < top_k, other=-1)
        position = tl.where(held < 0, -1, held * repeat + column % repeat)
    position = tl.where(position < length, position, -1)
    tl.store(out + token.to(tl.int64) * out_stride + column, position, mask=column < top_k)


@dataclass
class ForcedSelections:
    """Selections of all layers; static tensors, which CUDA graphs read.

    Attributes:
        settings: as in `_select`.
        trace: [requests, layers, steps, top-k] int32 positions of the last trace, flat; the start of the tensor.
        trace_layers: number of layers of the trace.
    """

    settings: torch.Tensor
    trace: torch.Tensor
    trace_layers: int = 1

    @classmethod
    def allocate(cls, trace_layers: int) -> ForcedSelections:
        settings = torch.tensor([INDEPENDENT, 0, 1, 1, 1, 0], dtype=torch.int32, device="cuda")
        trace = torch.zeros(MAX_TRACE_ELEMENTS, dtype=torch.int32, device="cuda")
        return cls(settings, trace, trace_layers)

    def use_independent(self, overlap: float) -> None:
        """Every position moves to a random place in a step with probability 1 - `overlap`."""
        threshold = int((1 - overlap) * (1 << 24))
        self.settings.copy_(torch.tensor([INDEPENDENT, threshold, 1, 1, 1, 0], dtype=torch.int32))

    def use_trace(self, positions: np.ndarray, num_prompt_tokens: int) -> None:
        """Replay a trace, each of whose positions stands for as many neighbouring ones as fit into a selection.

        Args:
            positions: [requests, layers, steps, top-k] int32.
            num_prompt_tokens: tokens of a sequence in the trace's first step.
        """
        requests, layers, steps, width = positions.shape
        assert layers == self.trace_layers and positions.size <= MAX_TRACE_ELEMENTS, positions.shape
        self.trace[: positions.size].copy_(torch.from_numpy(np.ascontiguousarray(positions)).flatten())
        self.settings.copy_(torch.tensor([TRACE, 0, requests, steps, width, num_prompt_tokens], dtype=torch.int32))

    def write(self, out: torch.Tensor, decode: Any, layer: int) -> None:
        """Overwrite what a layer selected.

        Args:
            out: [tokens, top-k] int32; its first rows are of the requests that decode.
            decode: the indexer's metadata of these.
            layer: index of the layer.
        """
        seq_lens, top_k = decode.seq_lens.flatten(), out.shape[1]
        names = decode.block_table  # [requests, blocks], or as many as tokens: the first block names a request
        grid = (len(seq_lens), triton.cdiv(top_k, COLUMNS_PER_PROGRAM))
        _select[grid](
            out, out.stride(0), top_k, seq_lens, max(len(seq_lens) // len(names), 1), names, names.stride(0),
            self.settings, self.trace, layer, self.trace_layers, COLUMNS_PER_PROGRAM, LONGEST_STAY,
        )  # fmt: skip


@cache
def forced() -> ForcedSelections:
    """Selections of this process; made when first asked for, on the current device."""
    return ForcedSelections.allocate(TRACE_LAYERS)


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
            forced().write(args[11], metadata[k_cache_prefix].decode, int(layer_of.search(k_cache_prefix)[1]))
        return out

    deepseek_attention.sparse_attn_indexer = select


_install()

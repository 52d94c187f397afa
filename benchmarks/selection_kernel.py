"""Selections that do not depend on the model: a trace or a random process gives the selection of each step.

The same kernel overwrites the selections of vLLM's layers (`benchmarks.forced_selections`) and of SGLang's
(`benchmarks.sglang_scheduler`). This module needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

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
    out, out_stride, top_k, seq_lens, tokens_per_name, names, names_stride, pages, pages_stride, tokens_per_row,
    settings, trace, layer, trace_layers, page_size: tl.constexpr, columns: tl.constexpr, stay: tl.constexpr,
):  # fmt: skip
    """Write the selection of one token: positions, or, where `page_size` is not 0, the slots of these positions.

    settings: [6] int32: mode, threshold of the coins (of 2^24), the trace's requests, steps, top-k and prompt's tokens.
    """
    token, column = tl.program_id(0), tl.program_id(1) * columns + tl.arange(0, columns)
    request = token // tokens_per_name
    length = tl.load(seq_lens + token).to(tl.int32)
    name = tl.load(names + request.to(tl.int64) * names_stride).to(tl.int32)
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
    if page_size > 0:
        row = (token // tokens_per_row).to(tl.int64) * pages_stride
        page = tl.load(pages + row + position // page_size, mask=position >= 0, other=0).to(tl.int32)
        position = tl.where(position >= 0, page * page_size + position % page_size, -1)
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

    def write(
        self,
        out: torch.Tensor,
        seq_lens: torch.Tensor,
        names: torch.Tensor,
        layer: int,
        pages: torch.Tensor | None = None,
        page_size: int = 0,
    ) -> None:
        """Overwrite what a layer selected.

        Args:
            out: [at least tokens, top-k] int32; its first rows are of the tokens that decode.
            seq_lens: [tokens] integers; a sequence's length up to each token.
            names: [requests] integers, or as many as tokens; they stay with a request. The stride may be any.
            layer: index of the layer.
            pages: [requests or tokens, pages] integers; the pages of a request. None: positions are written.
            page_size: tokens of a page, if slots are written.
        """
        num_tokens, top_k = len(seq_lens), out.shape[1]
        if not num_tokens:
            return
        grid = (num_tokens, triton.cdiv(top_k, COLUMNS_PER_PROGRAM))
        table = names if pages is None else pages
        _select[grid](
            out, out.stride(0), top_k, seq_lens, max(num_tokens // len(names), 1), names, names.stride(0),
            table, table.stride(0), max(num_tokens // len(table), 1),
            self.settings, self.trace, layer, self.trace_layers,
            0 if pages is None else page_size, COLUMNS_PER_PROGRAM, LONGEST_STAY,
        )  # fmt: skip


@cache
def forced() -> ForcedSelections:
    """Selections of this process; made when first asked for, on the current device."""
    return ForcedSelections.allocate(TRACE_LAYERS)

"""State of a sparse algorithm for the running requests of a dense model, and which keys it has yet to see."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from vllm_hisparse.algorithms.base import AttentionShape, SparseAlgorithm, State
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError, max_query_len
from vllm_hisparse.layout import StateLayout
from vllm_hisparse.ops.paged_field import PagedField

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


def make_algorithm(config: HiSparseConfig, spec: AttentionSpec, vllm_config: VllmConfig) -> SparseAlgorithm:
    """The algorithm of a dense model.

    Args:
        config: with all defaults filled in.
        spec: of a layer with hot units, or of the full KV in its place.
        vllm_config: of the engine.

    Raises:
        HiSparseConfigError: the algorithm's options do not fit the model.
    """
    model = vllm_config.model_config
    num_heads = model.get_num_attention_heads(vllm_config.parallel_config)
    shape = AttentionShape(num_heads, spec.num_kv_heads, spec.head_size, spec.dtype)
    return config.make_algorithm(shape, model.max_model_len, max_query_len(vllm_config))


@dataclass(frozen=True)
class KeySpan:
    """Keys for the algorithm to represent: positions [first, last) of a request, which are on the host.

    Attributes:
        request_index: of the request, which is its index in the algorithm's state, too.
        first, last: the positions, half-open.
    """

    request_index: int
    first: int
    last: int

    @classmethod
    def no_keys(cls, request_index: int) -> KeySpan:
        """The start of a request without keys: the algorithm forgets who had the index before."""
        return cls(request_index, 0, 0)


@dataclass
class _Progress:
    """How far a request is represented.

    Attributes:
        num_tokens: leading tokens that are represented; not counted while the request decodes.
        is_decoding: every token so far is represented, and each new one is as it is decoded.
    """

    num_tokens: int = 0
    is_decoding: bool = False

    def advance(self, num_tokens: int) -> tuple[int, int]:
        """Have `num_tokens` tokens represented; returns the positions that were not."""
        first, self.num_tokens = self.num_tokens, num_tokens
        return first, num_tokens


class AlgorithmState:
    """An algorithm's state of all layers, and the progress of every request.

    Representations follow the host pool: whatever brought a request's KV there - prefill, a transfer, a prefix hit, a
    resumption - the positions that are not represented yet are read from the host before the request decodes.

    Args:
        algorithm: whose state.
        layout: of what grows with the requests.
        tables: [num_requests + 1, state blocks of the longest request] int32, as `RequestTable.state_tables`.
        memory: [num_device_blocks, bytes of a block] uint8, the memory of vLLM's device blocks; they may lie apart.

    Attributes:
        layers: the state of each layer, by request index; the last entry is of no request.
    """

    def __init__(self, algorithm: SparseAlgorithm, layout: StateLayout, tables: torch.Tensor, memory: torch.Tensor):
        self.algorithm = algorithm
        self.layers = [_fixed_state(algorithm, len(tables), memory.device) for _ in range(layout.num_layers)]
        for layer, growing in zip(self.layers, _growing_state(algorithm, layout, tables, memory), strict=True):
            layer |= growing
        self._progress = [_Progress() for _ in range(len(tables) - 1)]

    def start(self, request_index: int) -> None:
        """A request begins: nothing of it is represented."""
        self._progress[request_index] = _Progress()

    def is_decoding(self, request_index: int) -> bool:
        """True if each new token of a request is represented as it is decoded."""
        return self._progress[request_index].is_decoding

    def begin_decoding(self, request_index: int, position: int) -> tuple[KeySpan, ...]:
        """Positions to represent before the token at `position`, which the request decodes next; from then on it
        represents each token itself. Nothing if it does already."""
        progress = self._progress[request_index]
        if progress.is_decoding:
            return ()
        span = KeySpan(request_index, *progress.advance(position))
        progress.is_decoding = True
        if position == 0:
            return (KeySpan.no_keys(request_index),)
        return (span,) if span.first < span.last else ()

    def prefill(self, request_index: int, first: int, last: int) -> tuple[KeySpan, ...]:
        """Positions to represent now that a chunk of the prompt, positions [first, last), is on the host, too."""
        progress, needs_whole_prompt = self._progress[request_index], self.algorithm.needs_whole_prompt
        if progress.is_decoding:
            if last - first == 1:
                # NOTE: a step of one token that Model Runner V1 put among the prefills; the scheduler counts it as one
                # that decodes.
                return (KeySpan(request_index, first, last),)
            # NOTE: from the start of a unit, which drafts may have entered that were rejected.
            first -= first % self.algorithm.tokens_per_unit
            self._progress[request_index] = progress = _Progress(0 if needs_whole_prompt else first)
        if needs_whole_prompt:
            return ()
        span = KeySpan(request_index, *progress.advance(last))
        return (span,) if span.first < span.last else ()


def _fixed_state(algorithm: SparseAlgorithm, num_requests: int, device: torch.device) -> State:
    """The part of one layer's state that every request has, whatever its length."""
    return {
        name: torch.zeros((num_requests, *field.shape), dtype=field.dtype, device=device)
        for name, field in algorithm.fixed_fields.items()
    }


def _growing_state(
    algorithm: SparseAlgorithm, layout: StateLayout, tables: torch.Tensor, memory: torch.Tensor
) -> list[State]:
    """The rest of each layer's state, in device blocks; arguments as of `AlgorithmState`."""
    layers: list[State] = [{} for _ in range(layout.num_layers)]
    fields, widths = algorithm.growing_fields, layout.field_blocks(algorithm.max_tokens)
    assert sum(widths) == tables.shape[1], "tables of other blocks than the layout has"
    parts = zip(fields.items(), layout.entries_per_block, tables.split(widths, 1), strict=True)
    for (name, field), per_block, table in parts:
        elements = memory.view(field.dtype)[:, : layout.num_layers * per_block * prod(field.shape)]
        by_layer = elements.unflatten(1, (layout.num_layers, per_block, *field.shape)).unbind(1)
        for layer, blocks in zip(layers, by_layer, strict=True):
            layer[name] = PagedField(table, blocks, field.num_entries(algorithm.max_tokens))
    return layers


def check_fixed_state_fits(
    algorithm: str, num_requests: int, max_num_seqs: int, request_bytes: int, free_bytes: int
) -> None:
    """Refuse state of a fixed size that the device cannot hold beside what vLLM has allocated.

    Args:
        algorithm: its name.
        num_requests: requests with state at once, at most `max_num_seqs`.
        max_num_seqs: what was asked for.
        request_bytes: of a request of any length, all layers.
        free_bytes: of the device, for state.

    Raises:
        HiSparseConfigError: there is no room.
    """
    if (num_requests + 1) * request_bytes > free_bytes:
        raise HiSparseConfigError(
            "--max-num-seqs",
            max_num_seqs,
            f"at most {max(free_bytes // request_bytes - 1, 0)}: '{algorithm}' keeps {request_bytes / 2**20:.1f} MiB "
            f"for every request that can run, and {free_bytes / 2**30:.1f} GiB of the device are free for it",
            "Lower it, or lower --gpu-memory-utilization to leave more free.",
        )

"""State of an algorithm for the running requests of a dense model, and the keys that it has not represented yet."""

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
    """Make the algorithm of a dense model.

    Args:
        config: checked options with all defaults filled in.
        spec: KV cache spec of a layer with a hot buffer, or of the full KV in its place.
        vllm_config: configuration of the engine.

    Raises:
        HiSparseConfigError: the algorithm's options do not fit the model.
    """
    model = vllm_config.model_config
    num_heads = model.get_num_attention_heads(vllm_config.parallel_config)
    dtype = spec.dtype if spec.dtype.is_floating_point else model.dtype  # fp8 KV is stored as uint8
    shape = AttentionShape(num_heads, spec.num_kv_heads, spec.head_size, dtype)
    return config.make_algorithm(shape, model.max_model_len, max_query_len(vllm_config))


@dataclass(frozen=True)
class KeySpan:
    """Keys for the algorithm to represent: positions [first, last) of a request, which are on the host.

    Attributes:
        request_index: index of the request, also in the algorithm's state.
        first, last: the positions, half-open.
    """

    request_index: int
    first: int
    last: int

    @classmethod
    def no_keys(cls, request_index: int) -> KeySpan:
        """An empty span at position 0, which lets the algorithm forget the request that had the index before."""
        return cls(request_index, 0, 0)


@dataclass
class _Progress:
    """The progress of a request's representation.

    Attributes:
        num_tokens: number of leading tokens that are represented; not updated while the request decodes.
        is_decoding: True if all tokens so far are represented, and each new token is represented when it is decoded.
    """

    num_tokens: int = 0
    is_decoding: bool = False

    def advance(self, num_tokens: int) -> tuple[int, int]:
        """Count the first `num_tokens` tokens as represented; return the positions that were not, half-open."""
        first, self.num_tokens = self.num_tokens, num_tokens
        return first, num_tokens


class AlgorithmState:
    """An algorithm's state of all layers, and the progress of every request.

    Before a request decodes, the positions that are not represented yet are read from the host pool. It does not matter
    how their KV got there: by prefill, a transfer, a prefix hit or a resumption.

    Args:
        algorithm: the algorithm.
        layout: layout of the state that grows with a request.
        tables: [num_requests + 1, state blocks of the longest request] int32 block ids, as
            `RequestTable.state_block_tables`.
        memory: [num_device_blocks, bytes of a block] uint8, the memory of vLLM's device blocks; they may lie apart.

    Attributes:
        layers: state of each layer, by request index; the last entry is for no request.
    """

    def __init__(self, algorithm: SparseAlgorithm, layout: StateLayout, tables: torch.Tensor, memory: torch.Tensor):
        self.algorithm = algorithm
        self.layers = [_fixed_state(algorithm, len(tables), memory.device) for _ in range(layout.num_layers)]
        for layer, growing in zip(self.layers, _growing_state(algorithm, layout, tables, memory), strict=True):
            layer |= growing
        self._progress = [_Progress() for _ in range(len(tables) - 1)]

    def start(self, request_index: int) -> None:
        """Start a request, of which nothing is represented."""
        self._progress[request_index] = _Progress()

    def is_decoding(self, request_index: int) -> bool:
        """True if each new token of a request is represented when it is decoded."""
        return self._progress[request_index].is_decoding

    def begin_decoding(self, request_index: int, position: int) -> tuple[KeySpan, ...]:
        """Return the keys to represent before a request decodes the token at `position`.

        From then on, each token is represented when it is decoded. Therefore nothing is returned if the request decodes
        already.
        """
        progress = self._progress[request_index]
        if progress.is_decoding:
            return ()
        span = KeySpan(request_index, *progress.advance(position))
        progress.is_decoding = True
        if position == 0:
            return (KeySpan.no_keys(request_index),)
        return (span,) if span.first < span.last else ()

    def prefill(self, request_index: int, first: int, last: int) -> tuple[KeySpan, ...]:
        """Return the keys to represent when positions [first, last) of a prompt are on the host."""
        progress, needs_whole_prompt = self._progress[request_index], self.algorithm.needs_whole_prompt
        if progress.is_decoding:
            if last - first == 1:
                # NOTE: Model Runner V1 has put this step of one token among the prefills, but the scheduler counts it
                # as a decode.
                return (KeySpan(request_index, first, last),)
            # NOTE: a unit is represented again from its start, because it may include drafts that were rejected.
            first -= first % self.algorithm.tokens_per_unit
            self._progress[request_index] = progress = _Progress(0 if needs_whole_prompt else first)
        if needs_whole_prompt:
            return ()
        span = KeySpan(request_index, *progress.advance(last))
        return (span,) if span.first < span.last else ()


def _fixed_state(algorithm: SparseAlgorithm, num_requests: int, device: torch.device) -> State:
    """Make the part of one layer's state whose size does not depend on a request's length."""
    return {
        name: torch.zeros((num_requests, *field.shape), dtype=field.dtype, device=device)
        for name, field in algorithm.fixed_fields.items()
    }


def _growing_state(
    algorithm: SparseAlgorithm, layout: StateLayout, tables: torch.Tensor, memory: torch.Tensor
) -> list[State]:
    """Make the part of each layer's state that grows with requests; arguments as in `AlgorithmState`."""
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
    """Refuse state of fixed size for which the device has too little free memory.

    Args:
        algorithm: name of the algorithm.
        num_requests: requests that have state at once, at most `max_num_seqs`.
        max_num_seqs: value of `--max-num-seqs`.
        request_bytes: bytes of state of fixed size of one request, in all layers.
        free_bytes: device memory that is free for state.

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

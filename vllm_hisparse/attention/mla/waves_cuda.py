"""Decode steps in waves: rows of one wave are copied while others select or attend.

A layer's copies need its selection, and its attention needs its copies. Without waves the link is idle while a layer
computes, and the device while it copies. So where rows may be missed, the requests of a step are divided: each wave
runs indexer, swap-in and attention on a CUDA stream of its own, and begins to select when the one before it has
selected. In a CUDA graph, waves become branches of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata

from vllm_hisparse.ops.limits import NUM_STREAMS

if TYPE_CHECKING:
    from vllm_hisparse.attention.mla.cuda import HotMLAMetadata
    from vllm_hisparse.kv_manager.rows.hot_buffer import HotBuffer

MAX_WAVES = NUM_STREAMS  # the first is on the main stream
MIN_WAVE_REQUESTS = 12  # of each; smaller ones are slower with recorded selections
MAX_REQUESTS = 128  # of a step in waves; sequences of many more are short and mostly hot, so that waves only cost


class Wave:
    """Consecutive decoding requests of a step. What is costly is made when a step runs, not when a graph replays it.

    Args:
        requests: which, in the step's batch.
        query_len: new tokens of each.
        build: makes their metadata.

    Attributes:
        tokens: of the step.
    """

    def __init__(self, requests: slice, query_len: int, build: Callable[[slice], HotMLAMetadata]):
        self.requests, self.tokens = requests, slice(requests.start * query_len, requests.stop * query_len)
        self._build = build

    @cached_property
    def metadata(self) -> HotMLAMetadata:
        """Of these requests alone."""
        return self._build(self.requests)

    @cached_property
    def selected(self) -> torch.cuda.Event:
        """Recorded when a layer has selected for them."""
        return torch.cuda.Event()

    @cached_property
    def attn_metadata(self) -> dict[str, Any]:
        """What vLLM's forward context has for each layer, of these requests alone."""
        context, indexers = get_forward_context(), {}
        found = dict(context.attn_metadata)
        for name, metadata in found.items():
            if type(metadata) is type(self.metadata):
                found[name] = self.metadata
            elif isinstance(metadata, DeepseekV32IndexerMetadata):
                if id(metadata) not in indexers:
                    page_size = context.no_compile_layers[name].kv_cache.shape[1]
                    indexers[id(metadata)] = self._indexer_metadata(metadata, page_size)
                found[name] = indexers[id(metadata)]
        return found

    def _indexer_metadata(self, metadata: DeepseekV32IndexerMetadata, page_size: int) -> DeepseekV32IndexerMetadata:
        """The indexer's part for these requests.

        Args:
            metadata: of all requests of a step in which every one decodes.
            page_size: tokens of a block of indexer keys.
        """
        decode, num_requests = metadata.decode, self.requests.stop - self.requests.start
        rows = self.requests if len(decode.decode_lens) == metadata.num_decodes else self.tokens
        seq_lens, indices, per_request = decode.seq_lens[rows], decode.indices, decode.per_req_decode_lens
        if indices is not None:  # of each row's request, on Blackwell
            indices = indices[rows] - self.requests.start
        part = replace(
            decode,
            block_table=decode.block_table[rows],
            seq_lens=seq_lens,
            decode_lens=decode.decode_lens[rows],
            schedule_metadata=get_paged_mqa_logits_metadata(
                seq_lens, page_size, num_compute_units(seq_lens.device.index), indices=indices
            ),
            indices=indices,
            per_req_decode_lens=None if per_request is None else per_request[self.requests],
        )
        num_tokens = self.tokens.stop - self.tokens.start
        return replace(metadata, num_decodes=num_requests, num_decode_tokens=num_tokens, decode=part)


def make_waves(hot_buffer: HotBuffer, num_requests: int, build: Callable[[slice], HotMLAMetadata]) -> Sequence[Wave]:
    """The waves of a step in which so many requests decode; none if it is better done at once.

    Layers that share an indexer need none: copies of those that follow are hidden anyway.
    """
    shape, num_waves = hot_buffer.shape, min(num_requests // MIN_WAVE_REQUESTS, MAX_WAVES)
    if num_waves < 2 or num_requests > MAX_REQUESTS or shape.holds_all(num_requests) or not all(hot_buffer.selects):
        return ()
    ends = [num_requests * index // num_waves for index in range(num_waves + 1)]
    return [Wave(slice(first, last), shape.max_query_len, build) for first, last in pairwise(ends)]


def run_in_waves(
    layer: Any, run: Callable[..., None], tensors: Sequence[torch.Tensor | None], waves: Sequence[Wave]
) -> None:
    """Run indexer and attention of a layer.

    Args:
        layer: whose implementation is a `HotMLACudaImpl`.
        run: vLLM's indexer and attention: takes a layer and the tensors.
        tensors: [tokens, ...] each, of the whole step.
        waves: of the step.
    """
    main, context = torch.cuda.current_stream(), get_forward_context()
    others = layer.impl.hot_buffer.streams[: len(waves) - 1]
    contexts = [replace(context, attn_metadata=wave.attn_metadata) for wave in waves]  # made on the main stream
    before: Wave | None = None
    for wave, wave_context, stream in zip(waves, contexts, [main, *others], strict=True):
        if before is not None:
            stream.wait_event(before.selected)
        with torch.cuda.stream(stream), override_forward_context(wave_context):
            _run_wave(layer, run, tensors, wave)
        before = wave
    for stream in others:
        main.wait_stream(stream)


def _run_wave(layer: Any, run: Callable[..., None], tensors: Sequence[torch.Tensor | None], wave: Wave) -> None:
    """Run a wave on a copy of the layer: vLLM reads selections from the start of the layer's buffer."""
    part = object.__new__(type(layer))
    selections = layer.topk_indices_buffer[wave.tokens.start :]
    part.__dict__.update(layer.__dict__, impl=layer.impl.of_wave(wave), topk_indices_buffer=selections)
    run(part, *(None if tensor is None else tensor[wave.tokens] for tensor in tensors))

"""Decode steps in microbatches: rows of one microbatch are copied while others select or attend.

A layer's copies need its selection, and its attention needs its copies. Without microbatches, the link is idle while a
layer computes, and the device is idle while the layer copies. Therefore the requests of a step are divided if rows may
be missed, unless so few are missed that microbatches cost more (`kv_manager.blocks.step_form`). Each microbatch runs
indexer, swap-in and attention on a CUDA stream of its own, and begins to select when the previous microbatch has
selected. In a CUDA graph, microbatches become branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata

from vllm_hisparse.attention.mla.microbatch_sizes import (
    LEAST_REQUESTS,
    MANAGED_LEAST_REQUESTS,
    MAX_REQUESTS,
    MIN_REQUESTS,
)
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.ops.limits import NUM_STREAMS

MAX_MICROBATCHES = NUM_STREAMS  # the first one runs on the main stream


class DecodeMicrobatch:
    """Consecutive decoding requests of a step.

    Costly attributes are made when they are first used: when a step runs, but not when a graph replays it.

    Args:
        requests: range of the requests in the step's batch.
        query_len: new tokens of each request.
        build: makes the metadata of a range of requests.

    Attributes:
        tokens: range of the requests' tokens in the step's batch.
    """

    def __init__(self, requests: slice, query_len: int, build: Callable[[slice], Any]):
        self.requests, self.tokens = requests, slice(requests.start * query_len, requests.stop * query_len)
        self._build = build

    @cached_property
    def metadata(self) -> Any:
        """Attention metadata of these requests only."""
        return self._build(self.requests)

    @cached_property
    def selected(self) -> torch.cuda.Event:
        """Event that is recorded when a layer has selected for these requests."""
        return torch.cuda.Event()

    @cached_property
    def attn_metadata(self) -> dict[str, Any]:
        """Metadata for each layer, as in vLLM's forward context, but of these requests only."""
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
        """Return the indexer's metadata of these requests only.

        Args:
            metadata: metadata of all requests of a step, all of which decode.
            page_size: tokens of a block of indexer keys.
        """
        decode, num_requests = metadata.decode, self.requests.stop - self.requests.start
        rows = self.requests if len(decode.decode_lens) == metadata.num_decodes else self.tokens
        seq_lens, indices, per_request = decode.seq_lens[rows], decode.indices, decode.per_req_decode_lens
        if indices is not None:  # index of each row's request, on Blackwell only
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


def may_be_divided(num_requests: int) -> bool:
    """Return True if some engine would divide a step in which `num_requests` requests decode."""
    return MIN_REQUESTS <= num_requests <= MAX_REQUESTS


def make_microbatches(
    hot_buffer: MLAHotBuffer, num_requests: int, build: Callable[[slice], Any]
) -> Sequence[DecodeMicrobatch]:
    """Divide a step in which `num_requests` requests decode; return no microbatches if the step runs faster as a whole,
    however many rows it misses.

    A model whose layers share an indexer needs no microbatches, because the copies of the sharing layers are hidden
    behind the layers before them anyway.
    """
    if not may_be_divided(num_requests) or hot_buffer.shape.holds_all(num_requests) or not all(hot_buffer.selects):
        return ()
    has_drafts = hot_buffer.shape.max_query_len > 1
    least = MANAGED_LEAST_REQUESTS if hot_buffer.host_is_managed and not has_drafts else LEAST_REQUESTS
    number = min(max(num_requests // least, 2), MAX_MICROBATCHES)
    ends = [num_requests * index // number for index in range(number + 1)]
    return [
        DecodeMicrobatch(slice(first, last), hot_buffer.shape.max_query_len, build) for first, last in pairwise(ends)
    ]


def run_in_microbatches(
    layer: Any,
    run: Callable[..., None],
    tensors: Sequence[torch.Tensor | None],
    microbatches: Sequence[DecodeMicrobatch],
) -> None:
    """Run indexer and attention of a layer.

    Args:
        layer: a layer whose implementation is a `HotMLACudaImpl`.
        run: vLLM's function for indexer and attention, which takes a layer and the tensors.
        tensors: [tokens, ...] each, of the whole step.
        microbatches: microbatches of the step.
    """
    main, context = torch.cuda.current_stream(), get_forward_context()
    others = layer.impl.hot_buffer.streams[: len(microbatches) - 1]
    # NOTE: the metadata must be made on the main stream.
    contexts = [replace(context, attn_metadata=microbatch.attn_metadata) for microbatch in microbatches]
    before: DecodeMicrobatch | None = None
    for microbatch, own_context, stream in zip(microbatches, contexts, [main, *others], strict=True):
        if before is not None:
            stream.wait_event(before.selected)
        with torch.cuda.stream(stream), override_forward_context(own_context):
            _run_microbatch(layer, run, tensors, microbatch)
        before = microbatch
    for stream in others:
        main.wait_stream(stream)


def _run_microbatch(
    layer: Any, run: Callable[..., None], tensors: Sequence[torch.Tensor | None], microbatch: DecodeMicrobatch
) -> None:
    """Run a microbatch on a copy of the layer, because vLLM reads selections from the start of the layer's buffer."""
    part = object.__new__(type(layer))
    selections = layer.topk_indices_buffer[microbatch.tokens.start :]
    part.__dict__.update(layer.__dict__, impl=layer.impl.of_microbatch(microbatch), topk_indices_buffer=selections)
    run(part, *(None if tensor is None else tensor[microbatch.tokens] for tensor in tensors))

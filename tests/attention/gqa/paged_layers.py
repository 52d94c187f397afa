"""The adaptors of the CPU and of CUDA under one interface; CUDA's kernels are replaced by formulas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged_layer import BLOCK_SIZE, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, PagedLayer
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils

from vllm_hisparse.attention.gqa.cpu import HotGQACpuImpl, HotGQACpuMetadataBuilder


def attend_paged(**call: Any) -> None:
    """`flash_attn_varlen_func` for one query token per request."""
    block_table, page_size = call["block_table"], call["k"].shape[1]
    for i, num_tokens in enumerate(call["seqused_k"].tolist()):
        pages = block_table[i, : -(-num_tokens // page_size)].long()
        keys, values = (cache[pages].flatten(0, 1)[:num_tokens, 0] for cache in (call["k"], call["v"]))
        weights = (call["q"][i] @ keys.T * call["softmax_scale"]).softmax(-1)
        call["out"][i] = weights @ values


if not hasattr(fa_utils, "flash_attn_varlen_func"):
    fa_utils.flash_attn_varlen_func = attend_paged  # a CPU build of vLLM has none

from vllm_hisparse.attention.gqa import cuda as gqa_cuda  # noqa: E402


def update_cache(_impl: Any, _layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots) -> None:
    """`FlashAttentionImpl.do_kv_cache_update`."""
    cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = torch.cat((key, value), -1)


def attend_staged(_impl: Any, _layer: Any, query: torch.Tensor, _key, _value, cache, metadata, output) -> torch.Tensor:
    """`FlashAttentionImpl.forward` over whole histories."""
    common = metadata.common
    for i, seq_len in enumerate(common.seq_lens.tolist()):
        rows = cache[common.block_table_tensor[i].long()].transpose(1, 2).flatten(0, 1)[:seq_len]
        keys, values = (part.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for part in rows.chunk(2, -1))
        span = slice(*common.query_start_loc_cpu[i : i + 2].tolist())
        length = span.stop - span.start
        scores = torch.einsum("qhd,khd->hqk", query[span], keys) * HEAD_SIZE**-0.5
        later = torch.arange(seq_len) > torch.arange(seq_len - length, seq_len)[:, None]
        output[span] = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -float("inf")).softmax(-1), values)
    return output


class CpuLayer(PagedLayer):
    impl_class, builder_class = HotGQACpuImpl, HotGQACpuMetadataBuilder

    def forward(self, batch, starts, seq_lens, tables, rows) -> torch.Tensor:
        self.begin_decodes(batch, seq_lens)  # Model Runner V1: before the metadata
        common = SimpleNamespace(
            num_reqs=len(batch), query_start_loc_cpu=starts, seq_lens=seq_lens, block_table_tensor=tables
        )
        metadata = self.builder.build(0, common)
        out = torch.full_like(rows[0], float("nan"))
        return self.impl.forward(None, *rows, self.device[:, 1], metadata, out)


class CudaLayer(PagedLayer):
    impl_class, builder_class = gqa_cuda.HotGQAImpl, gqa_cuda.HotGQAMetadataBuilder

    def __init__(self, algorithm_class: type):
        patch = pytest.MonkeyPatch()
        patch.setattr(gqa_cuda, "flash_attn_varlen_func", attend_paged)
        patch.setattr(gqa_cuda.FlashAttentionImpl, "forward", attend_staged)
        patch.setattr(gqa_cuda.FlashAttentionImpl, "do_kv_cache_update", update_cache)
        patch.setattr(
            gqa_cuda.FlashAttentionMetadataBuilder,
            "build",
            lambda _self, _prefix, common: SimpleNamespace(common=common, scheduler_metadata=None),
        )
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        self.undo = patch.undo
        super().__init__(algorithm_class)
        self.impl.num_queries_per_kv, self.impl.vllm_flash_attn_version = NUM_HEADS // NUM_KV_HEADS, 3

    def forward(self, batch, starts, seq_lens, tables, rows) -> torch.Tensor:
        order = sorted(range(len(batch)), key=lambda i: batch[i][1])  # Model Runner V2: decodes first
        spans = [torch.arange(starts[i], starts[i + 1]) for i in order]
        tokens, lengths = torch.cat(spans), torch.tensor([len(span) for span in spans])
        new_starts = torch.cat((torch.tensor([0]), lengths.cumsum(0))).int()
        common = CommonAttentionMetadata(
            query_start_loc=new_starts,
            query_start_loc_cpu=new_starts,
            seq_lens=seq_lens[order].int(),
            seq_lens_cpu_upper_bound=seq_lens[order].int(),
            num_reqs=len(batch),
            num_actual_tokens=len(tokens),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=tables[order],
            slot_mapping=torch.full((len(tokens),), -1),
        )
        metadata = self.builder.build(0, common)
        self.begin_decodes(batch, seq_lens)  # Model Runner V2: after the metadata
        out = torch.full_like(rows[0], float("nan"))
        self.impl.forward(None, *(part[tokens] for part in rows), self.device[:, 1], metadata, out)
        return torch.empty_like(out).index_copy_(0, tokens, out)

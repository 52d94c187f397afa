"""Swap-in operations of dense models on the CPU, where vLLM's kernels have their own order of a block's bytes."""

from __future__ import annotations

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm
from vllm_hisparse.compat.cpu_attention import cpu_attention_isa
from vllm_hisparse.cpu.paged_gqa import CpuBlocks
from vllm_hisparse.ops.kv_heads import KVHeads
from vllm_hisparse.ops.torch_ops import TorchSwapInOps


class CpuUnitOps(TorchSwapInOps):
    """`TorchSwapInOps` over host blocks that vLLM's CPU attention writes and reads (`CpuBlocks`).

    vLLM's kernel has written new tokens to their host blocks before a layer decodes, so `write_tokens` writes them to
    the device only.

    Args:
        algorithm: algorithm that selects units.
        block_size: tokens of a host block.
    """

    writes_host_tokens = False

    def __init__(self, algorithm: SparseAlgorithm, block_size: int):
        self.heads = KVHeads(algorithm.shape.num_kv_heads, tokens_per_unit=algorithm.tokens_per_unit)
        self.block_size, self.head_size = block_size, algorithm.shape.head_size

    def host_blocks(self, host_rows: torch.Tensor) -> CpuBlocks:
        """View a layer's host units as vLLM's blocks.

        Args:
            host_rows: [num_host_units, unit elements].
        """
        blocks = host_rows.view(-1, self.heads.num_heads, self.block_size, 2 * self.head_size)
        return CpuBlocks.view(blocks, cpu_attention_isa(host_rows.dtype, self.block_size, self.head_size))

    def read_host_rows(self, host_rows: torch.Tensor, host_row_ids: torch.Tensor) -> torch.Tensor:
        heads, per_unit = self.heads, self.heads.tokens_per_unit
        per_block = self.block_size // per_unit
        parts, units = host_row_ids // per_block, host_row_ids % per_block
        blocks, kv_heads = heads.host_blocks(parts), heads.heads_of(parts)
        offsets = (units[:, None] * per_unit + torch.arange(per_unit)).flatten()
        where = blocks.repeat_interleave(per_unit), kv_heads.repeat_interleave(per_unit), offsets
        cache = self.host_blocks(host_rows)
        return torch.cat((cache.load_keys(*where), cache.load_values(*where)), -1).view(-1, host_rows.shape[1])

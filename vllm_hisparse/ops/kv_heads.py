"""Numbering of sequences and blocks where every KV head selects for itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVHeads:
    """Numbering of KV heads for the swap-in operations, to which a request's KV head is a sequence, and a unit a row.

    Each request owns `num_heads` consecutive sequence indices. Each device block has `num_heads` consecutive parts, one
    for each head; the parts of the next block begin `head_stride` parts later. Parts of host blocks have no gaps.
    Lengths, positions and sizes of a head are in units. In an MLA model, all heads share one selection, so it counts as
    one head, and a part is a block.

    Attributes:
        num_heads: KV heads that select for themselves.
        head_stride: parts from one device block to the next, at least `num_heads`.
        tokens_per_unit: neighbouring tokens that are selected, copied and evicted together.
    """

    num_heads: int = 1
    head_stride: int = 1
    tokens_per_unit: int = 1

    def seqs(self, request_index: int) -> slice:
        """Sequence indices of a request."""
        return slice(request_index * self.num_heads, (request_index + 1) * self.num_heads)

    def seq_indices(self, request_indices: torch.Tensor) -> torch.Tensor:
        """Sequence indices of requests [batch], head after head: [batch * num_heads]."""
        return (request_indices[:, None] * self.num_heads + self._heads(request_indices)).flatten()

    def request_indices(self, seq_indices: torch.Tensor) -> torch.Tensor:
        """Request index of each sequence index, in the same shape."""
        return seq_indices.div(self.num_heads, rounding_mode="floor")

    def device_parts(self, block: int) -> slice:
        """Parts of a device block."""
        return slice(block * self.head_stride, block * self.head_stride + self.num_heads)

    def parts_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Parts of device blocks [n], one for each head: [n, num_heads]."""
        return blocks[:, None] * self.head_stride + self._heads(blocks)

    def first_parts(self, blocks: torch.Tensor) -> torch.Tensor:
        """Part of the first head in each device block [n]: [n]."""
        return blocks * self.head_stride

    def host_parts(self, blocks: torch.Tensor) -> torch.Tensor:
        """Parts of host blocks [blocks]: [num_heads, blocks]."""
        return blocks * self.num_heads + self._heads(blocks)[:, None]

    def host_blocks(self, parts: torch.Tensor) -> torch.Tensor:
        """Host block of each part, in the same shape; -1 for -1."""
        return parts.div(self.num_heads, rounding_mode="floor")

    def heads_of(self, parts: torch.Tensor) -> torch.Tensor:
        """Head of each part of a host block, in the same shape."""
        return parts % self.num_heads

    def _heads(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.num_heads, dtype=like.dtype, device=like.device)

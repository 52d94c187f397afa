"""Grouped-query KV on the CPU: reads tokens from blocks that vLLM's CPU kernels wrote, and attends to them."""

from __future__ import annotations

from typing import NamedTuple

import torch

AMX_TOKENS = 16  # tokens of a tile of keys, and elements of a tile of values


class CpuBlocks(NamedTuple):
    """One layer's blocks, as views that are indexed by token.

    A block of a KV head has all keys, then all values, in the layout of vLLM's `csrc/cpu/cpu_attn_*.hpp`: the vector
    kernels transpose the keys; the AMX kernels pack keys and values into tiles of pairs.

    Attributes:
        keys: [blocks, heads, head_size, block_size], or AMX [blocks, heads, token tiles, head_size / 2, 16, 2].
        values: [blocks, heads, block_size, head_size], or AMX [blocks, heads, element tiles, block_size / 2, 16, 2].
        is_amx: True if the layout is that of the AMX kernels.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_amx: bool

    @classmethod
    def view(cls, cache: torch.Tensor, isa: str) -> CpuBlocks:
        """View a cache.

        Args:
            cache: [blocks, heads, block_size, 2 * head_size] of any dtype, contiguous.
            isa: kind of kernels that vLLM uses (`cpu_attention_isa`); "amx" needs sizes that are multiples of 16.
        """
        num_blocks, num_heads, block_size, width = cache.shape
        keys, values = cache.view(num_blocks, num_heads, 2, block_size * width // 2).unbind(2)
        is_amx = isa == "amx"
        if is_amx:
            keys = keys.unflatten(2, (block_size // AMX_TOKENS, -1, AMX_TOKENS, 2))
            values = values.unflatten(2, (-1, block_size // 2, AMX_TOKENS, 2))
        else:
            keys, values = keys.unflatten(2, (-1, block_size)), values.unflatten(2, (block_size, -1))
        return cls(keys, values, is_amx)

    def load_keys(self, blocks: torch.Tensor, heads: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Load the keys of tokens.

        Args:
            blocks, heads, offsets: [num_tokens] int64 block, KV head, and place in the block of each token.

        Returns:
            [num_tokens, head_size] in the dtype of the cache.
        """
        if self.is_amx:
            return self.keys[blocks, heads, offsets // AMX_TOKENS, :, offsets % AMX_TOKENS].flatten(1)
        return self.keys[blocks, heads, :, offsets]

    def load_values(self, blocks: torch.Tensor, heads: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Load the values of tokens; arguments and result as in `load_keys`."""
        if self.is_amx:
            return self.values[blocks, heads, :, offsets // 2, :, offsets % 2].flatten(1)
        return self.values[blocks, heads, offsets]


def attend(query: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention over gathered rows.

    Args:
        query: [batch, heads, head_size] of any float dtype; the heads share the rows.
        rows: [batch, num_rows, 2 * head_size] of any float dtype, key and value side by side; rows that are not valid
            may hold anything.
        valid: [batch, num_rows] bool; at least one row of each batch entry is valid.
        scale: factor of the scores.

    Returns:
        [batch, heads, head_size] float32.
    """
    # NOTE: rows that were never written are set to 0, because 0 * NaN is NaN.
    keys, values = rows.float().masked_fill(~valid[..., None], 0).chunk(2, -1)
    scores = query.float() @ keys.transpose(1, 2) * scale
    return scores.masked_fill(~valid[:, None], -float("inf")).softmax(-1) @ values

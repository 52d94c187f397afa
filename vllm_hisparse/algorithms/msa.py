"""MSA: the model's own indexer selects blocks for each KV head."""

from __future__ import annotations

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm, State
from vllm_hisparse.layout import MSA_BLOCK_SIZE, MSA_UNIT


class MSA(SparseAlgorithm):
    """MiniMax Sparse Attention (MiniMax-M3, vLLM's `models/minimax_m3`).

    An indexer of each layer scores blocks of 128 tokens for each KV head, and selects the best and the newest block. It
    is a layer of the model with a KV cache group of its own, whose keys are saved, restored and transferred like KV.
    Here, nothing is represented, and a selected block becomes as many units as it has.
    """

    model_family = "msa"
    graph_capturable = True
    forgets_drafts = True  # the indexer keys of a rejected position are overwritten

    @classmethod
    def unit_tokens(cls, options: object) -> int:
        return MSA_UNIT

    def retrieve_topk(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Turn the indexer's selection into units.

        Args:
            state, request_indices: not used.
            query: [batch, num_kv_heads, blocks] int32 distinct blocks that the indexer selected, in any order and with
                the newest token's block among them; -1 for none. They take the place of queries.
            num_tokens: [batch] int64 tokens, the newest included; 0: nothing is selected.

        Returns:
            [batch, num_kv_heads, num_selected] int32 units, in ascending order, then -1.
        """
        per_block, none = MSA_BLOCK_SIZE // MSA_UNIT, torch.iinfo(torch.int32).max // MSA_BLOCK_SIZE
        blocks = query.masked_fill(query < 0, none).clamp(max=none).sort(-1).values
        units = (blocks[..., None] * per_block + torch.arange(per_block, device=query.device)).flatten(-2)
        num_units = (num_tokens + MSA_UNIT - 1) // MSA_UNIT
        units = units[..., : self.num_selected].int()
        return units.masked_fill(units >= num_units[:, None, None], -1)

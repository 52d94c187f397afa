"""PQCache: keys are product-quantised codes, and their scores are sums of entries of a table."""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_hisparse.algorithms.base import (
    AlgorithmOptions,
    AttentionShape,
    SparseAlgorithm,
    State,
    StateField,
)
from vllm_hisparse.algorithms.kmeans import chunks, kmeans, nearest


class PQCacheOptions(AlgorithmOptions):
    """Options. m = 2 and b = 6 are from the paper's evaluation, sinks and window from its code.

    The number of iterations is fixed here; the paper adapts it to the time that prefill leaves.
    """

    num_subspaces: int = Field(default=2, ge=1, le=64)
    """m: parts that a key is cut into; divides the head size."""
    num_bits: int = Field(default=6, ge=1, le=8)
    """b: bits of a code, 2^b centroids per part."""
    sink_tokens: int = Field(default=32, ge=0, le=1024)
    """First tokens, always attended."""
    window_tokens: int = Field(default=32, ge=1, le=4096)
    """Most recent tokens, always attended."""
    num_iterations: int = Field(default=10, ge=1, le=100)
    """Iterations of k-means."""


class PQCache(SparseAlgorithm):
    """Zhang et al., "PQCache: Product Quantization-based KVCache for Long Context LLM Inference", SIGMOD 2025,
    arXiv:2407.12820.

    Section 3.2: after prefill, the keys of every head are cut into m parts. Each part is clustered into 2^b centroids
    by k-means, and a key becomes m numbers of centroids (codes). A query is multiplied with all centroids once; the
    score of a key is the sum of m of these products, sum_j q_j . c_j[code_j]. The query attends to the best keys, the
    initial tokens (sinks) and the latest tokens (window). A generated token gets the codes of its nearest centroids.
    Query heads that share a KV head share a selection, by the largest of their scores.
    """

    graph_capturable = True
    forgets_drafts = True
    needs_whole_prompt = True
    Options = PQCacheOptions

    @classmethod
    def min_budget(cls, options: PQCacheOptions) -> int:
        return options.sink_tokens + options.window_tokens

    @classmethod
    def refuse(cls, options: PQCacheOptions, shape: AttentionShape) -> str | None:
        if shape.head_size % options.num_subspaces:
            return f"num_subspaces that divides the head size {shape.head_size}"
        return None

    @property
    def num_centroids(self) -> int:
        return 2**self.options.num_bits

    def state_fields(self) -> dict[str, StateField]:
        heads, parts = self.shape.num_kv_heads, self.options.num_subspaces
        part_size = self.shape.head_size // parts
        return {
            "codes": StateField((heads, parts), torch.uint8, tokens_per_entry=1),
            "codebooks": StateField((heads, parts, self.num_centroids, part_size), torch.float32),
        }

    def construct_representations(self, state: State, request_index: int, keys: torch.Tensor, first: int) -> None:
        if not len(keys):
            if first == 0:
                state["codebooks"][request_index] = 0  # a prompt of one token has no keys to cluster
            return
        codebooks = state["codebooks"][request_index]  # a view
        codes = torch.empty(len(keys), *codebooks.shape[:2], dtype=torch.uint8, device=keys.device)
        for heads in chunks(len(codebooks), len(keys) * self.shape.head_size * codebooks.element_size()):
            by_head = self._parts(keys[:, heads])
            points = by_head.flatten(1, 2).transpose(0, 1)  # [heads * parts, tokens, part size]
            if first == 0:
                learnt, labels = kmeans(points, self.num_centroids, self.options.num_iterations)
                codebooks[heads] = learnt.view_as(codebooks[heads])
            else:
                labels = nearest(points, codebooks[heads].flatten(0, 1))
            codes[:, heads] = labels.T.view(by_head.shape[:3]).byte()
        positions = torch.arange(first, first + len(keys), device=keys.device)
        state["codes"][request_index, positions] = codes

    def update_representations(
        self, state: State, request_indices: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> None:
        codebooks, by_head = state["codebooks"][request_indices], self._parts(keys)
        points = by_head.flatten(0, 2)[:, None]  # [batch * heads * parts, 1, part size]
        codes = nearest(points, codebooks.flatten(0, 2))
        state["codes"][request_indices, positions] = codes.view(by_head.shape[:3]).byte()

    def retrieve_topk(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        scores = self.approximate_scores(state, request_indices, query).amax(2)
        positions = torch.arange(self.max_tokens, device=query.device)
        recent = positions >= num_tokens[:, None] - self.options.window_tokens
        return self.select(scores, num_tokens, recent | (positions < self.options.sink_tokens))

    def approximate_scores(self, state: State, request_indices: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Score all tokens for each query head.

        Args:
            state, request_indices, query: as in `retrieve_topk`.

        Returns:
            [batch, num_kv_heads, heads per KV head, max_tokens] float32; undefined beyond a request's tokens.
        """
        query, parts = self.group_queries(query), self.options.num_subspaces
        query = query.unflatten(-1, (parts, -1)).transpose(2, 3)  # [batch, kv heads, parts, group, part size]
        table = query @ state["codebooks"][request_indices].transpose(
            3, 4
        )  # [batch, kv heads, parts, group, centroids]
        codes = state["codes"][request_indices].clamp_max(self.num_centroids - 1)  # undefined beyond the tokens
        codes = codes.permute(0, 2, 3, 1).long()
        codes = codes[:, :, :, None]  # [batch, kv heads, parts, 1, tokens]
        return table.gather(4, codes.expand(-1, -1, -1, query.shape[3], -1)).sum(2)

    def _parts(self, keys: torch.Tensor) -> torch.Tensor:
        """Cut keys into parts: [tokens, kv heads, parts, part size] float32."""
        return keys.float().unflatten(-1, (self.options.num_subspaces, -1))

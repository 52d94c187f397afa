"""ClusterKV: keys clustered by direction, clusters scored by their centroids."""

from __future__ import annotations

import torch
from pydantic import Field
from torch.nn.functional import normalize

from vllm_hisparse.algorithms.base import AlgorithmOptions, SparseAlgorithm, State, StateField
from vllm_hisparse.algorithms.kmeans import chunks, cluster_means, kmeans

UNCLUSTERED = -1


class ClusterKVOptions(AlgorithmOptions):
    """Options, with the paper's defaults; the window and the number of iterations are not in the paper."""

    sink_tokens: int = Field(default=16, ge=0, le=1024)
    """First tokens, always attended and never clustered."""
    window_tokens: int = Field(default=0, ge=0, le=4096)
    """Latest tokens, always attended, too; for models that look at the tokens just before in layers that are sparse."""
    tokens_per_cluster: int = Field(default=80, ge=1, le=4096)
    """Prompt tokens per cluster: C0 = L / 80."""
    update_interval: int = Field(default=320, ge=1, le=4096)
    """Generated tokens that are clustered at a time; until then all of them are attended."""
    clusters_per_update: int = Field(default=4, ge=1, le=1024)
    """Clusters that an update adds."""
    num_iterations: int = Field(default=10, ge=1, le=100)
    """Iterations of k-means."""


class ClusterKV(SparseAlgorithm):
    """Liu et al., "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression", DAC 2025,
    arXiv:2412.03213.

    Keys after the sinks are clustered by k-means with the distance D(i, j) = 1 - cos(k_i, k_j). A query ranks clusters
    by q . c, where c is the mean of the cluster's keys. It takes whole clusters in that order until the budget is full,
    and cuts the last one. Generated tokens are clustered separately, `update_interval` at a time. The first two layers
    keep full KV. Query heads that share a KV head share a selection, by the largest of their scores.
    """

    forgets_drafts = True
    needs_whole_prompt = True
    num_full_kv_layers = 2
    Options = ClusterKVOptions

    @classmethod
    def min_budget(cls, options: ClusterKVOptions) -> int:
        return options.sink_tokens + max(options.update_interval, options.window_tokens)

    @property
    def clusters_per_update(self) -> int:
        """Number of clusters that an update adds, at most one for each of its keys, because others would be empty."""
        return min(self.options.clusters_per_update, self.options.update_interval)

    @property
    def tokens_per_centroid(self) -> int:
        """Tokens for each centroid in the state.

        The entries suffice, because neither a prompt nor an update has more clusters for its tokens. A prompt's last
        cluster may have fewer tokens; the number of entries is rounded up, too.
        """
        return min(self.options.tokens_per_cluster, self.options.update_interval // self.clusters_per_update)

    def state_fields(self) -> dict[str, StateField]:
        heads, size = self.shape.num_kv_heads, self.shape.head_size
        return {
            "labels": StateField((heads,), torch.int32, tokens_per_entry=1),
            "centroids": StateField((heads, size), torch.float32, self.tokens_per_centroid),
            "num_clusters": StateField((), torch.int64),
            "pending_keys": StateField((self.num_kept_keys, heads, size), self.shape.dtype),
            "first_pending": StateField((), torch.int64),
        }

    @property
    def num_kept_keys(self) -> int:
        """Number of latest keys of generated tokens that the state keeps, each at its position modulo this number.

        These keys are not clustered yet, or, with drafts, would no longer be clustered if later tokens were rejected.
        """
        return self.options.update_interval + (self.max_query_len if self.max_query_len > 1 else 0)

    def construct_representations(self, state: State, request_index: int, keys: torch.Tensor, first: int) -> None:
        positions, num_sinks = torch.arange(first, first + len(keys), device=keys.device), self.options.sink_tokens
        if first > 0:  # the prompt came in the first call, so these keys count as generated
            requests = torch.full_like(positions, request_index)
            for token in zip(requests.split(1), keys.split(1), positions.split(1), strict=True):
                self.update_representations(state, *token)
            return
        state["num_clusters"][request_index] = 0
        state["labels"][request_index, positions] = UNCLUSTERED
        state["first_pending"][request_index] = max(len(keys), num_sinks)
        clustered = keys[num_sinks:]
        if len(clustered):
            num_clusters = -(-len(clustered) // self.options.tokens_per_cluster)
            self._add_clusters(state, request_index, clustered, num_sinks, num_clusters)

    def update_representations(
        self, state: State, request_indices: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> None:
        interval = self.options.update_interval
        state["labels"][request_indices, positions] = UNCLUSTERED
        pending = positions >= self.options.sink_tokens
        request_indices, keys, positions = request_indices[pending], keys[pending], positions[pending]
        rejected = positions < state["first_pending"][request_indices]
        for request_index, position in zip(
            request_indices[rejected].tolist(), positions[rejected].tolist(), strict=True
        ):
            self._remove_clusters(state, request_index, position)
        state["pending_keys"][request_indices, positions % self.num_kept_keys] = keys
        full = positions - state["first_pending"][request_indices] == interval - 1
        for request_index, position in zip(request_indices[full].tolist(), positions[full].tolist(), strict=True):
            first = position + 1 - interval
            if first != state["first_pending"][request_index]:
                continue  # a batch may contain padding several times
            kept = torch.arange(first, position + 1, device=keys.device) % self.num_kept_keys
            pending_keys = state["pending_keys"][request_index, kept]
            self._add_clusters(state, request_index, pending_keys, first, self.clusters_per_update)
            state["first_pending"][request_index] = position + 1

    def retrieve_topk(
        self, state: State, request_indices: torch.Tensor, query: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        centroids = state["centroids"][request_indices].permute(0, 2, 3, 1)
        cluster_scores = (self.group_queries(query) @ centroids).amax(2)
        labels = state["labels"][request_indices].transpose(1, 2).long()
        scores = cluster_scores.gather(2, labels.clamp(0, cluster_scores.shape[2] - 1))  # undefined beyond the tokens
        positions = torch.arange(self.max_tokens, device=query.device)
        recent = positions >= num_tokens[:, None] - self.options.window_tokens
        return self.select(scores, num_tokens, (labels == UNCLUSTERED) | recent[:, None])

    def _remove_clusters(self, state: State, request_index: int, position: int) -> None:
        """Undo the updates of generated tokens that included a key at `position` or later."""
        while position < state["first_pending"][request_index]:
            last = int(state["first_pending"][request_index])
            first = last - self.options.update_interval
            positions = torch.arange(first, last, device=state["first_pending"].device)
            state["labels"][request_index, positions] = UNCLUSTERED
            state["first_pending"][request_index] = first
            state["num_clusters"][request_index] -= self.clusters_per_update

    def _add_clusters(
        self, state: State, request_index: int, keys: torch.Tensor, first: int, num_clusters: int
    ) -> None:
        num_tokens, num_heads, head_size = keys.shape
        start = int(state["num_clusters"][request_index])
        clusters = torch.arange(start, start + num_clusters, device=keys.device)
        positions = torch.arange(first, first + num_tokens, device=keys.device)
        means = torch.empty(num_clusters, num_heads, head_size, device=keys.device)
        labels = torch.empty(num_tokens, num_heads, dtype=torch.int32, device=keys.device)
        for heads in chunks(num_heads, num_tokens * head_size * means.element_size()):
            means[:, heads], labels[:, heads] = self._cluster(keys[:, heads], num_clusters)
        state["centroids"][request_index, clusters] = means
        state["labels"][request_index, positions] = labels + start
        state["num_clusters"][request_index] = start + num_clusters

    def _cluster(self, keys: torch.Tensor, num_clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cluster keys; return the mean of each cluster, and the cluster of each key.

        Args:
            keys: [tokens, heads, head_size].
            num_clusters: clusters of each head.

        Returns:
            [num_clusters, heads, head_size] float32 and [tokens, heads] int64.
        """
        keys = keys.float().transpose(0, 1)
        # NOTE: on the unit sphere |a - b|^2 = 2 (1 - cos), so Euclidean k-means there ranks by the paper's distance.
        _, labels = kmeans(normalize(keys, dim=-1), num_clusters, self.options.num_iterations)
        means, _ = cluster_means(keys, labels, num_clusters)
        return means.transpose(0, 1), labels.transpose(0, 1)

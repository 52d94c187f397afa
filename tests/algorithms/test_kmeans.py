from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_hisparse.algorithms import kmeans as kmeans_module
from vllm_hisparse.algorithms.cluster_kv import ClusterKV
from vllm_hisparse.algorithms.kmeans import chunks, kmeans, nearest
from vllm_hisparse.algorithms.pq_cache import PQCache
from vllm_hisparse.algorithms.testing import REQUEST, poisoned_state, random_keys, random_query, represent

from .testing import make


def lloyd(points: torch.Tensor, num_clusters: int, num_iterations: int) -> torch.Tensor:
    """The textbook, point by point."""
    centroids = [points[i * len(points) // num_clusters] for i in range(num_clusters)]
    for _ in range(num_iterations):
        labels = [min(range(num_clusters), key=lambda c: float((p - centroids[c]).square().sum())) for p in points]
        for cluster in range(num_clusters):
            members = [p for p, label in zip(points, labels, strict=True) if label == cluster]
            if members:
                centroids[cluster] = torch.stack(members).mean(0)
    return torch.stack(centroids)


@pytest.mark.long
@given(num_points=st.integers(1, 30), num_clusters=st.integers(1, 6), seed=st.integers(0, 1000))
def test_is_lloyds_algorithm(num_points: int, num_clusters: int, seed: int) -> None:
    points = torch.randn(2, num_points, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    centroids, labels = kmeans(points, num_clusters, 4)
    for batch in range(2):
        torch.testing.assert_close(centroids[batch], lloyd(points[batch], num_clusters, 4))
    distances = torch.cdist(points, centroids)
    torch.testing.assert_close(distances.gather(2, labels[..., None])[..., 0], distances.min(-1).values)


def test_finds_separate_groups() -> None:
    points = torch.randn(1, 60, 4) * 0.1 + torch.arange(3).repeat_interleave(20)[None, :, None] * 10
    _, labels = kmeans(points, 3, 5)
    assert [len(set(group.tolist())) for group in labels[0].view(3, 20)] == [1, 1, 1]
    assert len(set(labels[0].tolist())) == 3


def test_nearest_ignores_the_points_own_length() -> None:
    points, centroids = torch.tensor([[[3.0, 0.0], [0.0, 9.0]]]), torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
    assert nearest(points, centroids).tolist() == [[0, 1]]


@given(count=st.integers(0, 50), num_bytes=st.integers(0, 100), limit=st.integers(1, 200))
def test_chunks_are_all_items_and_within_the_limit(count: int, num_bytes: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kmeans_module, "CHUNK_BYTES", limit)
        parts = list(chunks(count, num_bytes))
    assert [index for part in parts for index in range(count)[part]] == list(range(count))
    assert all(part.stop - part.start == 1 or (part.stop - part.start) * num_bytes <= limit for part in parts)


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that operations allocate."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return result


@pytest.mark.long
@pytest.mark.parametrize("algorithm_class", [ClusterKV, PQCache])
def test_a_long_prompt_is_clustered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch, algorithm_class: type) -> None:
    """The same clusters as at once; no tensor is larger than the limit or one KV head's keys."""
    num_tokens, limit = 3000, 64 << 10
    keys, algorithm = random_keys(num_tokens), make(algorithm_class, max_tokens=num_tokens)
    with LargestTensor() as at_once:
        expected = represent(algorithm, keys, num_tokens)
    assert at_once.num_bytes > 8 * limit
    states = poisoned_state(algorithm, 4)
    monkeypatch.setattr(kmeans_module, "CHUNK_BYTES", limit)
    with LargestTensor() as largest:
        state = represent(algorithm, keys, num_tokens, state=states)
    assert largest.num_bytes <= max(limit, keys[:, 0].float().nbytes)
    query, length = random_query(), torch.tensor([num_tokens])
    for each in (expected, state):
        each["selected"] = algorithm.retrieve_topk(each, torch.tensor([REQUEST]), query, length)
    assert torch.equal(expected["selected"], state["selected"])

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.algorithms.kmeans import kmeans, nearest


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

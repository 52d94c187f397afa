"""Lloyd's k-means, batched, without randomness and without waiting for the device."""

from __future__ import annotations

import torch


def kmeans(points: torch.Tensor, num_clusters: int, num_iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster by Euclidean distance, from points at even distances as first centroids.

    An empty cluster keeps its centroid.

    Args:
        points: [batch, num_points, dim] float32, at least one.
        num_clusters: may exceed the number of points.
        num_iterations: at least 1.

    Returns:
        centroids [batch, num_clusters, dim] and labels [batch, num_points] int64, the nearest of these centroids.
    """
    batch, num_points, dim = points.shape
    starts = torch.arange(num_clusters, device=points.device) * num_points // num_clusters
    centroids = points[:, starts].clone()
    ones = points.new_ones(batch, num_points)
    for _ in range(num_iterations):
        labels = nearest(points, centroids)
        sums = torch.zeros_like(centroids).scatter_add_(1, labels[..., None].expand(-1, -1, dim), points)
        counts = points.new_zeros(batch, num_clusters).scatter_add_(1, labels, ones)[..., None]
        centroids = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
    return centroids, nearest(points, centroids)


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Label of each point's nearest centroid by Euclidean distance.

    Args:
        points: [batch, num_points, dim] float32.
        centroids: [batch, num_clusters, dim] float32.

    Returns:
        [batch, num_points] int64; of equal distances the first centroid.
    """
    # |p - c|^2 without |p|^2, which is the same for all centroids.
    return (centroids.square().sum(-1)[:, None] - 2 * points @ centroids.transpose(1, 2)).argmin(-1)

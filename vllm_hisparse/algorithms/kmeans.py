"""Lloyd's k-means, batched. It uses no random numbers, never waits for the device, and needs bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_BYTES = 64 << 20  # bytes of the points of a run, and of the distances that are compared together


def kmeans(points: torch.Tensor, num_clusters: int, num_iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster points by Euclidean distance. The first centroids are points at even intervals of the list.

    An empty cluster keeps its centroid. On the CPU, the result is the same in every run; on CUDA, sums of points differ
    in their last bits from run to run. Distances take `CHUNK_BYTES` of memory, however many points there are.

    Args:
        points: [batch, num_points, dim] float32; `num_points` is at least 1.
        num_clusters: number of clusters; may exceed the number of points.
        num_iterations: number of iterations, at least 1.

    Returns:
        Centroids, [batch, num_clusters, dim], and labels, [batch, num_points] int64: the nearest centroid of each
        point.
    """
    num_points = points.shape[1]
    starts = torch.arange(num_clusters, device=points.device) * num_points // num_clusters
    centroids = points[:, starts].clone()
    for _ in range(num_iterations):
        labels = nearest(points, centroids)
        means, counts = cluster_means(points, labels, num_clusters)
        centroids = torch.where(counts > 0, means, centroids)
    return centroids, nearest(points, centroids)


def cluster_means(points: torch.Tensor, labels: torch.Tensor, num_clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of each cluster's points, 0 if it has none: [batch, num_clusters, dim], and the number of them:
    [batch, num_clusters, 1].

    Args:
        points: [batch, num_points, dim].
        labels: [batch, num_points] int64.
        num_clusters: number of clusters.
    """
    sums = points.new_zeros(len(points), num_clusters, points.shape[-1])
    sums.scatter_add_(1, labels[..., None].expand_as(points), points)
    ones = points.new_ones(()).expand_as(labels)
    counts = points.new_zeros(len(points), num_clusters).scatter_add_(1, labels, ones)[..., None]
    return sums / counts.clamp_min(1), counts


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Find the nearest centroid of each point by Euclidean distance.

    Args:
        points: [batch, num_points, dim] float32.
        centroids: [batch, num_clusters, dim] float32.

    Returns:
        [batch, num_points] int64 index of the centroid; the first one of equally near centroids.
    """
    # |p - c|^2 is compared without |p|^2, which is the same for all centroids.
    lengths, by_column = centroids.square().sum(-1)[:, None], centroids.transpose(1, 2)
    distance_bytes = len(points) * centroids.shape[1] * points.element_size()
    labels = [
        torch.baddbmm(lengths, points[:, chunk], by_column, alpha=-2).argmin(-1)
        for chunk in chunks(points.shape[1], distance_bytes)
    ]
    return torch.cat(labels, 1)


def chunks(count: int, num_bytes: int) -> Iterator[slice]:
    """Divide `count` items of `num_bytes` each into ranges of at most `CHUNK_BYTES`, but at least one item."""
    size = max(CHUNK_BYTES // max(num_bytes, 1), 1)
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))

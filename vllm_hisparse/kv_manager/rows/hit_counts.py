"""Hits and misses: the swap-in operations count them on the device, and they are read without waiting for it."""

from __future__ import annotations

import numpy as np
import torch

from vllm_hisparse.ops.kv_heads import KVHeads


class CountSnapshot:
    """The present values of a small tensor, readable when the device has reached this point of the stream.

    Args:
        counts: integers of any shape, on any device.
    """

    def __init__(self, counts: torch.Tensor):
        on_device = counts.device.type != "cpu"
        self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=on_device)
        self._host.copy_(counts, non_blocking=True)
        self._copied = torch.Event(counts.device) if on_device else None
        if self._copied is not None:
            self._copied.record()

    @property
    def ready(self) -> bool:
        """True if `values` may be read."""
        return self._copied is None or self._copied.query()

    @property
    def values(self) -> tuple[int, ...]:
        """The values of a tensor of one dimension."""
        return tuple(self._host.tolist())

    @property
    def array(self) -> np.ndarray:
        """The values of a tensor of any shape."""
        return self._host.numpy()


class HitCounts:
    """Hits and misses of all hot buffers.

    Args:
        num_requests: requests that can run at once.
        heads: KV heads of a request.
        device: device that counts.
        takes_per_snapshot: calls of `take` for each copy of the counts to the host.

    Attributes:
        by_seq: [num_requests * num_heads, 2] int64 hits and misses of each sequence index; never reset.
    """

    def __init__(self, num_requests: int, heads: KVHeads, device: torch.device, takes_per_snapshot: int = 1):
        self.by_seq = torch.zeros((num_requests * heads.num_heads, 2), dtype=torch.int64, device=device)
        self._heads = heads
        self._released: list[tuple[int, int, CountSnapshot]] = []
        self._before = [(0, 0)] * num_requests  # by request index: its counts when it was last released
        self._total: CountSnapshot | None = None
        self._num_takes, self._takes_per_snapshot = 0, takes_per_snapshot
        self._reported = (0, 0)

    def release(self, first_hot_block_id: int, request_index: int) -> None:
        """Record the counts of a request that ends."""
        counts = self.by_seq[self._heads.seqs(request_index)].sum(0)
        self._released.append((first_hot_block_id, request_index, CountSnapshot(counts)))

    def take_released(self) -> list[tuple[int, int, int]]:
        """Return first hot block id, hits and misses of the requests released since the last call, in order of release.

        The list ends before the first request whose counts have not arrived on the host yet.
        """
        taken = []
        while self._released and self._released[0][2].ready:
            first_hot_block_id, request_index, snapshot = self._released.pop(0)
            hits, misses = snapshot.values
            before = self._before[request_index]
            self._before[request_index] = (hits, misses)
            taken.append((first_hot_block_id, hits - before[0], misses - before[1]))
        return taken

    def take(self) -> tuple[int, int]:
        """Return hits and misses of all requests since the last copy of the counts that arrived; (0, 0) if none is new.

        On a device, the counts are copied once in `takes_per_snapshot` calls, and arrive some calls later.
        """
        if self._total is None:
            self._num_takes += 1
            if self._num_takes % self._takes_per_snapshot:
                return 0, 0
            self._total = CountSnapshot(self.by_seq.sum(0))
        if not self._total.ready:
            return 0, 0
        before, self._reported, self._total = self._reported, self._total.values, None
        return self._reported[0] - before[0], self._reported[1] - before[1]

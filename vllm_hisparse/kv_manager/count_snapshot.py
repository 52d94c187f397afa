"""Counts read from the device without waiting for it."""

from __future__ import annotations

import torch


class CountSnapshot:
    """The values of a small tensor as of now, readable once the device has got there.

    Args:
        counts: [n] int64, on any device.
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
        """Whether `values` may be read."""
        return self._copied is None or self._copied.query()

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(self._host.tolist())

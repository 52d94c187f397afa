"""Counts transfers, and the bytes that the workers copy in a step, as far as the scheduler half knows them."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_hisparse.connector.metrics import HiSparseStats
from vllm_hisparse.kv_manager.metadata import HiSparseMetadata
from vllm_hisparse.layout import KVLayout


@dataclass
class _Transfer:
    num_host_blocks: int
    num_device_blocks: int
    seconds: float | None = None  # on the slowest rank that has reported; None: no rank has


class CopyCounts:
    """Counters of the scheduler half since they were last taken.

    Args:
        layout: byte sizes.
        num_ranks: tensor parallel ranks, each with a device of its own.
        num_host_pools: number of host pools. If there are several, each has the same blocks, with the KV heads of its
            rank.

    Attributes:
        transfers: request id -> blocks that the request is receiving.
    """

    def __init__(self, layout: KVLayout, num_ranks: int, num_host_pools: int):
        self.layout, self.num_ranks, self.num_host_pools = layout, num_ranks, num_host_pools
        self._stats = HiSparseStats()
        self.transfers: dict[str, _Transfer] = {}

    def add(self, **counters: int) -> None:
        """Add to counters, which have the names of `connector/metrics.py`."""
        self._stats.add(**counters)

    def take(self) -> HiSparseStats:
        """Return the counters and set them to 0."""
        stats, self._stats = self._stats, HiSparseStats()
        return stats

    def step_scheduled(self, metadata: HiSparseMetadata, num_tokens: int) -> None:
        """Count the bytes that the workers copy in a step, except misses, which only the workers know.

        Args:
            metadata: the step's message to the workers.
            num_tokens: tokens that the step computes.
        """
        layout, num_saves = self.layout, len(metadata.saves) + len(metadata.preemption_saves)
        saved = num_tokens * layout.num_layers * layout.row_bytes + num_saves * layout.saved_block_bytes
        restored = len(metadata.restores) * layout.saved_block_bytes
        self.add(device_to_host_bytes=saved * self.num_ranks, host_to_device_bytes=restored * self.num_ranks)

    def transfer_started(self, request_id: str, num_host_blocks: int, num_device_blocks: int) -> None:
        """Record that a request's KV is being received."""
        self.transfers[request_id] = _Transfer(num_host_blocks, num_device_blocks)

    def transfer_took(self, request_id: str, seconds: float) -> None:
        """Record the seconds that a transfer took on a rank; called at most once per rank, before `transfer_ended`."""
        if transfer := self.transfers.get(request_id):
            transfer.seconds = max(seconds, transfer.seconds or 0.0)

    def transfer_expired(self, request_id: str) -> None:
        """Count a transfer whose KV is not used, because its lease may have ended."""
        del self.transfers[request_id]
        self.add(transfers_expired=1)

    def transfer_given_up(self, request_id: str) -> None:
        """Forget a transfer whose request ended before it; perhaps not all of its KV was received."""
        self.transfers.pop(request_id, None)

    def transfer_ended(self, request_id: str, failed: bool) -> tuple[int, int] | None:
        """Count a transfer.

        Returns:
            Bytes received by the host and by the devices; None if the transfer failed, expired or was given up, or
            there was none.
        """
        transfer = self.transfers.pop(request_id, None)
        if transfer is None:
            return None
        self.add(transfers=1, transfer_failures=int(failed))
        if failed:
            return None
        to_host = transfer.num_host_blocks * self.layout.received_block_bytes * self.num_host_pools
        to_device = transfer.num_device_blocks * self.layout.resident_block_bytes * self.num_ranks
        self.add(transfer_bytes_to_host=to_host, transfer_bytes_to_device=to_device)
        if transfer.seconds is not None:
            self._stats.record(transfer_time_seconds=[transfer.seconds])
        return to_host, to_device

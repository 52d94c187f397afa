"""Messages from the workers to the scheduler half of the connector."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile
from vllm_hisparse.kv_manager.usage import Usage


@dataclass
class HiSparseWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker -> scheduler.

    Attributes:
        requests: (first hot block, hits, misses) of released requests, in order of release; from rank 0 alone.
        expired: ids of requests whose pull has ended, but perhaps after its lease: their KV may be another prompt's.
        pull_seconds: request id -> seconds from the start to the end of a pull that neither failed nor expired, on the
            slowest of the ranks that have ended it.
        usage: use of the hot buffers since the last report; from rank 0 alone, and None in most steps.
        waiting: rank -> number of pulls that wait for its import buffer; only ranks on which the number has changed.
    """

    requests: list[tuple[int, int, int]] = field(default_factory=list)
    expired: set[str] = field(default_factory=set)
    pull_seconds: dict[str, float] = field(default_factory=dict)
    usage: Usage | None = None
    waiting: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HiSparseWorkerMetadata:
        assert isinstance(other, HiSparseWorkerMetadata)
        usage = other.usage if self.usage is None else self.usage
        seconds = dict(self.pull_seconds)
        for request_id, value in other.pull_seconds.items():
            seconds[request_id] = max(value, seconds.get(request_id, 0.0))
        requests, expired = self.requests + other.requests, self.expired | other.expired
        return HiSparseWorkerMetadata(requests, expired, seconds, usage, self.waiting | other.waiting)


@dataclass
class HiSparseHandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once, before the first step.

    Attributes:
        host_pool: the memory of this rank's host pool, which the scheduler's process maps.
    """

    host_pool: HostPoolFile

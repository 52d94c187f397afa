"""What the two halves of the connector tell each other each step; only what changed travels."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_hisparse.connector.leases import LeaseTerms
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile

BlockPairs = list[tuple[int, int]]


@dataclass
class HiSparseMetadata(KVConnectorMetadata):
    """Scheduler -> worker. A request is named by its handle, its first hot block.

    Attributes:
        released: handles of requests that ended or were preempted; applied first.
        tail_saves: (device, host) blocks of device-resident KV to save before the forward, of preempted requests.
        tables: handle -> (index of the first block, host block ids from there on); index 0 starts a request.
        hot_tables: handle -> (index of the first block, hot blocks from there on, which replace those it had).
        state_tables: handle -> (index of the first block, blocks of an algorithm's state from there on, which are new).
        restores: (host, device) blocks of device-resident KV to copy to the device before the forward.
        saves: (device, host) blocks of device-resident KV that this step fills, or with draft layers an earlier one, to
            save after the forward.
        first_decodes: (handle, position) of requests of a dense model that computed no tokens in their step before, or
            more than one that decodes, and decode from `position` on in this one.
        prefills: (handle, first, last) of requests of a dense model that compute positions [first, last) of their
            prompt.
        waits_for_tail_saves: whether the worker waits until `tail_saves` are done: in a step that computes nothing,
            whose output does not wait for the device.
        transport: metadata of the transport, or None.
        leases: request id -> what is known of the lease of a pull that begins.
    """

    released: list[int] = field(default_factory=list)
    tail_saves: BlockPairs = field(default_factory=list)
    tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    hot_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    state_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    restores: BlockPairs = field(default_factory=list)
    saves: BlockPairs = field(default_factory=list)
    first_decodes: list[tuple[int, int]] = field(default_factory=list)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)
    waits_for_tail_saves: bool = False
    transport: KVConnectorMetadata | None = None
    leases: dict[str, LeaseTerms] = field(default_factory=dict)


@dataclass
class HiSparseWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker -> scheduler.

    Attributes:
        requests: (handle, hits, misses) of released requests, in order of release; from rank 0 alone.
        expired: ids of requests whose KV may be another prompt's: their pull has ended, its lease perhaps before it.
    """

    requests: list[tuple[int, int, int]] = field(default_factory=list)
    expired: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HiSparseWorkerMetadata:
        assert isinstance(other, HiSparseWorkerMetadata)
        return HiSparseWorkerMetadata(self.requests + other.requests, self.expired | other.expired)


@dataclass
class HiSparseHandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once, before the first step.

    Attributes:
        host_pool: the memory of this rank's host pool, if the scheduler's process is to map it.
        transport: metadata of the transport, or None.
    """

    host_pool: HostPoolFile | None
    transport: KVConnectorHandshakeMetadata | None

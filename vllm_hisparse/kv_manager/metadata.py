"""The message of the scheduler's side to the workers, one for each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_hisparse.connector.leases import LeaseTerms

BlockPairs = list[tuple[int, int]]


@dataclass
class HiSparseMetadata(KVConnectorMetadata):
    """Scheduler -> worker: what has changed since the step before. A request is named by the id of its first hot block.

    Attributes:
        released: requests that ended or were preempted; applied first.
        preemption_saves: (device, host) blocks of device-resident KV to save before the forward, of preempted requests.
        tables: request -> (index of the first block, host block ids from there on); index 0 starts a request.
        hot_tables: request -> (index of the first block, hot blocks from there on, which replace those it had).
        state_tables: request -> (index of the first block, blocks of an algorithm's state from there on, all new).
        restores: (host, device) blocks of device-resident KV to copy to the device before the forward.
        saves: (device, host) blocks of device-resident KV that this step fills, or with draft layers an earlier one, to
            save after the forward.
        first_decodes: (request, position) of each request of a dense model that decodes from `position` on in this
            step, and in its step before computed nothing, or more tokens than a decoding request.
        prefills: (request, first, last) of each request of a dense model that computes positions [first, last) of its
            prompt.
        waits_for_preemption_saves: whether the worker waits until `preemption_saves` are done: in a step that computes
            nothing, because its output does not wait for the device.
        transport: metadata of the transport, or None.
        leases: request id -> what is known of the lease of a pull that begins.
    """

    released: list[int] = field(default_factory=list)
    preemption_saves: BlockPairs = field(default_factory=list)
    tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    hot_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    state_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    restores: BlockPairs = field(default_factory=list)
    saves: BlockPairs = field(default_factory=list)
    first_decodes: list[tuple[int, int]] = field(default_factory=list)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)
    waits_for_preemption_saves: bool = False
    transport: KVConnectorMetadata | None = None
    leases: dict[str, LeaseTerms] = field(default_factory=dict)

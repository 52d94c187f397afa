"""The message from the scheduler's side to the workers, one for each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

BlockPairs = list[tuple[int, int]]


@dataclass(frozen=True)
class LeaseTerms:
    """The lease of a pull that begins, as far as the scheduler's side knows it.

    Attributes:
        age_s: seconds since the request arrived with its transfer parameters.
        lease_s: duration of the prefill side's leases in seconds.
    """

    age_s: float
    lease_s: float


@dataclass
class HiSparseMetadata(KVConnectorMetadata):
    """Scheduler -> worker: changes since the previous step. A request is named by the id of its first hot block.

    Attributes:
        released: requests that ended or were preempted; applied first.
        preemption_saves: (device, host) blocks of preempted requests' device-resident KV, to save before the forward.
        host_block_tables: request -> (index of the first block, host block ids from there on); index 0 starts a
            request.
        hot_block_tables: request -> (index of the first block, hot block ids from there on); they replace the old ones.
        equal_rows: request -> True if its hot blocks are divided equally among layers from now on, False if they are
            not; these requests send all of their hot blocks again.
        state_block_tables: request -> (index of the first block, state block ids from there on); all of them are new.
        restores: (host, device) blocks of device-resident KV, to copy to the device before the forward.
        saves: (device, host) blocks of device-resident KV, to save after the forward. This step fills them; with draft
            layers, an earlier step did.
        first_decodes: (request, position), dense models only: requests that decode from `position` on in this step, but
            in the previous one computed nothing, or more tokens than a decoding request.
        prefills: (request, first, last), dense models only: requests that compute positions [first, last) of their
            prompt.
        waits_for_preemption_saves: True if the worker waits until `preemption_saves` are done. It must in a step that
            computes nothing, because the output of such a step does not wait for the device.
        transport: metadata of the P/D transport; None for a single instance.
        leases: request id -> lease of a pull that begins.
        runs_whole: True if the step is not to be divided into microbatches.
        step: number of the step, from 1 on; messages of different steps may be equal.
    """

    released: list[int] = field(default_factory=list)
    preemption_saves: BlockPairs = field(default_factory=list)
    host_block_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    hot_block_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    equal_rows: dict[int, bool] = field(default_factory=dict)
    state_block_tables: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    restores: BlockPairs = field(default_factory=list)
    saves: BlockPairs = field(default_factory=list)
    first_decodes: list[tuple[int, int]] = field(default_factory=list)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)
    waits_for_preemption_saves: bool = False
    transport: KVConnectorMetadata | None = None
    leases: dict[str, LeaseTerms] = field(default_factory=dict)
    runs_whole: bool = False
    step: int = field(default=0, compare=False)

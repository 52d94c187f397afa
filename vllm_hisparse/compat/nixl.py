"""Private parts of vLLM's NIXL connector."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_hisparse.connector.import_buffer import ImportBuffer, Source, pieces
from vllm_hisparse.vllm_patches.claimed_registrations import CheckedRegistrations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlAgentMetadata,
        NixlConnectorMetadata,
        ReqMeta,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

RELEASES = ">=0.32"
VLLM = (
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector.NixlPullConnector.connector_worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._heartbeat_interval",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._heartbeat_by_engine",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._heartbeat_req_engine",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._reqs_need_recv",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker.NixlPullConnectorWorker._read_blocks_for_req",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker.NixlPullConnectorWorker._read_blocks",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.use_mla",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.device_id",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.nixl_wrapper",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._send_heartbeats",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._handle_failed_transfer",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._log_failure",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._remote_agents",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._engine_clock_offset",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._handshake_lock",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._recving_transfers",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._recving_metadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._recv_failures",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._pending_recv_notifs",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._pop_done_transfers",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._try_release_xfer_handle",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._cleanup_remote_engine",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._skip_dram_xfer",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._apply_prefix_caching",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._block_ids_by_region",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._physical_blocks_per_logical_kv_block",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._registered_descs",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.kv_caches_base_addr",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.block_len_per_layer",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.block_stride_per_layer",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.region_group_ids",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.dst_region_group_ids",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.dst_region_mem_types",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.region_mem_types",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.dst_region_num_blocks",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.nixl_backends",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.nixl_memory_type",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.transfer_topo",
)


def copy_blocks_whole(connector: NixlPullConnector) -> None:
    """Tell NIXL's worker half that blocks are the same on both sides.

    NOTE: vLLM's flag for this is `use_mla`, but it holds for any model if both sides have equally many ranks, because
    then no block is divided by heads. Only with this flag does NIXL's worker half map one remote KV cache group to
    several local ones, and register host and device memory together.
    """
    connector.connector_worker.use_mla = True


def connect_on(connector: NixlPullConnector, device: torch.device) -> None:
    """Let the thread that connects to prefill instances use the worker's GPU, once memory is registered.

    NOTE: vLLM knows the GPU by the device memory that is registered. Without any, it takes the first one, where every
    rank would then open a context, for which no memory is set aside.
    """
    if device.index is not None:
        connector.connector_worker.device_id = device.index


def pending_pulls(connector: NixlPullConnector) -> dict[str, object]:
    """Return by name what NIXL's scheduler half remembers of requests: heartbeats to send, and pulls to start."""
    nixl = connector.connector_scheduler
    return {
        "heartbeats by engine": nixl._heartbeat_by_engine,
        "heartbeats by request": nixl._heartbeat_req_engine,
        "pulls to start": nixl._reqs_need_recv,
    }


@dataclass(frozen=True)
class _Place:
    """NIXL's kind of memory ("DRAM": host memory), and its device."""

    kind: str
    device_id: int


HOST = _Place("DRAM", 0)  # NOTE: vLLM gives host memory device 0


@dataclass(frozen=True)
class _RemoteMemory:
    """Memory of a rank of a prefill instance, of which vLLM keeps only the addresses.

    Attributes:
        block_strides: bytes from a block to the next one in each region.
        place: kind and device.
    """

    block_strides: list[int]
    place: _Place


class PullHooks(CheckedRegistrations):
    """Mixin of vLLM's `NixlPullConnectorWorker`: asks `may_pull` before a pull, and survives errors of a peer.

    After `read_through`, KV for the host pool comes through the import buffer. The other KV is read in pieces at the
    same time, or page by page afterwards if its pages do not follow each other in memory. When all KV has arrived, the
    prefill instance is told to free the blocks.
    """

    _imports: ImportBuffer | None = None
    _host_pool: range | None = None  # None: vLLM reads all KV

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._install_hooks()

    def _install_hooks(self) -> None:
        self.install_checks()
        self._remote_memory: dict[Source, _RemoteMemory] = {}
        self._given_up: set[str] = set()  # requests that have ended while they are pulled
        self._unreached: set[str] = set()  # agents to which the latest message could not be sent
        send = self.nixl_wrapper.send_notif

        def send_notif(agent_name: str, *args: Any, **kwargs: Any) -> None:
            self._unreached.add(agent_name)
            send(agent_name, *args, **kwargs)
            self._unreached.discard(agent_name)

        self.nixl_wrapper.send_notif = send_notif  # NOTE: vLLM tells nobody that a heartbeat could not be sent

    def may_pull(self, request_id: str, meta: ReqMeta, clock_offset: float) -> bool:
        """Return True to pull. On False, the request is reported as finished without a pull.

        Args:
            request_id: id of the request.
            meta: description of the blocks to pull.
            clock_offset: the prefill instance's `time.perf_counter` less this process's, in seconds.
        """
        raise NotImplementedError

    def needs_blocks(self) -> bool:
        """Return True if this rank reads the blocks of a pull; else it only tells the prefill instance to free them."""
        raise NotImplementedError

    def heartbeats_sent(self, request_ids: dict[str, set[str]], sent_at: float) -> None:
        """Record heartbeats that were sent to all ranks of prefill instances.

        Args:
            request_ids: engine id -> ids of the requests on the prefill side.
            sent_at: time before the heartbeats were sent, `time.perf_counter`.
        """
        raise NotImplementedError

    def heartbeats_due(self, request_ids: dict[str, set[str]]) -> None:
        """Record all transfers that get heartbeats, before these are sent.

        Args:
            request_ids: engine id -> ids of the requests on the prefill side.
        """
        raise NotImplementedError

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        """Pull a request's blocks, or begin a handshake. NOTE: vLLM calls this again when the handshake has ended."""
        engine_id = meta.remote.engine_id
        try:
            if self.claim_waits(req_id, meta):
                return
            with self._handshake_lock:  # NOTE: vLLM's thread enters an instance first, and its clock offset afterwards
                is_connected = engine_id in self._remote_agents
            is_posted = meta.awaiting_kvs and is_connected  # False: vLLM connects, or only lets blocks be freed
            if is_posted and not self.may_pull(req_id, meta, self._engine_clock_offset[engine_id]):
                self._recving_transfers.setdefault(req_id, [])  # an empty list counts as done
            elif is_posted and (not self.needs_blocks() or req_id in self._given_up):
                nothing = replace(meta, local_block_ids=(), local_physical_block_ids=())
                super()._read_blocks_for_req(req_id, nothing)
            else:
                super()._read_blocks_for_req(req_id, meta)
        except Exception as error:  # NOTE: vLLM computes with what the peer says, outside any `try`
            self._log_failure(failure_type="pull_failed", req_id=req_id, error=error, meta=meta)
            self._handle_failed_transfer(req_id, None, self._recv_failures)

    def give_up(self, request_ids: Set[str]) -> None:
        """Start no more reads for requests that have ended, such as aborted ones. The prefill instance is told to free
        their blocks when the reads that run have ended.

        NOTE: the host and device blocks of such a request come back when vLLM reports its pull as finished.
        """
        self._given_up = (self._given_up | request_ids) & self._recving_metadata.keys()
        if self._imports is not None:
            for request_id in self._given_up & request_ids:
                self._imports.give_up(request_id)

    @property
    def reads_for_host(self) -> bool:
        """True if this rank reads KV for the host pool; False if rank 0 does so for all ranks that share the pool."""
        return self.needs_blocks() and not self._skip_dram_xfer

    def read_through(self, imports: ImportBuffer | None, host_pool: range) -> None:
        """Read KV for the host pool through a buffer from now on, and other KV in pieces; called once, after memory has
        been registered.

        Args:
            imports: the buffer, with its reads from this object. None: this rank reads nothing for the host pool.
            host_pool: addresses of the host pool.
        """
        self._imports, self._host_pool = imports, host_pool
        if imports is None:
            return
        memory = imports.memory
        kind = "DRAM" if memory.device.type == "cpu" else self.nixl_memory_type
        self._buffer_place = _Place(kind, max(memory.get_device(), 0))
        part = (memory.data_ptr(), memory.nbytes, self._buffer_place.device_id, "")
        descriptors = self.nixl_wrapper.get_reg_descs([part], kind)
        self.nixl_wrapper.register_memory(descriptors, backends=self.nixl_backends)
        self._registered_descs.append(descriptors)

    def add_remote_agent(
        self, nixl_agent_meta: NixlAgentMetadata, remote_tp_rank: int = 0, *args: Any, **kwargs: Any
    ) -> str:
        name = super().add_remote_agent(nixl_agent_meta, remote_tp_rank, *args, **kwargs)
        if self._host_pool is None:
            return name
        engine_id, addresses = nixl_agent_meta.engine_id, nixl_agent_meta.kv_caches_base_addr
        # NOTE: vLLM has reduced `nixl_agent_meta` to the regions that this side has, unless it knew the rank already.
        if self.kv_caches_base_addr.get(engine_id, {}).get(remote_tp_rank) is addresses:
            kind, strides = self.dst_region_mem_types[engine_id][0], nixl_agent_meta.block_strides
            memory = _RemoteMemory(strides, _Place(kind, nixl_agent_meta.device_id))
            self._remote_memory[Source(engine_id, remote_tp_rank)] = memory
        return name

    def _cleanup_remote_engine(self, engine_id: str, *args: Any, **kwargs: Any) -> None:
        """Forget a prefill instance.

        NOTE: vLLM >= 0.33 also forgets an instance that has registered its memory again, while requests read from it.
        The addresses of reads that are not started yet, and vLLM's handles for them, are void then, so these requests
        fail. Otherwise vLLM would look up the forgotten instance when their reads end, which would end the engine.
        """
        super()._cleanup_remote_engine(engine_id, *args, **kwargs)
        for source in [each for each in list(self._remote_memory) if each.engine_id == engine_id]:
            del self._remote_memory[source]
        if self._imports is not None:
            self._imports.abandon(engine_id)
        for request_id in self._recving_transfers.keys() - self._recv_failures:
            request = self._recving_metadata.get(request_id)
            if request is not None and request.remote.engine_id == engine_id:
                self._handle_failed_transfer(request_id, None, self._recv_failures)

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        if self._imports is not None:
            self._imports.advance()
        super().start_load_kv(metadata)

    def _read_blocks(self, read_spec: ReadSpec, dst_engine_id: str, request_id: str, *args: Any, **kwargs: Any) -> bool:
        """Read a request's blocks from one rank; after `read_through`, those of the host pool through the buffer."""
        read_blocks = super()._read_blocks

        def read_directly(spec: ReadSpec) -> bool:
            return read_blocks(spec, dst_engine_id, request_id, *args, **kwargs)

        if self._host_pool is None or not any(read_spec.local_block_ids):  # NOTE: vLLM only sends a message
            return read_directly(read_spec)
        remote_info = self.transfer_topo.get_engine_info(dst_engine_id)
        # NOTE: if a block of this side is several of the other side, vLLM reads pages of another size.
        if self.transfer_topo.block_size_ratio(remote_info.remote_block_size) > 1:
            return read_directly(read_spec)
        block_ids = self._block_ids_of_regions(read_spec, dst_engine_id)
        source = Source(dst_engine_id, read_spec.remote_rank)
        addresses = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        on_host = [region for region, address in enumerate(addresses) if address in self._host_pool]
        others = [region for region in range(len(addresses)) if region not in on_host]
        rest, main = (self._pages(source, regions, *block_ids) for regions in (others, on_host))
        notice = f"{kwargs['remote_request_id']}:{kwargs['expected_consumers']}".encode()  # vLLM's message
        agent = self._remote_agents[dst_engine_id][0, source.rank]
        joined, read_rest = pieces(*rest), None
        if len(joined[0]) < len(rest[0]) or not len(rest[0]):
            if len(rest[0]) and not self._read_pieces(request_id, source, *joined, self._place_of(others)):
                return False
            self._send_later(request_id, agent, notice)
        else:  # vLLM has prepared reads of single pages; the end of such a read sends the message, so it comes last
            ids = [[ids if region in others else [] for region, ids in enumerate(side)] for side in block_ids]
            spec = replace(read_spec, local_block_ids=ids[0], remote_block_ids=ids[1], block_ids_by_region=True)
            read_rest = partial(read_directly, spec)
        local, remote, sizes = main
        if self._imports is None or not len(sizes):
            return read_rest() if read_rest else True
        then = partial(self._read_later, read_rest, request_id, agent, notice) if read_rest else None
        self._imports.add(request_id, source, remote, local - self._host_pool.start, sizes, then)
        return True

    def _send_later(self, request_id: str, agent: str, notice: bytes) -> None:
        """Let vLLM send a message when all transfers of a request have ended well."""
        self._pending_recv_notifs.setdefault(request_id, []).append((agent, notice))

    def _read_later(self, read: Callable[[], bool], request_id: str, agent: str, notice: bytes) -> None:
        """Read the KV that does not come through the buffer, unless the request has been given up.

        Args:
            read: reads this KV. The end of this read tells the prefill instance to free the blocks.
            request_id: the request.
            agent, notice: receiver and text of a message to free the blocks, sent if there is no read.
        """
        if request_id in self._given_up:
            self._send_later(request_id, agent, notice)
            return
        try:
            read()
        except Exception as error:
            self._log_failure(failure_type="pull_failed", req_id=request_id, error=error)
            self._handle_failed_transfer(request_id, None, self._recv_failures)

    def _read_pieces(
        self, request_id: str, source: Source, local: np.ndarray, remote: np.ndarray, place: _Place
    ) -> bool:
        """Read pieces in one of the request's transfers, which vLLM polls.

        Args:
            request_id: the request.
            source: place of the pieces.
            local, remote: [pieces, 2] int64: address and bytes of each piece, on this side and at the source.
            place: memory of this side.

        Returns:
            False if the read could not be started, which has been recorded; else True.
        """
        handle, is_started = self._start_transfer(request_id, source, local, remote, place)
        if handle is not None:
            self._recving_transfers[request_id].append(handle)
        return is_started

    def _block_ids_of_regions(self, read_spec: ReadSpec, engine_id: str) -> tuple[list[list[int]], list[list[int]]]:
        """Return the block ids to read into each region, and those to read from it, in the same order."""
        if read_spec.block_ids_by_region:
            return list(read_spec.local_block_ids), list(read_spec.remote_block_ids)
        remote_info = self.transfer_topo.get_engine_info(engine_id)
        local, remote = self._apply_prefix_caching(
            decode_block_ids=read_spec.local_block_ids,
            prefill_block_ids=read_spec.remote_block_ids,
            decode_physical_per_logical=self._physical_blocks_per_logical_kv_block,
            prefill_physical_per_logical=remote_info.remote_physical_blocks_per_logical,
        )
        remote_groups = self.dst_region_group_ids[engine_id]
        return (
            self._block_ids_by_region(local, self.region_group_ids),
            self._block_ids_by_region(remote, remote_groups),
        )

    def _pages(
        self,
        source: Source,
        regions: Sequence[int],
        local_ids: Sequence[Sequence[int]],
        remote_ids: Sequence[Sequence[int]],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the pages of some regions: [pages] int64 addresses here and at their source, and bytes.

        Args:
            source: place of the pages.
            regions: numbers of the regions.
            local_ids, remote_ids: block ids of each region of this engine, to read into and to read from.

        Raises:
            ValueError: the source does not have a block.
        """
        here = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        there = self.kv_caches_base_addr[source.engine_id][source.rank]
        strides, pages = self._remote_memory[source].block_strides, [np.empty((3, 0), np.int64)]
        for region in regions:
            local, remote = np.asarray(local_ids[region], np.int64), np.asarray(remote_ids[region], np.int64)
            num_blocks = self.dst_region_num_blocks[source.engine_id][region]
            if (remote >= num_blocks).any():
                raise ValueError(f"block {remote.max()} of a prefill instance that has {num_blocks} blocks")
            local = here[region] + local * self.block_stride_per_layer[region]
            remote = there[region] + remote * strides[region]
            pages.append(np.stack([local, remote, np.full_like(local, self.block_len_per_layer[region])]))
        local, remote, sizes = np.concatenate(pages, axis=1)
        return local, remote, sizes

    def _place_of(self, regions: Sequence[int]) -> _Place:
        """Return the memory of regions that are all on the device, or all on the host."""
        (kind,) = {self.region_mem_types[region] for region in regions}
        return HOST if kind == "DRAM" else _Place(kind, self.device_id)

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """Poll transfers, except those in the import buffer: without handles, vLLM would take them for done."""
        if self._imports is None:
            return super()._pop_done_transfers(transfers)
        self._imports.advance()
        held = {name: transfers.pop(name) for name in self._imports.pending & transfers.keys()}
        results = super()._pop_done_transfers(transfers)
        transfers.update(held)
        return results

    def start_read(
        self, request_id: str, source: Source, local: np.ndarray, remote: np.ndarray
    ) -> tuple[Any | None, bool]:
        return self._start_transfer(request_id, source, local, remote, self._buffer_place)

    def start_read_to_host(
        self, request_id: str, source: Source, places: np.ndarray, addresses: np.ndarray, sizes: np.ndarray
    ) -> tuple[Any | None, bool]:
        joined = pieces(self._host_pool.start + places, addresses, sizes)
        return self._start_transfer(request_id, source, *joined, HOST)

    def _start_transfer(
        self, request_id: str, source: Source, local: np.ndarray, remote: np.ndarray, place: _Place
    ) -> tuple[Any | None, bool]:
        """Start to read pieces into memory of this side (`place`), with arguments and result of `start_read`."""
        handle = None
        try:
            descriptors = [
                self.nixl_wrapper.get_xfer_descs(np.insert(side, 2, at.device_id, axis=1).astype(np.uint64), at.kind)
                for side, at in ((local, place), (remote, self._remote_memory[source].place))
            ]
            agent = self._remote_agents[source.engine_id][0, source.rank]
            handle = self.nixl_wrapper.initialize_xfer("READ", *descriptors, agent)
            self.nixl_wrapper.transfer(handle)
        except Exception as error:  # NOTE: NIXL has exception classes of its own
            self._log_failure(
                failure_type="transfer_setup_failed",
                req_id=request_id,
                error=error,
                dst_engine_id=source.engine_id,
                remote_rank=source.rank,
            )
            is_released = self._handle_failed_transfer(request_id, handle, self._recv_failures)
            return None if is_released else handle, False
        return handle, True

    def poll_read(self, request_id: str, read: Any) -> tuple[bool, bool]:
        ended, failed = super()._pop_done_transfers({request_id: [read]})
        self._recv_failures |= failed
        return bool(ended), bool(failed)

    def release_read(self, request_id: str, read: Any) -> None:
        self._try_release_xfer_handle(request_id, read)

    def shutdown(self) -> None:
        """Shut down; NOTE: vLLM calls this again when the object is deleted."""
        imports, self._imports = self._imports, None
        if imports is not None:
            imports.close()
        super().shutdown()

    def _send_heartbeats(self, metadata: NixlConnectorMetadata) -> None:
        due = {engine_id: set(info.req_ids) for engine_id, info in metadata.heartbeat_by_engine.items()}
        if not due:
            return
        self.heartbeats_due(due)
        connected, sent_at = self._remote_agents.keys() & due.keys(), time.perf_counter()
        try:
            super()._send_heartbeats(metadata)
        except Exception as error:
            self._log_failure(failure_type="heartbeats_failed", req_id=None, error=error)
            return
        agents = {engine_id: self._remote_agents.get(engine_id, {}).values() for engine_id in connected}
        reached = {name: due[name] for name in connected if agents[name] and self._unreached.isdisjoint(agents[name])}
        self.heartbeats_sent(reached, sent_at)


def send_heartbeats_every(connector: NixlPullConnector, seconds: int) -> None:
    """Set the time between two heartbeats of a NIXL scheduler half; vLLM takes a sixth of this side's own lease."""
    connector.connector_scheduler._heartbeat_interval = seconds

"""Private parts of vLLM's NIXL connector."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta

RELEASES = ">=0.32"
VLLM = (
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector.NixlPullConnector.connector_worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._heartbeat_interval",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._heartbeat_by_engine",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._heartbeat_req_engine",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler._reqs_need_recv",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker.NixlPullConnectorWorker._read_blocks_for_req",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.use_mla",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.device_id",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker.nixl_wrapper",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._send_heartbeats",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._handle_failed_transfer",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._log_failure",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._remote_agents",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._engine_clock_offset",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._recving_transfers",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._recv_failures",
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


class PullHooks:
    """Mixin of vLLM's `NixlPullConnectorWorker`: asks before a pull, and keeps errors of a peer inside."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._install_hooks()

    def _install_hooks(self) -> None:
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
        """Called after heartbeats were sent to all ranks of prefill instances: engine id -> request ids there."""
        raise NotImplementedError

    def heartbeats_due(self, request_ids: dict[str, set[str]]) -> None:
        """Called before heartbeats are sent, with all transfers that get them: engine id -> request ids there."""
        raise NotImplementedError

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        """Pull a request's blocks, or begin a handshake. NOTE: vLLM calls this again when the handshake has ended."""
        engine_id = meta.remote.engine_id
        try:
            is_posted = meta.awaiting_kvs and engine_id in self._remote_agents  # False: connects, or frees
            if is_posted and not self.may_pull(req_id, meta, self._engine_clock_offset[engine_id]):
                self._recving_transfers.setdefault(req_id, [])  # an empty list counts as done
            elif is_posted and not self.needs_blocks():
                nothing = replace(meta, local_block_ids=(), local_physical_block_ids=())
                super()._read_blocks_for_req(req_id, nothing)
            else:
                super()._read_blocks_for_req(req_id, meta)
        except Exception as error:  # NOTE: vLLM computes with what the peer says, outside any `try`
            self._log_failure(failure_type="pull_failed", req_id=req_id, error=error, meta=meta)
            self._handle_failed_transfer(req_id, None, self._recv_failures)

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

"""A client may end running pulls, and move a prefill instance to another address, with a number in its request.

A prefill instance of vLLM 0.33 counts how often it has registered its memory, and sends the number with each prompt
(`remote_registration_generation` of `kv_transfer_params`). If a request comes with a larger number than all before,
`NixlPullConnectorWorker._read_blocks_for_req` of the decode side forgets the instance, fails what it reads from there,
and connects to the address in the same request. A client may choose both. After the largest number, the engine notices
no registration any more.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, ReqMeta

RELEASES = ">=0.33"
DELETE = "the base class of `PullHooks` in compat/nixl.py, and the calls there of its methods"
VLLM = (
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata.RemoteMeta.registration_generation",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker.NixlPullConnectorWorker._read_blocks_for_req",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker.NixlPullConnectorWorker._remote_registration_generations",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._nixl_handshake",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._handshake_initiation_executor",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._handshake_lock",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._remote_agents",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._engine_by_address",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._ready_requests",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._failed_recv_reqs",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._cleanup_remote_engine",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.NixlBaseConnectorWorker._log_failure",
)

MAX_CHECKED = 16  # checked numbers that are remembered for each instance
MAX_ANSWERS = 2  # because only the first answer can be to a question that was asked before the request came


@dataclass
class _Check:
    """A question to the listener of a prefill instance.

    Attributes:
        claimed: number of registrations that a request claims, which is the reason for the question.
        answer: rank of the instance -> digest of the memory that it has registered.
    """

    claimed: int
    answer: Future[dict[int, bytes]]


class CheckedRegistrations:
    """Mixin of vLLM's `NixlPullConnectorWorker`: believes a prefill instance's listener, but no number of a client.

    If a request claims a number that was not checked lately, the listener at the address to which the instance is
    connected is asked which memory is registered. vLLM gets a number of our own, which grows when this is not the
    memory that we are connected to. A request waits for at most `MAX_ANSWERS` answers, whatever others claim meanwhile.
    """

    def install_checks(self) -> None:
        # (engine id, rank) -> digest of the memory that we read from
        self.registered_memory: dict[tuple[str, int], bytes] = {}
        self._checked: dict[str, deque[int]] = {}  # engine id -> latest numbers that were checked
        self._num_answers: dict[str, int] = {}  # request -> answers that came while it waited
        self._checks: dict[str, _Check] = {}  # engine id -> question to which the answer has not been read
        self._renewed: set[str] = set()  # instances that have other memory now
        # rank -> digest, while the handshake thread asks. NOTE: vLLM has one such thread.
        self.found_memory: dict[int, bytes] | None = None

    def claim_waits(self, req_id: str, meta: ReqMeta) -> bool:
        """Check a request's claim; replace the claim and the address by values that may be believed.

        Returns:
            True if the request waits for an answer; then vLLM calls `_read_blocks_for_req` again, or the request fails.
        """
        remote = meta.remote
        claimed = getattr(remote, "registration_generation", None)
        if claimed is None:  # before vLLM 0.33
            return False
        engine_id = remote.engine_id
        known = self._remote_registration_generations.get(engine_id, 0)
        address = self._connected_address(engine_id)
        if address is None:
            self._record_checked(engine_id, claimed)  # by the handshake that follows
        else:
            remote.host, remote.port = address
            self._read_answer(engine_id)
            # NOTE: after a handshake, vLLM calls this method again with `known` in place of the claim. True claims are
            # larger than `known`, because they start at 1 and grow at least as often.
            if known < claimed and claimed not in self._checked.get(engine_id, ()):
                if self._num_answers.get(req_id, 0) < MAX_ANSWERS:
                    self._ask(req_id, meta, claimed)
                    return True
                self._record_checked(engine_id, claimed)
            if engine_id in self._renewed:
                self._renewed.remove(engine_id)
                known += 1
        self._num_answers.pop(req_id, None)
        remote.registration_generation = known
        return False

    def add_remote_agent(
        self, nixl_agent_meta: NixlAgentMetadata, remote_tp_rank: int = 0, *args: Any, **kwargs: Any
    ) -> str:
        addresses = repr(nixl_agent_meta.kv_caches_base_addr).encode()
        digest = hashlib.sha256(nixl_agent_meta.agent_metadata + addresses).digest()
        if self.found_memory is not None:
            self.found_memory[remote_tp_rank] = digest
            return ""
        name = super().add_remote_agent(nixl_agent_meta, remote_tp_rank, *args, **kwargs)
        self.registered_memory[nixl_agent_meta.engine_id, remote_tp_rank] = digest
        return name

    def _cleanup_remote_engine(self, engine_id: str, *args: Any, **kwargs: Any) -> None:
        super()._cleanup_remote_engine(engine_id, *args, **kwargs)
        for key in [each for each in list(self.registered_memory) if each[0] == engine_id]:
            del self.registered_memory[key]
        self._checked.pop(engine_id, None)
        self._checks.pop(engine_id, None)
        self._renewed.discard(engine_id)

    def _record_checked(self, engine_id: str, claimed: int) -> None:
        self._checked.setdefault(engine_id, deque(maxlen=MAX_CHECKED)).append(claimed)

    def _connected_address(self, engine_id: str) -> tuple[str, int] | None:
        """Host and port of the listener of a connected instance; None if another instance has taken its place."""
        with self._handshake_lock:
            if engine_id not in self._remote_agents:
                return None
            return next((each for each, name in self._engine_by_address.items() if name == engine_id), None)

    def _ask(self, req_id: str, meta: ReqMeta, claimed: int) -> None:
        """Let a request wait for the next answer of its prefill instance."""
        remote = meta.remote
        if remote.engine_id not in self._checks:
            arguments = remote.host, remote.port, meta.tp_size, remote.engine_id, meta.dcp_size, meta.pp_size
            answer = self._handshake_initiation_executor.submit(self.find_registered, *arguments)
            self._checks[remote.engine_id] = _Check(claimed, answer)
        self._checks[remote.engine_id].answer.add_done_callback(partial(self._answered, req_id, meta))

    def find_registered(self, *arguments: Any) -> dict[int, bytes]:
        """Shake hands without connecting; runs in the handshake thread."""
        self.found_memory = {}
        try:
            self._nixl_handshake(*arguments)
            return self.found_memory
        finally:
            self.found_memory = None

    def _answered(self, req_id: str, meta: ReqMeta, answer: Future[dict[int, bytes]]) -> None:
        """Let a request go on, or fail without an answer; runs in the handshake thread."""
        error = answer.exception()
        if error is None:
            self._num_answers[req_id] = self._num_answers.get(req_id, 0) + 1
            self._ready_requests.put((req_id, meta))
        else:
            self._num_answers.pop(req_id, None)
            self._log_failure(failure_type="handshake_failed", req_id=req_id, error=error, meta=meta)
            self._failed_recv_reqs.put(req_id)

    def _read_answer(self, engine_id: str) -> None:
        check = self._checks.get(engine_id)
        if check is None or not check.answer.done():
            return
        del self._checks[engine_id]
        if check.answer.exception() is None:
            self._record_checked(engine_id, check.claimed)
            known = self.registered_memory
            if any(known.get((engine_id, rank)) != digest for rank, digest in check.answer.result().items()):
                self._renewed.add(engine_id)

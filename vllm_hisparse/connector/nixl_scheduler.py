"""Scheduler half of the P/D transport: which blocks vLLM's NIXL pull connector reads, and for which request."""

from __future__ import annotations

import time
from collections import OrderedDict
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_hisparse.compat.nixl import pending_pulls, send_heartbeats_every
from vllm_hisparse.compat.request_ids import owns_transfer, transfer_of_sample
from vllm_hisparse.connector.leases import DEFAULT_LEASE_S
from vllm_hisparse.connector.nixl_config import host_resident_config
from vllm_hisparse.connector.transfer_params import TransferParams, TransferRefused
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.metadata import LeaseTerms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

_SHARED_BLOCK_HASH = b"host"  # marks a host block as filled; vLLM's connector only checks that there is a hash
MAX_CLAIMS = 2**16  # transfers that are remembered, so that no second request uses one of them


class NixlSchedulerTransport:
    """Decides which requests pull which blocks, and into which host and device blocks.

    Only the request that a transfer was made for may use it, and only once. Every other request that comes with the
    same transfer parameters computes its prompt here. NIXL's scheduler half sees accepted requests only, with checked
    parameters in which it keeps its own flags.

    NOTE: NIXL's scheduler half gets no handshake metadata of the workers. It would listen on a port for instances that
    read from this one, which none does, and wait for ever if the port is in use.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        groups: DeviceGroups,
        num_host_blocks: int,
        prefill_tp_size: int,
    ):
        config = host_resident_config(vllm_config, kv_cache_config, groups, num_host_blocks)
        self.connector = NixlPullConnector(vllm_config, KVConnectorRole.SCHEDULER, config)
        own_lease_s = vllm_config.kv_transfer_config.get_from_extra_config("kv_lease_duration", DEFAULT_LEASE_S)
        # NOTE: the prefill side's leases may be shorter than this side's. It says how long they are only if it has this
        # plugin, too.
        self._assumed_lease_s = min(own_lease_s, DEFAULT_LEASE_S)
        send_heartbeats_every(self.connector, self._assumed_lease_s // 6)
        self._no_blocks: tuple[list[KVCacheBlock], ...] = tuple([] for _ in config.kv_cache_groups)
        self._block_size, self._prefill_tp_size = groups.layout.block_size, prefill_tp_size
        self._receives_on_host = groups.layout.receives_on_host
        self._accepted: dict[str, dict[str, Any]] = {}  # request id -> parameters, until the request ends
        self._arrivals: dict[str, float] = {}  # request id -> arrival of an accepted request, `time.perf_counter`
        # (engine id, request id) of the prefill side for each transfer that was given to a request, the latest last
        self._claims: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._warned: set[str] = set()
        self._has_warned_of_leases = False

    def accept(self, request: Request) -> bool:
        """Accept the transfer that came with a new request if it belongs to the request; return False if it is refused.

        When vLLM's API refuses a request, vLLM sends a request that ends at once (`abort_immediately`) as a notice, so
        that the prefill instance frees the KV. The notice has no prompt, and may come for a request that was accepted
        before, so a notice is never refused.
        """
        try:
            params = TransferParams.parse(request.kv_transfer_params)
            if params is not None:
                self._claim(request, params)
        except TransferRefused as refusal:
            _drop_unreadable_params(request)
            if not request.abort_immediately:
                self._warn(request, refusal)
                return False
        return True

    def is_remote(self, request: Request) -> bool:
        """Return True if the request's KV has yet to be pulled from a prefill instance."""
        params = self._accepted.get(request.request_id)
        return params is not None and params["do_remote_prefill"]  # NIXL clears this flag when it starts the pull

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return the number of prompt tokens that the prefill instance holds beyond `num_computed_tokens`; 0 for a
        local request.
        """
        if not self.is_remote(request):
            return 0
        num_tokens, _ = self.connector.get_num_new_matched_tokens(self._seen_by_nixl(request), num_computed_tokens)
        return num_tokens

    def start(
        self,
        request: Request,
        host_ids: Sequence[int],
        num_shared: int,
        device_blocks: Sequence[KVCacheBlock] | None,
        num_external_tokens: int,
    ) -> str:
        """Pull the prompt's KV; return the engine id of the prefill instance.

        Args:
            request: the request.
            host_ids: ids of the host blocks of the whole prompt.
            num_shared: number of leading host blocks that hold their KV already; they are not written.
            device_blocks: blocks for the whole prompt's device-resident KV; a block with a hash holds its KV already.
                None: the model has no such KV, or it is received on the host.
            num_external_tokens: tokens to pull; with 0, the prefill instance is only told to free the blocks.
        """
        host_blocks = [KVCacheBlock(block_id) for block_id in host_ids]
        for block in host_blocks[:num_shared]:
            block.set_block_hash(_SHARED_BLOCK_HASH)
        blocks = (host_blocks,) if device_blocks is None else (host_blocks, list(device_blocks))
        if self._receives_on_host:
            blocks = host_blocks, host_blocks
        self.connector.update_state_after_alloc(self._seen_by_nixl(request), KVCacheBlocks(blocks), num_external_tokens)
        return self._accepted[request.request_id]["remote_engine_id"]

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[NixlConnectorMetadata, dict[str, LeaseTerms]]:
        """Return the worker's part of a step: NIXL's metadata, and the leases of the step's pulls by request id."""
        metadata, now = self.connector.build_connector_meta(scheduler_output), time.perf_counter()
        pulls = [request_id for request_id, meta in metadata.reqs_to_recv.items() if meta.awaiting_kvs]
        return metadata, {request_id: self._lease_terms(request_id, now) for request_id in pulls}

    def warn_expired(self, request_id: str) -> None:
        """Warn of KV whose lease may have ended, but only once; a counter counts all cases."""
        if not self._has_warned_of_leases:
            self._has_warned_of_leases = True
            logger.warning(
                "The lease of the KV of request %s on its prefill instance may have ended before it was pulled. Its "
                "prompt is computed here, and so will be others like it, without a warning: see "
                "vllm:hisparse_transfers_expired. Raise kv_lease_duration, on both sides to the same value, above the "
                "time between the end of the prefill and the arrival of the request here.",
                request_id,
            )

    def request_finished(self, request: Request) -> None:
        """Forget a request; if it ended before its KV was pulled, let the prefill instance free the KV."""
        if request.request_id in self._accepted:
            self.connector.request_finished_all_groups(self._seen_by_nixl(request), self._no_blocks)
            del self._accepted[request.request_id], self._arrivals[request.request_id]

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.connector.update_connector_output(output)

    def leftovers(self) -> dict[str, object]:
        """Return by name what should be empty when there is no request, but is not; an empty dict if all is well."""
        left = {"accepted": self._accepted, "arrivals": self._arrivals, **pending_pulls(self.connector)}
        return {name: value for name, value in left.items() if value}

    def shutdown(self) -> None:
        self.connector.shutdown()

    def _claim(self, request: Request, params: TransferParams) -> None:
        """Give the transfer to the request.

        Raises:
            TransferRefused: the request may not or cannot use the transfer.
        """
        params.check_tp_size(self._prefill_tp_size)
        self._check_owner(request, params)
        if request.prompt_token_ids is None:
            raise TransferRefused("prompt", "embeddings", "token ids: NIXL does not know the number of embeddings")
        if not request.abort_immediately:  # such a request is a notice for a prompt of any length
            params.check_prompt(request.num_prompt_tokens, self._block_size)
        self._remember(params.remote_engine_id, params.remote_request_id)
        self._accepted[request.request_id] = params.model_dump()
        self._arrivals[request.request_id] = time.perf_counter()
        self.connector.on_new_request(self._seen_by_nixl(request))

    def _lease_terms(self, request_id: str, now: float) -> LeaseTerms:
        lease_s = self._accepted[request_id]["kv_lease_duration"] or self._assumed_lease_s
        return LeaseTerms(now - self._arrivals[request_id], lease_s)

    def _remember(self, engine_id: str, remote_request_id: str) -> None:
        self._claims[engine_id, remote_request_id] = None
        if len(self._claims) > MAX_CLAIMS:
            self._claims.popitem(last=False)

    def _release_sample(self, request: Request, params: TransferParams) -> None:
        """Let the prefill instance free the KV of one sample that nobody will pull, because a sample is refused here.

        The prefill instance computes each sample of a prompt, but the router sends the transfer parameters of only one.
        """
        sample = transfer_of_sample(request.request_id, params.remote_request_id)
        if sample is not None and (params.remote_engine_id, sample) not in self._claims:
            self._remember(params.remote_engine_id, sample)
            seen = copy(request)
            seen.kv_transfer_params = {**params.model_dump(), "remote_request_id": sample}
            self.connector.request_finished_all_groups(seen, self._no_blocks)

    def _check_owner(self, request: Request, params: TransferParams) -> None:
        if params.remote_engine_id == self.connector.engine_id:
            raise TransferRefused("remote_engine_id", params.remote_engine_id, "another engine")
        if not owns_transfer(request.request_id, params.remote_request_id):
            self._release_sample(request, params)
            expected = "the one made for this request: a transfer serves the first prompt of a request, once"
            raise TransferRefused("remote_request_id", params.remote_request_id, expected)
        if (params.remote_engine_id, params.remote_request_id) in self._claims:
            raise TransferRefused("remote_request_id", params.remote_request_id, "one that no other request came with")

    def _seen_by_nixl(self, request: Request) -> Request:
        """Return a copy of the request with the checked parameters; the request itself does not change."""
        seen = copy(request)
        seen.kv_transfer_params = self._accepted[request.request_id]
        return seen

    def _warn(self, request: Request, refusal: TransferRefused) -> None:
        """Warn of a parameter, but only once; a counter counts all cases."""
        parameter = refusal.name.split(".")[0]
        if parameter not in self._warned:
            self._warned.add(parameter)
            logger.warning(
                "kv_transfer_params of request %s: %s. Its prompt is computed here, and so will be others like it, "
                "without a warning: see vllm:hisparse_transfers_refused.",
                request.request_id,
                refusal,
            )


def _drop_unreadable_params(request: Request) -> None:
    """Drop parameters that are no dict, because vLLM's scheduler later reads them as one without a check."""
    if not isinstance(request.kv_transfer_params, dict):
        request.kv_transfer_params = None

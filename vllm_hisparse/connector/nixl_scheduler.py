"""Scheduler half of the P/D transport: which blocks vLLM's NIXL pull connector reads, and for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_hisparse.connector.nixl_config import host_resident_config
from vllm_hisparse.kv_manager.groups import DeviceGroups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

_REMOTE_PARAMS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_SHARED_BLOCK_HASH = b"host"  # marks a host block as already filled; the connector only asks whether a hash is set


class NixlSchedulerTransport:
    """What to pull, into which host and device blocks."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: DeviceGroups, num_host_blocks: int
    ):
        config = host_resident_config(vllm_config, kv_cache_config, groups, num_host_blocks)
        self.connector = NixlPullConnector(vllm_config, KVConnectorRole.SCHEDULER, config)
        self._no_blocks = tuple([] for _ in config.kv_cache_groups)
        # Whole blocks are pulled: the prefill instance must split KV heads over as many ranks.
        parallel = vllm_config.parallel_config
        self._num_ranks = None if groups.num_kv_heads is None else parallel.tensor_parallel_size

    def on_new_request(self, request: Request) -> None:
        self._check_params(request)
        self.connector.on_new_request(request)

    def is_remote(self, request: Request) -> bool:
        """Whether a prefill instance still holds the request's KV."""
        return bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"))

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Prompt tokens that the prefill instance holds beyond `num_computed_tokens`; 0 for a local request."""
        if not self.is_remote(request):
            return 0
        num_tokens, _ = self.connector.get_num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens

    def start(
        self,
        request: Request,
        host_ids: Sequence[int],
        num_shared: int,
        device_blocks: Sequence[KVCacheBlock] | None,
        num_external_tokens: int,
    ) -> None:
        """Pull the prompt's KV.

        Args:
            request: the request.
            host_ids: host blocks of the whole prompt; the first `num_shared` hold their KV already.
            num_shared: host blocks to leave alone.
            device_blocks: indexer blocks of the whole prompt; hashed ones hold their keys already. None: no indexer.
            num_external_tokens: tokens to pull; 0 only tells the prefill instance to let go.
        """
        host_blocks = [KVCacheBlock(block_id) for block_id in host_ids]
        for block in host_blocks[:num_shared]:
            block.set_block_hash(_SHARED_BLOCK_HASH)
        blocks = (host_blocks,) if device_blocks is None else (host_blocks, list(device_blocks))
        self.connector.update_state_after_alloc(request, KVCacheBlocks(blocks), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.connector.build_connector_meta(scheduler_output)

    def request_finished(self, request: Request) -> None:
        """Tell the prefill instance about a request that ended before its KV was pulled."""
        self.connector.request_finished_all_groups(request, self._no_blocks)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.connector.update_connector_output(output)

    def set_handshake_metadata(self, metadata: dict) -> None:
        self.connector.set_xfer_handshake_metadata_pp_aware(metadata)

    def shutdown(self) -> None:
        self.connector.shutdown()

    def _check_params(self, request: Request) -> None:
        """Compute a prompt here when what came with it does not say where its KV is, or says where it does not fit."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        reason = None
        missing = [name for name in _REMOTE_PARAMS if not params.get(name)]
        if missing:
            reason = f"lack {', '.join(missing)}"
        elif request.prompt_token_ids is None:
            reason = "come with embeddings, of which NIXL does not know the number"
        elif self._num_ranks is not None and params.get("tp_size", 1) != self._num_ranks:
            reason = f"have tp_size {params.get('tp_size', 1)}, and this model's KV heads lie as with {self._num_ranks}"
        if reason:
            logger.warning(
                "kv_transfer_params of request %s %s: computing its prompt here.", request.request_id, reason
            )
            params["do_remote_prefill"] = False

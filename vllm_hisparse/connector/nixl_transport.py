"""P/D transport: vLLM's own NIXL pull connector, told that main KV lives in host memory.

The prefill side is stock vLLM with one KV group. Here the connector gets a `KVCacheConfig` of two groups, main KV
(`host_resident`) and indexer keys, maps the remote group onto both and reads main KV into the host pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from vllm_hisparse.compat import copy_blocks_whole
from vllm_hisparse.kv_manager.groups import DeviceGroups
from vllm_hisparse.kv_manager.host_memory import shares_host_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

_REMOTE_PARAMS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_SHARED_BLOCK_HASH = b"host"  # marks a host block as already filled; the connector only asks whether a hash is set


def _host_resident_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: DeviceGroups, num_host_blocks: int
) -> KVCacheConfig:
    """The KV cache as the NIXL connector should see it: main KV on the host, indexer keys on the device."""
    hot = groups.hot_spec
    main = MLAAttentionSpec(
        block_size=hot.block_size,
        num_kv_heads=1,
        head_size=hot.head_size,
        dtype=hot.dtype,
        kv_quant_mode=hot.kv_quant_mode,
        state_content_bytes=hot.row_bytes,
    )
    device_groups = [groups.indexer_group] if groups.indexer_group else []
    return replace(
        kv_cache_config,
        kv_cache_groups=[KVCacheGroupSpec(groups.hot_group.layer_names, main, host_resident=True), *device_groups],
        hisparse_host_num_blocks=num_host_blocks,
        hisparse_shared_host_pool=shares_host_pool(vllm_config),
    )


class NixlSchedulerTransport:
    """Scheduler half: what to pull, into which host and device blocks."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: DeviceGroups, num_host_blocks: int
    ):
        config = _host_resident_config(vllm_config, kv_cache_config, groups, num_host_blocks)
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
        host_blocks = [
            KVCacheBlock(block_id, _block_hash=_SHARED_BLOCK_HASH if index < num_shared else None)
            for index, block_id in enumerate(host_ids)
        ]
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


class NixlWorkerTransport:
    """Worker half: registers host and device memory and moves the blocks."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: DeviceGroups, num_host_blocks: int
    ):
        config = _host_resident_config(vllm_config, kv_cache_config, groups, num_host_blocks)
        self.connector = NixlPullConnector(vllm_config, KVConnectorRole.WORKER, config)
        copy_blocks_whole(self.connector)

    def register(self, main_kv: dict[str, torch.Tensor], indexer_keys: dict[str, torch.Tensor]) -> None:
        """Register memory.

        Args:
            main_kv: layer -> host pool, [num_host_blocks, block_size, row elements].
            indexer_keys: layer -> device cache as vLLM allocated it, [num_blocks, 1, block_size, row bytes].
        """
        host = {name: tensor.unsqueeze(1) for name, tensor in main_kv.items()}
        self.connector.register_kv_caches({**host, **indexer_keys})

    def bind_metadata(self, metadata: KVConnectorMetadata) -> None:
        self.connector.bind_connector_metadata(metadata)

    def clear_metadata(self) -> None:
        self.connector.clear_connector_metadata()

    def start_load(self, forward_context: ForwardContext) -> None:
        self.connector.start_load_kv(forward_context)

    def transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose pull finished or failed."""
        results = self.connector.get_transfer_results(finished_req_ids)
        # NOTE: the connector names the first group's blocks of a failed request too; vLLM accepts block ids from models
        # with one group only, and `failed_recving` says it all.
        self.connector.get_block_ids_with_load_errors()
        return results

    def take_stats(self) -> NixlKVConnectorStats | None:
        return self.connector.get_kv_connector_stats()

    def handshake_metadata(self):
        return self.connector.get_handshake_metadata()

    def shutdown(self) -> None:
        self.connector.shutdown()

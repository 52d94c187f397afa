"""KV connectors that act as if the KV of every prompt were in host memory, so that no prompt is computed.

`kv_connector_module_path` names this module. Its classes have the names of the connectors that they replace, because
vLLM and the plugin know them by these names. The host memory is never written, so tokens mean nothing; but places of
KV, copies and waits are those of real prompts. vLLM's `DecodeBenchConnector` does the same for full KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import connector as native

from vllm_hisparse.connector import connector as ours
from vllm_hisparse.kv_manager.blocks.host_block_pool import HostMatch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class HiSparseHostConnector(ours.HiSparseHostConnector):
    """The plugin's connector. The host pool holds all of a request except its last token, in blocks that are not
    shared.
    """

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.host_pool.find_match = _hold_all_but_the_last_token


def _hold_all_but_the_last_token(request: Request, enable_caching: bool) -> HostMatch:
    return HostMatch((), request.num_tokens - 1)


@dataclass
class NativeMetadata(native.HiSparseConnectorMetadata):
    """Metadata with the ids of requests whose KV has arrived."""

    arrived: frozenset[str] = frozenset()


class HiSparseConnector(native.HiSparseConnector):
    """vLLM's own connector. The KV of every request arrives in host memory one step after it was asked for."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: set[str] = set()
        self._arrived: set[str] = set()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens = request.num_tokens - 1 - num_computed_tokens
        return max(num_tokens, 0), num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._asked.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NativeMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        arrived, self._asked = frozenset(self._asked), set()
        return NativeMetadata(**vars(metadata), arrived=arrived)

    def bind_connector_metadata(self, connector_metadata: NativeMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._arrived |= connector_metadata.arrived

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        arrived, self._arrived = self._arrived, set()
        return KVConnectorTransferResults(finished_recving=arrived)

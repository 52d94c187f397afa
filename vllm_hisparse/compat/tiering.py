"""Private parts of vLLM's tiering."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

RELEASES = ">=0.32"
VLLM = (
    "vllm.v1.kv_offload.cpu.manager.CPUOffloadingManager._policy",
    "vllm.v1.kv_offload.cpu.manager.CPUOffloadingManager._free_chunk",
    "vllm.v1.kv_offload.cpu.manager.CPUOffloadingManager._num_evictable_cache_chunks",
    "vllm.v1.kv_offload.tiering.manager.TieringOffloadingManager._jobs",
    "vllm.v1.kv_offload.tiering.manager.TieringOffloadingManager._req_state",
)


def forget_chunk(primary: CPUPrimaryTierOffloadingManager, key: OffloadKey) -> None:
    """Remove a chunk that no tier reads from the primary tier of vLLM's tiering; do nothing if there is none."""
    chunk = primary._policy.get(key)
    if chunk is not None and chunk.is_ready and not chunk.ref_cnt:
        primary._policy.remove(key)
        primary._free_chunk(chunk)
        primary._num_evictable_cache_chunks -= 1


def known_jobs(manager: TieringOffloadingManager) -> Collection[int]:
    """Return the ids of the transfers that vLLM's tiering has begun and not yet ended."""
    return manager._jobs.keys()


def known_requests(manager: TieringOffloadingManager) -> Collection[str]:
    """Return the ids of the requests for which vLLM's tiering keeps state."""
    return manager._req_state.keys()

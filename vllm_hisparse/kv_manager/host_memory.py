"""Memory of the host pool: a worker's own, or one for all tensor parallel ranks of an engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as

from vllm_hisparse.config import HiSparseConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def shares_host_pool(vllm_config: VllmConfig) -> bool:
    """Whether all ranks of the engine use one host pool: those of an MLA model hold the same rows."""
    return vllm_config.model_config.use_mla and vllm_config.parallel_config.tensor_parallel_size > 1


def num_host_pools(vllm_config: VllmConfig) -> int:
    """Host pools of the engine: one, or one for the KV heads of each rank."""
    return 1 if shares_host_pool(vllm_config) else vllm_config.parallel_config.tensor_parallel_size


def private_memory(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone, page-aligned as cudaHostRegister and NIXL want it."""
    return mmap.mmap(-1, num_bytes)


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Memory that every tensor parallel rank maps; called by all of them.

    Every rank writes all rows, each to the same place and the same bytes, so that no rank waits for another one's.

    Raises:
        HiSparseConfigError: the ranks run on several hosts.
    """
    group = get_tp_group()
    if not all(in_the_same_node_as(group.cpu_group)):
        raise HiSparseConfigError(
            "--tensor-parallel-size",
            group.world_size,
            "GPUs of one host, whose memory all ranks share",
            "Lower it to the GPUs of one host, or raise --data-parallel-size instead.",
        )
    return _map_together(num_bytes, group.rank_in_group == 0, group.broadcast_object, group.barrier)


def _map_together(
    num_bytes: int, is_owner: bool, broadcast: Callable[[str | None], str], barrier: Callable[[], None]
) -> mmap.mmap:
    """Map what the owner creates.

    NOTE: without a name in a file system, so that nothing remains of a killed engine and no size limit of /dev/shm, 64
    MiB in most containers, applies.
    """
    file = os.memfd_create("hisparse-host-pool") if is_owner else None
    if file is not None:
        os.ftruncate(file, num_bytes)
    path = broadcast(f"/proc/{os.getpid()}/fd/{file}" if is_owner else None)
    if file is None:
        file = os.open(path, os.O_RDWR)
    memory = mmap.mmap(file, num_bytes)
    barrier()
    os.close(file)
    return memory

"""Memory of the host pool: a worker's own, or one for all tensor parallel ranks of an engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile
from vllm_hisparse.kv_manager.rows.free_memory import engines_beside, free_memory, host_pool_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FREE_MEMORY_SHARE = 0.95  # of the memory that host and container leave

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]  # what every rank gives, by rank; also waits for all of them


@dataclass
class HostPoolMemory:
    """Memory of a host pool.

    Attributes:
        memory: page-aligned, as cudaHostRegister and NIXL want it.
        descriptor: of the file behind it, if others are to map it; on the rank that created it.
    """

    memory: mmap.mmap
    descriptor: int | None = None

    @property
    def file(self) -> HostPoolFile | None:
        """How others find the memory."""
        return None if self.descriptor is None else HostPoolFile.of(self.descriptor, len(self.memory))

    def close_file(self) -> None:
        """Nobody else can map the memory any more; who has mapped it keeps it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def shares_host_pool(vllm_config: VllmConfig) -> bool:
    """True if all ranks of the engine use one host pool: those of an MLA model hold the same rows."""
    return vllm_config.model_config.use_mla and vllm_config.parallel_config.tensor_parallel_size > 1


def num_host_pools(vllm_config: VllmConfig) -> int:
    """Host pools of the engine: one, or one for the KV heads of each rank."""
    return 1 if shares_host_pool(vllm_config) else vllm_config.parallel_config.tensor_parallel_size


def allocate_host_pool(
    num_bytes: int,
    vllm_config: VllmConfig,
    size_option: tuple[str, float],
    has_file: bool = False,
    buffer_bytes: int = 0,
) -> HostPoolMemory:
    """The host pool of this rank; called by all ranks of the engine together.

    Args:
        num_bytes: of one pool.
        vllm_config: the engine's configuration.
        size_option: the option that asked for this size and its value, for the error message.
        has_file: whether the scheduler's process is to map it.
        buffer_bytes: of the tiers' transfer buffer, which the engine takes later.

    Raises:
        HiSparseConfigError: less memory is free, or ranks that share a pool run on several hosts.
        RuntimeError: on the other ranks, when it fails on one.
    """
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        check_free_memory(num_bytes, size_option, buffer_bytes)
        return _own_memory(num_bytes, has_file)
    group = get_tp_group()
    is_one_host = all(in_the_same_node_as(group.cpu_group))

    def gather(given: Any) -> list[Any]:
        gathered = [None] * group.world_size
        torch.distributed.all_gather_object(gathered, given, group=group.cpu_group)
        return gathered

    if not shares_host_pool(vllm_config):
        num_bytes_here = num_bytes * (group.world_size if is_one_host else 1)
        # NOTE: no rank pins its pool before every rank has looked: pinned memory is not free any more.
        _on_all_ranks(gather, lambda: check_free_memory(num_bytes_here, size_option, buffer_bytes))
        return _own_memory(num_bytes, has_file)
    if not is_one_host:
        raise HiSparseConfigError(
            "--tensor-parallel-size",
            group.world_size,
            "GPUs of one host, whose memory all ranks share",
            "Lower it to the GPUs of one host, or raise --data-parallel-size instead.",
        )
    return _share(num_bytes, size_option, buffer_bytes, group.rank_in_group == 0, gather, has_file)


def check_free_memory(num_bytes: int, size_option: tuple[str, float], buffer_bytes: int = 0) -> None:
    """Refuse host pools that the free memory cannot hold, with those of the data parallel ranks beside this one.

    Raises:
        HiSparseConfigError: less than `num_bytes` and `buffer_bytes` together is free for this engine.
    """
    free, others = free_memory(), engines_beside()
    # Memory that the others have taken already is not free any more: it counts, whichever rank looks first.
    taken = sum(min(host_pool_bytes(engine), num_bytes + buffer_bytes) for engine in others)
    available = (int(free.num_bytes * FREE_MEMORY_SHARE) + taken) // (1 + len(others)) - buffer_bytes
    if num_bytes > available:
        shared = f", for each of {1 + len(others)} data parallel ranks" if others else ""
        buffer = f", with {buffer_bytes / 2**30:.1f} GiB for the buffer of tiers" if buffer_bytes else ""
        raise HiSparseConfigError(
            *size_option,
            f"a host pool of at most {max(available, 0) / 2**30:.1f} GiB ({free.source}{shared}{buffer}), "
            f"not {num_bytes / 2**30:.1f} GiB",
            "Lower it, or free memory on the host, or raise the container's limit.",
        )


def _own_memory(num_bytes: int, has_file: bool) -> HostPoolMemory:
    """A pool that no other rank uses."""
    if not has_file:
        return HostPoolMemory(mmap.mmap(-1, num_bytes))
    descriptor = _create_file(num_bytes)
    return HostPoolMemory(mmap.mmap(descriptor, num_bytes), descriptor)


def _create_file(num_bytes: int) -> int:
    """Memory as a file.

    NOTE: without a name in a file system, so that nothing remains of a killed engine and no size limit of /dev/shm, 64
    MiB in most containers, applies.
    """
    file = os.memfd_create("hisparse-host-pool")
    os.ftruncate(file, num_bytes)
    return file


def _share(
    num_bytes: int, size_option: tuple[str, float], buffer_bytes: int, is_owner: bool, gather: Gather, keeps_file: bool
) -> HostPoolMemory:
    """Map what the owner creates.

    Every rank writes all rows, each to the same place and the same values, so that no rank waits for another one's.
    """

    def create() -> int | None:
        if not is_owner:
            return None
        check_free_memory(num_bytes, size_option, buffer_bytes)
        return _create_file(num_bytes)

    descriptor = _on_all_ranks(gather, create)
    file = gather(None if descriptor is None else HostPoolFile.of(descriptor, num_bytes))[0]
    memory = _on_all_ranks(gather, lambda: _map(file))
    if descriptor is not None and not keeps_file:
        os.close(descriptor)  # the mappings stay
        descriptor = None
    return HostPoolMemory(memory, descriptor)


def _map(file: HostPoolFile) -> mmap.mmap:
    try:
        return file.map()
    except OSError as error:
        raise HiSparseConfigError(
            "--tensor-parallel-size",
            f"a rank that cannot map the host pool ({error})",
            "ranks of one user in one container, which share the host pool through /proc",
            "Start all ranks of an engine in one container.",
        ) from error


def _on_all_ranks(gather: Gather, action: Callable[[], T]) -> T:
    """Do something on every rank; when it fails on one it fails on all, so that none waits for another for ever."""
    result, failure = None, None
    try:
        result = action()
    except (HiSparseConfigError, OSError) as error:
        failure = error
    failures = gather(failure and str(failure))
    if failure is not None:
        raise failure
    for rank, message in enumerate(failures):
        if message is not None:
            raise RuntimeError(f"tensor parallel rank {rank} has no host pool: {message}")
    return result

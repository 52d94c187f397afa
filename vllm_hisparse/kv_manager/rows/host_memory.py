"""Memory of the host pool: one pool per worker, or one for all tensor parallel ranks of an engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as
from vllm.logger import init_logger

from vllm_hisparse.config import HiSparseConfigError, shares_host_pool
from vllm_hisparse.kv_manager.host_pool_memory import HostPoolFile
from vllm_hisparse.kv_manager.rows.free_memory import FREE_MEMORY_SHARE, engines_beside, free_memory, host_pool_bytes
from vllm_hisparse.kv_manager.rows.managed_memory import (
    ManagedBuffer,
    NoManagedMemoryError,
    allocate_managed,
    why_not_managed,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")
MemoryKind = Literal["auto", "managed", "pinned"]  # option `host_pool_memory`
Gather = Callable[[Any], list[Any]]  # waits for all ranks, and returns the value that each rank gives, by rank

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


@dataclass
class HostPoolMemory:
    """Memory of a host pool.

    Attributes:
        memory: mapped memory, which is pinned later, or managed memory. It is page-aligned, because cudaHostRegister
            and NIXL need that.
        descriptor: descriptor of the file behind it, on the rank that created the file, if another process maps it.
    """

    memory: mmap.mmap | ManagedBuffer
    descriptor: int | None = None

    @property
    def file(self) -> HostPoolFile | None:
        """The file by which other processes find the memory; None if they do not map it."""
        return None if self.descriptor is None else HostPoolFile.of(self.descriptor, len(self.memory))

    def close_file(self) -> None:
        """Close the file, so that nobody else can map the memory any more; existing mappings stay."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def num_host_pools(vllm_config: VllmConfig) -> int:
    """Number of host pools of the engine: one, or one for each rank's KV heads."""
    return 1 if shares_host_pool(vllm_config) else vllm_config.parallel_config.tensor_parallel_size


def allocate_host_pool(
    num_bytes: int,
    vllm_config: VllmConfig,
    size_option: tuple[str, float],
    has_file: bool = False,
    buffer_bytes: int = 0,
    kind: MemoryKind = "pinned",
) -> HostPoolMemory:
    """Allocate the host pool of this rank; all ranks of the engine call this together.

    Args:
        num_bytes: size of one pool.
        vllm_config: the engine's configuration.
        size_option: the option that sets the size, and its value, for the error message.
        has_file: True if the scheduler's process maps the pool.
        buffer_bytes: size of the tiers' transfer buffer, which the engine takes later.
        kind: `managed` or `auto` only if neither another rank nor the scheduler's process maps the pool.

    Raises:
        HiSparseConfigError: too little memory is free, or ranks that share a pool run on several hosts.
        RuntimeError: the allocation failed on another rank.
    """
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        check_free_memory(num_bytes, size_option, buffer_bytes)
        return own_memory(num_bytes, has_file, kind)
    group = get_tp_group()
    is_one_host = all(in_the_same_node_as(group.cpu_group))

    def gather(given: Any) -> list[Any]:
        gathered = [None] * group.world_size
        torch.distributed.all_gather_object(gathered, given, group=group.cpu_group)
        return gathered

    if not shares_host_pool(vllm_config):
        num_bytes_here = num_bytes * (group.world_size if is_one_host else 1)
        # NOTE: no rank may fill or pin its pool before every rank has checked, because this takes free memory.
        _on_all_ranks(gather, lambda: check_free_memory(num_bytes_here, size_option, buffer_bytes))
        return own_memory(num_bytes, has_file, kind)
    if not is_one_host:
        raise HiSparseConfigError(
            "--tensor-parallel-size",
            group.world_size,
            "GPUs of one host, whose memory all ranks share",
            "Lower it to the GPUs of one host, or raise --data-parallel-size instead.",
        )
    return _share(num_bytes, size_option, buffer_bytes, group.rank_in_group == 0, gather, has_file)


def check_free_memory(num_bytes: int, size_option: tuple[str, float], buffer_bytes: int = 0) -> None:
    """Refuse host pools for which too little memory is free, if each data parallel rank beside this one takes as much.

    Raises:
        HiSparseConfigError: less than `num_bytes + buffer_bytes` is free for this engine.
    """
    free, others = free_memory(), engines_beside()
    # Memory that the others have taken is not free any more. It is added, so that all ranks see the same total.
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


def own_memory(num_bytes: int, has_file: bool, kind: MemoryKind = "pinned") -> HostPoolMemory:
    """Allocate a pool that no other rank uses.

    Raises:
        HiSparseConfigError: `kind` is `managed`, and CUDA has none.
    """
    if kind != "pinned" and _may_be_managed(num_bytes, kind):
        try:
            return HostPoolMemory(allocate_managed(num_bytes))
        except NoManagedMemoryError as error:
            if kind == "managed":
                raise HiSparseConfigError(
                    "host_pool_memory", kind, f"pinned, because CUDA gives no managed memory ({error})", "Remove it."
                ) from error
            logger.warning("HiSparse: the host pool is pinned, because CUDA gives no managed memory (%s).", error)
    if not has_file:
        return HostPoolMemory(mmap.mmap(-1, num_bytes))
    descriptor = _create_file(num_bytes)
    return HostPoolMemory(mmap.mmap(descriptor, num_bytes), descriptor)


def _may_be_managed(num_bytes: int, kind: MemoryKind) -> bool:
    """Return True if a pool is small enough for managed memory, or if the user insists on managed memory."""
    if (reason := why_not_managed(num_bytes)) is None:
        return True
    if kind == "managed":
        logger.warning("HiSparse: %s. If the GPU stalls, set host_pool_memory to pinned.", reason)
        return True
    logger.info(
        "HiSparse: the host pool is pinned, because %s. For managed memory, lower host_pool_gib or "
        "host_to_device_ratio, or set host_pool_memory to managed.",
        reason,
    )
    return False


def _create_file(num_bytes: int) -> int:
    """Create memory as a file, and return its descriptor.

    NOTE: the file has no name in a file system. Therefore nothing remains of a killed engine, and the size limit of
    /dev/shm, 64 MiB in most containers, does not apply.
    """
    file = os.memfd_create("hisparse-host-pool")
    os.ftruncate(file, num_bytes)
    return file


def _share(
    num_bytes: int, size_option: tuple[str, float], buffer_bytes: int, is_owner: bool, gather: Gather, keeps_file: bool
) -> HostPoolMemory:
    """Map one pool on all ranks; the owner creates it.

    Every rank writes all rows, with the same values to the same places, so that no rank has to wait for another.
    """

    def create() -> int | None:
        if not is_owner:
            return None
        check_free_memory(num_bytes, size_option, buffer_bytes)
        return _create_file(num_bytes)

    descriptor = _on_all_ranks(gather, create)
    file = gather(None if descriptor is None else HostPoolFile.of(descriptor, num_bytes))[0]
    memory = _on_all_ranks(gather, lambda: _map(file))
    pool = HostPoolMemory(memory, descriptor)
    if not keeps_file:
        pool.close_file()
    return pool


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
    """Run an action on every rank. If it fails on one, it fails on all, so that no rank waits for another for ever."""
    result: Any = None
    failure: Exception | None = None
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

"""Managed memory of CUDA that stays in host memory, as memory of the host pool."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any
from weakref import finalize

import torch
from vllm.logger import init_logger

from vllm_hisparse.kv_manager.rows.free_memory import MANAGED_POOL, free_memory
from vllm_hisparse.kv_manager.rows.pinned_memory import wait_for_device
from vllm_hisparse.ops.kernels import kernels

NUM_THREADS, CHUNK_BYTES = 8, 64 << 20  # threads that fill memory at start-up, and bytes that one fills at a time

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

ManagedBuffer = ctypes.Array  # of c_uint8


class NoManagedMemoryError(RuntimeError):
    """CUDA gives no managed memory, or none that CPU and GPU can use at the same time."""


def why_not_managed(num_bytes: int) -> str | None:
    """Return why memory of this size should not be managed: it is larger than the current device's free memory.

    NOTE: pages of such memory should never move to the device, but if they did, the device could stall. An engine asks
    before it takes device memory for KV, so more is free than later.

    Returns:
        The reason, as a clause; None if the memory is small enough, or if there is no CUDA device.

    Raises:
        RuntimeError: the device cannot be used.
    """
    if not torch.cuda.is_available() or num_bytes <= (free := torch.cuda.mem_get_info()[0]):
        return None
    return (
        f"a pool of {num_bytes / 2**30:.2f} GiB is larger than the GPU's free memory of {free / 2**30:.2f} GiB, and "
        "the GPU could stall if so much managed memory moved to it"
    )


def allocate_managed(num_bytes: int) -> ManagedBuffer:
    """Allocate memory that is filled with zeros, and that the current device reads and writes where it is.

    The device reads scattered rows of a large pool faster than from pinned memory, probably because it translates the
    addresses in larger pages (docs/decisions/managed-host-memory.md).

    Returns:
        [num_bytes] c_uint8. The memory is freed when nothing refers to it any more.

    Raises:
        NoManagedMemoryError: there is no CUDA device, or CUDA refuses.
        RuntimeError: the host's free memory does not suffice; the kernels were not built, or are of another version.
    """
    if not torch.cuda.is_available():
        raise NoManagedMemoryError("there is no CUDA device")
    library, device = kernels(), torch.cuda.current_device()
    file = os.memfd_create(MANAGED_POOL)  # tells other processes how much is filled; it holds nothing
    try:
        address = library.allocate_managed(num_bytes, device)
    except RuntimeError as error:
        os.close(file)
        raise NoManagedMemoryError(str(error)) from error
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    # The end of the process frees the memory, too.
    finalize(memory, _free, address, device, file, os.getpid()).atexit = False
    start = time.perf_counter()
    _fill(address, num_bytes, file)
    # NOTE: the device maps the memory when it is filled, so that its pages exist and are large.
    try:
        library.map_managed(address, num_bytes, device)
    except RuntimeError as error:
        raise NoManagedMemoryError(str(error)) from error
    size, seconds = num_bytes / 2**30, time.perf_counter() - start
    logger.info("HiSparse: filled %.1f GiB of managed host memory in %.1f s.", size, seconds)
    return memory


def _fill(address: int, num_bytes: int, file: int) -> None:
    """Fill memory with zeros, and let a file grow to as many bytes as are filled.

    Raises:
        RuntimeError: too little memory is free by now. Beyond that, the kernel might end the process.
    """
    lock, num_begun, num_filled = Lock(), 0, 0

    def fill(start: int) -> None:
        nonlocal num_begun, num_filled
        size = min(CHUNK_BYTES, num_bytes - start)
        with lock:
            free = free_memory()
            if free.num_bytes < num_begun - num_filled + size:
                raise RuntimeError(
                    f"Filling {num_bytes / 2**30:.1f} GiB of managed memory failed after {num_filled / 2**30:.1f} GiB, "
                    f"because {free.num_bytes / 2**30:.1f} GiB are left ({free.source}). Free memory on the host, or "
                    "lower host_pool_gib or host_to_device_ratio."
                )
            num_begun += size
        ctypes.memset(address + start, 0, size)
        with lock:
            num_filled += size
            os.ftruncate(file, num_filled)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(fill, range(0, num_bytes, CHUNK_BYTES)))


def _free(address: int, device: int, file: int, owner: int) -> None:
    """Free memory, and show other processes that it is free.

    Args:
        address: first byte.
        device: index of the device for which it was allocated.
        file: descriptor of the file that shows its size.
        owner: id of the process that allocated it. A forked process has no such memory.
    """
    if os.getpid() != owner:
        return
    try:
        with torch.cuda.device(device):  # NOTE: on a new thread, CUDA would use the first device otherwise.
            kernels().free_managed(address)
    except RuntimeError as error:
        logger.warning("HiSparse: managed memory could not be freed (%s), and stays until the process ends.", error)
        return
    os.ftruncate(file, 0)  # forked processes may have the file, too
    os.close(file)


class ManagedMemory:
    """Access of the device to managed memory, with the methods of `PinnedMemory`."""

    def device_view(self, part: torch.Tensor) -> torch.Tensor:
        """Return a device tensor over the same bytes.

        Args:
            part: contiguous tensor in managed memory.
        """
        flat = torch.as_tensor(_CudaArray(part), device=torch.device("cuda", torch.cuda.current_device()))
        assert flat.data_ptr() == part.data_ptr()
        return flat.view(part.dtype).view(part.shape)

    def close(self) -> None:
        """Wait for the device."""
        wait_for_device()


class _CudaArray:
    """A tensor's bytes in the form in which torch takes device memory of others."""

    def __init__(self, part: torch.Tensor):
        self._part = part
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (part.nbytes,),
            "typestr": "|u1",
            "data": (part.data_ptr(), False),
            "version": 3,
        }

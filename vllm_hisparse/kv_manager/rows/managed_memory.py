"""Managed memory of CUDA that stays in host memory, as memory of the host pool."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import finalize

import torch
from vllm.logger import init_logger

from vllm_hisparse.ops.kernels import kernels

NUM_THREADS, CHUNK_BYTES = 8, 1 << 30  # threads that fill memory at start-up, and bytes that one fills at a time

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.

ManagedBuffer = ctypes.Array  # of c_uint8


def allocate_managed(num_bytes: int) -> ManagedBuffer:
    """Allocate memory that is filled with zeros, and that the current device reads and writes where it is.

    Pinned memory has an entry for every 4 KiB in the device's page tables. Managed memory has an entry for 2 MiB where
    the host finds as much in one piece. With a large pool, scattered rows arrive sooner then, because most addresses
    are translated without a read of the page tables.

    Returns:
        [num_bytes] c_uint8. The memory is freed when nothing refers to it any more.

    Raises:
        RuntimeError: there is no CUDA device, or the CPU and the device cannot use managed memory at the same time, or
            CUDA refuses.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device")
    library, device = kernels(), torch.cuda.current_device()
    address = library.allocate_managed(num_bytes, device)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    finalize(memory, library.free_managed, address).atexit = False  # the end of the process frees it, too
    # NOTE: the CPU fills the memory before the device maps it, so that its pages exist and are large.
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        starts = range(0, num_bytes, CHUNK_BYTES)
        list(threads.map(lambda start: ctypes.memset(address + start, 0, min(CHUNK_BYTES, num_bytes - start)), starts))
    library.map_managed(address, num_bytes, device)
    return memory


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
        try:
            torch.accelerator.synchronize()
        except RuntimeError as error:
            logger.warning("The device failed (%s); its host memory stays until the process ends.", error)


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

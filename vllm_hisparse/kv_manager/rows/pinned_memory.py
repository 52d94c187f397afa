"""Host memory that the device reads and writes directly."""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

CHUNK_BYTES = 64 * 2**30  # drivers limit the size of one registration; vllm/v1/kv_offload/cpu/gpu_worker.py: same bound

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


class PinnedMemory:
    """Registers existing memory with CUDA, because torch's own pinned allocator rounds sizes up to powers of two.

    Args:
        memory: tensor to register, contiguous and page-aligned.

    Raises:
        RuntimeError: CUDA refuses, most often because of the limit of locked memory.
    """

    def __init__(self, memory: torch.Tensor):
        self._memory, self._chunks = memory, []
        first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        for start in range(first, last, CHUNK_BYTES):
            status = torch.cuda.cudart().cudaHostRegister(start, min(CHUNK_BYTES, last - start), 0)
            if int(status) != 0:
                raise RuntimeError(
                    f"cudaHostRegister of {memory.nbytes / 2**30:.1f} GiB failed ({status}) after "
                    f"{(start - first) / 2**30:.1f} GiB. Raise the limit of locked memory (ulimit -l unlimited), or "
                    "lower host_pool_gib or host_to_device_ratio."
                )
            self._chunks.append(start)

    def device_view(self, part: torch.Tensor) -> torch.Tensor:
        """Return a device tensor over the same bytes, valid until `close`."""
        return get_accelerator_view_from_cpu_tensor(part)

    def close(self) -> None:
        """Wait for the device and unregister the memory, unless the device has failed."""
        if wait_for_device():
            for start in self._chunks:
                torch.cuda.cudart().cudaHostUnregister(start)


def wait_for_device() -> bool:
    """Wait for the device; return False, with a warning, if it has failed."""
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        logger.warning("The device failed (%s); its host memory stays until the process ends.", error)
        return False
    return True

"""Host memory that the device reads and writes directly."""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

logger = init_logger(f"vllm.{__name__}")  # NOTE: vLLM configures handlers for its own name only.


class PinnedMemory:
    """Registers existing memory with CUDA, at its exact size: torch's own pinned allocator rounds up to powers of two.

    Args:
        memory: contiguous, page-aligned.

    Raises:
        RuntimeError: CUDA refuses, most often because of the limit of locked memory.
    """

    def __init__(self, memory: torch.Tensor):
        self._memory = memory
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) != 0:
            raise RuntimeError(
                f"cudaHostRegister of {memory.nbytes / 2**30:.1f} GiB failed ({status}). Raise the limit of locked "
                "memory (ulimit -l unlimited), or lower host_pool_gib or host_to_device_ratio."
            )

    def device_view(self, part: torch.Tensor) -> torch.Tensor:
        """A device tensor over the same bytes; valid until `close`."""
        return get_accelerator_view_from_cpu_tensor(part)

    def close(self) -> None:
        """Wait for the device and unregister the memory."""
        try:
            torch.accelerator.synchronize()
        except RuntimeError as error:
            logger.warning("The device failed (%s); its host memory stays pinned until the process ends.", error)
            return
        torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

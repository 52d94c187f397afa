"""Which implementation of the swap-in operations serves a device."""

from __future__ import annotations

import torch

from vllm_hisparse.ops.base import SwapInOps


def swap_in_ops(device: torch.device, refresh_hits: bool) -> SwapInOps:
    """The operations for hot buffers on `device`.

    Args:
        device: where hot rows and tables are.
        refresh_hits: True for LRU eviction, False for FIFO.

    Raises:
        RuntimeError: `device` is a CUDA device and the kernels were not built.
    """
    if device.type == "cuda":
        from vllm_hisparse.ops.cuda_ops import CudaSwapInOps

        return CudaSwapInOps(refresh_hits)
    from vllm_hisparse.ops.torch_ops import TorchSwapInOps

    return TorchSwapInOps(refresh_hits)

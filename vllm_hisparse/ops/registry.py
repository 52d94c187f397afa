"""Chooses the implementation of the swap-in operations for a device."""

from __future__ import annotations

import torch

from vllm_hisparse.ops.base import SwapInOps


def swap_in_ops(device: torch.device) -> SwapInOps:
    """Return the operations for hot buffers on `device`.

    Args:
        device: device of hot rows and tables.

    Raises:
        RuntimeError: `device` is a CUDA device and the kernels were not built.
    """
    if device.type == "cuda":
        from vllm_hisparse.ops.cuda_ops import CudaSwapInOps

        return CudaSwapInOps()
    from vllm_hisparse.ops.torch_ops import TorchSwapInOps

    return TorchSwapInOps()

"""Device memory beside the KV cache, held while vLLM measures how much is left for its KV cache.

At the end of a profiling run, vLLM gives its KV cache all unallocated memory of its share of the device. Residency is
proportional to the KV cache, so its size is known only afterwards. Therefore memory of its largest possible size, and
of the import buffer's size, is allocated before that run, and given back when the hot buffers are made.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.layout import KVLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Reserve:
    """Memory of one engine; given back once."""

    def __init__(self, engine: VllmConfig, memory: torch.Tensor):
        self.engine, self.memory = weakref.ref(engine), memory


_reserve: _Reserve | None = None


def reserve_memory(layout: KVLayout, vllm_config: VllmConfig, import_buffer_bytes: int) -> None:
    """Allocate as much device memory as residency and import buffer can take, once per engine.

    Nothing happens on the CPU, or if the user sets the KV cache's size (`--kv-cache-memory-bytes`).

    Args:
        layout: sizes of the device blocks.
        vllm_config: configuration of the engine.
        import_buffer_bytes: bytes of the import buffer.

    Raises:
        HiSparseConfigError: the device has no room for the import buffer.
    """
    global _reserve
    is_cuda = vllm_config.device_config.device_type == "cuda"
    if not is_cuda or vllm_config.cache_config.kv_cache_memory_bytes is not None:
        return
    if _reserve is not None and _reserve.engine() is vllm_config:
        return
    accelerator = torch.accelerator
    total = accelerator.get_memory_info()[1]
    share = math.ceil(total * vllm_config.cache_config.gpu_memory_utilization)
    free_bytes = share - accelerator.memory_allocated()
    check_import_buffer_fits(import_buffer_bytes, free_bytes)
    num_bytes = most_residency_bytes(layout, free_bytes - import_buffer_bytes) + import_buffer_bytes
    device = torch.device(accelerator.current_accelerator().type, accelerator.current_device_index())
    _reserve = _Reserve(vllm_config, torch.empty(num_bytes, dtype=torch.uint8, device=device))


def release_memory() -> None:
    """Give the memory back to torch, so that residency and import buffer can be allocated in it."""
    if _reserve is not None:
        _reserve.memory = torch.empty(0, dtype=torch.uint8)


def most_residency_bytes(layout: KVLayout, num_bytes: int) -> int:
    """Bytes of residency for as many device blocks as fit into `num_bytes` together with their residency."""
    block_bytes = layout.device_block_bytes + layout.residency_block_bytes
    return max(num_bytes, 0) // block_bytes * layout.residency_block_bytes


def check_residency_fits(layout: KVLayout, num_device_blocks: int, free_bytes: int) -> None:
    """Refuse a KV cache that leaves no room on the device for its residency.

    Args:
        layout: sizes of the device blocks.
        num_device_blocks: blocks of vLLM's device pool.
        free_bytes: free memory of the device.

    Raises:
        HiSparseConfigError: there is no room.
    """
    needed = num_device_blocks * layout.residency_block_bytes
    if needed > free_bytes:
        raise HiSparseConfigError(
            "--kv-cache-memory-bytes",
            num_device_blocks * layout.device_block_bytes,
            f"a KV cache that leaves {needed / 2**20:.0f} MiB for its residency; {free_bytes / 2**20:.0f} MiB are free",
            "Lower it, or remove it: vLLM then leaves room for both within --gpu-memory-utilization.",
        )


def check_import_buffer_fits(num_bytes: int, free_bytes: int) -> None:
    """Refuse an import buffer for which the device has no room.

    Args:
        num_bytes: bytes of the import buffer; 0: none.
        free_bytes: free memory of the device.

    Raises:
        HiSparseConfigError: there is no room.
    """
    if num_bytes > max(free_bytes, 0):
        raise HiSparseConfigError(
            "import_buffer_gib",
            num_bytes / 2**30,
            f"at most the {max(free_bytes, 0) / 2**30:.3f} GiB of device memory that are free",
            "Lower it, or --kv-cache-memory-bytes if that is set.",
        )

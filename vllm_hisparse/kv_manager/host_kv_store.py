"""Host KV store: the memory behind the host block pool (worker side)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil
import torch

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Iterable

FREE_MEMORY_SHARE = 0.95  # of the memory the system reports as available


class HostKVStore:
    """Main KV and indexer keys of all host blocks in one page-aligned allocation.

    Args:
        layout: byte sizes.
        num_blocks: host blocks.
        main_layers, indexer_layers: layer names.
        dtype: element type of a main row.
        size_option: the option that asked for this size, for the error message.

    Attributes:
        main_kv: layer -> [num_blocks, block_size, row elements] of `dtype`.
        indexer_keys: layer -> [num_blocks, block_size * indexer row bytes] uint8.

    Raises:
        HiSparseConfigError: the host has less free memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        main_layers: Sequence[str],
        indexer_layers: Sequence[str],
        dtype: torch.dtype,
        size_option: str,
    ):
        self.layout = layout
        num_bytes = num_blocks * layout.host_block_bytes
        check_free_memory(num_bytes, size_option)
        self._memory = mmap.mmap(-1, num_bytes)  # NOTE: page-aligned, as cudaHostRegister and NIXL want it.
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        main_bytes = layout.block_size * layout.row_bytes * num_blocks
        keys_bytes = layout.block_size * layout.indexer_row_bytes * num_blocks
        keys_start = main_bytes * len(main_layers)
        self.main_kv = {
            name: flat[i * main_bytes : (i + 1) * main_bytes].view(dtype).view(num_blocks, layout.block_size, -1)
            for i, name in enumerate(main_layers)
        }
        self.indexer_keys = {
            name: flat[keys_start + i * keys_bytes : keys_start + (i + 1) * keys_bytes].view(num_blocks, -1)
            for i, name in enumerate(indexer_layers)
        }

    def save_indexer_keys(self, caches: dict[str, torch.Tensor], pairs: Iterable[tuple[int, int]]) -> int:
        """Copy (device, host) blocks of all layers to the host; returns the bytes copied.

        Args:
            caches: layer -> [num_device_blocks, block_size * indexer row bytes] uint8.
            pairs: block ids.
        """
        if not pairs:
            return 0
        device_ids, host_ids = torch.tensor(pairs).unbind(1)
        for name, cache in caches.items():
            self.indexer_keys[name][host_ids] = cache[device_ids].to("cpu")
        return len(pairs) * self.layout.indexer_block_bytes

    def restore_indexer_keys(self, caches: dict[str, torch.Tensor], pairs: Iterable[tuple[int, int]]) -> int:
        """Copy (host, device) blocks of all layers to the device; returns the bytes copied."""
        if not pairs:
            return 0
        host_ids, device_ids = torch.tensor(pairs).unbind(1)
        for name, cache in caches.items():
            cache[device_ids] = self.indexer_keys[name][host_ids].to(cache.device)
        return len(pairs) * self.layout.indexer_block_bytes


def check_free_memory(num_bytes: int, size_option: str) -> None:
    """Refuse a host pool that the host's free memory cannot hold.

    Raises:
        HiSparseConfigError: less than `num_bytes` is free.
    """
    available = int(psutil.virtual_memory().available * FREE_MEMORY_SHARE)
    if num_bytes > available:
        name, value = size_option.split("=")
        raise HiSparseConfigError(
            name,
            float(value),
            f"a host pool of at most {available / 2**30:.1f} GiB (free host memory), not {num_bytes / 2**30:.1f} GiB",
            "Lower it, or free memory on the host.",
        )

"""Host KV store: the memory behind the host block pool (worker side)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_hisparse.kv_manager.host_pool_memory import HostPoolLayout
from vllm_hisparse.kv_manager.rows.pinned_memory import PinnedMemory

if TYPE_CHECKING:
    import mmap


class HostKVStore:
    """Main KV and copies of device-resident KV, all host blocks in one allocation.

    Args:
        layout: byte ranges of the pool.
        main_layers: names of the layers with main KV, in the order of the pool.
        dtype: element type of a main row.
        memory: `layout.num_bytes` bytes, page-aligned.

    Attributes:
        main_kv: layer -> [num_blocks, block_size, row elements] of `dtype`.
        resident_kv: [num_blocks, bytes of all layers] uint8.
    """

    def __init__(self, layout: HostPoolLayout, main_layers: Sequence[str], dtype: torch.dtype, memory: mmap.mmap):
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        rows = (layout.num_blocks, layout.kv.block_size, -1)
        main = flat[layout.main_kv].view(layout.main_shape)
        self.main_kv = {name: main[i].view(dtype).view(rows) for i, name in enumerate(main_layers)}
        self.resident_kv = flat[layout.resident_kv].view(layout.resident_shape)
        self._pinned: PinnedMemory | None = None
        self._flat, self._device_view = flat, self.resident_kv

    def attach(self, device: torch.device) -> None:
        """Let the device read and write the store: pins the memory, except for the CPU."""
        if device.type != "cpu":
            self._pinned = PinnedMemory(self._flat)
            self._device_view = self._pinned.device_view(self.resident_kv)

    def save_resident_kv(self, cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device, host) blocks of all layers to the host.

        Args:
            cache: [num_device_blocks, bytes of all layers] uint8.
            pairs: block ids.
        """
        if pairs:
            device_ids, host_ids = self._ids(pairs, cache.device)
            self._device_view.index_copy_(0, host_ids, cache.index_select(0, device_ids))

    def restore_resident_kv(self, cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host, device) blocks of all layers to the device.

        Args:
            cache: [num_device_blocks, bytes of all layers] uint8.
            pairs: block ids.
        """
        if pairs:
            host_ids, device_ids = self._ids(pairs, cache.device)
            cache.index_copy_(0, device_ids, self._device_view.index_select(0, host_ids))

    def wait(self) -> None:
        """Wait until the copies between host and device are done."""
        if self._pinned is not None:
            torch.accelerator.current_stream().synchronize()

    def close(self) -> None:
        """Unpin the memory, once the device is done with it."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _ids(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(pairs, pin_memory=self._pinned is not None).to(device, non_blocking=True)
        return ids[:, 0].contiguous(), ids[:, 1].contiguous()

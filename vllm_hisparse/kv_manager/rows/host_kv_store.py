"""Host KV store: the memory behind the host block pool (worker side)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch

from vllm_hisparse.kv_manager.host_pool_memory import HostPoolLayout
from vllm_hisparse.kv_manager.rows.key_conversion import KeyConversion
from vllm_hisparse.kv_manager.rows.managed_memory import ManagedBuffer, ManagedMemory
from vllm_hisparse.kv_manager.rows.pinned_memory import PinnedMemory

CHUNK_BYTES = 64 << 20  # device memory of blocks that are copied together


class HostKVStore:
    """Main KV and copies of device-resident KV in one allocation for all host blocks.

    Args:
        layout: byte ranges of the pool.
        main_layers: names of the layers with main KV, in the order of the pool.
        dtype: element type of a main row.
        memory: `layout.num_bytes` bytes, page-aligned. The device maps them already if they are managed memory.

    Attributes:
        pool: [layout.num_bytes] uint8: all bytes.
        main_kv: layer -> [num_blocks, block_size, row elements] of `dtype`.
        resident_kv: [num_blocks, bytes of all layers] uint8.
    """

    def __init__(
        self,
        layout: HostPoolLayout,
        main_layers: Sequence[str],
        dtype: torch.dtype,
        memory: mmap.mmap | ManagedBuffer,
    ):
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        rows = (layout.num_blocks, layout.kv.block_size, -1)
        # NOTE: every layer has a torch storage of its own, because vLLM's NIXL worker assumes that layers of one
        # storage lie side by side in every block.
        layer_bytes = prod(layout.main_shape[1:])
        starts = range(layout.main_kv.start, layout.main_kv.stop, layer_bytes)
        self.main_kv = {
            name: torch.frombuffer(memory, dtype=dtype, count=layer_bytes // dtype.itemsize, offset=start).view(rows)
            for name, start in zip(main_layers, starts, strict=True)
        }
        self.resident_kv = flat[layout.resident_kv].view(layout.resident_shape)
        self._access: PinnedMemory | ManagedMemory | None = None  # the device's access to the memory
        self._conversion: KeyConversion | None = None
        self.pool, self._device_view = flat, self.resident_kv
        self._layout, self._memory = layout, memory

    @property
    def is_managed(self) -> bool:
        """True if the pool is managed memory."""
        return not isinstance(self._memory, mmap.mmap)

    def attach(self, device: torch.device, conversion: KeyConversion | None = None) -> None:
        """Let the device read and write the store; this pins the memory, unless it is managed.

        Args:
            device: device of the caches.
            conversion: conversion of blocks of device-resident KV. None: host and device keep the same bytes.
        """
        self._conversion = conversion
        if device.type != "cpu":
            self._access = ManagedMemory() if self.is_managed else PinnedMemory(self.pool)
            self._device_view = self._access.device_view(self.resident_kv)

    def device_pool(self) -> torch.Tensor:
        """Return `pool` as the device sees it, from `attach` to `close`."""
        return self.pool if self._access is None else self._access.device_view(self.pool)

    def saved_layers(self, layer_bytes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return the copies of device-resident KV by layer.

        NOTE: all layers share a torch storage that has nothing else in it, because vLLM's NIXL worker assumes that
        layers of one storage lie side by side in every block.

        Args:
            layer_bytes: layer -> bytes of a block, in the order of a host block.

        Returns:
            Layer -> [num_blocks, 1, block_size, bytes of a token] uint8.
        """
        part, num_tokens = self._layout.resident_kv, self._layout.kv.block_size
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=part.stop - part.start, offset=part.start)
        blocks, layers, first = flat.view(self._layout.resident_shape), {}, 0
        for name, num_bytes in layer_bytes.items():
            layers[name] = blocks[:, first : first + num_bytes].unflatten(1, (1, num_tokens, -1))
            first += num_bytes
        return layers

    def save_resident_kv(self, cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of all layers to the host.

        Args:
            cache: [num_device_blocks, bytes of all layers] uint8.
            pairs: (device, host) block ids.
        """
        self._copy(cache, self._device_view, pairs, self._conversion and self._conversion.to_host)

    def restore_resident_kv(self, cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of all layers to the device.

        Args:
            cache: [num_device_blocks, bytes of all layers] uint8.
            pairs: (host, device) block ids.
        """
        self._copy(self._device_view, cache, pairs, self._conversion and self._conversion.to_device)

    def wait(self) -> None:
        """Wait until the copies between host and device are done."""
        if self._access is not None:
            torch.accelerator.current_stream().synchronize()

    def close(self) -> None:
        """Wait until the device is done with the memory, and unpin it if it is pinned."""
        if self._access is not None:
            self._access.close()
            self._access = None

    def _copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        pairs: Sequence[tuple[int, int]],
        convert: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """Copy blocks, through at most `CHUNK_BYTES` of device memory at a time, or that of one block if this is more.

        NOTE: blocks are copied in words, not in bytes, because torch's kernels move one element per lane, also over the
        link to the host.

        Args:
            source, target: [blocks, bytes of all layers] uint8.
            pairs: (source, target) block ids.
            convert: function that turns blocks from the source's form into the target's; None: the forms are equal.
        """
        if not pairs:
            return
        dtype = widest_word(source, target)
        source, target = source.view(dtype), target.view(dtype)
        source_ids, target_ids = self._ids(pairs, self._device_view.device)
        block_bytes = self._conversion.working_bytes if self._conversion else source.shape[1] * source.element_size()
        size = max(CHUNK_BYTES // block_bytes, 1)
        for ids, homes in zip(source_ids.split(size), target_ids.split(size), strict=True):
            blocks = source.index_select(0, ids)
            if convert is not None:
                blocks = convert(blocks.view(torch.uint8)).view(dtype)
            target.index_copy_(0, homes, blocks)

    def _ids(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(pairs, pin_memory=self._access is not None).to(device, non_blocking=True)
        return ids[:, 0].contiguous(), ids[:, 1].contiguous()


def widest_word(*blocks: torch.Tensor) -> torch.dtype:
    """Return the largest integer dtype as which all tensors can be viewed.

    Args:
        blocks: tensors of [blocks, bytes] uint8, whose blocks may lie apart.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        sizes = [size for each in blocks for size in (each.data_ptr(), each.stride(0), each.shape[1])]
        if not any(size % dtype.itemsize for size in sizes):
            return dtype
    return torch.uint8

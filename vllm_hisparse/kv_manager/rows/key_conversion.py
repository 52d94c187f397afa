"""Blocks of device-resident KV whose indexer keys the device keeps in 4 bits, and the host in 8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from vllm_hisparse.ops.indexer_keys import KEY_BYTES, TILE, WIDE_KEY_BYTES, narrow_blocks, widen_blocks

NARROW_BYTES, WIDE_BYTES = TILE * KEY_BYTES, TILE * WIDE_KEY_BYTES  # bytes of a block of keys in one layer


class KeyConversion:
    """Converts whole blocks of all layers.

    Args:
        layers: layers of a device block in the order of memory: bytes of each, and True if these are keys in 4 bits.

    Attributes:
        layer_bytes: bytes of each layer of a host block.
        device_bytes, host_bytes: bytes of a block.
        working_bytes: bytes that the conversion of a block takes at most, both of its forms included.
    """

    def __init__(self, layers: Sequence[tuple[int, bool]]):
        # Runs of layers of one kind: True for keys, number of layers, their bytes on the device and on the host
        self._parts: list[tuple[bool, int, int, int]] = []
        for is_narrow, group in groupby(layers, key=lambda layer: layer[1]):
            sizes = [size for size, _ in group]
            wide_bytes = len(sizes) * WIDE_BYTES if is_narrow else sum(sizes)
            self._parts.append((is_narrow, len(sizes), sum(sizes), wide_bytes))
        self.layer_bytes = [WIDE_BYTES if is_narrow else size for size, is_narrow in layers]
        self.device_bytes = sum(part[2] for part in self._parts)
        self.host_bytes = sum(self.layer_bytes)
        self.working_bytes = 2 * (self.device_bytes + self.host_bytes)  # keys are copied before and after

    def to_host(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return blocks in the form of the host. No precision is lost.

        Args:
            blocks: [blocks, device_bytes] uint8.

        Returns:
            [blocks, host_bytes] uint8.
        """
        wide = blocks.new_empty(len(blocks), self.host_bytes)
        for is_narrow, num_layers, device, host in self._places():
            if is_narrow:
                keys = blocks.new_empty(len(blocks) * num_layers, WIDE_BYTES)
                widen_blocks(blocks[:, device].contiguous().view(-1, NARROW_BYTES), keys)
                wide[:, host] = keys.view(len(blocks), -1)
            else:
                wide[:, host] = blocks[:, device]
        return wide

    def to_device(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return blocks in the form of the device, with keys quantised.

        Args:
            blocks: [blocks, host_bytes] uint8.

        Returns:
            [blocks, device_bytes] uint8.
        """
        narrow = blocks.new_empty(len(blocks), self.device_bytes)
        for is_narrow, num_layers, device, host in self._places():
            if is_narrow:
                keys = blocks.new_empty(len(blocks) * num_layers, NARROW_BYTES)
                narrow_blocks(blocks[:, host].contiguous().view(-1, WIDE_BYTES), keys)
                narrow[:, device] = keys.view(len(blocks), -1)
            else:
                narrow[:, device] = blocks[:, host]
        return narrow

    def _places(self) -> Iterator[tuple[bool, int, slice, slice]]:
        """Yield for each part: True for keys, number of layers, its bytes in a device block and in a host block."""
        device = host = 0
        for is_narrow, num_layers, device_bytes, host_bytes in self._parts:
            yield is_narrow, num_layers, slice(device, device + device_bytes), slice(host, host + host_bytes)
            device, host = device + device_bytes, host + host_bytes

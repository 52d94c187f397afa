"""The memory of a host pool: where its bytes are, and how other processes find it."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from vllm_hisparse.layout import KVLayout


@dataclass(frozen=True)
class HostPoolLayout:
    """Byte ranges of a host pool: main KV layer by layer, then device-resident KV block by block.

    Args:
        kv: sizes of rows and blocks.
        num_blocks: host blocks of the pool.
    """

    kv: KVLayout
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.kv.host_block_bytes

    @property
    def main_kv(self) -> slice:
        """Bytes of the main KV of all layers."""
        return slice(0, self.num_blocks * self.kv.main_block_bytes)

    @property
    def main_shape(self) -> tuple[int, int, int]:
        """Shape of the bytes in `main_kv`: (layers, blocks, bytes of a block in one layer)."""
        return self.kv.num_layers, self.num_blocks, self.kv.main_block_bytes // self.kv.num_layers

    @property
    def resident_kv(self) -> slice:
        """Bytes of the copies of device-resident KV."""
        return slice(self.main_kv.stop, self.num_bytes)

    @property
    def resident_shape(self) -> tuple[int, int]:
        """Shape of the bytes in `resident_kv`: (blocks, bytes of a block in all layers)."""
        return self.num_blocks, self.kv.saved_block_bytes


@dataclass(frozen=True)
class HostPoolFile:
    """The memory behind a worker's host pool, as a file that processes of the same user and container can map.

    Attributes:
        path: below /proc of the worker that created it.
        device, inode: identity of the file that the path must lead to.
        num_bytes: size of the pool.
    """

    path: str
    device: int
    inode: int
    num_bytes: int

    @classmethod
    def of(cls, descriptor: int, num_bytes: int) -> HostPoolFile:
        """Describe an open file of this process."""
        status = os.fstat(descriptor)
        return cls(f"/proc/{os.getpid()}/fd/{descriptor}", status.st_dev, status.st_ino, num_bytes)

    def map(self) -> mmap.mmap:
        """Map the file; the mapping stays valid when its creator closes the file.

        Raises:
            OSError: this process cannot open it, or the path leads to another file.
        """
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (self.device, self.inode):
                raise FileNotFoundError(f"{self.path} is another file")
            return mmap.mmap(descriptor, self.num_bytes)
        finally:
            os.close(descriptor)

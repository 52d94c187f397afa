from types import SimpleNamespace

import pytest
import torch

from vllm_hisparse.kv_manager.rows import pinned_memory
from vllm_hisparse.kv_manager.rows.pinned_memory import PinnedMemory


class FakeRuntime:
    """Registers ranges as CUDA does: each once, none of another's bytes."""

    def __init__(self, refuses_from: int | None = None):
        self.ranges, self.refuses_from = {}, refuses_from

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        if self.refuses_from is not None and len(self.ranges) >= self.refuses_from:
            return 2
        assert all(start >= other + length or start + size <= other for other, length in self.ranges.items())
        self.ranges[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.ranges[start]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(pinned_memory, "CHUNK_BYTES", 4096)
    return runtime


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 3 * 4096])
def test_every_byte_is_registered_in_chunks_and_given_back(runtime: FakeRuntime, num_bytes: int) -> None:
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    pinned = PinnedMemory(memory)
    assert sum(runtime.ranges.values()) == num_bytes
    assert max(runtime.ranges.values()) <= 4096
    assert min(runtime.ranges) == memory.data_ptr()
    pinned.close()
    assert not runtime.ranges


def test_says_how_much_could_be_pinned(runtime: FakeRuntime) -> None:
    runtime.refuses_from = 1
    with pytest.raises(RuntimeError, match=r"of 0\.0 GiB failed \(2\) after 0\.0 GiB\. Raise the limit of locked"):
        PinnedMemory(torch.zeros(3 * 4096, dtype=torch.uint8))

"""The kernel that forces selections, under Triton's interpreter, against numpy."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

TOP_K, PAGE = 64, 16
LAYER = 3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "benchmarks.selection_kernel", raising=False)
    return importlib.import_module("benchmarks.selection_kernel")


def hashed(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    value = (value ^ (value >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return value ^ (value >> np.uint32(16))


def independent(name: int, length: int, threshold: int, stay: int) -> np.ndarray:
    """[top-k] int64 positions of one token, in numpy."""
    column = np.arange(TOP_K)
    key = (((name * 61 + LAYER) * 4096 + column) & 0x7FFFFFFF).astype(np.uint32)
    then = np.full(TOP_K, length // stay * stay)
    for index in range(TOP_K):
        for step in range(length, length - stay, -1):
            coin = hashed(key[index : index + 1] * np.uint32(0x9E3779B1) + np.uint32(step) * np.uint32(0x7FEB352D))
            if coin[0] >> np.uint32(8) < threshold:
                then[index] = step
                break
    draw = hashed(key * np.uint32(0x27D4EB2F) + then.astype(np.uint32) * np.uint32(0x165667B1)) >> np.uint32(16)
    places = max(length // 4096 * 4096 // TOP_K, 1)
    position = column + (draw.astype(np.int64) * places >> 16) * TOP_K
    return np.where(position < length, position, -1)


def make_selections(kernel: ModuleType, trace_layers: int = 4) -> object:
    settings = torch.tensor([kernel.INDEPENDENT, 0, 1, 1, 1, 0], dtype=torch.int32)
    return kernel.ForcedSelections(settings, torch.zeros(1 << 16, dtype=torch.int32), trace_layers)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's integers wrap around, as the kernel's do
@pytest.mark.parametrize("page_size", [0, PAGE])
def test_positions_and_slots(kernel: ModuleType, page_size: int) -> None:
    selections = make_selections(kernel)
    selections.use_independent(0.5)
    lengths, names = [9000, 9001, 40, 41], [7, 1000]  # two requests of two tokens each
    table = torch.randperm(2 * 1024, generator=torch.manual_seed(0)).view(2, 1024).to(torch.int32)
    wide_names = torch.full((2, 3), -1, dtype=torch.int32)  # the first column of a table has the names
    wide_names[:, 0] = torch.tensor(names)
    out = torch.full((6, TOP_K), -7, dtype=torch.int32)
    selections.write(out, torch.tensor(lengths, dtype=torch.int32), wide_names[:, 0], LAYER, table, page_size)
    for token, length in enumerate(lengths):
        expected = independent(names[token // 2], length, 1 << 23, kernel.LONGEST_STAY)
        if page_size:
            slots = table[token // 2].numpy()[expected // PAGE] * PAGE + expected % PAGE
            expected = np.where(expected >= 0, slots, -1)
        assert out[token].tolist() == expected.tolist()
    assert (out[4:] == -7).all()


@pytest.mark.long
def test_a_trace_is_replayed(kernel: ModuleType) -> None:
    selections = make_selections(kernel)
    width, prompt = 16, 500
    positions = np.random.default_rng(0).integers(-1, 100, (2, 4, 5, width)).astype(np.int32)
    selections.use_trace(positions, prompt)
    out = torch.zeros((3, TOP_K), dtype=torch.int32)
    lengths = torch.tensor([prompt, prompt + 3, prompt + 40], dtype=torch.int32)
    selections.write(out, lengths, torch.tensor([5, 6, 7], dtype=torch.int32), LAYER)
    for request, step in enumerate((0, 3, 4)):
        held = positions[request % 2, LAYER, step]
        expected = [-1 if one < 0 else one * 4 + part for one in held for part in range(4)]
        assert out[request].tolist() == expected

"""The kernels' library as Python sees it: what it says of itself, and what it refuses. No kernel runs here."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_hisparse.ops import kernels as library
from vllm_hisparse.ops import limits
from vllm_hisparse.ops.base import DecodeMetadata, HotRows, Residency, Resolved, UnitMetadata
from vllm_hisparse.ops.kernels import kernels
from vllm_hisparse.ops.kv_heads import KVHeads

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which builds the library")

CPU = torch.device("cpu")


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


DECODE = DecodeMetadata(ints(9), ints(0), ints(0), ints(3, 4), ints(3), ints(3, 5), 64)
HOT = HotRows(torch.zeros(64, 32, dtype=torch.uint8), 4, 8)
RESIDENCY, RESOLVED = Residency.allocate(8, CPU), Resolved.allocate(4, 8, CPU)
COUNTS, SELECTED = torch.zeros(3, 2, dtype=torch.int64), ints(0, 8)
HOST = torch.zeros(64, 32, dtype=torch.uint8)
UNITS = UnitMetadata.allocate(4, 3, KVHeads(2, 6, 16), CPU)


def test_steps_without_requests_launch_nothing() -> None:
    """Every argument has the type that the library wants, and no device is needed."""
    selection = RESIDENCY.native, DECODE.native, SELECTED
    kernels().resolve(*selection, HOT.native, COUNTS, RESOLVED.native, 0)
    kernels().gather(HOST, HOT.native, RESOLVED.native, 0, True, 0)
    kernels().newest_row_ids(DECODE.native, HOT.native, ints(1).long(), None, 0)
    kernels().newest_row_ids(DECODE.native, HOT.native, ints(3, 1).long(), ints(3), 0)
    kernels().write_back(kernels().layer_group([HOT.native] * 3, [HOST] * 3), DECODE.native, 0)
    kernels().stage_rows(HOST, ints(3), 16, HOST[:0], 0)
    kernels().save_rows(HOST[:0], 5, HOST, ints(3), 16, 0)
    kernels().begin_units(ints(0), ints(0), None, ints(60), 7, UNITS.native, 0)
    tokens = torch.zeros(0, 2, 8)
    kernels().write_tokens(tokens, tokens, UNITS.native, DECODE.native, HOT.native, HOST, ints(3), 0)
    kernels().compact_rows(ints(0, 8), ints(0), 0)
    kernels().select_units(torch.zeros(0, 2, 9), ints(0).long(), 16, ints(0, 2, 4), 0)
    bounds, vectors = torch.zeros(5, 7, 2, 2, 64).bfloat16(), torch.zeros(0, 2, 64).bfloat16()
    indices, table = ints(0).long(), ints(3, 4)
    latest = torch.zeros(3, 5, 2, 2, 64).bfloat16()
    kernels().update_page_bounds(table, bounds, latest, indices, vectors, indices, 16, 0)
    kernels().page_scores(table, bounds, indices, vectors, indices, 16, torch.zeros(0, 2, 20), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a device")
def test_errors_of_managed_memory_are_raised() -> None:
    for call in (
        lambda: kernels().allocate_managed(4096, 0),
        lambda: kernels().map_managed(4096, 4096, 0),
        lambda: kernels().free_managed(4096),
    ):
        with pytest.raises(RuntimeError, match="CUDA error"):
            call()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HotRows(HOST.t(), 4, 8), ValueError, "contiguous matrix"),
        (lambda: HotRows(HOST[:, :8].contiguous(), 4, 8), ValueError, "multiple of 16 bytes"),
        (lambda: Residency(torch.zeros(8, 2)), TypeError, "residency is of another dtype"),
        (lambda: replace(DECODE, first_hot_block_ids=ints(2)), ValueError, "first_hot_block_ids and seq_lens"),
        (lambda: replace(DECODE, seq_lens=ints(0).long()), TypeError, "seq_lens is of another dtype"),
        (lambda: replace(DECODE, hot_block_tables=ints(4, 3).t()), ValueError, "hot_block_tables is no matrix"),
        (lambda: replace(DECODE, first_hot_block_ids=None), TypeError, "argument #1"),
        (lambda: replace(RESOLVED, num_misses=ints(8)[::2]), ValueError, "num_misses is not contiguous"),
        (lambda: replace(UNITS, tails=ints(8).long()), TypeError, "tails is of another dtype"),
    ],
)
def test_tensors_that_kernels_cannot_take_are_refused(make, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        _ = make().native


def test_arguments_of_launches_are_checked() -> None:
    with pytest.raises(TypeError, match=r"Expected `vllm_hisparse\.Resolved` but got `int`"):
        kernels().gather(HOST, HOT.native, 3, 0, True, 0)
    with pytest.raises(ValueError, match="of different sizes"):
        kernels().gather(HOST[:, :16].contiguous(), HOT.native, RESOLVED.native, 0, True, 0)
    with pytest.raises(ValueError, match="selections of other sizes"):
        kernels().resolve(RESIDENCY.native, DECODE.native, ints(0, 7), HOT.native, COUNTS, RESOLVED.native, 0)
    with pytest.raises(ValueError, match="layers are of unequal sizes"):
        kernels().layer_group([HOT.native, replace(HOT, rows_per_block=5).native], [HOST] * 2)
    with pytest.raises(ValueError, match="at most 128"):
        kernels().layer_group([HOT.native] * (limits.MAX_LAYERS + 1), [HOST] * (limits.MAX_LAYERS + 1))


@pytest.fixture
def fresh() -> None:
    library.kernels.cache_clear()
    yield
    library.kernels.cache_clear()


def test_a_library_with_other_limits_is_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOP_K", 8192)
    with pytest.raises(RuntimeError, match=r"of another version: .*'MAX_TOP_K': 4096.*this code has .*8192"):
        kernels()


def test_a_library_of_an_older_interface_is_refused(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A build that is older than the Python code beside it cannot say what it was built with."""
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "_kernels.so")
    library.LIBRARY.touch()
    monkeypatch.setattr("tvm_ffi.load_module", lambda _: SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"of an older interface.*install vllm_hisparse again"):
        kernels()

"""vLLM's Triton kernel over units of hot buffers, in Triton's interpreter: units of any size, rows that are empty, with
splits and without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from interpreted_kernels import interpreted

from vllm_hisparse.attention.gqa import triton_cuda
from vllm_hisparse.attention.gqa.cuda import FP8
from vllm_hisparse.ops.base import READ_AHEAD, Resolved

NUM_UNITS = 64


def test_the_kernel_reads_no_further_than_there_is_memory() -> None:
    tile_size = interpreted()["unified_attention"]._get_tile_size
    assert max(tile_size(128, 0, 2, is_prefill=prefill) for prefill in (False, True)) - 1 <= READ_AHEAD


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "head_size", "unit", "num_selected", "fp8"),
    [
        (5, 3, 32, 1, 40, False),
        (6, 4, 64, 16, 9, False),
        (130, 2, 32, 4, 9, False),  # without splits
        (6, 4, 64, 16, 9, True),
    ],
)
def test_rows_of_every_kind_of_length(
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    num_heads: int,
    head_size: int,
    unit: int,
    num_selected: int,
    fp8: bool,
) -> None:
    """The formula is for what is selected; what is not is NaN."""
    monkeypatch.setattr(triton_cuda, "unified_attention", interpreted()["unified_attention"].unified_attention)
    torch.manual_seed(0)
    pages = torch.randn(NUM_UNITS, unit, 1, 2 * head_size)
    query = torch.randn(num_rows, num_heads, head_size)
    out = torch.full_like(query, float("nan"))
    units = Resolved.allocate(num_rows, num_selected, torch.device("cpu")).hot_row_ids
    assert units.untyped_storage().nbytes() // units.itemsize >= units.numel() + READ_AHEAD
    lengths = torch.randint(1, num_selected * unit + 1, (num_rows,), dtype=torch.int32)
    lengths[0], lengths[1], lengths[2] = num_selected * unit, 0, 1
    for row, length in enumerate(lengths.tolist()):
        num_units = -(-length // unit)
        units[row, :num_units] = torch.randperm(NUM_UNITS - 1)[:num_units] + 1
    pages[0] = float("nan")  # not selected
    last = int(units[2, 0])
    pages[last, 1:] = float("nan")  # beyond a row's last token
    units[3:][units[3:] == last] = 1
    units[0][units[0] == last] = 1
    keys, values = pages.split(head_size, -1)
    layer = SimpleNamespace(_q_scale=None, _k_scale=torch.tensor(2.0), _v_scale=torch.tensor(0.25))
    if fp8:
        pages = pages.to(FP8)
        keys, values = pages.split(head_size, -1)
    impl = SimpleNamespace(
        hot_keys=keys,
        hot_values=values,
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32),
        scale=head_size**-0.5,
        stores_fp8=fp8,
        algorithm=SimpleNamespace(tokens_per_unit=unit),
    )
    triton_cuda.HotTritonImpl.run_kernel(impl, layer, query, units, lengths, out)
    for row, length in enumerate(lengths.tolist()):
        ids = units[row, : -(-length // unit)].long()
        key, value = (part.float()[ids].flatten(0, 1)[:length, 0] for part in (keys, values))
        if fp8:
            key, value = key * layer._k_scale, value * layer._v_scale
        weights = (query[row] @ key.T * head_size**-0.5).softmax(-1)
        torch.testing.assert_close(out[row], weights @ value, atol=2e-5, rtol=2e-5)

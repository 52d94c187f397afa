"""Run by a test in a process of its own: vLLM's Triton kernel, interpreted on the CPU, over units of hot buffers.

NOTE: vLLM disables Triton without a GPU, so its package of Triton is replaced before vLLM imports it.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from interpreted_kernels import replace_language_once
from triton.language.extra import libdevice
from triton.runtime import interpreter

replace_language_once(interpreter)

package = ModuleType("vllm.triton_utils")
package.__path__ = [str(Path(find_spec("vllm").origin).parent / "triton_utils")]
package.HAS_TRITON, package.triton, package.tl, package.tldevice = True, triton, tl, libdevice
package.LOG2E, package.LOGE2 = 1.4426950408889634, 0.6931471805599453
package.get_autotune_warmup_bounds = None
sys.modules["vllm.triton_utils"] = package

from vllm.v1.attention.ops.triton_unified_attention import _get_tile_size  # noqa: E402

from vllm_hisparse.attention.gqa.cuda import FP8  # noqa: E402
from vllm_hisparse.attention.gqa.triton_cuda import HotTritonImpl  # noqa: E402
from vllm_hisparse.ops.base import READ_AHEAD, Resolved  # noqa: E402

NUM_UNITS = 64


def check(num_rows: int, num_heads: int, head_size: int, unit: int, num_selected: int, fp8: bool = False) -> None:
    """Compare rows of every kind of length with the formula; what is not selected is NaN."""
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
    HotTritonImpl._run_kernel(impl, layer, query, units, lengths, out)
    for row, length in enumerate(lengths.tolist()):
        ids = units[row, : -(-length // unit)].long()
        key, value = (part.float()[ids].flatten(0, 1)[:length, 0] for part in (keys, values))
        if fp8:
            key, value = key * layer._k_scale, value * layer._v_scale
        weights = (query[row] @ key.T * head_size**-0.5).softmax(-1)
        torch.testing.assert_close(out[row], weights @ value, atol=2e-5, rtol=2e-5)


torch.manual_seed(0)
assert max(_get_tile_size(128, 0, 2, is_prefill=prefill) for prefill in (False, True)) - 1 <= READ_AHEAD
check(num_rows=5, num_heads=3, head_size=32, unit=1, num_selected=40)
check(num_rows=6, num_heads=4, head_size=64, unit=16, num_selected=9)
check(num_rows=130, num_heads=2, head_size=32, unit=4, num_selected=9)  # without splits
check(num_rows=6, num_heads=4, head_size=64, unit=16, num_selected=9, fp8=True)

"""FlashInfer's XQA over units of hot buffers against the formula, also replayed from a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

flashinfer_cuda = pytest.importorskip("vllm_hisparse.attention.gqa.flashinfer_cuda", exc_type=ImportError)

NUM_UNITS = 64
TOLERANCE = 2e-2  # of outputs near 1 in bf16
CASES = [(1, 4, 64, 16, 9), (7, 4, 128, 16, 33), (300, 4, 128, 16, 9), (8, 4, 128, 64, 5), (5, 2, 64, 32, 3)]


class Rows:
    """Random rows of one step; what is not selected, and what is beyond a row's last token, is NaN.

    Args:
        num_rows: rows of the step; with at least three, they include the longest row, an empty one and one token.
        group: heads per KV head.
        head_size: elements of a head.
        unit: tokens of a unit.
        num_selected: units of a row, at most.
    """

    def __init__(self, num_rows: int, group: int, head_size: int, unit: int, num_selected: int):
        device = torch.device("cuda")
        torch.manual_seed(num_rows)
        self.unit, self.head_size = unit, head_size
        self.query = torch.randn(num_rows, group, head_size, dtype=torch.bfloat16, device=device)
        self.units = torch.zeros(num_rows, num_selected, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.pages = torch.full((NUM_UNITS, unit, 1, 2 * head_size), float("nan"), device=device).bfloat16()
        self.out = torch.full_like(self.query, float("nan"))
        self.impl = SimpleNamespace(
            hot_keys=self.pages[..., :head_size],
            hot_values=self.pages[..., head_size:],
            scale=0.7 * head_size**-0.5,
            algorithm=SimpleNamespace(tokens_per_unit=unit),
        )

    def fill(self, seed: int) -> None:
        """Give all rows other lengths, units and contents, in place."""
        torch.manual_seed(seed)
        num_rows, num_selected = self.units.shape
        lengths = torch.randint(1, num_selected * self.unit + 1, (num_rows,))
        if num_rows >= 3:
            lengths[:3] = torch.tensor([num_selected * self.unit, 0, 1])
        units = torch.zeros(num_rows, num_selected, dtype=torch.int32)
        last = torch.randperm(NUM_UNITS - 1)[:num_rows] + 1 if num_rows < NUM_UNITS // 2 else None
        self.pages.normal_()
        self.pages[0] = float("nan")
        shared = [page for page in range(1, NUM_UNITS) if last is None or page not in last.tolist()]
        for row, length in enumerate(lengths.tolist()):
            num_units = -(-length // self.unit)
            units[row, :num_units] = torch.tensor(shared)[torch.randperm(len(shared))[:num_units]]
            if last is not None and length:  # a page of its own, which ends with NaN
                units[row, num_units - 1] = last[row]
                self.pages[last[row], (length - 1) % self.unit + 1 :] = float("nan")
        self.units.copy_(units)
        self.lengths.copy_(lengths)

    def attend(self) -> None:
        flashinfer_cuda.HotFlashInferImpl.run_kernel(self.impl, None, self.query, self.units, self.lengths, self.out)

    def expected(self) -> torch.Tensor:
        found = torch.zeros_like(self.query, dtype=torch.float32)
        for row, length in enumerate(self.lengths.tolist()):
            ids = self.units[row, : -(-length // self.unit)].long()
            keys, values = self.pages[ids].flatten(0, 1)[:length, 0].float().split(self.head_size, -1)
            found[row] = (self.query[row].float() @ keys.T * self.impl.scale).softmax(-1) @ values
        return found


def check(rows: Rows) -> None:
    torch.testing.assert_close(rows.out.float(), rows.expected(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("sizes", CASES)
def test_units_of_every_size(sizes: tuple[Any, ...]) -> None:
    rows = Rows(*sizes)
    for seed in range(3):
        rows.fill(seed)
        rows.attend()
        check(rows)


def test_a_graph_reads_lengths_and_units_of_each_replay() -> None:
    rows, graph = Rows(7, 4, 128, 16, 33), torch.cuda.CUDAGraph()
    rows.fill(0)
    rows.attend()  # FlashInfer loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        rows.attend()
    for seed in range(1, 5):
        rows.fill(seed)
        rows.out.fill_(float("nan"))
        graph.replay()
        check(rows)

"""The CUDA kernel that selects positions by score, against the torch reference."""

from __future__ import annotations

import pytest
import torch

from vllm_hisparse.ops.select_positions import select_positions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [0, 1, 511, 512, 2047, 2048, 2049, 2050, 4099, 16384, 16385, 33001, 65537, 131072, 139999]
SCORES = {
    "random": lambda shape: torch.randn(shape),
    "few values": lambda shape: torch.randint(-3, 4, shape).float(),
    "equal": lambda shape: torch.full(shape, 5.0),
    "of all sizes": lambda shape: -torch.exp(10 * torch.randn(shape)),
    "infinite": lambda shape: torch.where(torch.rand(shape) < 0.02, torch.inf, torch.randint(-1, 2, shape).float()),
}


@pytest.mark.parametrize("num_queries", [1, 14, 16, 17, 28, 33, 56, 65, 128, 300])
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("top_k", [512, 2048])
def test_positions_are_the_best(num_queries: int, kind: str, top_k: int) -> None:
    torch.manual_seed(num_queries)
    lengths = torch.tensor([LENGTHS[(7 * query) % len(LENGTHS)] for query in range(num_queries)], dtype=torch.int32)
    scores = SCORES[kind]((num_queries, 140_000))
    for row, length in zip(scores, lengths.tolist(), strict=True):
        row[length:] = torch.nan
    expected = torch.empty(num_queries, top_k, dtype=torch.int32)
    select_positions(scores, lengths, expected)
    found = torch.full((num_queries, top_k + 32), -7, dtype=torch.int32, device="cuda")
    select_positions(scores.cuda(), lengths.cuda(), found[:, :top_k])
    assert torch.equal(found[:, :top_k].cpu(), expected)
    assert (found[:, top_k:] == -7).all()


def test_a_graph_selects_from_what_its_tensors_hold() -> None:
    scores, lengths = torch.randn(14, 32_768, device="cuda"), torch.full((14,), 30_000, dtype=torch.int32).cuda()
    found = torch.empty(14, 2048, dtype=torch.int32, device="cuda")
    select_positions(scores, lengths, found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_positions(scores, lengths, found)
    for _ in range(3):
        scores.normal_()
        lengths.random_(1, 32_768)
        graph.replay()
        expected = torch.empty(14, 2048, dtype=torch.int32)
        select_positions(scores.cpu(), lengths.cpu(), expected)
        assert torch.equal(found.cpu(), expected)

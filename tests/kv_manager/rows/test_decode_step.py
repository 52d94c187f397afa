"""Begin and end of a decode step: the work that the first and the last layer do, once each, and the data they find."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from vllm_hisparse.kv_manager.rows.decode_step import GQADecodeStep, LayerRows, MLADecodeStep, StepShape
from vllm_hisparse.kv_manager.rows.request_table import RequestTable
from vllm_hisparse.kv_manager.rows.row_classes import RowClasses
from vllm_hisparse.ops.base import HotRows
from vllm_hisparse.ops.kv_heads import KVHeads
from vllm_hisparse.ops.registry import swap_in_ops

NUM_LAYERS, NUM_SLOTS, BLOCK_SIZE, NUM_BLOCKS, WIDTH = 3, 6, 4, 12, 2
CPU = torch.device("cpu")
OPS = swap_in_ops(CPU)


def make_layers(rows_per_block: int = NUM_SLOTS + 1, num_parts: int = NUM_BLOCKS) -> list[LayerRows]:
    def layer() -> LayerRows:
        hot = HotRows(torch.zeros(num_parts * rows_per_block, WIDTH), rows_per_block, rows_per_block)
        return LayerRows(hot, torch.zeros(NUM_BLOCKS * BLOCK_SIZE, WIDTH))

    return [layer() for _ in range(NUM_LAYERS)]


def make_mla_step() -> MLADecodeStep:
    requests = RequestTable(2, 5, 1, RowClasses.of([NUM_SLOTS + 1] * NUM_LAYERS), NUM_BLOCKS, KVHeads(), CPU)
    for first_hot_block_id, ids in ((3, [9, 1, 4]), (5, [2, 7])):
        requests.add(first_hot_block_id)
        requests.extend({first_hot_block_id: (0, ids)})
        requests.change_hot({first_hot_block_id: (0, [first_hot_block_id])})
    return MLADecodeStep(requests, make_layers(), OPS, StepShape(4, 2, BLOCK_SIZE), CPU)


def tensor(*first_hot_block_ids: int) -> torch.Tensor:
    return torch.tensor(first_hot_block_ids, dtype=torch.int32)


def test_newest_rows_reach_the_host_after_the_last_layer() -> None:
    """A step of two requests, beside padding: one past its buffer, whose newest row has the reserved slot."""
    step = make_mla_step()
    step.plan(tensor(3, 5, 0), torch.tensor([10, 3, 0], dtype=torch.int32))
    for index, layer in enumerate(step.layers):
        step.begin(index)
        assert step.newest_row_ids[0, :3].tolist() == [3 * 7 + NUM_SLOTS, 5 * 7 + 2, -1]
        layer.hot.rows[step.newest_row_ids[0, :2]] = torch.tensor([[1.0], [2.0]]) + 10 * index
        assert not any(layer.host.any() for layer in step.layers)
        step.finish(index)
    for index, layer in enumerate(step.layers):
        expected = torch.zeros_like(layer.host)
        expected[4 * BLOCK_SIZE + 1], expected[2 * BLOCK_SIZE + 2] = 1 + 10 * index, 2 + 10 * index
        assert torch.equal(layer.host, expected)


def test_requests_are_looked_up_when_the_step_begins() -> None:
    """Model Runner V2 builds the metadata before the worker hears of a new request."""
    step = make_mla_step()
    step.plan(tensor(3), torch.tensor([2], dtype=torch.int32))
    step.requests.remove(3)
    step.begin(0)
    assert step.newest_row_ids[0, 0] == -1
    step.requests.add(3)
    step.requests.change_hot({3: (0, [3])})
    step.begin(0)
    assert step.newest_row_ids[0, 0] == 3 * 7 + 1


def test_what_a_step_needs_once_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step, ops = make_mla_step(), Mock()
    step.ops = ops
    step.plan(tensor(3), torch.tensor([2], dtype=torch.int32))
    assert not ops.method_calls
    for index in range(NUM_LAYERS):
        step.begin(index)
        step.finish(index)
    assert [call[0] for call in ops.method_calls] == ["newest_row_ids", "write_back"]


def test_a_dense_models_step_is_by_kv_head_and_unit() -> None:
    heads = KVHeads(num_heads=2, head_stride=5, tokens_per_unit=4)
    requests = RequestTable(2, 5, 1, RowClasses.of([NUM_SLOTS + 1] * NUM_LAYERS), NUM_BLOCKS, heads, CPU)
    requests.add(8)
    index = requests.add(3)
    requests.change_hot({3: (0, [3])})
    layers = make_layers(num_parts=NUM_BLOCKS * heads.head_stride)
    step = GQADecodeStep(
        requests,
        layers,
        OPS,
        StepShape(6, 2, 1),
        CPU,
        num_layers=NUM_LAYERS,
    )
    step.plan(tensor(3, 0), torch.tensor([11, 0], dtype=torch.int32))
    step.begin(0)
    assert step.units.request_indices[0, :2].tolist() == [index, requests.num_requests]
    assert step.units.positions[0, :2].tolist() == [10, 0] and step.units.num_tokens[0, :2].tolist() == [11, 0]
    assert step.by_class[0].seq_lens.tolist() == [3, 3, 0, 0]  # units
    assert step.by_class[0].first_hot_block_ids.tolist() == [15, 16, -1, -1]
    step.first_units.zero_()
    step.reload_newest_units(requests.seqs_of(index))
    assert (step.first_units == -1).nonzero().tolist() == [
        [layer, 2 * index + head] for layer in range(NUM_LAYERS) for head in (0, 1)
    ]

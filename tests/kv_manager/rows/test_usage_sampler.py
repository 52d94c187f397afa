"""Reports of hits, misses and ages: from hot buffers whose selections are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm_hisparse.kv_manager.rows import usage_sampler
from vllm_hisparse.kv_manager.rows.hot_buffer import HotBufferShape
from vllm_hisparse.kv_manager.rows.mla_hot_buffer import MLAHotBuffer
from vllm_hisparse.kv_manager.rows.usage_sampler import STEPS_PER_REPORT, UsageSampler
from vllm_hisparse.kv_manager.usage import SIZES, Usage
from vllm_hisparse.ops.base import HotRows
from vllm_hisparse.ops.kv_heads import KVHeads

TOP_K, NUM_LAYERS, BLOCK_SIZE, ROWS_PER_BLOCK, NUM_BLOCKS, PROMPT = 16, 6, 8, 5, 110, 300
SHAPE = HotBufferShape(
    num_requests=3,
    max_batch=3,
    num_layers=NUM_LAYERS,
    top_k=TOP_K,
    max_blocks=64,
    block_size=BLOCK_SIZE,
    num_device_blocks=NUM_BLOCKS,
    max_hot_blocks=80,
    rows_per_hot_block=ROWS_PER_BLOCK,
)


class Requests:
    """Decoding requests whose selections keep a share of the positions; each layer keeps another share."""

    def __init__(
        self,
        num_hot_blocks: dict[int, int],
        max_query_len: int = 1,
        shares_from: int = NUM_LAYERS,
        layer_rows: tuple[int, ...] = (ROWS_PER_BLOCK,) * NUM_LAYERS,
    ):
        selects = [layer < shares_from for layer in range(NUM_LAYERS)]
        shape = replace(SHAPE, max_query_len=max_query_len, layer_rows=layer_rows)
        self.buffer = MLAHotBuffer(shape, torch.device("cpu"), selects)
        for rows in layer_rows:
            hot = HotRows(torch.zeros(NUM_BLOCKS * rows, 1), rows, rows)
            self.buffer.add_layer(hot, torch.zeros(64 * BLOCK_SIZE, 1))
        self.first_blocks, first = list(num_hot_blocks), 0
        for first_block, count in num_hot_blocks.items():
            assert first_block > 0
            self.buffer.extend_host_block_tables({first_block: (0, list(range(first, first + 60)))})
            self.buffer.change_hot_block_tables({first_block: (0, list(range(first_block, first_block + count)))})
        self.rng, self.num_steps = np.random.default_rng(0), 0
        self.selected = np.stack([self.rng.permutation(PROMPT)[:TOP_K] for _ in range(NUM_LAYERS)])
        self.kept = np.linspace(0.4, 0.9, NUM_LAYERS)
        self.swap_ins = [self.buffer.swap_in_of(layer) for layer in range(NUM_LAYERS)]

    def step(self) -> None:
        """All requests select the same."""
        newest = PROMPT + self.num_steps
        self.num_steps += 1
        first_blocks = torch.tensor(self.first_blocks, dtype=torch.int32)
        self.buffer.step.plan(first_blocks, torch.full((len(first_blocks),), newest + 1, dtype=torch.int32))
        for layer, swap_in in enumerate(self.swap_ins):
            stays = self.selected[layer][self.rng.random(TOP_K) < self.kept[layer]]
            others = np.setdiff1d(np.arange(PROMPT), stays)
            self.selected[layer] = np.concatenate((stays, self.rng.permutation(others)[: TOP_K - len(stays)]))
            swap_in(torch.from_numpy(self.selected[layer]).int().expand(len(first_blocks), -1).contiguous())


def reports(requests: Requests, num_steps: int) -> list[Usage]:
    sampler, found = UsageSampler(requests.buffer), []
    for number in range(1, num_steps + 1):
        requests.step()
        sampler.step_ends(number)
        if (usage := sampler.take()) is not None:
            found.append(usage)
    return found


@pytest.mark.long
def test_counts_are_those_since_the_last_report() -> None:
    requests = Requests({10: 10, 40: 20})
    found = reports(requests, 5 * STEPS_PER_REPORT)
    assert [usage.step for usage in found] == [STEPS_PER_REPORT * (1 + index) for index in range(5)]
    assert [usage.hits + usage.misses for usage in found] == [STEPS_PER_REPORT * 2 * NUM_LAYERS * TOP_K] * 5
    assert sum(usage.misses for usage in found) == requests.buffer.counts.by_seq.sum(0)[1]


@pytest.mark.long
def test_ages_tell_what_a_small_buffer_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves of two large buffers beside the misses of a small one with the same selections."""
    monkeypatch.setattr(usage_sampler, "LAYERS_PER_REPORT", NUM_LAYERS)
    monkeypatch.setattr(usage_sampler, "STEPS_PER_REPORT", 4)
    small_rows = 2 * TOP_K + 3  # one row is reserved for the new token
    # A small buffer, one of 5 selections, and one with a slot for every token; reports take turns
    requests = Requests({5: small_rows // ROWS_PER_BLOCK, 13: 16, 30: 70})
    reports(requests, 80)
    before = requests.buffer.counts.by_seq[0].tolist()
    curves = np.array([usage.curve for usage in reports(requests, 144)])
    hits, misses = (requests.buffer.counts.by_seq[0] - torch.tensor(before)).tolist()
    assert hits + misses == 144 * NUM_LAYERS * TOP_K
    expected, size = misses / (hits + misses), (small_rows - 1) / TOP_K
    assert 0.1 < expected < 0.6
    for turn in (1, 2):
        curve = curves[turn::3].mean(0)
        assert np.interp(size, SIZES[:8], curve[:8]) == pytest.approx(expected, abs=0.03)


def test_rows_of_the_prompt_tell_nothing() -> None:
    """They are hot from the start, and no step has selected them."""
    requests = Requests({10: 70})
    for residency in requests.buffer.residency:
        residency.entries[10 * ROWS_PER_BLOCK : 10 * ROWS_PER_BLOCK + PROMPT] = torch.arange(PROMPT)[:, None].int()
    [usage] = reports(requests, STEPS_PER_REPORT)
    assert usage.misses == 0
    known = [share for share in usage.curve if share == share]
    assert 0.2 < known[0] < 0.6 and len(known) < len(SIZES) / 2


def test_requests_and_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, seen = Requests({10: 10, 30: 2, 40: 20}, shares_from=3), []
    sampler = UsageSampler(requests.buffer)
    seqs = KVHeads.seqs
    monkeypatch.setattr(KVHeads, "seqs", lambda heads, index: seen.append(index) or seqs(heads, index))
    for number in range(4 * STEPS_PER_REPORT):
        sampler.step_ends(number)
        sampler.take()
    assert seen == [0, 2, 0, 2], "a request whose buffer holds no selection was looked at"


@pytest.mark.parametrize("steps_before", [1, 2])
def test_a_request_whose_blocks_change_tells_nothing(steps_before: int) -> None:
    """It gets a block between two of the three steps after which its rows are looked at."""
    requests = Requests({10: 60})
    sampler = UsageSampler(requests.buffer)
    for number in range(2 * STEPS_PER_REPORT):
        if number == STEPS_PER_REPORT - steps_before:
            requests.buffer.change_hot_block_tables({10: (60, [80])})
        requests.step()
        sampler.step_ends(number)
        usage = sampler.take()
        if number == STEPS_PER_REPORT - 1:
            assert usage.hits + usage.misses > 0 and usage.curves is None
    assert usage.curves is not None


def test_curves_of_layers_with_other_rows_are_over_the_size_of_a_mean_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with half and with three halves of the mean rows, which still hold all rows that were used."""
    monkeypatch.setattr(usage_sampler, "LAYERS_PER_REPORT", NUM_LAYERS)
    [equal] = reports(Requests({10: 60}, layer_rows=(6,) * NUM_LAYERS), STEPS_PER_REPORT)
    [usage] = reports(Requests({10: 60}, layer_rows=(3, 9, 3, 9, 3, 9)), STEPS_PER_REPORT)
    assert usage.curves.keys() == equal.curves.keys() == set(range(NUM_LAYERS))
    for layer, curve in usage.curves.items():
        own_size, mean_size = (1.5, 1) if layer % 2 else (1, 2)
        expected = equal.curves[layer][SIZES.index(own_size)]
        assert 0 < expected < 1 and curve[SIZES.index(mean_size)] == pytest.approx(expected)


@pytest.mark.parametrize(("layer_rows", "expected"), [((5,) * 6, 1), ((4, 6, 4, 6, 4, 6), 2)])
def test_layers_of_a_row_class_are_looked_at_in_the_same_places(
    monkeypatch: pytest.MonkeyPatch, layer_rows: tuple[int, ...], expected: int
) -> None:
    """A device gets no more small kernels than it has to."""
    sampler, found = UsageSampler(Requests({10: 10}, layer_rows=layer_rows).buffer), HotRows.entries
    calls: list[HotRows] = []
    monkeypatch.setattr(HotRows, "entries", lambda hot, *args: calls.append(hot) or found(hot, *args))
    for number in range(STEPS_PER_REPORT):
        sampler.step_ends(number)
    assert len(calls) == expected


def test_nothing_is_reported_of_no_request() -> None:
    buffer = MLAHotBuffer(SHAPE, torch.device("cpu"))
    sampler = UsageSampler(buffer)
    for number in range(STEPS_PER_REPORT):
        sampler.step_ends(number)
    assert sampler.take() == Usage(STEPS_PER_REPORT - 1, 0, 0, None)
    assert sampler.take() is None

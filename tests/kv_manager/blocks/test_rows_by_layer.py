"""Divisions of hot rows among layers: learned from what buffers of equal rows tell, tried on traces."""

from __future__ import annotations

import ast
import itertools
import logging
import re
import unittest
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from campaign.script import ScriptedEngine
from simulated_engine import hot_spec
from vllm.v1.outputs import KVConnectorOutput

from vllm_hisparse.cli.replay_layers import LayerMisses
from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.connector.metadata import HiSparseWorkerMetadata
from vllm_hisparse.kv_manager.blocks.admission import Demand
from vllm_hisparse.kv_manager.blocks.rows_by_layer import FIRST_LOOKS, RowsByLayer, best_division
from vllm_hisparse.kv_manager.usage import SIZES, Usage
from vllm_hisparse.layout import KVLayout
from vllm_hisparse.trace import Trace

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"
TOP_K, WARM_UP = 2048, 32
LOGGER = "vllm.vllm_hisparse.kv_manager.blocks.rows_by_layer"


@cache
def misses_of(trace: str) -> LayerMisses:
    return LayerMisses.of(Trace.read(TRACES / f"{trace}.trace"))


def curves_of(misses: LayerMisses, held: np.ndarray) -> dict[int, tuple[float, ...]]:
    """Curves over the size of a mean layer, as far as the buffers of each layer tell.

    Args:
        misses: misses of a trace.
        held: [layers] selections that each layer holds.
    """
    means, scales = misses.missed[:, :, WARM_UP:].mean((0, 2)) / misses.top_k, held / held.mean()
    return {
        layer: tuple(
            float(np.interp(size * scale, misses.sizes, mean)) if size * scale <= own else np.nan for size in SIZES
        )
        for layer, (mean, scale, own) in enumerate(zip(means, scales, held, strict=True))
    }


def learner(shares: list[float] | None = None, group_size: int = 1, num_groups: int = 8) -> RowsByLayer:
    given = shares or [1.0] * num_groups
    layout = KVLayout(656, 132, num_groups * group_size, num_groups, row_shares=tuple((s, group_size) for s in given))
    return RowsByLayer(layout, TOP_K, 2 * TOP_K)


@pytest.mark.parametrize("size", [3.5, 7])
def test_a_list_that_is_learned_from_equal_rows_is_nearly_the_best_one(size: float) -> None:
    misses, rows = misses_of("code-dsa-4096"), learner()
    curves = curves_of(misses, np.full(8, size))
    for _ in range(2):
        rows.measured(Usage(1, 1, 1, curves), None)
    shares, ratio = rows.best(size, float(misses.sizes[-1]))
    best = misses.shared(misses.rows_by_layer(size, WARM_UP), size, WARM_UP)
    equal, found = misses.equal(size, WARM_UP), misses.shared(shares, size, WARM_UP)
    assert np.mean(shares) == pytest.approx(1, abs=0.01) and min(shares) >= 0.54
    assert found / equal < 0.7 and found - best < 0.1 * equal
    assert found / equal < ratio < 0.85, "a careful estimate"


def test_a_list_in_use_is_learned_further() -> None:
    """Layers that have more rows tell more; a division that is the best already stays nearly as it is."""
    misses, size = misses_of("code-dsa-4096"), 3.5
    shares = misses.rows_by_layer(size, WARM_UP)
    rows = learner(shares)
    present = np.array(rows.present_shares)
    rows.measured(Usage(1, 1, 1, curves_of(misses, size * present)), None)
    found, ratio = rows.best(size, float(misses.sizes[-1]))
    assert found == pytest.approx(shares, abs=0.35)
    assert 0.85 < ratio <= 1.05
    assert misses.shared(found, size, WARM_UP) < 1.1 * misses.shared(shares, size, WARM_UP)


def test_groups_of_layers_take_as_much_memory_as_they_have_layers() -> None:
    """Two groups with one curve: the one with three layers gets no more rows than the one with one."""
    curve = tuple(1 / size for size in SIZES)
    layout = KVLayout(656, 132, 4, 2, row_shares=((1.0, 3), (1.0, 1)))
    rows = RowsByLayer(layout, TOP_K, 2 * TOP_K)
    rows.measured(Usage(1, 1, 1, {0: curve, 1: curve}), None)
    shares, ratio = rows.best(4.0, 16.0)
    assert shares == pytest.approx([1, 1], abs=0.1) and ratio == pytest.approx(1, abs=0.03)
    assert (3 * shares[0] + shares[1]) / 4 == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("key_bytes", [None, 68])
@pytest.mark.parametrize("num_drafts", [0, 1])
@pytest.mark.parametrize("ratio", [1, 1.5, 2, 4])
def test_a_learned_list_leaves_every_layer_room_for_a_selection(
    key_bytes: int | None, num_drafts: int, ratio: float
) -> None:
    """Layers that miss nothing beside one that misses much; blocks have 6 or 13 rows of a mean layer."""
    query_len, rng = 1 + num_drafts, np.random.default_rng(0)
    options = {"device_buffer_size": int(ratio * query_len * TOP_K), "top_k": TOP_K}
    sizes = {"narrow_key_bytes": key_bytes, "max_query_len": query_len}
    config = HiSparseConfig(host_pool_gib=1, **options)
    layout = KVLayout(656, 132, 61, 61, row_shares=config.row_shares([True] * 61), **sizes)
    rows = RowsByLayer(layout, TOP_K, config.rows)
    for layer in range(61):
        power = rng.choice([0.05, 0.1, 2, 8])
        rows.measured(Usage(1, 1, 1, {layer: tuple(size**-power for size in SIZES)}), None)
    shares, _ = rows.best(1.7 * ratio * query_len, 64.0)
    assert (len(set(shares)) == 1) == (ratio == 1)
    found = HiSparseConfig(host_pool_gib=1, rows_by_layer=shares, **options)
    found.check_rows_by_layer(replace(layout, row_shares=found.row_shares([True] * 61)))


def divisions(num_groups: int, budget: int, sizes: np.ndarray) -> Iterator[tuple[int, ...]]:
    for held in itertools.product(range(budget + 1), repeat=num_groups):
        if np.dot(held, sizes) <= budget:
            yield held


@pytest.mark.parametrize("seed", range(10))
def test_the_best_division_of_falling_gains_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gains = -np.sort(-rng.random((3, 6)), axis=1)
    misses = 10 - np.concatenate((np.zeros((3, 1)), gains.cumsum(1)), axis=1)
    sizes = np.ones(3, int)
    held = best_division(misses, 6, sizes)
    least = min(sum(misses[group, each] for group, each in enumerate(found)) for found in divisions(3, 6, sizes))
    assert held.sum() <= 6
    assert sum(misses[group, each] for group, each in enumerate(held)) == pytest.approx(least)


def test_a_gain_that_comes_late_is_seen() -> None:
    """A layer that saves nothing with one step more, and everything with four."""
    misses = np.array([[10, 9, 8.5, 8.2, 8.1, 8.1], [10, 10, 10, 10, 0, 0]])
    assert best_division(misses, 5, np.ones(2, int)).tolist() == [1, 4]
    assert best_division(misses, 3, np.ones(2, int)).tolist() == [3, 0]


def test_the_log_has_a_list_after_some_looks_and_after_twice_as_many() -> None:
    rows, misses = learner(), misses_of("code-dsa-4096")
    curves = curves_of(misses, np.full(8, 3.5))
    blocks = np.full(4, 100.0)
    demand = Demand(4, np.full(4, 8.0 * TOP_K), blocks, 10 * blocks, np.full(4, 3.5 * TOP_K), 400, 13, 13)
    looks = []
    with unittest.TestCase().assertLogs(LOGGER, logging.INFO) as logs:
        for look, layer in itertools.product(range(1, 3 * FIRST_LOOKS), range(8)):
            rows.measured(Usage(look, 1, 1, {layer: curves[layer]}), demand)
            looks += [look] * (len(logs.records) - len(looks))
    assert looks == [FIRST_LOOKS, 2 * FIRST_LOOKS]
    message = logs.records[0].getMessage()
    shares = ast.literal_eval(re.search(r'"rows_by_layer": (\[.*?\])', message)[1])
    assert shares == rows.best(3.5, 8.0)[0]
    assert f"each layer was read {FIRST_LOOKS} times; requests have 3.5 times top_k rows in a mean layer" in message


@pytest.mark.parametrize(("more", "expected"), [(0, "hot as a whole"), (900, "no list misses clearly fewer")])
def test_the_log_says_if_no_layer_needs_more_rows(more: float, expected: str) -> None:
    rows, blocks = learner(), np.full(1, 100.0)
    demand = Demand(1, np.full(1, 3.0 * TOP_K), blocks, np.full(1, more), np.full(1, 2.0 * TOP_K), 100, 13, 13)
    curves = dict.fromkeys(range(8), tuple(1 / size for size in SIZES))
    with unittest.TestCase().assertLogs(LOGGER, logging.INFO) as logs:
        for look in range(FIRST_LOOKS):
            rows.measured(Usage(look, 1, 1, curves), demand)
    (record,) = logs.records
    assert expected in record.getMessage()


@pytest.mark.parametrize("num_missing_blocks", [0, 20])
def test_requests_are_hot_as_a_whole_if_equal_rows_hold_them(num_missing_blocks: int) -> None:
    """A mean layer has more rows than a request has tokens in both cases."""
    shares, equal, tokens = (2.0, *[0.5, 0.75] * 30), hot_spec(), 10_000
    layout = replace(equal.layout, row_shares=tuple((share, 1) for share in shares), narrow_key_bytes=68)
    spec = replace(equal, layout=layout)
    num_blocks = spec.num_request_blocks(tokens, is_whole=True) - num_missing_blocks
    demand, rows = Demand.of(spec, [tokens], num_blocks), RowsByLayer(spec.layout, TOP_K, 2 * TOP_K)
    assert layout.mean_rows > layout.equal_rows > layout.fewest_rows
    assert demand.rows_with(np.ones(1))[0, 0] > tokens
    curves = dict.fromkeys(range(61), tuple(1 / size for size in SIZES))
    with unittest.TestCase().assertLogs(LOGGER, logging.INFO) as logs:
        for look in range(FIRST_LOOKS):
            rows.measured(Usage(look, 1, 1, curves), demand)
    (record,) = logs.records
    assert ("hot as a whole" in record.getMessage()) == (num_missing_blocks == 0)


def test_requests_that_are_hot_as_a_whole_do_not_count() -> None:
    """Twenty short requests beside a long one, which alone misses rows."""
    equal = hot_spec()
    spec = replace(equal, layout=replace(equal.layout, row_shares=((1.0, 1),) * 61))
    num_blocks = spec.num_request_blocks(30_000) + 20 * spec.num_request_blocks(200, is_whole=True) + 200
    demand, rows = Demand.of(spec, [200] * 20 + [30_000], num_blocks), RowsByLayer(spec.layout, TOP_K, 2 * TOP_K)
    curves = dict.fromkeys(range(len(spec.layout.row_shares)), tuple(1 / size for size in SIZES))
    found: list[tuple[float, float]] = []
    rows.best = lambda size, whole: found.append((size, whole)) or ([1.0], 1.0)  # type: ignore[method-assign]
    for look in range(FIRST_LOOKS):
        rows.measured(Usage(look, 1, 1, curves), demand)
    ((size, whole),) = found
    assert whole == pytest.approx(30_000 / TOP_K) and 2 < size < whole


def test_an_engine_learns_from_the_reports_of_its_workers() -> None:
    shares = {"row_shares": ((1.0, 1), (1.0, 1))}
    engine = ScriptedEngine(options={"log_rows_by_layer": True}, **shares)
    curve = tuple(1 / size for size in SIZES)
    usage = Usage(1, 1, 1, {0: curve, 1: (1.0,) * len(SIZES)})
    engine.half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=HiSparseWorkerMetadata(usage=usage)))
    best, _ = engine.half.rows_by_layer.best(4.0, 16.0)
    assert best[0] > best[1]
    assert ScriptedEngine(**shares).half.rows_by_layer is None

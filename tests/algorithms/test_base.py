"""Properties of every algorithm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hisparse.algorithms.base import SparseAlgorithm, State
from vllm_hisparse.algorithms.registry import ALGORITHMS, find_algorithm
from vllm_hisparse.algorithms.testing import (
    ENTRIES_PER_BLOCK,
    REQUEST,
    SHAPE,
    check,
    chosen,
    poisoned_state,
    random_keys,
    random_query,
    represent,
    retrieve,
)

from .testing import MAX_TOKENS, make, state_bytes

SMALL_OPTIONS = {
    "quest": {"page_size": 4},
    "streaming_llm": {"page_size": 4},
    "cluster_kv": {"sink_tokens": 3, "tokens_per_cluster": 9, "update_interval": 7, "clusters_per_update": 2},
    "pq_cache": {"sink_tokens": 3, "window_tokens": 5, "num_bits": 3},
    "oracle": {},
}
DENSE = list(SMALL_OPTIONS)


def small(name: str, budget: int = 32, **sizes: int) -> SparseAlgorithm:
    return make(find_algorithm(name), budget, **sizes, **SMALL_OPTIONS[name])


def test_the_registry_knows_its_algorithms_by_name() -> None:
    assert set(ALGORITHMS) == {*DENSE, "dsa", "msa"}
    for name in ALGORITHMS:
        assert find_algorithm(name).__name__.lower() == name.replace("_", "")


@pytest.mark.parametrize("name", ["", "Quest", "quest ", "no.such.module", "torch"])
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(LookupError, match="cluster_kv, dsa, msa, oracle, pq_cache, quest, streaming_llm"):
        find_algorithm(name)


@pytest.mark.long
def test_the_registry_imports_nothing_before_it_is_asked() -> None:
    import subprocess
    import sys

    code = "import sys, vllm_hisparse.config; sys.exit(any('algorithms.quest' in name for name in sys.modules))"
    assert subprocess.call([sys.executable, "-c", code]) == 0


@pytest.mark.parametrize("options", ["small", "default"])
@pytest.mark.parametrize("name", DENSE)
def test_every_algorithm_passes_the_checks_for_authors(name: str, options: str) -> None:
    check(name, SMALL_OPTIONS[name] if options == "small" else {})


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
@given(num_prompt=st.integers(0, 90), num_new=st.integers(1, 40), budget=st.sampled_from([16, 24, 64]))
def test_selections_fit_the_budget_and_hold_the_newest(name: str, num_prompt: int, num_new: int, budget: int) -> None:
    algorithm, num_tokens = small(name, budget), num_prompt + num_new
    state = represent(algorithm, random_keys(num_tokens, num_prompt), num_prompt)
    selection = retrieve(algorithm, state, random_query(num_new), num_tokens)
    num_units = -(-num_tokens // algorithm.tokens_per_unit)
    assert selection.shape == (1, SHAPE.num_kv_heads, budget // algorithm.tokens_per_unit)
    assert selection.dtype == torch.int32
    for units in chosen(selection):
        assert len(units) == min(num_units, budget // algorithm.tokens_per_unit)
        assert units <= set(range(num_units))
        assert num_units - 1 in units


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in DENSE if not find_algorithm(name).needs_whole_prompt])
@given(cuts=st.lists(st.integers(0, 80), max_size=4).map(sorted), num_prompt=st.integers(80, 90))
def test_chunks_and_single_tokens_give_the_state_of_one_chunk(name: str, cuts: list[int], num_prompt: int) -> None:
    algorithm, keys = small(name), random_keys(90)
    pieces, whole = represent(algorithm, keys, num_prompt, tuple(cuts)), represent(algorithm, keys, 90)
    num_units = -(-90 // algorithm.tokens_per_unit)
    for field in whole:
        torch.testing.assert_close(pieces[field][REQUEST][:num_units], whole[field][REQUEST][:num_units])


def selections_with_drafts(
    algorithm: SparseAlgorithm, keys: torch.Tensor, num_prompt: int, accepted: list[int]
) -> tuple[State, dict[int, list[set[int]]]]:
    """The selection of each token after the prompt if every step has as many tokens as it may, of which `accepted` stay
    beside the first; the others have keys that stand out. Also the state after all of them."""
    state, position, selected = represent(algorithm, keys[:num_prompt], num_prompt), num_prompt, {}
    for step, num_accepted in enumerate(accepted):
        for i in range(algorithm.max_query_len):
            is_right = i <= num_accepted and position + i < len(keys)
            key = keys[position + i][None] if is_right else random_keys(1, 1000 * step + i) * 30
            algorithm.update_representations(state, torch.tensor([REQUEST]), key, torch.tensor([position + i]))
            if is_right:
                query = random_query(position + i)
                selected[position + i] = chosen(retrieve(algorithm, state, query, position + i + 1))
        position += 1 + num_accepted
        if position >= len(keys):
            break
    return state, selected


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
@settings(max_examples=10)
@given(
    num_prompt=st.integers(35, 55),
    accepted=st.lists(st.integers(-1, 3), min_size=40, max_size=40),
    max_query_len=st.sampled_from([2, 4]),
)
def test_rejected_tokens_leave_nothing_behind(
    name: str, num_prompt: int, accepted: list[int], max_query_len: int
) -> None:
    """Every token selects what it would without drafts. -1: the step's first token, too, is computed again, as at the
    end of a session's turn."""
    keys, sizes = random_keys(80, num_prompt), {"budget": 16, "max_query_len": max_query_len}
    algorithm, plain = small(name, **sizes), small(name, budget=16)
    accepted = [min(num, max_query_len - 1) for num in accepted]
    _, selected = selections_with_drafts(algorithm, keys, num_prompt, accepted)
    _, expected = selections_with_drafts(plain, keys, num_prompt, [0] * 60)
    assert selected.keys() <= expected.keys()
    assert selected == {position: expected[position] for position in selected}


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
def test_state_after_rejected_tokens_is_that_without_them(name: str) -> None:
    keys, algorithm, plain = random_keys(90), small(name, max_query_len=4), small(name)
    # One more token after the last rejected ones, with which an algorithm may go back over them.
    state, _ = selections_with_drafts(algorithm, keys[:89], 40, [0, 1, 3, 0, 0, 2, 1, 0] * 4)
    algorithm.update_representations(state, torch.tensor([REQUEST]), keys[89:], torch.tensor([89]))
    expected = represent(plain, keys, 40)
    counts = {"bounds": 23, "labels": 90, "codes": 90, "keys": 90, "codebooks": None}
    counts |= {"centroids": int(expected.get("num_clusters", [0] * 4)[REQUEST]), "num_clusters": None}
    for field in expected.keys() & counts.keys():
        got, want = state[field][REQUEST], expected[field][REQUEST]
        assert torch.equal(got[: counts[field]], want[: counts[field]]) if want.dim() else got == want, field
    assert len(expected.keys() & counts.keys()) > 0 or name == "streaming_llm"


@pytest.mark.parametrize("name", DENSE)
def test_state_takes_what_is_declared(name: str) -> None:
    """The state of a request of the longest length, and the part that every request has."""
    algorithm, state = small(name), poisoned_state(small(name), 1)
    num_bytes = sum(field[0].numel() * field[0].element_size() for field in state.values())
    assert state_bytes(algorithm, MAX_TOKENS) == num_bytes
    fixed = {field: state[field][0].nbytes for field in algorithm.fixed_fields}
    assert fixed == {field: declared.num_bytes for field, declared in algorithm.fixed_fields.items()}
    longer = small(name, max_tokens=100 * MAX_TOKENS)
    assert longer.fixed_fields == algorithm.fixed_fields and longer.state_entries == algorithm.state_entries


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
@settings(max_examples=settings().max_examples // 2)
@given(num_prompt=st.integers(0, 60), num_new=st.integers(1, 60))
def test_a_request_has_entries_for_its_own_tokens_alone(name: str, num_prompt: int, num_new: int) -> None:
    """A request with blocks for exactly its own tokens selects the same, and nothing is written beyond them."""
    algorithm, num_tokens = small(name), num_prompt + num_new
    keys = random_keys(num_tokens, num_prompt)
    whole, short = represent(algorithm, keys, num_prompt), poisoned_state(algorithm, 4)
    for name_of, field in algorithm.growing_fields.items():
        num_blocks = -(-field.num_entries(num_tokens) // ENTRIES_PER_BLOCK)
        short[name_of].table[REQUEST, num_blocks:] = 0
    nobodys = {field: short[field].blocks[0].clone() for field in algorithm.growing_fields}
    represent(algorithm, keys, num_prompt, state=short)
    for seed in range(3):
        query = random_query(seed)
        expected, got = (retrieve(algorithm, state, query, num_tokens) for state in (whole, short))
        assert torch.equal(got, expected)
    for field, before in nobodys.items():
        assert torch.equal(short[field].blocks[0].view(torch.uint8), before.view(torch.uint8)), "written beyond"


@pytest.mark.parametrize("name", DENSE)
def test_what_is_always_selected_fits_the_least_budget(name: str) -> None:
    options = find_algorithm(name).Options(**SMALL_OPTIONS[name])
    algorithm = small(name, find_algorithm(name).min_budget(options))
    state = represent(algorithm, random_keys(100), 60)
    for units in chosen(retrieve(algorithm, state, random_query(), 100)):
        assert 99 // algorithm.tokens_per_unit in units

"""Division of blocks: properties of pure functions. `test_lent_blocks.py` tests lending in a schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.kv_manager.blocks.lending import MIN_CHANGE, Borrower, blocks_wanted, divide, plan


@st.composite
def borrowers(draw: st.DrawFn) -> dict[str, Borrower]:
    """Requests in any state."""
    found = {}
    for name in "abcdef"[: draw(st.integers(0, 6))]:
        least = draw(st.integers(0, 40))
        found[name] = Borrower(draw(st.integers(0, 40)), least, least + draw(st.sampled_from([0, 3])))
    return found


def num_lent(requests: dict[str, Borrower]) -> int:
    return sum(request.num_lent for request in requests.values())


def plan_blocks(requests: dict[str, Borrower], num_available: int, num_slack: int) -> tuple[dict[str, int], int]:
    """The plan, and the blocks that it divides."""
    num_blocks = max(num_lent(requests) + num_available - num_slack, 0)
    return plan(requests, num_blocks, num_available), num_blocks


def test_all_get_equal_shares_of_what_is_free() -> None:
    assert divide({"a": 5, "b": 3, "c": 0}, 8) == {"a": 5, "b": 3, "c": 0}
    assert divide({"a": 5, "b": 3, "c": 5}, 9) == {"b": 3, "a": 3, "c": 3}
    assert divide({"a": 9, "b": 9, "c": 2}, 8) == {"c": 2, "a": 3, "b": 3}
    assert divide({"a": 9, "b": 9}, 0) == {"a": 0, "b": 0}
    assert divide({"a": 5, "b": 6, "c": 2}, 8) == {"c": 2, "a": 3, "b": 3}
    assert divide({}, 5) == {}
    assert divide({"a": 0, "b": 2, "c": 0}, 1) == {"b": 1, "a": 0, "c": 0}, "nobody else wants the last block"


@pytest.mark.long
@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=8), st.integers(0, 400))
def test_blocks_are_divided_equally_and_without_waste(wanted: dict[str, int], num_blocks: int) -> None:
    found = divide(wanted, num_blocks)
    assert found.keys() == wanted.keys()
    assert all(0 <= num <= wanted[name] for name, num in found.items())
    assert sum(found.values()) == min(sum(wanted.values()), num_blocks)
    short = [found[name] for name in wanted if found[name] < wanted[name]]
    assert all(num <= share + 1 for num in found.values() for share in short), "somebody got more than another's share"


@given(borrowers(), st.integers(-60, 120), st.integers(0, 10))
def test_no_more_is_lent_than_is_free(requests: dict[str, Borrower], num_available: int, num_slack: int) -> None:
    found, num_blocks = plan_blocks(requests, num_available, num_slack)
    assert found.keys() == requests.keys() and all(num >= 0 for num in found.values())
    assert sum(found.values()) <= max(num_lent(requests) + num_available, 0)
    if num_available < 0:
        assert sum(found.values()) <= num_blocks, "what is needed comes back as a whole"


@given(borrowers(), st.integers(-60, 120), st.integers(0, 10))
def test_nobody_gets_more_than_it_wants(requests: dict[str, Borrower], num_available: int, num_slack: int) -> None:
    found, _ = plan_blocks(requests, num_available, num_slack)
    assert all(found[name] <= max(request.num_lent, request.most) for name, request in requests.items())


def test_nobody_loses_blocks_to_an_increase_that_is_left_out() -> None:
    requests = {"a": Borrower(104, 100, 105), "b": Borrower(96, 101, 105)}
    assert plan(requests, num_blocks=200, num_available=0) == {"a": 104, "b": 96}


@given(borrowers())
def test_all_get_the_least_that_they_want_if_there_is_enough(requests: dict[str, Borrower]) -> None:
    num_needed = sum(request.least for request in requests.values())
    found, _ = plan_blocks(requests, max(num_needed - num_lent(requests), 0), 0)
    assert all(found[name] >= request.least for name, request in requests.items())


@given(borrowers(), st.integers(-60, 120), st.integers(0, 10))
def test_a_plan_is_stable(requests: dict[str, Borrower], num_available: int, num_slack: int) -> None:
    """Carried out, nothing is left to change, but for a request that has all that it wants now and had not."""
    found, _ = plan_blocks(requests, num_available, num_slack)
    after = {name: Borrower(found[name], request.least, request.most) for name, request in requests.items()}
    num_left = num_available - sum(found.values()) + num_lent(requests)
    again, _ = plan_blocks(after, num_left, num_slack)
    assert sum(again.values()) <= sum(found.values()) + max(num_left, 0)
    for name, num in again.items():
        is_small = abs(num - found[name]) <= MIN_CHANGE * max(num, found[name])
        assert not is_small or num in (found[name], blocks_wanted(after, 10**6)[name], requests[name].least)

"""Which keys an algorithm has yet to see, and whether its state fits."""

from types import SimpleNamespace

import pytest

from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.worker.algorithm_state import AlgorithmState, KeySpan, check_state_fits

MIB = 2**20


def make_state(needs_whole_prompt: bool = False) -> AlgorithmState:
    algorithm = SimpleNamespace(
        needs_whole_prompt=needs_whole_prompt, tokens_per_unit=4, allocate_state=lambda num_requests, device: {}
    )
    state = AlgorithmState(algorithm, num_requests=2, num_layers=3, device="cpu")
    assert len(state.layers) == 3
    state.start(1)
    return state


def test_a_prompt_is_represented_chunk_by_chunk() -> None:
    state = make_state()
    assert state.prefill(1, 0, 20) == (KeySpan(1, 0, 20),)
    assert state.prefill(1, 20, 57) == (KeySpan(1, 20, 57),)
    assert state.begin_decoding(1, 57) == ()
    assert state.is_decoding(1)
    assert state.begin_decoding(1, 58) == ()


def test_what_came_before_a_chunk_is_represented_with_it() -> None:
    state = make_state()
    assert state.prefill(1, 30, 40) == (KeySpan(1, 0, 40),)


def test_a_whole_prompt_is_represented_when_its_request_decodes() -> None:
    state = make_state(needs_whole_prompt=True)
    assert state.prefill(1, 0, 20) == state.prefill(1, 20, 40) == ()
    assert state.begin_decoding(1, 40) == (KeySpan(1, 0, 40),)


def test_an_imported_prompt_is_represented_when_its_request_decodes() -> None:
    assert make_state().begin_decoding(1, 75) == (KeySpan(1, 0, 75),)


def test_a_request_that_decodes_its_first_token_forgets_who_had_its_index() -> None:
    state = make_state()
    assert state.begin_decoding(1, 0) == (KeySpan.no_keys(1),) == (KeySpan(1, 0, 0),)
    assert state.is_decoding(1) and not state.is_decoding(0)


@pytest.mark.parametrize(("needs_whole_prompt", "spans"), [(False, (KeySpan(1, 40, 60),)), (True, ())])
def test_a_prompt_goes_on_after_a_step_of_one_token(needs_whole_prompt: bool, spans: tuple[KeySpan, ...]) -> None:
    """From the start of a unit, into which rejected drafts may have come."""
    state = make_state(needs_whole_prompt)
    state.begin_decoding(1, 40)
    assert state.prefill(1, 40, 41) == (KeySpan(1, 40, 41),)  # a decoding step that the runner put among the prefills
    assert state.is_decoding(1)
    assert state.prefill(1, 41, 60) == spans
    assert not state.is_decoding(1)
    assert state.begin_decoding(1, 60) == ((KeySpan(1, 0, 60),) if needs_whole_prompt else ())


def test_a_new_request_starts_anew() -> None:
    state = make_state()
    state.begin_decoding(1, 40)
    state.start(1)
    assert not state.is_decoding(1)
    assert state.begin_decoding(1, 7) == (KeySpan(1, 0, 7),)


def test_state_that_just_fits() -> None:
    check_state_fits("quest", 7, 256, 10 * MIB, 80 * MIB)  # one entry is of no request


def test_refuses_state_that_does_not_fit() -> None:
    with pytest.raises(HiSparseConfigError) as refused:
        check_state_fits("quest", 20, 256, 64 * MIB, 1024 * MIB)
    message = str(refused.value)
    assert message.startswith("--max-num-seqs: got 256, expected at most 15: 'quest' keeps 64.0 MiB")
    assert "1.0 GiB of the device are free for it. Lower it or --max-model-len" in message

"""State of an algorithm: its place, the keys that are not represented yet, and the check of its fixed size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_hisparse.algorithms.base import StateField
from vllm_hisparse.config import HiSparseConfigError
from vllm_hisparse.kv_manager.rows.algorithm_state import AlgorithmState, KeySpan, check_fixed_state_fits
from vllm_hisparse.layout import StateLayout

MIB = 2**20
FIELDS = {"scores": StateField((2, 3), torch.float32, 4), "marks": StateField((5,), torch.int16, 1)}
FIXED = {"count": StateField((), torch.int64), "book": StateField((3,), torch.float32)}
MAX_TOKENS, NUM_LAYERS, BLOCK_BYTES = 40, 3, 200


def make_state(needs_whole_prompt: bool = False, memory: torch.Tensor | None = None) -> AlgorithmState:
    """State of two requests, with fields of 4 entries and of 1 token; blocks of 2 entries and of 6."""
    algorithm = SimpleNamespace(
        needs_whole_prompt=needs_whole_prompt,
        tokens_per_unit=4,
        max_tokens=MAX_TOKENS,
        growing_fields=FIELDS,
        fixed_fields=FIXED,
    )
    layout = StateLayout(((4, 24), (1, 10)), NUM_LAYERS, BLOCK_BYTES)
    assert (layout.entries_per_block, layout.field_blocks(MAX_TOKENS)) == ((2, 6), [5, 7])
    memory = torch.zeros(30, BLOCK_BYTES, dtype=torch.uint8) if memory is None else memory
    tables = torch.arange(36, dtype=torch.int32).view(3, 12) % 30
    state = AlgorithmState(algorithm, layout, tables, memory)
    assert len(state.layers) == 3
    state.start(1)
    return state


def test_layers_and_fields_share_no_byte() -> None:
    """Every entry of every request, layer and field is written; then each holds what was written."""
    memory = torch.zeros(30, BLOCK_BYTES + 24, dtype=torch.uint8)[:, :BLOCK_BYTES]  # blocks that lie apart
    state = make_state(memory=memory)
    values = {}
    for layer, fields in enumerate(state.layers):
        assert fields["count"].shape == (3,) and fields["book"].shape == (3, 3)
        for name, field in FIELDS.items():
            num_entries = field.num_entries(MAX_TOKENS)
            for request in range(2):
                new = torch.randint(100, (num_entries, *field.shape)).to(field.dtype)
                fields[name][request, torch.arange(num_entries)] = new
                values[layer, name, request] = new
    for (layer, name, request), expected in values.items():
        assert torch.equal(state.layers[layer][name][request], expected)
        assert torch.equal(state.layers[layer][name][torch.tensor([1, request])][1], expected)
    used = sorted({int(block) for block in state.layers[0]["scores"].table[:2].flatten()})
    assert memory[used].any(1).all() and not memory[24:].any(), "the memory is another's, or a block of nobody's"


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
    """A prompt is represented again from the start of a unit, because the unit may include rejected drafts."""
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
    check_fixed_state_fits("quest", 7, 256, 10 * MIB, 80 * MIB)  # one entry is of no request


def test_refuses_state_that_does_not_fit() -> None:
    with pytest.raises(HiSparseConfigError) as refused:
        check_fixed_state_fits("quest", 20, 256, 64 * MIB, 1024 * MIB)
    message = str(refused.value)
    assert message.startswith("--max-num-seqs: got 256, expected at most 15: 'quest' keeps 64.0 MiB")
    assert "for every request that can run, and 1.0 GiB of the device are free for it. Lower it, or" in message

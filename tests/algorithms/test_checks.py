"""The checks for authors of algorithms find what breaks a rule, and errors say what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vllm_hisparse.algorithms.base import AlgorithmOptions, SparseAlgorithm, StateField
from vllm_hisparse.algorithms.quest import Quest
from vllm_hisparse.algorithms.registry import AlgorithmRefused, check_class, find_algorithm
from vllm_hisparse.algorithms.testing import SHAPE, results
from vllm_hisparse.cli.main import app
from vllm_hisparse.config import HiSparseConfig, HiSparseConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from mean_page import PAGE, MeanPage

sys.path.pop(0)


class Reads(MeanPage):
    def retrieve_topk(self, state, request_indices, query, num_tokens):
        assert num_tokens.max().item() >= 0
        return super().retrieve_topk(state, request_indices, query, num_tokens)


class Masks(MeanPage):
    def update_representations(self, state, request_indices, keys, positions):
        is_old = positions > 0
        super().update_representations(state, request_indices[is_old], keys[is_old], positions[is_old])
        super().update_representations(state, request_indices, keys, positions)


class KeepsDrafts(MeanPage):
    forgets_drafts = True


class KeepsTheTurn(MeanPage):
    """Adds tokens that come again once more."""

    def construct_representations(self, state, request_index, keys, first):
        pages = torch.arange(first // PAGE, -(-(first + len(keys)) // PAGE))
        old = state["sums"][request_index, pages].nan_to_num() if first else 0
        super().construct_representations(state, request_index, keys, first)
        if first and first % PAGE == 0:
            state["sums"][request_index, pages] = state["sums"][request_index, pages] + old


class KeepsTheRequest(MeanPage):
    """A request adds to the sums of the one before it."""

    def construct_representations(self, state, request_index, keys, first):
        pages = torch.arange(first // PAGE, -(-(first + len(keys)) // PAGE))
        old = state["sums"][request_index, pages].nan_to_num()
        super().construct_representations(state, request_index, keys, first)
        if not first:
            state["sums"][request_index, pages] = state["sums"][request_index, pages] + old


class FirstKey(MeanPage):
    """The result depends on the chunks of a prompt."""

    def construct_representations(self, state, request_index, keys, first):
        super().construct_representations(state, request_index, keys, first)
        if len(keys):
            state["sums"][request_index, torch.tensor([first // PAGE])] = keys[:1] * 20


class FirstRequest(MeanPage):
    def retrieve_topk(self, state, request_indices, query, num_tokens):
        return super().retrieve_topk(state, request_indices[:1].expand_as(request_indices), query, num_tokens)


class Writes(MeanPage):
    def retrieve_topk(self, state, request_indices, query, num_tokens):
        state["sums"][request_indices, num_tokens // PAGE] = 0
        return super().retrieve_topk(state, request_indices, query, num_tokens)


class Changed(MeanPage):
    def change(self, selection: torch.Tensor, num_tokens: torch.Tensor) -> object:
        raise NotImplementedError

    def retrieve_topk(self, state, request_indices, query, num_tokens):
        return self.change(super().retrieve_topk(state, request_indices, query, num_tokens), num_tokens)


class Long(Changed):
    def change(self, selection, num_tokens):
        return selection.long()


class Backwards(Changed):
    def change(self, selection, num_tokens):
        return selection.flip(-1)


class Repeats(Changed):
    def change(self, selection, num_tokens):
        return torch.where(selection > 0, selection.amax(-1, keepdim=True), selection)


class Oldest(Changed):
    """Leaves the newest unit out."""

    def change(self, selection, num_tokens):
        return torch.where(selection == selection.amax(-1, keepdim=True), -1, selection)


class Padding(Changed):
    """Selects for places without tokens."""

    def change(self, selection, num_tokens):
        return selection.clamp_min(0) if not num_tokens.any() else selection


class Infinite(MeanPage):
    """Leaves units out by a score of minus infinity."""

    def select(self, scores, num_tokens, keep=None):
        scores[..., 3] = -float("inf")
        return super().select(scores, num_tokens, keep)


class Narrow(MeanPage):
    def select(self, scores, num_tokens, keep=None):
        return super().select(scores[..., 1:], num_tokens, keep)


class Whole(MeanPage):
    def select(self, scores, num_tokens, keep=None):
        return super().select(scores, num_tokens, torch.ones(len(scores), self.max_units))


class Integers(MeanPage):
    def select(self, scores, num_tokens, keep=None):
        return super().select(scores.long(), num_tokens, keep)


class Beyond(Changed):
    """Selects a unit beyond the request, in place of one before the newest."""

    def change(self, selection, num_tokens):
        newest = ((num_tokens[:, None, None] - 1) // PAGE).int()
        is_changed = (selection >= 0).sum(-1, keepdim=True) > 1
        is_first = torch.arange(selection.shape[-1]) == 0
        changed = torch.where(is_changed & (selection == newest), newest + 1, selection)
        return torch.where(is_changed & is_first, newest, changed)


class Floats(MeanPage):
    """Takes keys and queries for float32."""

    def retrieve_topk(self, state, request_indices, query, num_tokens):
        assert query.dtype == torch.float32, "expected float32"
        return super().retrieve_topk(state, request_indices, query, num_tokens)


class OnTheObject(MeanPage):
    """Keeps the last key on the object."""

    def update_representations(self, state, request_indices, keys, positions):
        self.last = getattr(self, "last", keys) if positions.min() % 2 else keys
        super().update_representations(state, request_indices, self.last[: len(keys)], positions)


class NewTokens(MeanPage):
    """Takes new tokens for larger than those of a prompt."""

    def update_representations(self, state, request_indices, keys, positions):
        super().update_representations(state, request_indices, keys * 5, positions)


class ByList(MeanPage):
    def retrieve_topk(self, state, request_indices, query, num_tokens):
        assert max(num_tokens.tolist()) >= 0
        return super().retrieve_topk(state, request_indices, query, num_tokens)


class OnTheHost(MeanPage):
    def retrieve_topk(self, state, request_indices, query, num_tokens):
        assert num_tokens.cpu() is not None
        return super().retrieve_topk(state, request_indices, query, num_tokens)


class Counts(MeanPage):
    def retrieve_topk(self, state, request_indices, query, num_tokens):
        torch.bincount(num_tokens)
        return super().retrieve_topk(state, request_indices, query, num_tokens)


class NonZero(MeanPage):
    def update_representations(self, state, request_indices, keys, positions):
        torch.nonzero(positions)
        super().update_representations(state, request_indices, keys, positions)


class OfOwnLength(MeanPage):
    """Repeats by values on the device."""

    def retrieve_topk(self, state, request_indices, query, num_tokens):
        num_tokens.repeat_interleave(torch.ones_like(num_tokens))
        return super().retrieve_topk(state, request_indices, query, num_tokens)


class KeepsTheRules(MeanPage):
    """Operations that look like others that wait for the device."""

    def update_representations(self, state, request_indices, keys, positions):
        old = state["sums"][request_indices, positions // PAGE]
        old[positions % PAGE == 0] = 0
        old.index_fill_(0, torch.zeros(0).long(), 0)
        state["sums"][request_indices, positions // PAGE] = keys + old

    def retrieve_topk(self, state, request_indices, query, num_tokens):
        num_tokens.repeat_interleave(torch.ones_like(num_tokens), output_size=len(num_tokens))
        same = query.index_select(0, torch.arange(len(query)))
        return super().retrieve_topk(state, request_indices, same, num_tokens)

    def select(self, scores, num_tokens, keep=None):
        nothing = torch.zeros(1, 1, self.max_units, dtype=torch.bool)
        return super().select(scores, num_tokens, keep=nothing)


class Heads64(MeanPage):
    @classmethod
    def refuse(cls, options, shape):
        return "heads of a multiple of 64 elements" if shape.head_size % 64 else None


def failures(algorithm: type[SparseAlgorithm]) -> dict[str, str]:
    return {rule: str(error) for rule, error in results(algorithm) if error is not None}


def test_an_algorithm_that_keeps_the_rules_passes() -> None:
    assert failures(KeepsTheRules) == {}
    assert failures(MeanPage) == {} and len(list(results(MeanPage))) == 12


@pytest.mark.parametrize(
    ("algorithm", "rule", "message"),
    [
        (Reads, "reads no value on the host", "item"),
        (Masks, "reads no value on the host", "an index by a mask"),
        (KeepsDrafts, "Rejected drafts leave nothing behind", "selects without drafts"),
        (KeepsTheTurn, "goes on from the start of a unit", "to be forgotten when positions from"),
        (KeepsTheRequest, "finds nothing of the request before it", "nothing left of the request"),
        (FirstKey, "how a prompt is divided", "the selection of one chunk"),
        (FirstRequest, "Requests of a batch", "what the request selects alone"),
        (Writes, "changes no state", "leaves the field 'sums' as it is"),
        (Integers, "right shape and dtype", "got torch.int64 [1, 2, 51], expected float [1, 2, 51]"),
        (Beyond, "right shape and dtype", "no unit beyond the"),
        (Floats, "in bfloat16", "expected float32"),
        (OnTheObject, "All state is in the fields", "kept outside of the fields"),
        (NewTokens, "how a prompt is divided", "chunks cut at"),
        (ByList, "reads no value on the host", "tolist"),
        (OnTheHost, "reads no value on the host", "cpu"),
        (Counts, "reads no value on the host", "bincount"),
        (NonZero, "reads no value on the host", "nonzero"),
        (OfOwnLength, "reads no value on the host", "repeat_interleave"),
        (Long, "right shape and dtype", "Long returned torch.int64 [1, 2, 9], expected torch.int32 [1, 2, 9]"),
        (Backwards, "right shape and dtype", "valid units first, then -1"),
        (Repeats, "right shape and dtype", "distinct units"),
        (Oldest, "includes the newest unit", "of the newest of"),
        (Padding, "A place without tokens", "only -1"),
        (Infinite, "A budget of all tokens", "without [3]"),
        (Narrow, "right shape and dtype", "scores of select in Narrow: got torch.float32 [1, 2, 50], expected float"),
        (
            Whole,
            "right shape and dtype",
            "keep of select in Whole: got torch.float32 [1, 51], expected bool [1, 2, 51]",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_breaks_a_rule_is_found(algorithm: type[SparseAlgorithm], rule: str, message: str) -> None:
    found = {name: text for name, text in failures(algorithm).items() if rule in name}
    assert len(found) == 1 and message in next(iter(found.values())), failures(algorithm)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (((4,), torch.float32, 0), "StateField tokens_per_entry: got 0, expected None or a whole number from 1 on"),
        (((4,), torch.float32, -16), "got -16, expected None"),
        (((4,), torch.float32, 16.0), "got 16.0, expected None"),
        (((0,), torch.float32, 16), "StateField shape: got (0,), expected a tuple of whole numbers from 1 on"),
        (((-1,), torch.float32), "StateField shape: got (-1,), expected a tuple of whole numbers from 0 on"),
        ((4, torch.float32), "StateField shape: got 4, expected a tuple"),
        (((4,), "float32"), "StateField dtype: got 'float32', expected a torch.dtype of real numbers"),
        (((4,), torch.complex64), "StateField dtype: got torch.complex64"),
        (((4,), torch.qint8), "StateField dtype: got torch.qint8"),
    ],
)
def test_state_fields_that_cannot_be_are_refused(field: tuple, message: str) -> None:
    with pytest.raises(ValueError) as error:
        StateField(*field)
    assert message in str(error.value)


def test_a_field_may_have_no_element_if_it_does_not_grow() -> None:
    assert StateField((0, 4), torch.float32).num_bytes == 0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_module.py").write_text(
        "from vllm_hisparse.algorithms.base import *\n"
        "def function(): pass\n"
        "class Plain: pass\n"
        "class Abstract(SparseAlgorithm): pass\n"
        "class Base(SparseAlgorithm):\n    def retrieve_topk(self, *args): pass\n"
        "class Zero(Base):\n    @classmethod\n    def unit_tokens(cls, options): return 0\n"
        "class Half(Base):\n    @classmethod\n    def min_budget(cls, options): return 0.5\n"
        "class Raises(Base):\n    @classmethod\n    def unit_tokens(cls, options): return options.pages\n"
        "class Method(Base):\n    def unit_tokens(self, options): return 16\n"
        "class Dict(Base):\n    Options = dict\n"
        "class Family(Base):\n    model_family = 'mla'\n"
    )
    (tmp_path / "broken_module.py").write_text("import no_such_dependency\n")
    (tmp_path / "failing_module.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_module"
    sys.modules.pop("own_module", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_module.function", "a subclass of SparseAlgorithm; it is of type function. Derive the class"),
        ("own_module.Plain", "a subclass of SparseAlgorithm; it is a class. Derive the class from SparseAlgorithm."),
        ("own_module.Abstract", "a class with the method retrieve_topk. Write it."),
        ("own_module.Zero", "a class whose unit_tokens returns a whole number from 1 on; it returns 0. Correct"),
        ("own_module.Half", "a class whose min_budget returns a whole number from 1 on; it returns 0.5. Correct"),
        ("own_module.Raises", "a class whose unit_tokens returns a number; it fails with AttributeError: "),
        ("own_module.Method", "a class whose unit_tokens is a classmethod. Decorate it with @classmethod."),
        ("own_module.Dict", "a class whose Options is a subclass of AlgorithmOptions. Correct the class."),
        ("own_module.Family", "(model_family 'gqa'). Derive the class from SparseAlgorithm, and leave model_family"),
        ("own_module.Missing", "a class of the module 'own_module', which has no 'Missing'. Correct the name."),
        ("own_module:Base", "a dot before the class, not a colon. Correct the name."),
        ("no_module.Base", "No module named 'no_module'. Correct the path, or set PYTHONPATH to the folder of the"),
        (
            "broken_module.X",
            "'broken_module' fails with ModuleNotFoundError: No module named 'no_such_dependency'. Mend",
        ),
        ("failing_module.X", "'failing_module' fails with RuntimeError: at import. Mend the module."),
    ],
)
def test_classes_that_cannot_be_used_are_refused(module: str, name: str, expected: str) -> None:
    with pytest.raises(HiSparseConfigError) as error:
        HiSparseConfig.from_extra_config({"host_pool_gib": 1.0, "algorithm": name})
    assert str(error.value).startswith(f"algorithm: got '{name}', expected") and expected in str(error.value)


def test_the_traceback_says_where_a_module_fails(module: str) -> None:
    with pytest.raises(HiSparseConfigError) as error:
        HiSparseConfig.from_extra_config({"host_pool_gib": 1.0, "algorithm": "failing_module.X"})
    assert isinstance(error.value.__cause__, RuntimeError)


def test_check_class_takes_what_is_complete() -> None:
    check_class(Quest, Quest.Options())
    check_class(find_algorithm("dsa"), AlgorithmOptions())
    for name in ("dsa", "msa"):
        with pytest.raises(AlgorithmRefused, match="an algorithm for dense models"):
            next(results(name))
    with pytest.raises(AlgorithmRefused, match="for heads of 16 elements: heads of a multiple of 64"):
        next(results(Heads64))
    large = replace(SHAPE, head_size=64, num_heads=4, num_kv_heads=4)
    assert [error for _, error in results(Heads64, shape=large) if error] == []


def run(*arguments: str) -> tuple[int, str]:
    environment = {"COLUMNS": "200"}
    result = CliRunner().invoke(app, ["check-algorithm", *arguments], env=environment)
    return result.exit_code, result.output


def test_the_command_shows_what_passes_and_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run("quest", "--algorithm-options", '{"page_size": 8}', "--head-size", "8")
    assert code == 0 and output.count("passed") == 12 and "failed" not in output
    (tmp_path / "in_this_folder.py").write_text(
        "from vllm_hisparse.algorithms.quest import Quest\n"
        "class Fails(Quest):\n"
        "    def retrieve_topk(self, *args):\n"
        "        raise RuntimeError('in retrieve_topk')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, output = run("in_this_folder.Fails")
    assert code == 1 and output.count("passed") < 12
    assert f"RuntimeError: in retrieve_topk ({tmp_path / 'in_this_folder.py'}, line 4)" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("qest",), "got 'qest', expected one of cluster_kv"),
        (("quest", "--algorithm-options", "page_size"), "got 'page_size', expected a JSON object"),
        (("quest", "--algorithm-options", "[]"), "got '[]', expected a JSON object (no object)"),
        (("quest", "--algorithm-options", '{"page_size": 0}'), "page_size: got 0: Input should be greater than"),
        (("pq_cache", "--algorithm-options", '{"num_subspaces": 5}'), "for heads of 16 elements"),
        (("quest", "--num-kv-heads", "4"), "got 4, expected a divisor of 6"),
    ],
)
def test_the_command_refuses_bad_input(arguments: tuple[str, ...], expected: str) -> None:
    code, output = run(*arguments)
    assert code == 2 and expected in " ".join(output.replace("│", " ").split()), output

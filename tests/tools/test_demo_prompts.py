"""Questions of the demo: about unseen packages, each with the file's own continuation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools.demo import prompts as demo_prompts
from tools.demo.prompts import (
    MAX_PROMPT_TOKENS,
    MAX_WORD_TOKENS,
    PACKAGES,
    QUESTION_TOKENS,
    NoQuestionError,
    Question,
    SourceFile,
    make_questions,
    num_leading,
    source_texts,
)

MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "code-dsa"
TEXT = "import os\n\n\n" + "".join(
    f"class C{i}:\n    async def method_{i}(self, x):\n        return x * {i} + sum(range({i}), {i * 7919})\n\n"
    for i in range(40)
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_the_model_was_not_trained_on_the_packages() -> None:
    listed = json.loads((MODEL / "training.json").read_text())["packages"]
    trained = {package["package"].replace("-", "_").lower() for package in listed if not package["held_out"]}
    assert not trained & set(PACKAGES)
    assert {name.partition("/")[0] for name, _ in source_texts()} == set(PACKAGES)


def question_size(tokenizer: Tokenizer, question: Question) -> int:
    """Tokens of the function that the prompt ends with."""
    sizes = range(QUESTION_TOKENS, QUESTION_TOKENS + MAX_WORD_TOKENS)
    begin = f"def {question.function}("
    return next(size for size in sizes if tokenizer.decode(question.prompt[-size:]).lstrip().startswith(begin))


@pytest.mark.long
def test_questions_are_answered_by_their_own_prompt(tokenizer: Tokenizer) -> None:
    """The prompt ends with tokens that it has further up, and what follows there is the expected answer."""
    questions = make_questions(MODEL, 12, 32, seed=3)
    texts = dict(source_texts())
    lengths = [len(question.prompt) for question in questions]
    assert lengths == sorted(set(lengths)) and lengths[-1] <= MAX_PROMPT_TOKENS
    for question in questions:
        prompt, answer = question.prompt, len(question.prompt) - question.distance
        size = question_size(tokenizer, question)
        assert prompt[answer - size : answer] == prompt[-size:]
        assert prompt[answer : answer + 32] == question.expected
        assert question.distance > size + 32 and answer < len(prompt) // 2
        assert question.expected_text[0].isspace(), "it begins within a word"
        before = tokenizer.decode(prompt[:-size])
        assert texts[question.source].startswith(before) and before.rstrip(" ").endswith("\n")
        assert question.last_line + question.expected_text in texts[question.source]
        assert tokenizer.decode(prompt).endswith(question.last_line)


@pytest.mark.long
def test_the_seed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = list(source_texts())[::8]
    monkeypatch.setattr(demo_prompts, "source_texts", lambda: iter(texts))
    first, again, other = (make_questions(MODEL, 3, 16, seed) for seed in (0, 0, 1))
    assert first == again != other


def test_functions_are_found_at_their_def(tokenizer: Tokenizer) -> None:
    file = SourceFile("module.py", TEXT, tokenizer)
    assert file.names == [f"method_{i}" for i in range(40)]
    for start, name in zip(file.starts, file.names, strict=True):
        assert tokenizer.decode(file.ids[start : start + 12]).lstrip().startswith(f"def {name}(")
    lengths = [end - start for start, end in zip(file.starts, [*file.starts[1:], len(file.ids)], strict=True)]
    shortest, last = min(lengths), file.starts[10]
    assert file.functions(last, shortest) == list(range(10))
    assert file.functions(last, max(lengths) + 1) == []


def test_too_few_functions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_prompts, "source_texts", lambda: iter([("module.py", TEXT)]))
    with pytest.raises(NoQuestionError, match="give 0 of 2 questions"):
        make_questions(MODEL, 2, 100, seed=0)


@pytest.mark.parametrize(("answer", "leading"), [([1, 2, 3], 3), ([1, 9, 3], 1), ([9, 2, 3], 0)])
def test_leading_tokens(answer: list[int], leading: int) -> None:
    assert num_leading(answer, [1, 2, 3]) == leading

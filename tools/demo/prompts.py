"""Questions about source files: a prompt is a long file, followed by the beginning of one of its functions."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Packages that vLLM needs and that the model in benchmarks/models/code-dsa was not trained on.
PACKAGES = ("charset_normalizer", "starlette", "uvicorn")
DEFINITION = re.compile(r"^[ \t]*(?:async )?(?P<start>def) (?P<name>\w+)", re.MULTILINE)
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 2000, 6000
DRAWS_PER_QUESTION = 8
QUESTION_TOKENS = 48  # tokens of a function in a prompt, at least; they identify the function
MAX_WORD_TOKENS = 8  # largest number of tokens until the next word begins


class NoQuestionError(RuntimeError):
    """The source files are not enough for the questions."""


@dataclass(frozen=True)
class Question:
    """A prompt, and the text that follows it in the file.

    Attributes:
        function: name of the function that the prompt ends with.
        source: path of its file, from the package on.
        distance: tokens between the expected text in the file and the end of the prompt.
        prompt, expected: token ids.
        last_line: last line of the prompt, which the answer continues.
        expected_text: text of `expected`.
    """

    function: str
    source: str
    distance: int
    prompt: list[int]
    expected: list[int]
    last_line: str
    expected_text: str


class SourceFile:
    """A file as tokens.

    Args:
        name: name of the file.
        text: its text.
        tokenizer: tokenizer of the model.
    """

    def __init__(self, name: str, text: str, tokenizer: Tokenizer):
        self.name, self.tokenizer = name, tokenizer
        encoding = tokenizer.encode(text, add_special_tokens=False)
        self.ids, ends = encoding.ids, [end for _, end in encoding.offsets]
        starts = [start for start, _ in encoding.offsets]
        self.line_ends = [i + 1 for i in range(len(ends)) if "\n" in text[starts[i] : ends[i]]]
        self.begins_word = [text[start : start + 1].isspace() for start in starts]
        found = list(DEFINITION.finditer(text))
        self.names = [match["name"] for match in found]
        self.starts = [bisect_right(ends, match.start("start")) for match in found]

    def functions(self, last: int, num_tokens: int) -> list[int]:
        """Return functions whose first `num_tokens` tokens are before token `last` and contain no other function."""
        ends = [*self.starts[1:], len(self.ids)]
        fits = (start + num_tokens <= min(end, last) for start, end in zip(self.starts, ends, strict=True))
        return [number for number, is_long in enumerate(fits) if is_long]

    def question(self, function: int, cut: int, num_expected: int) -> Question:
        """Ask how a function goes on.

        Args:
            function: index of the function.
            cut: number of the file's tokens in the prompt.
            num_expected: tokens of the answer.
        """
        start = self.starts[function]
        least = start + QUESTION_TOKENS
        asked = next((i for i in range(least, least + MAX_WORD_TOKENS) if self.begins_word[i]), least)
        expected = self.ids[asked : asked + num_expected]
        prompt = self.ids[:cut] + self.ids[start:asked]
        begin, text = (self.tokenizer.decode(ids) for ids in (self.ids[start:asked], expected))
        last_line, distance = begin.split("\n")[-1].lstrip(), len(prompt) - asked
        return Question(self.names[function], self.name, distance, prompt, expected, last_line, text)


def make_questions(model_dir: Path, num_questions: int, num_expected: int, seed: int) -> list[Question]:
    """Make questions about files of `PACKAGES`, ordered by length. All lengths differ; short ones are more frequent.

    Args:
        model_dir: directory with the tokenizer.
        num_questions: number of questions.
        num_expected: tokens of each answer.
        seed: seed of the choice.

    Raises:
        NoQuestionError: the files are not enough for so many questions.
    """
    from tokenizers import Tokenizer

    tokenizer, rng = Tokenizer.from_file(str(model_dir / "tokenizer.json")), random.Random(seed)
    files = [SourceFile(name, text, tokenizer) for name, text in source_texts()]
    files = [file for file in files if len(file.ids) >= MIN_PROMPT_TOKENS]
    rng.shuffle(files)
    found: dict[int, Question] = {}
    for file in islice(cycle(files), DRAWS_PER_QUESTION * num_questions):
        question = draw_question(file, num_expected, rng) if len(found) < num_questions else None
        if question is not None:
            found.setdefault(len(question.prompt), question)
    if len(found) < num_questions:
        raise NoQuestionError(f"the sources of {', '.join(PACKAGES)} give {len(found)} of {num_questions} questions")
    return [found[length] for length in sorted(found)]


def draw_question(file: SourceFile, num_expected: int, rng: random.Random) -> Question | None:
    """Make a question about a function in the first half of the prompt; None if there is no such function."""
    most = MIN_PROMPT_TOKENS + round((MAX_PROMPT_TOKENS - MIN_PROMPT_TOKENS) * rng.random() ** 2)
    longest = most - QUESTION_TOKENS - MAX_WORD_TOKENS
    cut = max((end for end in file.line_ends if end <= longest), default=0)
    functions = file.functions(cut // 2, QUESTION_TOKENS + MAX_WORD_TOKENS + num_expected)
    return file.question(rng.choice(functions), cut, num_expected) if functions else None


def source_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and text of every file of the packages, in a fixed order."""
    for package in PACKAGES:
        spec = find_spec(package)
        for root in map(Path, (spec and spec.submodule_search_locations) or ()):
            for path in sorted(root.rglob("*.py")):
                yield f"{package}/{path.relative_to(root)}", path.read_text(encoding="utf-8")


def num_leading(answer: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of tokens of an answer before the first one that is not as expected."""
    pairs = zip(answer, expected, strict=True)
    return next((index for index, (token, wanted) in enumerate(pairs) if token != wanted), len(answer))

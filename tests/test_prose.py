"""Sentences of documents, docstrings and comments name their subject first.

A sentence that begins with one of `FIRST_WORDS` refers to something that the reader has not met yet ("Of those that the
worker knows"). Start with a name or a verb instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.vllm_sources import FUNCTIONS, statements

ROOT = Path(__file__).parents[1]
FIRST_WORDS = ("Of", "Those", "What", "Whether", "As", "That")

GENERATED = ("docs/results.md", "docs/decisions/index.md")
DOCUMENTS = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
    if str(path.relative_to(ROOT)) not in GENERATED
)
CODE = sorted(
    path
    for folder in ("vllm_hisparse", "tests", "benchmarks", "tools", "deploy", "examples")
    for path in (ROOT / folder).rglob("*.py")
)

STRING_OR_COMMENT = re.compile(r"""(?s:("{3}|'{3}).*?(?<!\\)\1)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#.*""")
SENTENCE_END = re.compile(r"(?<=[.!?:])[\"')*]*\s+")
SECTION = re.compile(r"^(?:Args|Attributes):\n((?: .*\n?|\n)+)", re.MULTILINE)
ARGUMENT = re.compile(r"^    [\w*]+(?:, [\w*]+)*: .*$", re.MULTILINE)
SHAPE = re.compile(r"\[[^\]]*\](?: u?(?:int|float|bool)\d*| of [^.;:]*\bdtypes?\b)?,? ?")
NO_NOUN = re.compile(rf"(?:{'|'.join(FIRST_WORDS)}|where|whose|when|which|how)\b", re.IGNORECASE)
REFERENCE = re.compile(r"as (?:in|for) (?:`|the a|vLLM)")
FIRST_WORD = re.compile(rf"[\"'(*]*({'|'.join(FIRST_WORDS)})\b(?!`)")


def bad_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph that begin with one of `FIRST_WORDS`; a question may."""
    sentences = SENTENCE_END.split(" ".join(paragraph.split()))
    return [sentence[:80] for sentence in sentences if FIRST_WORD.match(sentence) and not sentence.endswith("?")]


def markdown_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, list items, headings and table cells of a Markdown document, without code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*\-#>]|\d+\.) )|\n(?=\|)", text):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            yield re.sub(r"^\s*(?:[*\-#>]+|\d+\.)\s+", "", cell)


@cache
def docstrings(source: str) -> list[str]:
    """Docstrings of a Python file, its classes and its functions, in their order."""
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    nodes = [node for node in statements(ast.parse(source)) if isinstance(node, documented)]
    return [ast.get_docstring(node) or "" for node in nodes]


def code_paragraphs(source: str) -> Iterator[str]:
    """Paragraphs of a Python file's docstrings, and its comments; comments on consecutive lines are one."""
    for docstring in docstrings(source):
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[*\-] )", docstring):
            yield re.sub(r"^\s*[*\-] ", "", paragraph)
    comment, end = "", 0
    for token in STRING_OR_COMMENT.finditer(source):
        if token[0].startswith("#"):
            if source[end : token.start()].strip() or source.count("\n", end, token.start()) != 1:
                yield comment
                comment = ""
            comment, end = f"{comment} {token[0].lstrip('# ')}", token.end()
    yield comment


def bad_arguments(source: str) -> list[str]:
    """Arguments and attributes in a file's docstrings whose description does not begin with a noun phrase.

    A shape and dtype may come first. "as in `name`" and its like are references to another description.
    """
    found = []
    for docstring in docstrings(source):
        for section in SECTION.findall(docstring):
            for line in ARGUMENT.findall(section):
                description = SHAPE.sub("", line.partition(": ")[2])
                if NO_NOUN.match(description) and not REFERENCE.match(description):
                    found.append(line.strip()[:80])
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents(document: Path) -> None:
    found = [line for paragraph in markdown_paragraphs(document.read_text()) for line in bad_sentences(paragraph)]
    assert not found


@pytest.mark.parametrize("document", [*DOCUMENTS, *(ROOT / name for name in GENERATED)], ids=lambda path: path.name)
def test_documents_have_no_markers_of_conflicts(document: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", document.read_text(), re.MULTILINE)


@pytest.mark.long
def test_code() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in CODE
        if (lines := [line for part in code_paragraphs(path.read_text()) for line in bad_sentences(part)])
    }
    assert not found


@pytest.mark.long
def test_descriptions_of_arguments() -> None:
    files = [path for path in CODE if "tests" not in path.relative_to(ROOT).parts]
    found = {str(path.relative_to(ROOT)): lines for path in files if (lines := bad_arguments(path.read_text()))}
    assert len(files) > 150
    assert not found


@pytest.mark.parametrize(
    ("description", "is_bad"),
    [
        ("of a layer.", True),
        ("whether it holds.", True),
        ("[tokens, heads] int32, where they are.", True),
        ("[n] of these.", True),
        ("as written.", True),
        ("as in `resolve`.", False),
        ("as in the arguments.", False),
        ("[tokens] int32 positions, where known.", False),
        ("offset of the row; where it is.", False),
    ],
)
def test_descriptions_without_a_noun_are_found(description: str, is_bad: bool) -> None:
    line = f"layer, other: {description}"
    source = f'''def f():
    """Do it.

    Args:
        first: of another form
            and more.
        {line}

    Returns:
        of: no argument
    """
'''
    assert bad_arguments(source) == ["first: of another form", *[line] * is_bad]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Rows of a step. Those that miss are copied.", ["Those that miss are copied."]),
        ("**What limits it.** The link.", ["**What limits it."]),
        ("Rows that were selected, as before.", []),
        ("`As` is a word.", []),
        ("Asynchronous scheduling. Thatched roofs.", []),
        ("What does a step cost?", []),
        ("Hot\nrows. Of\nthese, few.", ["Of these, few."]),
    ],
)
def test_sentences_are_found(text: str, expected: list[str]) -> None:
    assert bad_sentences(text) == expected

"""Links of the documentation lead somewhere, and every page can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *PAGES,
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(document: Path) -> list[tuple[str, str]]:
    """(path, anchor) of each link and picture that does not lead to another host."""
    return re.findall(r"\]\((?!https?:|mailto:)([^)#]*)#?([^)]*)\)", without_code(document.read_text()))


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in links(document):
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_begin_and_end(document: Path) -> None:
    """A fence is a line of its own: a language at most follows it, and nothing is before it."""
    lines = document.read_text().splitlines()
    fences = [line for line in lines if "```" in line]
    assert all(re.fullmatch(r"\s*```\w*", line) for line in fences) and len(fences) % 2 == 0


def test_every_page_can_be_reached() -> None:
    """Every page can be reached from the README over links."""
    seen, to_read = set(), [ROOT / "README.md"]
    while to_read:
        document = to_read.pop()
        if document in seen:
            continue
        seen.add(document)
        targets = [(document.parent / target).resolve() for target, _ in links(document) if target]
        to_read += [target for target in targets if target.suffix == ".md"]
    assert not [str(page.relative_to(ROOT)) for page in PAGES if page not in seen]


@pytest.mark.parametrize(
    "document",
    [ROOT / "docs" / "structure.md", *sorted((ROOT / "docs" / "design").glob("*.md"))],
    ids=lambda path: path.name,
)
def test_classes_that_a_design_page_names_exist(document: Path) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "vllm_hisparse").rglob("*.py"))
    named = set(re.findall(r"`([A-Z]\w*[a-z][A-Z]\w*)", document.read_text()))
    assert not {name for name in named if not re.search(rf"\b{name}\b", code)}


def test_folders_of_the_structure_page_exist() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    folders = re.findall(r"^\| `([\w/]+/)` \|", text, re.MULTILINE)
    assert folders
    assert not [folder for folder in folders if not (ROOT / folder).is_dir()]
    packages = {path.parent for path in (ROOT / "vllm_hisparse").glob("*/__init__.py")}
    assert not [path.name for path in packages if f"vllm_hisparse/{path.name}/" not in text]

"""docs/structure.md names every module of the package, and links of the documentation lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_hisparse"
STRUCTURE = (ROOT / "docs" / "structure.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def table_paths(text: str) -> list[str]:
    """Paths in the first column of a table; a name without a folder is in the folder of the one before it."""
    paths = []
    for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", cell):
            path = name if "/" in name else f"{folder}{name}"
            folder = path[: path.rfind("/") + 1]
            paths.append(path)
    return paths


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_module_has_its_line() -> None:
    package, _ = STRUCTURE[STRUCTURE.index("## Modules") :].split("Beside the package:")
    named = table_paths(package)
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert sorted(named) == sorted(modules)


def test_every_path_beside_the_package_exists() -> None:
    _, beside = STRUCTURE.split("Beside the package:")
    assert not [path for path in table_paths(beside) if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), anchor

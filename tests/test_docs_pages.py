"""Generated pages are those that the result files and decision records give."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "tools" / "docs_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs_pages = load_tool()


@pytest.mark.parametrize(("path", "expected"), docs_pages.pages().items(), ids=lambda item: getattr(item, "name", ""))
def test_page_is_current(path: Path, expected: str) -> None:
    assert path.read_text() == expected, "run `make pages`"


def test_rows_become_a_table_of_what_differs() -> None:
    rows = [
        {"system": "ours", "us_p10": 1.0, "us_p50": 2.34567, "us_p90": 3.0, "batch": 1, "steps": [1, 2]},
        {"system": "full", "us_p10": 1.0, "us_p50": 4.0, "us_p90": 5.0, "batch": 1, "steps": [1, 2]},
    ]
    assert docs_pages.table(docs_pages.table_rows(rows)) == [
        "All rows: batch 1.",
        "",
        "| system | us |",
        "|---|---|",
        "| ours | 2.346 (p10 1, p90 3) |",
        "| full | 4 (p10 1, p90 5) |",
    ]


def test_compared_requests_are_summed() -> None:
    requests = [{"same": 3, "tokens": 8, "margin": 0.25}, {"same": 8, "tokens": 8, "margin": None}]
    assert docs_pages.table_rows({"fp8": {"requests": {"hot": requests, "chunks": None}}}) == [
        {"test": "fp8", "hot same tokens": "11 of 16, widest tie 0.25"}
    ]


def test_a_decision_without_a_date_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.md").write_text("# Some decision\n")
    monkeypatch.setattr(docs_pages, "DECISIONS", tmp_path)
    monkeypatch.setattr(docs_pages, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"some\.md"):
        docs_pages.decisions_page()

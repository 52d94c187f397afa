"""The documented output of the demo."""

from __future__ import annotations

import inspect
from pathlib import Path

from tools.demo.demo import demo_command

PAGE = Path(__file__).parents[2] / "docs" / "demo.md"


def test_the_documented_output_ends_with_the_file_of_figures() -> None:
    out = inspect.signature(demo_command).parameters["out"].default
    assert PAGE.read_text().endswith(f"\nFigures: {out}\n```\n")

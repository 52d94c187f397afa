"""`vllm-hisparse trace record` refuses what it cannot record before an engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers.utils
from typer.testing import CliRunner, Result

from vllm_hisparse.cli import trace
from vllm_hisparse.cli.main import app


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prompt's file; an engine that starts fails the test."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("an engine starts")

    monkeypatch.setattr(trace, "start_engine", start)
    monkeypatch.setattr(trace.os, "environ", dict(trace.os.environ))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the host keeps the rest")
    return "text.txt"


def record(*arguments: str) -> tuple[Result, str]:
    """Return the result and its output, without the box around errors."""
    result = CliRunner().invoke(app, ["trace", "record", *arguments])
    return result, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("output", "reason"), [(".", "Is a directory"), ("text.txt/some.trace", "Not a directory")])
def test_an_output_that_cannot_be_written_is_refused(text: str, output: str, reason: str) -> None:
    result, shown = record(text, "--model", "nosuch", "--output", output)
    assert result.exit_code == 2, shown
    assert f"Invalid value for --output: got {output}: {reason}" in shown


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_model_without_a_configuration_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, is_directory: bool
) -> None:
    def find(*_: object) -> str:
        raise OSError("We couldn't connect to the Hub")

    monkeypatch.setattr(transformers.utils, "cached_file", find)
    model = "folder" if is_directory else "nosuch"
    Path("folder").mkdir()
    result, shown = record(text, "--model", model, "--output", "new/some.trace")
    assert result.exit_code == 2, shown
    assert f"Invalid value for --model: got {model}, expected a directory with config.json, or the name" in shown
    assert not list(Path("new").iterdir())


def test_a_model_of_the_hub_is_taken(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils, "cached_file", lambda *_: "config.json")
    result, _ = record(text, "--model", "some/model", "--output", "some.trace")
    assert "an engine starts" in str(result.exception)

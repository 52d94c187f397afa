"""Rows of the table of models and back ends: which there are, how completions are compared, and a second run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import models
from benchmarks.models import ATTENTION, BY_NAME, MODELS, Case, app, cases, compare, long_request, prompts
from vllm_hisparse.cli.tiny_model import VARIANTS


def completion(tokens: list[int], margins: list[float]) -> dict[str, Any]:
    return {"tokens": tokens, "margins": margins}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_model_has_a_row(device: str) -> None:
    rows = cases(device)
    assert {case.model for case in rows} == set(BY_NAME) and len(set(rows)) == len(rows)
    assert {model.variant for model in MODELS} == set(VARIANTS) - {
        "hyv4_mixed",  # no checkpoint has its layers
        "minimax_m3",  # vLLM has no code for it on the CPU
    }


def test_every_back_end_has_a_row() -> None:
    assert {case.backend for case in cases("cuda")} == set(ATTENTION)


def test_tokens_count_up_to_where_completions_part() -> None:
    stock = [completion([5, 6, 7], [1.0, 0.2, 0.9]), completion([1, 2, 3], [0.5, 0.6, 0.7])]
    ours = [completion([5, 8, 7], []), completion([1, 2, 3], [])]
    assert compare(ours, stock) == {"same_tokens": 4, "compared_tokens": 6, "widest_tie": 0.2}
    assert compare(stock, stock) == {"same_tokens": 6, "compared_tokens": 6, "widest_tie": None}


def test_the_second_turn_begins_like_the_first() -> None:
    first, second = prompts("cpu", 0), prompts("cpu", 1)
    assert all(longer[: len(shorter)] == shorter for shorter, longer in zip(first, second, strict=True))
    assert [len(longer) - len(shorter) for shorter, longer in zip(first, second, strict=True)] == [41] * len(first)
    assert first == prompts("cpu", 0)


def test_bytes_of_a_long_request() -> None:
    """DeepSeek-V3.2 in fp8: 61 rows of 656 and 61 indexer keys of 132 bytes; the hot buffer has 4,096 rows."""
    found = long_request(Case("DeepSeek-V3.2", "FLASHMLA_SPARSE", "fp8"))
    assert found["full_bytes_128k"] == 131072 * 61 * (656 + 132)
    keys, hot = 131072 * 61 * 132, 4096 * 61 * 656
    assert keys + hot <= found["device_bytes_128k"] <= 1.1 * (keys + hot)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that answer at once; the list gets the names of their logs."""
    started: list[str] = []

    def answer(function: Any, engine: dict[str, Any], device: str, log: Path) -> list[dict[str, Any]]:
        assert function is models.answer and device == "cpu"
        started.append(log.stem)
        if "glm4" in engine["model"]:
            raise RuntimeError("answer has failed")
        return [completion([1, 2], [0.1, 0.1])]

    monkeypatch.setattr(models, "in_a_process", answer)
    monkeypatch.setattr(models.torch.cuda, "is_available", lambda: False)
    return started


def invoke(output: Path, *names: str) -> Any:
    chosen = [word for name in names for word in ("--model", name)]
    return CliRunner().invoke(app, ["run", "--output", str(output), *chosen])


def test_a_second_run_adds_rows(answers: list[str], tmp_path: Path) -> None:
    output = tmp_path / "models.json"
    assert invoke(output, "Llama-3.1-8B").exit_code == 0
    assert sorted(answers) == ["Llama-3.1-8B_CPU_ATTN_auto_ours", "Llama-3.1-8B_CPU_ATTN_auto_stock"]
    assert invoke(output, "Llama-3.1-8B", "Qwen3-8B").exit_code == 0
    assert len(answers) == 4
    rows = json.loads(output.read_text())["rows"]
    assert [row["model"] for row in rows] == ["Llama-3.1-8B", "Qwen3-8B"]
    expected = {"model", "backend", "kv_dtype", "gpu", "same_tokens", "compared_tokens", "widest_tie"}
    assert rows[0].keys() == expected | {"device_bytes_128k", "full_bytes_128k"}


def test_a_row_that_fails_is_left_out(answers: list[str], tmp_path: Path) -> None:
    output = tmp_path / "models.json"
    result = invoke(output, "GLM-4.5", "Qwen3-8B")
    assert result.exit_code == 1 and "answer has failed" in result.output
    assert [row["model"] for row in json.loads(output.read_text())["rows"]] == ["Qwen3-8B"]


def test_an_unknown_row_is_refused(tmp_path: Path) -> None:
    result = invoke(tmp_path / "models.json", "GPT-2")
    assert result.exit_code == 2 and "Llama-3.1-8B" in result.output

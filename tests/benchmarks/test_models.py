"""Rows of the table of models and back ends: which there are, and where their numbers come from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import models
from benchmarks.models import ATTENTION, TESTS, Case, app, long_request, table
from benchmarks.release import PARTS, ROOT
from tests.image_models import IMAGE_MODELS
from vllm_hisparse.cli import tiny_model

FP8, BF16 = Case("DeepSeek-V3.2", "FLASHMLA_SPARSE", "fp8"), Case("DeepSeek-V3.2", "FLASHMLA_SPARSE", "bfloat16")


def test_every_model_has_a_row() -> None:
    assert {case.model for case in TESTS} == set(models.VARIANTS)
    of_images = {models.VARIANTS[model] for model in models.LANGUAGE_MODELS}
    assert of_images <= set(IMAGE_MODELS)
    # No checkpoint has the layers of hyv4_mixed.
    assert set(models.VARIANTS.values()) - of_images == set(tiny_model.VARIANTS) - {"hyv4_mixed"}


def test_every_back_end_has_a_row() -> None:
    assert {case.backend for case in TESTS} - {"MINIMAX_M3_SPARSE"} == set(ATTENTION)  # that one cannot be chosen


@pytest.mark.long
def test_every_row_has_a_test_in_a_part() -> None:
    """The tests are among those that pytest finds in the files of the parts, and that a part's selection takes."""
    files = sorted({test.partition("::")[0] for test in TESTS.values()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0", *files]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(TESTS.values()) <= set(collected)

    def is_taken(test: str, part: str) -> bool:
        words = re.sub(r"\w+", lambda word: word[0] if word[0] in ("and", "or", "not") else str(word[0] in test), part)
        return not part or eval(words)

    for test in TESTS.values():
        assert any(test.partition("::")[0] in part.files and is_taken(test, part.selection) for part in PARTS.values())


def test_bytes_of_a_long_request() -> None:
    """DeepSeek-V3.2 in fp8: 61 rows of 656 and 61 indexer keys of 132 bytes; the hot buffer has 4,096 rows."""
    found = long_request(FP8)
    assert found["full_bytes_128k"] == 131072 * 61 * (656 + 132)
    keys, hot = 131072 * 61 * 132, 4096 * 61 * 656
    assert keys + hot <= found["device_bytes_128k"] <= 1.1 * (keys + hot)
    flashinfer = long_request(Case("DeepSeek-V3.2", "FLASHINFER_MLA_SPARSE_SM90", "fp8"))
    assert flashinfer["full_bytes_128k"] == 131072 * 61 * (576 + 132)
    images = long_request(Case("GLM-4.1V-9B", "FLASH_ATTN 3", "bfloat16"))
    assert images["full_bytes_128k"] == 131072 * 40 * 2 * 2 * 128 * 2  # layers, key and value, KV heads, elements, bf16


def comparison(case: Case, **overrides: Any) -> dict[str, Any]:
    counts = {"requests": 2, "tokens": 128, "same_tokens": 100, "ties": 1, "widest_tie": 0.25}
    return {"test": TESTS[case]} | counts | overrides


def release(*parts: dict[str, Any]) -> dict[str, Any]:
    hardware = {"gpu": "NVIDIA H100 80GB HBM3", "num_cores": 16}
    versions = {"vllm": "0.33.0"}
    return {"commit": "abc", "date": "2026-11-26", "hardware": hardware, "versions": versions, "rows": list(parts)}


def test_rows_have_the_counts_of_their_tests() -> None:
    parts = (
        {"not_passed": ["test_other: failed"], "comparisons": [comparison(FP8)], "commit": "def"},
        {"not_passed": [], "comparisons": [comparison(BF16, same_tokens=128, widest_tie=None)]},
        {"not_passed": []},
    )
    first, second = table(release(*parts))
    counts = {"gpu": "h100", "same_tokens": 100, "compared_tokens": 128, "widest_tie": 0.25}
    place = {"model": "DeepSeek-V3.2", "backend": "FLASHMLA_SPARSE"}
    assert first == {**place, "kv_dtype": "fp8", **counts, **long_request(FP8), "commit": "def"}
    counts |= {"same_tokens": 128, "widest_tie": None}
    assert second == {**place, "kv_dtype": "bfloat16", **counts, **long_request(BF16)}


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_test_that_has_not_passed_gives_no_row(outcome: str) -> None:
    name = TESTS[FP8].rpartition("::")[2]
    part = {"not_passed": [f"{name}: {outcome}"], "comparisons": [comparison(FP8), comparison(BF16)]}
    (row,) = table(release(part))
    assert row["kv_dtype"] == "bfloat16"


def test_the_result_has_the_provenance_of_the_release(tmp_path: Path) -> None:
    path = tmp_path / "release_0.33.0.json"
    source = release({"not_passed": [], "comparisons": [comparison(FP8)]})
    path.write_text(json.dumps(source))
    result = CliRunner().invoke(app, ["--release", str(path)])
    assert result.exit_code == 0 and TESTS[BF16] in result.output.replace("\n", "")
    found = json.loads((tmp_path / "models.json").read_text())
    assert found["command"] == "python -m benchmarks.models --release release_0.33.0.json"
    assert {name: found[name] for name in ("commit", "date", "hardware", "versions")} == {
        name: source[name] for name in ("commit", "date", "hardware", "versions")
    }
    assert [row["kv_dtype"] for row in found["rows"]] == ["fp8"]

"""Parts of the GPU tests: which there are, in which rounds, and what is counted of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import release
from benchmarks.release import PARTS, ROUNDS, TWO_GPUS, rounds, run_part, summary
from tests.gpu.engines import assert_same_but_ties


def test_every_part_is_in_one_round() -> None:
    assert sorted([part for each in ROUNDS for part in each] + [*TWO_GPUS]) == sorted(PARTS)
    assert rounds(["ranks", "mtp", "memory", "dense"]) == [["memory"], ["mtp", "dense"], ["ranks"]]


@pytest.mark.parametrize("part", PARTS)
def test_parts_name_tests(part: str) -> None:
    """The words after -k are in names of tests of the file."""
    files = [argument for argument in PARTS[part] if argument.startswith("tests/")]
    sources = "".join((release.ROOT / name).read_text() for name in files)
    words = PARTS[part][-1].replace("(", " ").replace(")", " ").split() if "-k" in PARTS[part] else []
    assert files and all(word in sources for word in words if word not in ("and", "or", "not"))


def completion(tokens: list[int]) -> dict[str, list]:
    return {"tokens": tokens, "logprobs": [0.0] * len(tokens), "margins": [0.1] * len(tokens)}


def test_outcomes_and_comparisons_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of pytest in a folder of its own, whose tests compare tokens."""
    engines = Path(release.ROOT / "tests/gpu")
    (tmp_path / "test_part.py").write_text(
        f"import sys; sys.path.insert(0, {str(engines)!r})\n"
        "import pytest\n"
        "from engines import assert_same_but_ties\n"
        f"ONE, OTHER = {completion([1, 2, 3])!r}, {completion([1, 2, 4])!r}\n"
        "def test_same(): assert_same_but_ties([ONE, ONE], [ONE, OTHER])\n"
        "def test_fails(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n"
    )
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setitem(PARTS, "part", ("test_part.py",))
    row = run_part("part", tmp_path)
    assert row["tests"] == {"test_same": "passed", "test_fails": "failed", "test_skipped": "skipped"}
    counts = {name: row[name] for name in ("passed", "failed", "skipped", "requests", "tokens", "same_tokens", "ties")}
    assert counts == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "requests": 2,
        "tokens": 6,
        "same_tokens": 5,
        "ties": 1,
    }


def test_a_run_that_never_began_has_passed_nothing(tmp_path: Path) -> None:
    assert summary(tmp_path / "missing.xml", tmp_path / "missing.jsonl")["passed"] == 0


def test_results_of_another_commit_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "release.json"
    monkeypatch.setattr(release, "commit", lambda: "abc")
    monkeypatch.setattr(release, "versions", lambda: {"vllm": "0.33.0"})
    row = {"part": "kernels", "passed": 3}
    assert release.earlier(path) == {}
    path.write_text(json.dumps({"commit": "abc", "versions": {"vllm": "0.33.0"}, "rows": [row]}))
    assert release.earlier(path) == {"kernels": row}
    path.write_text(json.dumps({"commit": "abc", "versions": {"vllm": "0.32.0"}, "rows": [row]}))
    assert release.earlier(path) == {}


def test_no_folder_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HISPARSE_TEST_REPORT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert_same_but_ties([completion([1])], [completion([1])])
    assert not list(tmp_path.iterdir())

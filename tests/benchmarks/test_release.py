"""Parts of the GPU tests: which there are, which run side by side, and how their comparisons are counted."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from benchmarks import release
from benchmarks.release import PARTS, Part, by_test, run_part, run_parts, summary
from tests.gpu.engines import assert_not_the_same, assert_same_but_ties


def test_parts_run_side_by_side_within_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Five engines at most; a larger part and one that is alone wait until nothing runs."""
    parts = {
        "three": Part(("a",), num_engines=3),
        "large": Part(("b",), num_engines=9),
        "two": Part(("c",), num_engines=2),
        "one": Part(("d",), num_engines=1),
        "alone": Part(("e",), num_engines=1, is_alone=True),
    }
    running, beside, lock, third = set(), {}, threading.Lock(), threading.Event()

    def run(name: str, folder: Path) -> dict[str, str]:
        with lock:
            running.add(name)
            beside[name] = set(running)
        if name == "two":
            third.set()
        if name == "three":
            assert third.wait(10)
        with lock:
            running.remove(name)
        return {"part": name}

    monkeypatch.setattr(release, "PARTS", parts)
    monkeypatch.setattr(release, "run_part", run)
    assert {row["part"] for row in run_parts(list(parts), tmp_path, max_engines=5)} == set(parts)
    assert beside["two"] == {"three", "two"}
    assert beside["large"] == {"large"} and beside["alone"] == {"alone"}
    for names in beside.values():
        assert len(names) == 1 or sum(parts[name].num_engines for name in names) <= 5


@pytest.mark.parametrize("part", PARTS)
def test_parts_name_tests(part: str) -> None:
    """The words of the selection are in names of tests of the files."""
    sources = "".join((release.ROOT / name).read_text() for name in PARTS[part].files)
    words = PARTS[part].selection.replace("(", " ").replace(")", " ").split()
    assert sources and all(word in sources for word in words if word not in ("and", "or", "not"))


def test_parts_run_all_gpu_tests() -> None:
    """A benchmark's own test is not about a release of vLLM."""
    found = {path.relative_to(release.ROOT).as_posix() for path in release.ROOT.glob("tests/gpu/test_*.py")}
    in_parts = {name for part in PARTS.values() for name in part.files}
    assert found - in_parts == {"tests/gpu/test_swap_in_benchmark.py"}


def completion(tokens: list[int]) -> dict[str, list]:
    return {"tokens": tokens, "logprobs": [0.0] * len(tokens), "margins": [0.1] * len(tokens)}


@pytest.mark.long
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
    monkeypatch.setitem(PARTS, "part", Part(("test_part.py",)))
    row = run_part("part", tmp_path)
    assert row["not_passed"] == ["test_fails: failed", "test_skipped: skipped"]
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
    (found,) = row["comparisons"]
    assert found["test"] == "test_part.py::test_same"
    assert (found["tokens"], found["same_tokens"], found["widest_tie"]) == (6, 5, 0.1)


def test_comparisons_of_a_test_are_added_up() -> None:
    line = {"requests": 1, "tokens": 8, "same_tokens": 3, "ties": 1}
    lines = [{"test": test} | line | {"widest_tie": tie} for test, tie in (("a", 0.1), ("a", 0.3), ("b", None))]
    both = {"requests": 2, "tokens": 16, "same_tokens": 6, "ties": 2, "widest_tie": 0.3}
    assert by_test(lines) == [{"test": "a"} | both, {"test": "b"} | line | {"widest_tie": None}]


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


def test_what_must_differ_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPARSE_TEST_REPORT", str(tmp_path))
    other = {**completion([2]), "margins": [5.0]}
    assert_not_the_same([completion([1])], [other])
    with pytest.raises(AssertionError, match="the same up to ties"):
        assert_not_the_same([other], [other])
    assert not list(tmp_path.iterdir())


def test_no_folder_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HISPARSE_TEST_REPORT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert_same_but_ties([completion([1])], [completion([1])])
    assert not list(tmp_path.iterdir())

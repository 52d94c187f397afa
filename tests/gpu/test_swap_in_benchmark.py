"""The swap-in benchmark runs in a tiny configuration and writes a valid result; speed is not asserted."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def swap_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    return importlib.import_module("benchmarks.swap_in")


def test_result(swap_in, tmp_path: Path) -> None:
    options = {"batch": 2, "row-bytes": 656, "overlap": 0.5, "device-buffer-size": 512, "top-k": 256, "context": 2000}
    options |= {"graph-steps": 2, "num-graphs": 2, "repeats": 2, "output": tmp_path / "swap_in.json"}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    CliRunner().invoke(swap_in.app, ["run", *arguments], catch_exceptions=False)
    rows = json.loads((tmp_path / "swap_in.json").read_text())["rows"]
    expected = {("memcpy", "gather"), ("bare_gather", "gather")}
    for system in swap_in.available_systems():
        expected |= {(system.name, op) for op in ("resolve", "gather", "swap_in")}
    assert {(row["system"], row["op"]) for row in rows} == expected
    assert all(0 < row["us_p10"] <= row["us_p50"] <= row["us_p90"] for row in rows)
    picture = tmp_path / "swap_in.png"
    arguments = ["--result", str(tmp_path / "swap_in.json"), "--output", str(picture), "--overlap", "0.5"]
    CliRunner().invoke(swap_in.app, ["plot", *arguments, "--device-buffer-size", "512"], catch_exceptions=False)
    assert picture.stat().st_size > 0


def test_a_wrong_row_is_refused(swap_in) -> None:
    case = swap_in.Case(2, 656, 0.5, 512, 256, 2000)
    pool = swap_in.HostPool(2 * 33 * 64 * 656)
    trace = swap_in.Trace(case, 2, 2)
    tables = (torch.randperm(64, device="cuda") + 1).view(2, 32).int()
    system = swap_in.Ours(case, pool.rows(656), tables, 1)
    system.swap_in(trace.timed[0], 0)
    swap_in.check_rows(system, trace.timed[0], 0, pool.expected(656))
    system.hot.rows[system.outputs[0].hot_row_ids[1, 5].long(), 655] ^= 1
    with pytest.raises(AssertionError, match="ours copied wrong rows"):
        swap_in.check_rows(system, trace.timed[0], 0, pool.expected(656))

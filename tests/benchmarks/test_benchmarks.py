"""The CPU benchmarks run in a tiny configuration and write a valid result; speed is not asserted."""

import importlib
import json
import re
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.common import command

ROOT = Path(__file__).resolve().parents[2]
SPREAD = {"median", "p10", "p90", "max"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a benchmark with options; returns its result file's content."""
    monkeypatch.syspath_prepend(ROOT)

    def run_benchmark(name: str, *options: str) -> dict[str, Any]:
        app = importlib.import_module(f"benchmarks.{name}").app
        output = tmp_path / f"{name}.json"
        CliRunner().invoke(app, [*options, "--output", str(output)], catch_exceptions=False)
        result = json.loads(output.read_text())
        check_frame(result, name)
        assert str(tmp_path) not in output.read_text()
        return result

    num_threads = torch.get_num_threads()
    yield run_benchmark
    torch.set_num_threads(num_threads)


def check_frame(result: dict[str, Any], name: str) -> None:
    assert set(result) == {"command", "commit", "date", "hardware", "versions", "rows"}
    assert re.fullmatch(r"[0-9a-f]{9}\+?|unknown", result["commit"])
    assert result["command"].startswith(f"python -m benchmarks.{name} --")
    assert set(result["hardware"]) == {"cpu", "num_cores", "memory_gib"}
    assert {"python", "torch"} <= set(result["versions"])


def check_times(times: dict[str, dict[str, float]]) -> None:
    for clock in ("wall_ms", "cpu_ms"):
        assert set(times[clock]) == SPREAD
        assert 0 <= times[clock]["p10"] <= times[clock]["median"] <= times[clock]["p90"] <= times[clock]["max"]


def test_scheduler(run) -> None:
    options = ("--num-requests", "3", "--num-tokens", "300", "--num-tokens", "70", "--steps", "130", "--warmup", "2")
    rows = run("scheduler", *options)["rows"]
    assert [row["num_tokens"] for row in rows] == [300, 70]
    for row in rows:
        for phase in ("total", "allocate", "build_connector_meta", "take_stats", "pickle"):
            check_times(row[phase])
        assert row["metadata_bytes"]["max"] > row["metadata_bytes"]["p10"] > 0  # a new block has to be told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_decode(run, dtype: str) -> None:
    options = {"batch": 2, "top-k": 16, "dtype": dtype, "context": 100, "num-layers": 2, "steps": 4, "warmup": 2}
    rows = run("cpu_decode", *(part for name, value in options.items() for part in (f"--{name}", str(value))))["rows"]
    assert [(row["batch"], row["top_k"], row["dtype"]) for row in rows] == [(2, 16, dtype)]
    check_times(rows[0]["hot"])
    check_times(rows[0]["full"])
    assert set(rows[0]["wall_ratio"]) == set(rows[0]["cpu_ratio"]) == SPREAD
    assert 0 < rows[0]["misses_per_selection"] <= 16
    assert rows[0]["host_to_device_bytes_per_step"] > 0


def test_cpu_decode_compares_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark refuses to report times of a wrong result."""
    monkeypatch.syspath_prepend(ROOT)
    cpu_decode = importlib.import_module("benchmarks.cpu_decode")
    with pytest.raises(AssertionError):
        cpu_decode.compare([torch.zeros(2)], [torch.ones(2)])


def serve_fakes(connection: Connection, system: str, job: dict[str, Any]) -> None:
    """Stands for an engine: answers with the case, and ends when it comes to the one it cannot do."""
    connection.send(None)
    for case in iter(connection.recv, None):
        if list(case) == job.get("fails_at"):
            sys.exit(3)
        connection.send({"system": system, "case": list(case)})


@pytest.mark.slow
def test_engines_of_the_decode_benchmark_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case by case; a case with one request is repeated; an engine that fails ends alone."""
    monkeypatch.syspath_prepend(ROOT)
    decode = importlib.import_module("benchmarks.decode")
    engines = [
        decode.Engine("full", {}, serve_fakes),
        decode.Engine("ours", {"fails_at": [300, 7]}, serve_fakes),
    ]
    rows = list(decode.take_turns(engines, [(100, 1), (200, 3), (300, 7)], repeats=2))
    assert [(row["system"], *row["case"]) for row in rows] == [
        ("full", 100, 1),
        ("ours", 100, 1),
        ("full", 100, 1),
        ("ours", 100, 1),
        ("full", 200, 3),
        ("ours", 200, 3),
        ("full", 300, 7),
    ]
    assert "ours failed with exit code 3" in capsys.readouterr().err
    assert not any(engine._process.is_alive() for engine in engines)


def test_back_ends_are_compared_with_the_base_of_the_same_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    decode = importlib.import_module("benchmarks.decode")

    def row(backend: str, system: str, requests: int, speed: float | None) -> dict[str, Any]:
        return {"backend": backend, "system": system, "context": 9, "requests": requests, "tokens_per_s": speed}

    base = decode.BASE_BACKEND
    rows = [row(base, "full", 1, 10.0), row(base, "ours", 1, 20.0), row(base, "ours", 1, 40.0)]
    assert decode.of_base(rows[0], rows) == 1.0
    assert decode.of_base(row("TRITON_ATTN", "ours", 1, 30.0), rows) == 0.75
    assert decode.of_base(row("TRITON_ATTN", "full", 1, 8.0), rows) == 0.8
    assert decode.of_base(row("TRITON_ATTN", "ours", 4, 8.0), rows) is None
    assert decode.of_base(row("TRITON_ATTN", "ours", 1, None), rows) is None
    assert base in decode.DENSE_BACKENDS and "FLASHINFER" in decode.DENSE_BACKENDS


def test_the_decode_benchmark_runs_each_back_end_with_either_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines differ in the back end and in the connector alone."""
    monkeypatch.syspath_prepend(ROOT)
    decode, found = importlib.import_module("benchmarks.decode"), []
    monkeypatch.setattr(decode, "gpu_hardware", lambda: {"gpu": "NVIDIA H100"})
    monkeypatch.setattr(decode, "make_model_of", lambda *_, **__: "llama")
    monkeypatch.setattr(decode, "take_turns", lambda engines, cases, repeats: [])
    monkeypatch.setattr(decode, "Engine", lambda system, job: found.append(decode.engine_args(system, job)))
    result = CliRunner().invoke(decode.app, ["backends", "--backend", "FLASH_ATTN 2", "--backend", "FLASHINFER"])
    assert result.exit_code == 1 and not result.output, result.output  # no engine has measured anything
    attention = [{"backend": "FLASH_ATTN", "flash_attn_version": 2}] * 2 + [{"backend": "FLASHINFER"}] * 2
    assert [each.pop("attention_config") for each in found] == attention
    options = [each.pop("kv_transfer_config", {}).get("kv_connector") for each in found]
    assert options == [None, "HiSparseHostConnector"] * 2 and all(each == found[0] for each in found)
    assert CliRunner().invoke(decode.app, ["backends", "--backend", "FLEX"]).exit_code == 2


def test_the_prefill_benchmark_runs_both_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engines differ in the connector alone."""
    monkeypatch.syspath_prepend(ROOT)
    prefill, found = importlib.import_module("benchmarks.prefill"), []

    def measure_all(system: Any, job: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
        found.append(prefill.engine_args(system, job))
        return []

    monkeypatch.setattr(prefill, "measure_all", measure_all)
    monkeypatch.setattr(prefill, "show", lambda *_: None)
    CliRunner().invoke(prefill.app, ["--model-dir", str(tmp_path)], catch_exceptions=False)
    options = [each.pop("kv_transfer_config", {}).get("kv_connector") for each in found]
    assert options == [None, "HiSparseHostConnector"] and found[0] == found[1]


def test_the_profile_of_a_step_adds_up_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    module = importlib.import_module("benchmarks.decode_profile")
    steps, on_device, on_host = module.NUM_STEPS, torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    profile = module.StepProfile()
    profile.seconds = [9.0] * module.WARM_UP_STEPS + [0.001] * (steps - 1) + [0.5] + [9.0] * steps
    found = [("b", 2.0, on_device), ("a", 3.0, on_device), ("b", 4.0, on_device), ("a", 100.0, on_host)]
    events = [
        SimpleNamespace(name=name, device_type=where, time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
        for name, us, where in found
    ]
    profile._profiler = SimpleNamespace(events=lambda: events * steps)
    summary = profile.summary()
    assert summary["kernels"] == [{"name": "b", "launches": 2, "us": 6.0}, {"name": "a", "launches": 1, "us": 3.0}]
    assert (summary["device_us"], summary["launches"], summary["step_us_p50"]) == (9.0, 3, 1000.0)


def test_the_decode_benchmark_counts_decode_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    decode = importlib.import_module("benchmarks.decode")
    # At 0.1 s a prompt is computed; 2 requests decode for 3 steps, the one that is left for 2.
    steps = [(0.1, (9, 9)), (0.2, (1, 1)), (0.3, (1, 1)), (0.4, (1, 1)), (0.6, (1, 1)), (0.7, (1,)), (0.8, (1,))]
    scheduler = SimpleNamespace(update_from_output=lambda scheduler_output, model_output: model_output)
    clock = decode.StepClock()
    clock.attach(scheduler)
    for index, (now, counts) in enumerate(steps):
        monkeypatch.setattr(decode.time, "perf_counter", lambda now=now: now)
        output = SimpleNamespace(num_scheduled_tokens=dict(enumerate(counts)))
        assert scheduler.update_from_output(output, index) == index
    summary = clock.summary()
    assert (summary["steps"], summary["running_max"]) == (5, 2)
    assert summary["tokens_per_s"] == pytest.approx(8 / 0.6, abs=0.1)
    assert summary["tokens_per_s_full_batch"] == pytest.approx(6 / 0.4, abs=0.1)
    assert (summary["itl_ms_p50"], summary["itl_ms_p99"]) == (pytest.approx(100), pytest.approx(200))
    assert decode.StepClock().summary()["tokens_per_s"] is None


def test_trace_cost(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(importlib.import_module("benchmarks.trace_cost"), "CASES", ((2, 3, 64),))
    [row] = run("trace_cost", "--steps", "5", "--context", "4096")["rows"]
    for name in ("without", "with"):
        check_times(row[name])
    assert row["bytes_per_selection"] > 0 and row["write_ms"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_tiers(tmp_path: Path) -> None:
    output = tmp_path / "tiers.json"
    options = ["--models", "llama", "--tiers", "fs", "--prefix-tokens", "300", "--repeats", "1"]
    files = ["--output", str(output), "--plot", str(tmp_path / "tiers.png")]
    command = [sys.executable, "-m", "benchmarks.tiers", *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(output.read_text())
    check_frame(result, "tiers")
    [row] = result["rows"]
    assert row["same_tokens"] and row["loaded_bytes"] > 0
    assert set(row["ttft_ms"]) >= {"median", "p10", "p90"}


@pytest.mark.slow
@pytest.mark.e2e
def test_imports(run) -> None:
    """Between two processes, from memory to memory."""
    options = ("--device", "cpu", "--choice", "shared memory", "--mib", "8")
    (row,) = run("imports", *options)["rows"]
    assert row["error"] is None and row["gb_s"] > 0
    assert (row["choice"], row["way"], row["mib"]) == ("shared memory", "host", 7)  # whole pieces of 41 KiB
    assert "memory" in row["transport"]


@pytest.mark.slow
@pytest.mark.e2e
def test_nixl_calls(run) -> None:
    """Between two processes, from memory to memory."""
    rows = run("nixl_calls", "--device", "cpu", "--mib", "8", "--piece-kib", "64")["rows"]
    assert [(row["choice"], row["reads"]) for row in rows] == [
        (name, n) for name in ("default", "tcp") for n in (1, 2, 4)
    ]
    for row in rows:
        assert (
            row["mib"] == 8 and 0 < row["longest_start_s"] + row["longest_poll_s"] < row["seconds"] + 2e-4
        )  # all are rounded


UCX_TABLES = """
| ucp_context_0 intra-node cfg#1 | remote memory read by ucp_get*(multi) into cuda/GPU1 from cuda/dev[0] |
|                       0..4095  | short                          | tcp/lo             |
|                       4K..inf  | zero-copy                      | cuda_ipc/cuda      |
| ucp_context_0 intra-node cfg#1 | remote memory read by ucp_get*(multi) into host memory from cuda |
|                       0..inf   | software emulation             | tcp/lo             |
| ucp_context_0 intra-node cfg#1 | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda |
|                       0..inf   | zero-copy                      | rc_mlx5/mlx5_0     |
| ucp_context_0 intra-node cfg#1 | active message by ucp_am_send*(multi) |
|                       0..inf   | short                          | sysv/memory        |
"""


@pytest.mark.parametrize(
    ("is_device", "is_write", "transport"),
    [
        (True, False, "zero-copy: cuda_ipc/cuda"),
        (False, False, "software emulation: tcp/lo"),
        (True, True, "zero-copy: rc_mlx5/mlx5_0"),
    ],
)
def test_imports_name_the_transport_of_the_largest_pieces(
    monkeypatch: pytest.MonkeyPatch, is_device: bool, is_write: bool, transport: str
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    imports = importlib.import_module("benchmarks.imports")
    assert imports.transport_of(UCX_TABLES, is_device, is_write) == transport
    assert imports.transport_of("", is_device, is_write) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "python -m benchmarks.x --size 3"),
        (["--size", "4", "--output", "a.json"], "python -m benchmarks.x --size 4 --output a.json"),
        (["--output", "/tmp/b.json"], "python -m benchmarks.x --output b.json --size 3"),
    ],
)
def test_the_recorded_command_leaves_out_a_default_output(words: list[str], expected: str) -> None:
    found: list[str] = []

    def run(ctx: typer.Context, size: int = 3, output: str = "result.json") -> None:
        found.append(command(ctx, "benchmarks.x"))

    app = typer.Typer()
    app.command()(run)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert found == [expected]

"""GPU tests against the installed release of vLLM, with a result file: `python -m benchmarks.release`.

Each part is a pytest run; parts of a round share the GPU. Every comparison of tokens is counted: those compared up to
where two runs part, those in common, and the runs that part at a tie. Parts can be run one by one: the result file of
the same commit and the same release keeps what other parts found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

from benchmarks.common import RESULTS, commit, gpu_hardware, show, versions, write_result

ROOT = Path(__file__).parents[1]
PARITY, DENSE = "tests/gpu/test_engine_parity.py", "tests/gpu/test_dense_parity.py"
PARTS: dict[str, tuple[str, ...]] = {
    "memory": ("tests/gpu/test_memory_profile.py", "-k", "test_vllm_sizes and (dense or fused)"),
    "kernels": ("tests/gpu/test_cuda_ops.py", "tests/gpu/test_unit_ops.py"),
    "parity": (PARITY, "-k", "test_parity_with_cuda_graphs and not generic"),
    "generic": (PARITY, "-k", "test_parity_with_cuda_graphs and generic"),
    "preemption": (PARITY, "-k", "test_preemption_and_prefix_reuse"),
    "pd": ("tests/gpu/test_pd_gpu.py", "-k", "imported and (fp8 or llama) and not mtp and not tp2"),
    "mtp": (PARITY, "-k", "test_a_draft_layer_with_cuda_graphs and fp8"),
    "ngram": (PARITY, "-k", "test_drafts_with_cuda_graphs and fp8"),
    "shared": (PARITY, "-k", "test_shared_indexers_with_cuda_graphs and fp8"),
    "dense": (DENSE, "-k", "test_evicted or test_budget_of_everything"),
    "ranks": ("tests/gpu/test_tensor_parallel.py",),
}
# NOTE: vLLM measures the memory of the whole device, so that the parts that let it are alone on it.
ROUNDS = (("memory",), ("kernels", "parity"), ("generic", "preemption", "pd"), ("mtp", "ngram", "shared", "dense"))
TWO_GPUS = ("ranks",)

app = typer.Typer(add_completion=False)


def run_part(part: str, folder: Path) -> dict[str, Any]:
    """Run a part's tests; returns what they found."""
    report = folder / part
    report.mkdir()
    junit, environment = report / "junit.xml", {**os.environ, "HISPARSE_TEST_REPORT": str(report)}
    arguments = ["-q", "-p", "no:cacheprovider", f"--junitxml={junit}", "-o", "junit_family=xunit1", *PARTS[part]]
    start = time.monotonic()
    with (report / "pytest.log").open("w") as log:
        command = [sys.executable, "-m", "pytest", *arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    found = summary(junit, report / "comparisons.jsonl")
    if status:
        tail = (report / "pytest.log").read_text().splitlines()[-60:]
        typer.echo("\n".join([f"{part}: pytest ended with {status}", *tail]))
    return {"part": part, "seconds": round(time.monotonic() - start, 1), **found}


def summary(junit: Path, comparisons: Path) -> dict[str, Any]:
    """Outcomes of a run's tests, and its comparisons.

    Args:
        junit: what pytest wrote; it is missing if pytest did not come that far.
        comparisons: lines of `tests/gpu/engines.py`; missing if there was none.
    """
    cases = list(ElementTree.parse(junit).iter("testcase")) if junit.exists() else []
    outcomes = {case.get("name", ""): outcome(case) for case in cases}
    lines = [json.loads(line) for line in comparisons.read_text().splitlines()] if comparisons.exists() else []
    counts = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}
    totals = {name: sum(line[name] for line in lines) for name in ("requests", "tokens", "same_tokens", "ties")}
    return {**counts, **totals, "tests": outcomes}


def outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def rounds(parts: list[str]) -> list[list[str]]:
    """The chosen parts by rounds; those on two GPUs are the last."""
    chosen = [[part for part in each if part in parts] for each in (*ROUNDS, TWO_GPUS)]
    return [each for each in chosen if each]


def earlier(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of the result file by part, where it is of this commit and these versions."""
    record = json.loads(path.read_text()) if path.exists() else {}
    is_same = record.get("commit") == commit() and record.get("versions") == versions()
    return {row["part"]: row for row in record["rows"]} if is_same else {}


@app.command()
def main(
    ctx: typer.Context,
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; default: all on one GPU")] = None,
    output: Annotated[Path | None, typer.Option(help="result file; default: by GPU and release")] = None,
) -> None:
    """Run the tests of parts, and write the result file."""
    if unknown := set(part or ()) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    gpu = gpu_hardware()
    path = output or RESULTS / str(gpu["gpu"]).split()[1].lower() / f"release_{versions()['vllm']}.json"
    rows = earlier(path)
    with TemporaryDirectory() as folder:
        for each in rounds(part or [name for name in PARTS if name not in TWO_GPUS]):
            with ThreadPoolExecutor(len(each)) as pool:
                found = list(pool.map(lambda name: run_part(name, Path(folder)), each))
            rows |= {row["part"]: row for row in found}
            write_result(path, ctx, "benchmarks.release", list(rows.values()), gpu)
            show("Parts", [{name: value for name, value in row.items() if name != "tests"} for row in found])
    raise typer.Exit(1 if any(row["failed"] or not row["passed"] for row in rows.values()) else 0)


if __name__ == "__main__":
    app()

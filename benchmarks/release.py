"""GPU tests against the installed release of vLLM, with a result file: `python -m benchmarks.release`.

Each part is a pytest run; several share the GPU. For every comparison, a row counts all tokens of the answers, the
tokens before the first one in which an answer differs from its reference, and the answers that differ at a tie. A
part's row is written when the part ends. A result file of the same commit and the same release keeps the rows of other
parts, so parts can be run one by one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

from benchmarks.common import RESULTS, commit, gpu_hardware, show, versions, write_result

ROOT = Path(__file__).parents[1]
PARITY, DENSE, PD = "tests/gpu/test_engine_parity.py", "tests/gpu/test_dense_parity.py", "tests/gpu/test_pd_gpu.py"
MEMORY = "tests/gpu/test_memory_profile.py"
COUNTS = ("requests", "tokens", "same_tokens", "ties")  # of comparisons


@dataclass(frozen=True)
class Part:
    """Tests that run in one process of pytest.

    Attributes:
        files: the files of the tests.
        selection: expression of pytest's option -k; empty: all tests of the files.
        num_engines: engines that the part has at one time.
        is_alone: nothing else may run on the device, because vLLM measures the memory of the whole device.
        num_gpus: GPUs that the part needs.
    """

    files: tuple[str, ...]
    selection: str = ""
    num_engines: int = 1
    is_alone: bool = False
    num_gpus: int = 1

    @property
    def arguments(self) -> list[str]:
        return [*self.files, *(("-k", self.selection) if self.selection else ())]


# The order in which parts start: the longest first, those that are alone at the end.
PARTS: dict[str, Part] = {
    "parity_fp8": Part((PARITY,), "test_parity_with_cuda_graphs and fp8 and not generic", 3),
    "pd": Part((PD,), "imported and (fp8 or llama) and not mtp and not tp2", 2),
    "pd_buffer": Part((PD, "tests/gpu/test_page_writer_gpu.py"), "imported and buffer and not managed", 3),
    "pd_managed": Part((PD, "tests/gpu/test_page_writer_gpu.py"), "imported and managed", 3),
    "pd_narrow_keys": Part((PD,), "imported and narrow_keys and not buffer", 3),
    "pd_hyv4": Part((PD,), "imported and hyv4", 2),
    "pd_minimax_m3": Part((PD,), "imported and minimax", 2),
    "kernels": Part(("tests/gpu/test_cuda_ops.py", "tests/gpu/test_unit_ops.py")),
    "flashinfer_units": Part(("tests/gpu/test_flashinfer_units.py",)),  # compiles XQA for each size, 15 s each
    "parity_bf16_flash_attn": Part((PARITY,), "test_parity_with_cuda_graphs and bf16_flash_attn", 3),
    "parity_bf16_flashmla": Part((PARITY,), "test_parity_with_cuda_graphs and bf16_flashmla", 3),
    "forms": Part((PARITY,), "test_both_forms_of_a_step", 3),
    "rows_by_layer": Part((PARITY,), "test_layers_with_different_numbers_of_rows", 3),
    "preemption": Part((PARITY,), "test_preemption_and_prefix_reuse", 2),
    "dense": Part((DENSE,), "test_evicted or (test_budget_of_everything and (quest or pq_cache))", 7),
    "mtp": Part((PARITY,), "test_a_draft_layer_with_cuda_graphs and fp8", 3),
    "ngram": Part((PARITY,), "test_drafts_with_cuda_graphs and fp8", 3),
    "shared": Part((PARITY,), "test_shared_indexers_with_cuda_graphs and fp8", 2),
    "hyv4": Part(("tests/gpu/test_hyv4_parity.py",), num_engines=4),
    "minimax_m3": Part(("tests/gpu/test_minimax_m3_parity.py",), num_engines=4),
    "glm": Part((PARITY,), "test_glm_architectures_eager and fp8 and not glm52", 2),
    "qwen": Part((DENSE,), "test_other_models and qwen", 2),
    "mixtral": Part((DENSE,), "test_other_models and mixtral", 2),
    "glm4_moe": Part((DENSE,), "test_other_models and glm4_moe", 2),
    "ernie45_moe": Part((DENSE,), "test_other_models and ernie45_moe", 2),
    "images": Part(("tests/gpu/test_image_parity.py",), num_engines=8),
    "backends": Part((DENSE,), "test_other_backends and not flashinfer", 4),
    "flashinfer": Part((DENSE,), "test_other_backends and flashinfer", 3),  # compiles FlashInfer's prefill and decode
    "dense_fp8": Part((DENSE,), "test_kv_in_fp8", 4),
    "managed_memory": Part(("tests/gpu/test_managed_memory_gpu.py",)),
    "select_positions": Part(("tests/gpu/test_select_positions_gpu.py",)),
    "narrow_keys_kernels": Part(("tests/gpu/test_indexer_keys.py",)),
    "narrow_keys": Part((PARITY,), "test_indexer_keys_in_4_bits", 2),
    "generic": Part((PARITY,), "test_parity_with_cuda_graphs and fp8_generic", 3),
    # compiles FlashInfer's sparse MLA
    "parity_flashinfer": Part((PARITY,), "test_parity_with_cuda_graphs and flashinfer_sm90", 6),
    "memory": Part((MEMORY,), "test_vllm_sizes and (dense or fused)", 2, is_alone=True),
    "pd_memory": Part((PD,), "takes_no_device_memory and (fp8 or buffer_blocks) and not mtp", 2, is_alone=True),
    "memory_llama_8b": Part((MEMORY,), "llama_8b", 1, is_alone=True),
    "ranks": Part(("tests/gpu/test_tensor_parallel.py",), num_engines=4, is_alone=True, num_gpus=2),
    "pd_ranks": Part((PD,), "imported and tp2", num_engines=2, is_alone=True, num_gpus=2),
}

app = typer.Typer(add_completion=False)


def run_part(part: str, folder: Path) -> dict[str, Any]:
    """Run the tests of a part.

    Args:
        part: a name of `PARTS`.
        folder: gets a folder of the part's name, with the logs of pytest and of the servers, and every comparison.

    Returns: the row of the result file.
    """
    report = folder / part
    report.mkdir(parents=True, exist_ok=True)
    (report / "comparisons.jsonl").unlink(missing_ok=True)
    junit, environment = report / "junit.xml", {**os.environ, "HISPARSE_TEST_REPORT": str(report)}
    environment.setdefault("OMP_NUM_THREADS", "8")  # references on the CPU
    arguments = ["-q", "-p", "no:cacheprovider", f"--junitxml={junit}", "-o", "junit_family=xunit1"]
    arguments += PARTS[part].arguments
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
    """Count the outcomes of a run's tests and its comparisons, and name the tests that did not pass.

    Args:
        junit: JUnit file that pytest wrote; it is missing if pytest did not come that far.
        comparisons: lines of `tests/gpu/engines.py`; missing if there was none.
    """
    cases = list(ElementTree.parse(junit).iter("testcase")) if junit.exists() else []
    outcomes = {case.get("name", ""): outcome(case) for case in cases}
    lines = [json.loads(line) for line in comparisons.read_text().splitlines()] if comparisons.exists() else []
    tests = by_test(lines)
    counts = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}
    totals = {name: sum(test[name] for test in tests) for name in COUNTS}
    others = [f"{name}: {kind}" for name, kind in outcomes.items() if kind != "passed"]
    return {**counts, **totals, "not_passed": others, "comparisons": tests}


def by_test(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up the comparisons of each test, and take the widest of its ties."""
    tests: dict[str, dict[str, Any]] = {}
    for line in lines:
        found = tests.setdefault(line["test"], {"test": line["test"]} | dict.fromkeys(COUNTS, 0) | {"widest_tie": None})
        found |= {name: found[name] + line[name] for name in COUNTS}
        ties = [tie for tie in (found["widest_tie"], line["widest_tie"]) if tie is not None]
        found["widest_tie"] = round(max(ties), 4) if ties else None
    return list(tests.values())


def outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def run_parts(parts: list[str], folder: Path, max_engines: int) -> Iterator[dict[str, Any]]:
    """Run parts side by side, and yield the row of each when it ends.

    Args:
        parts: names of `PARTS`, in the order in which they start; one that does not fit beside those that run lets
            later ones pass.
        folder: as for `run_part`.
        max_engines: engines at one time. A part that needs more runs alone.
    """
    waiting, running = list(parts), dict[Future[dict[str, Any]], Part]()
    with ThreadPoolExecutor(len(parts)) as pool:
        while waiting or running:
            for name in [name for name in waiting if fits(PARTS[name], list(running.values()), max_engines)]:
                if fits(PARTS[name], list(running.values()), max_engines):
                    waiting.remove(name)
                    running[pool.submit(run_part, name, folder)] = PARTS[name]
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                del running[future]
                yield future.result()


def fits(part: Part, running: list[Part], max_engines: int) -> bool:
    """Tell if a part may start beside those that run."""
    if not running:
        return True
    is_shared = not any(each.is_alone for each in (part, *running))
    return is_shared and sum(each.num_engines for each in (part, *running)) <= max_engines


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
    logs: Annotated[Path | None, typer.Option(help="folder that keeps the logs; default: none are kept")] = None,
    max_engines: Annotated[int, typer.Option(help="engines at one time; a GPU of 80 GB has room for 8")] = 8,
) -> None:
    """Run the tests of parts, and write the result file."""
    if unknown := set(part or ()) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    gpu = gpu_hardware()
    path = output or RESULTS / str(gpu["gpu"]).split()[1].lower() / f"release_{versions()['vllm']}.json"
    rows, chosen = earlier(path), part or [name for name, each in PARTS.items() if each.num_gpus == 1]
    with TemporaryDirectory() as temporary:
        for row in run_parts(chosen, logs or Path(temporary), max_engines):
            rows[row["part"]] = row
            write_result(path, ctx, "benchmarks.release", list(rows.values()), gpu)
            show(row["part"], [row])
    raise typer.Exit(1 if any(row["failed"] or not row["passed"] for row in rows.values()) else 0)


if __name__ == "__main__":
    app()

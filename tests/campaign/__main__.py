"""`python -m tests.campaign`: many lives of every configuration, and faults of real engines."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # before vLLM is imported: every world starts an engine

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.common import RESULTS, show, write_result

from .configuration import CONFIGURATIONS
from .lives import Result
from .many_lives import run_many_lives

Row = dict[str, Any]


class Part(StrEnum):
    LIVES = "lives"
    FAULTS = "faults"


KEYS = {Part.LIVES: "configuration", Part.FAULTS: "fault"}  # first field of a part's rows
SHOWN = (
    "configuration",
    "lives",
    "steps",
    "preemptions",
    "violations",
    "fault",
    "times",
    "lost_blocks",
    "wrong_tokens",
)

app = typer.Typer(add_completion=False)
console = Console(stderr=True)


@app.command()
def campaign(
    ctx: typer.Context,
    part: Annotated[list[Part], typer.Option(help="What to run; repeatable.")] = list(Part),  # noqa: B006
    lives: Annotated[int, typer.Option(min=1, help="Requests of each configuration.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the worlds they live in.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes for lives. Default: one per core.")] = None,
    lives_minutes: Annotated[
        float | None, typer.Option(min=0.01, help="End the lives after this time, with those that were lived.")
    ] = None,
    kill_points: Annotated[int, typer.Option(min=1, help="Times that each engine is killed.")] = 20,
    minutes: Annotated[float, typer.Option(min=0.1, help="Of load on a full host pool.")] = 10.0,
    disconnects: Annotated[int, typer.Option(min=1, help="Clients that leave early.")] = 50,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run only what the output file lacks; fewer lives count as none.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Result file; its rows of what is not run stay.")] = RESULTS
    / "cpu"
    / "campaign.json",
) -> None:
    """Look for requests that read another's KV, end an engine or leave blocks behind."""
    rows = {_name(row): row for row in json.loads(output.read_text())["rows"]} if output.exists() else {}
    known = {name for name, row in rows.items() if row.get("lives", lives) >= lives} if resume else set()
    with _progress() as progress:
        measured = []
        if Part.LIVES in part:
            limit = None if lives_minutes is None else 60 * lives_minutes
            measured.append(_run_lives(progress, known, lives, seed, jobs or len(os.sched_getaffinity(0)), limit))
        if Part.FAULTS in part:
            measured.append(_run_faults(progress, kill_points, minutes, disconnects, known))
        for row in (row for rows_of_part in measured for row in rows_of_part):
            rows[_name(row)] = row
            ctx.params["part"] = [name for name, key in KEYS.items() if any(key in row for row in rows.values())]
            write_result(output, ctx, "tests.campaign", list(rows.values()))
    _show(list(rows.values()))
    if any(row.get(name) for row in rows.values() for name in ("violations", "lost_blocks", "wrong_tokens")):
        raise typer.Exit(1)


def _run_lives(
    progress: Progress, known: set[str], lives: int, seed: int, num_jobs: int, seconds: float | None
) -> Iterator[Row]:
    configurations = [configuration for configuration in CONFIGURATIONS if configuration.name not in known]
    tasks: dict[str, TaskID] = {}

    def show_progress(result: Result) -> None:
        name = result.configuration.name
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=lives)
        progress.update(tasks[name], completed=min(result.counts["lives"], lives))

    for result in run_many_lives(configurations, lives, seed, num_jobs, seconds, show_progress):
        for violation in result.violations:
            name = result.configuration.name
            console.print(f"{name}, seed {violation.seed}: {violation.message} ({violation.where})")
        yield result.row()


def _run_faults(
    progress: Progress, kill_points: int, minutes: float, disconnects: int, known: set[str]
) -> Iterator[Row]:
    # NOTE: not above: it starts engines, and only this command has the tests' helpers on its path.
    from tools.harness.processes import ProcessGroup

    from . import faults
    from .cluster import Cluster

    runs: dict[str, tuple[Callable[..., faults.Fault], float]] = {
        "clients disconnect": (faults.clients_disconnect, disconnects),
        "host pool full": (faults.host_pool_full, 60 * minutes),
        "prefill killed during a transfer": (partial(faults.killed, "prefill"), kill_points),
        "decode killed during a transfer": (partial(faults.killed, "decode"), kill_points),
    }
    runs = {name: run for name, run in runs.items() if name not in known}
    if not runs:
        return
    with tempfile.TemporaryDirectory() as log_dir, ProcessGroup() as group:
        cluster = Cluster(group, Path(log_dir))
        for name, (run, total) in runs.items():
            task = progress.add_task(name, total=total)
            fault = run(cluster, total, partial(progress.advance, task))
            yield {name: value for name, value in asdict(fault).items() if value is not None}


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _name(row: Row) -> str:
    return row.get("configuration") or row["fault"]


def _show(rows: list[Row]) -> None:
    for part, key in KEYS.items():
        if of_part := [{name: row[name] for name in row if name in SHOWN} for row in rows if key in row]:
            show(part.value, of_part)


if __name__ == "__main__":
    app()

"""`vllm-hisparse check-algorithm`: checks an algorithm of your own without an engine."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def check_algorithm_command(
    algorithm: Annotated[str, typer.Argument(help="Dotted path of the class, or a name such as quest.")],
    algorithm_options: Annotated[str, typer.Option(help="Options of the algorithm, a JSON object.")] = "{}",
    num_heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 6,
    num_kv_heads: Annotated[int, typer.Option(min=1, help="KV heads, a divisor of the query heads.")] = 2,
    head_size: Annotated[int, typer.Option(min=1, help="Elements of a key.")] = 16,
) -> None:
    """Check an algorithm of your own on random keys, in seconds, without an engine. Exits with 1 if a check fails.

    The class is looked up on PYTHONPATH and in the current directory.
    """
    from vllm_hisparse.algorithms.registry import AlgorithmRefused
    from vllm_hisparse.algorithms.testing import SHAPE, results

    if num_heads % num_kv_heads:
        raise typer.BadParameter(f"got {num_kv_heads}, expected a divisor of {num_heads}", param_hint="--num-kv-heads")
    shape = replace(SHAPE, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)
    sys.path.append(os.getcwd())
    table, failures = Table(box=box.SIMPLE), []
    table.add_column("check")
    table.add_column("result")
    try:
        options = json.loads(algorithm_options)
        if not isinstance(options, dict):
            raise ValueError("no object")
    except ValueError as invalid:
        message = f"got {algorithm_options!r}, expected a JSON object ({invalid})"
        raise typer.BadParameter(message, param_hint="--algorithm-options") from None
    try:
        for rule, error in results(algorithm, options, shape):
            table.add_row(escape(rule), "[green]passed[/]" if error is None else "[red]failed[/]")
            if error is not None:
                failures.append((rule, error))
    except AlgorithmRefused as refused:
        message = f"got {algorithm!r}, expected {refused}. {refused.advice}"
        raise typer.BadParameter(message, param_hint="ALGORITHM") from None
    except ValidationError as invalid:
        detail = invalid.errors()[0]
        name = ".".join(map(str, detail["loc"]))
        message = f"{name}: got {detail['input']!r}: {detail['msg']}"
        raise typer.BadParameter(message, param_hint="--algorithm-options") from None
    Console().print(table)
    for rule, error in failures:
        typer.echo(f"{rule}\n  {_describe(error)}")
    raise typer.Exit(1 if failures else 0)


def _describe(error: Exception) -> str:
    """Return the text of an error, with the line of the algorithm that raised it."""
    import torch

    import vllm_hisparse
    from vllm_hisparse.algorithms.testing import AlgorithmError

    if isinstance(error, AlgorithmError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    others = [Path(package.__path__[0]) for package in (vllm_hisparse, torch)]
    own = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, others))]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"

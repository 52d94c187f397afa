"""`vllm-hisparse doctor`: options and the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_hisparse.cli.doctor.checks import (
    check_gpu,
    check_memory,
    check_network,
    check_numa,
    check_versions,
    in_one_line,
)
from vllm_hisparse.cli.doctor.report import Report, Status
from vllm_hisparse.cli.output_files import check_writable

MAX_PORT = 65535
MIN_WIDTH = 120  # columns of the table
COLOURS = {Status.ok: "green", Status.note: "dim", Status.warning: "yellow", Status.error: "bold red"}


def doctor_command(
    host_pool_gib: Annotated[float, typer.Option(min=0.1, help="Size of the host pool that is intended.")] = 8.0,
    peer: Annotated[str | None, typer.Option(help="HOST:PORT of a doctor that serves on another host.")] = None,
    serve: Annotated[int | None, typer.Option(min=1, max=MAX_PORT, help="Serve a peer's doctor on this port.")] = None,
    nixl: Annotated[bool, typer.Option(help="Try NIXL between two processes of this host.")] = True,
    rates: Annotated[bool, typer.Option(help="Measure the link to the GPU.")] = True,
    output: Annotated[Path | None, typer.Option(help="File for the JSON, which `plan --gpu` reads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, GPU, memory and network of this machine and measure its links. Exits with 1 after an error."""
    if peer is not None:
        _check_peer(peer)
    if output is not None:
        check_writable(output, "--output")
    console, report = Console(highlight=False, stderr=as_json), Report()
    examine(report, "versions", check_versions)
    has_kernels = examine(report, "GPU", check_gpu)
    device = "cuda" if report.gpu else "cpu"
    if serve is not None:
        _serve(console, serve, device)
        return
    fits = examine(report, "host memory", check_memory, host_pool_gib)
    examine(report, "NUMA", check_numa, host_pool_gib)
    examine(report, "network", check_network)
    if has_kernels and rates and not fits:
        report.add("rates of the link", Status.note, "not measured: the host pool may not fit", "See host memory.")
    elif has_kernels and rates:
        from vllm_hisparse.cli.doctor.rates import measure_rates

        with console.status(f"filling and pinning {host_pool_gib:g} GiB, and measuring the link"):
            examine(report, "rates of the link", measure_rates, host_pool_gib)
    if nixl:
        from vllm_hisparse.cli.doctor.nixl_peer import check_two_processes

        with console.status("reading from another process over NIXL"):
            examine(report, "NIXL", check_two_processes, device)
    if peer is not None:
        from vllm_hisparse.cli.doctor.nixl_peer import check_peer

        with console.status(f"reading from {peer} over NIXL"):
            examine(report, f"NIXL from {peer}", check_peer, peer)
    text = json.dumps(report.as_json(), indent=2)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        console.width = max(console.width, MIN_WIDTH)
        console.print(make_table(report))
    raise typer.Exit(report.exit_status)


def examine(report: Report, name: str, check: Callable[..., Any], *arguments: Any) -> Any:
    """Run a check and return its result. If it fails, that is a finding, and the result is None: the others still run.

    Args:
        report: gets the findings.
        name: name of the finding.
        check: gets the report and the arguments.
    """
    try:
        return check(report, *arguments)
    except Exception as error:  # files without permission, packages that are missing, a GPU without free memory
        found = f"not checked: {type(error).__name__}: {in_one_line(error)}"
        report.add(name, Status.warning, found)
        return None


def _check_peer(peer: str) -> None:
    host, _, port = peer.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT):
        message = f"got {peer!r}, expected HOST:PORT, with a port from 1 to {MAX_PORT}"
        raise typer.BadParameter(message, param_hint="--peer")


def _serve(console: Console, port: int, device: str) -> None:
    from vllm_hisparse.cli.doctor.nixl_peer import is_installed
    from vllm_hisparse.cli.doctor.nixl_peer import serve as serve_peers

    if not is_installed():
        raise typer.BadParameter(f"got {port}, but nixl is not installed: pip install nixl", param_hint="--serve")
    console.print(f"Serving peers on port {port}; stop with Ctrl-C.")
    try:
        serve_peers(port, device)
    except OSError as error:
        raise typer.BadParameter(f"got {port}: {error.strerror}", param_hint="--serve") from None


def make_table(report: Report) -> Table:
    """Make the table of findings that users see."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("", "checked", "found", "what to do"):
        table.add_column(header, no_wrap=header in ("", "checked"))
    for finding in report.findings:
        colour = COLOURS[finding.status]
        cells = (escape(cell) for cell in (finding.name, finding.found, finding.advice))  # of extras: [cuda]
        table.add_row(f"[{colour}]{finding.status}[/]", *cells)
    return table

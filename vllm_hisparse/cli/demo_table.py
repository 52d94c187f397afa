"""How the demo shows its report on a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from vllm_hisparse.cli.demo_report import Report, RequestRow

MIB = 2**20


def request_table(report: Report) -> Table:
    """One line per request."""
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("request", "prompt tokens", "tokens as full KV", "hot-buffer hits"):
        table.add_column(header, justify="right")
    for header in ("device KV", "with full KV", "straight to host", "first token", "total"):
        table.add_column(header, justify="right")
    for row in report.rows:
        table.add_row(*cells(row))
    return table


def cells(row: RequestRow) -> list[str]:
    same = f"[green]{row.output_tokens} of {row.output_tokens}[/]"
    differs = f"[red]{row.first_difference} of {row.output_tokens}[/]"
    return [
        str(row.request),
        str(row.prompt_tokens),
        same if row.identical else differs,
        f"{row.hit_rate:.1%}",
        *(f"{size / MIB:.1f} MiB" for size in (row.device_bytes, row.full_bytes, row.nixl_bytes_to_host)),
        f"{row.first_token_s:.1f} s",
        f"{row.total_s:.1f} s",
    ]


def verdict(report: Report) -> str:
    """One line: what was shown, or what went wrong."""
    if problems := report.problems():
        return f"[bold red]✗ {'; '.join(problems)}.[/]"
    device, full = report.device_bytes_per_request, report.full_bytes_per_request
    received = report.counter("transfer_bytes_to_host")
    return (
        f"[bold green]✓ {len(report.rows)} of {len(report.rows)} requests: the same tokens as with full KV.[/] "
        f"Device KV per request: {device / MIB:.1f} instead of {full / MIB:.1f} MiB ({full / device:.1f}x less); "
        f"{report.hit_rate:.1%} hits; {received / MIB:.0f} MiB went from prefill straight to host memory."
    )

"""Shows the demo's report on a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from vllm_hisparse.cli.demo_report import Report, RequestResult

MIB = 2**20
CAPTION = (
    "same: tokens as with full KV; hits: selected rows found in the hot buffer; hot, full MiB: device KV with a hot "
    "buffer and with full KV; host MiB: KV received straight into host memory; first, total s: time to tokens"
)


def request_table(report: Report) -> Table:
    """One line per request."""
    table = Table(box=box.SIMPLE_HEAD, caption=CAPTION, caption_justify="left", pad_edge=False)
    for header in ("#", "prompt", "same", "hits", "hot MiB", "full MiB", "host MiB", "first s", "total s"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in report.results:
        table.add_row(*cells(result))
    return table


def cells(result: RequestResult) -> list[str]:
    """One request: its number, tokens of the prompt, tokens as with full KV, and so on."""
    num_same = result.output_tokens if result.first_difference is None else result.first_difference
    return [
        str(result.request),
        str(result.prompt_tokens),
        f"[{'green' if result.identical else 'red'}]{num_same}/{result.output_tokens}[/]",
        f"{result.hit_rate:.1%}",
        *(f"{size / MIB:.1f}" for size in (result.device_bytes, result.full_bytes, result.nixl_bytes_to_host)),
        f"{result.first_token_s:.1f}",
        f"{result.total_s:.1f}",
    ]


def verdict(report: Report) -> str:
    """One line: the result, or what went wrong."""
    if problems := report.problems():
        return f"[bold red]✗ {'; '.join(problems)}.[/]"
    device, full = report.device_bytes_per_request, report.full_bytes_per_request
    received = report.counter("transfer_bytes_to_host")
    return (
        f"[bold green]✓ {len(report.results)} of {len(report.results)} requests: the same tokens as with full KV.[/] "
        f"Device KV per request: {device / MIB:.1f} instead of {full / MIB:.1f} MiB ({full / device:.1f}x less); "
        f"{report.hit_rate:.1%} hits; {received / MIB:.0f} MiB went from prefill directly to host memory."
    )

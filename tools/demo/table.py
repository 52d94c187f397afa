"""Shows the demo's report on a terminal."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from tools.demo.report import Report, RequestResult

MIB = 2**20
REQUEST_COLUMNS = (
    "#",
    "prompt\ntokens",
    "tokens as\nwith full KV",
    "hot-buffer\nhits",
    "MiB on\ndevice",
    "MiB with\nfull KV",
    "first\ntoken, s",
    "last\ntoken, s",
)


def request_table(report: Report) -> Table:
    """One line per request."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header in REQUEST_COLUMNS:
        table.add_column(header, justify="right", no_wrap=True)
    for result in report.results:
        table.add_row(*cells(result))
    return table


def cells(result: RequestResult) -> list[str]:
    """The cells of one request, in the order of `REQUEST_COLUMNS`."""
    num_same = result.output_tokens if result.first_difference is None else result.first_difference
    colour = "green" if result.identical else "yellow" if result.is_tie else "red"
    return [
        str(result.request),
        str(result.prompt_tokens),
        f"[{colour}]{num_same}/{result.output_tokens}[/]",
        f"{result.hit_rate:.1%}",
        f"{result.device_bytes / MIB:.1f}",
        f"{result.full_bytes / MIB:.1f}",
        f"{result.first_token_s:.1f}",
        f"{result.total_s:.1f}",
    ]


def answer_table(report: Report) -> Table:
    """The question, the answer, and the text of the file where it differs from the answer."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header in ("#", "tokens as\nin the file"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("function that the model continues,\nand its answer", overflow="fold")
    for result in report.results:
        table.add_row(str(result.request), f"{result.num_right}/{result.output_tokens}", answer(result))
    return table


def answer(result: RequestResult) -> str:
    """The function, the answer on one line, and the file's text below it if they differ."""
    function = f"[bold]{escape(result.function)}[/] [dim]{escape(result.source)}[/]"
    answered, expected = (escape(one_line(text)) for text in (result.answer, result.expected))
    asked = f"{function}\n[dim]… {escape(result.last_line)}[/]"
    if result.num_right == result.output_tokens:
        return f"{asked}[green]{answered}[/]"
    return f"{asked}{answered}\n[dim]in the file: … {escape(result.last_line)}[/]{expected}"


def one_line(text: str) -> str:
    """Text with its line ends shown and without indentation."""
    first, *rest = text.splitlines() or [""]
    return " ⏎ ".join([first.rstrip(), *(line.strip() for line in rest if line.strip())])


def verdict(report: Report) -> str:
    """One sentence: the result, or what went wrong."""
    if problems := report.problems():
        return f"[bold red]✗ {'; '.join(problems)}.[/]"
    device, full = report.device_bytes_per_request, report.full_bytes_per_request
    num_ties = sum(result.is_tie for result in report.results)
    ties = f" up to a tie in {num_ties} of them" if num_ties else ""
    requests = f"{len(report.results)} of {len(report.results)} requests"
    return (
        f"[bold green]✓ {requests} got the same tokens as with full KV{ties}[/], with {device / full:.0%} of the KV on "
        f"the device ({device / MIB:.1f} instead of {full / MIB:.1f} MiB per request)."
    )


def totals(report: Report) -> str:
    """Figures of all requests together, one per line."""
    received = report.counter("transfer_bytes_to_host")
    return (
        f"{report.hit_rate:.1%} of the selected rows were in the hot buffers.\n"
        f"{received / MIB:.0f} MiB went from prefill straight into host memory.\n"
        f"{report.share_right:.0%} of the answers' tokens are as in the file.\n"
        "Times are those of CPU cores: the prefill instance computes one prompt after the other, and others wait."
    )

"""Shows the demo's report on a terminal."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from tools.demo.report import Report, RequestResult

MIB = 2**20
CAPTION = (
    "same: tokens as with full KV; hits: selected rows found in the hot buffer; hot, full MiB: device KV with a hot "
    "buffer and with full KV; host MiB: KV received straight into host memory; first, total s: time to tokens"
)
ANSWER_CAPTION = (
    "A prompt is a file and, once more, the beginning of one of its functions. back: tokens between the two; right: "
    "tokens of the answer before the first one that is not as in the file"
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
    colour = "green" if result.identical else "yellow" if result.is_tie else "red"
    return [
        str(result.request),
        str(result.prompt_tokens),
        f"[{colour}]{num_same}/{result.output_tokens}[/]",
        f"{result.hit_rate:.1%}",
        *(f"{size / MIB:.1f}" for size in (result.device_bytes, result.full_bytes, result.nixl_bytes_to_host)),
        f"{result.first_token_s:.1f}",
        f"{result.total_s:.1f}",
    ]


def answer_table(report: Report) -> Table:
    """The question, the answer, and the text of the file where it differs from the answer."""
    table = Table(box=box.SIMPLE_HEAD, caption=ANSWER_CAPTION, caption_justify="left", pad_edge=False)
    for header in ("#", "back", "right"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("the body of … continues", overflow="fold")
    for result in report.results:
        right = f"{result.num_right}/{result.output_tokens}"
        table.add_row(str(result.request), str(result.distance), right, answer(result))
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
    """One line: the result, or what went wrong."""
    if problems := report.problems():
        return f"[bold red]✗ {'; '.join(problems)}.[/]"
    device, full = report.device_bytes_per_request, report.full_bytes_per_request
    received = report.counter("transfer_bytes_to_host")
    num_ties = sum(result.is_tie for result in report.results)
    ties = f" up to a tie in {num_ties} of them" if num_ties else ""
    requests = f"{len(report.results)} of {len(report.results)} requests"
    return (
        f"[bold green]✓ {requests}: the same tokens as with full KV{ties}.[/] "
        f"Answers are as in the file for {report.share_right:.0%} of their tokens. "
        f"Device KV per request: {device / MIB:.1f} instead of {full / MIB:.1f} MiB ({full / device:.1f}x less); "
        f"{report.hit_rate:.1%} hits; {received / MIB:.0f} MiB went from prefill directly to host memory."
    )

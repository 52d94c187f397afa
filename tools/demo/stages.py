"""Progress of a command that works in stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

Update = Callable[[str], None]


class Stages:
    """Shows the running stage, its seconds and its current activity; a finished stage leaves one line.

    Args:
        console: console to write to; without a terminal, only the lines of finished stages are written.
    """

    def __init__(self, console: Console):
        self.seconds: dict[str, float] = {}  # by title
        self._console = console

    @contextmanager
    def stage(self, title: str) -> Iterator[Update]:
        """Run a block as a stage; the yielded function shows its current activity."""
        started = time.monotonic()
        with self._progress() as progress:
            task = progress.add_task(title, total=None, detail="")
            try:
                yield lambda detail: progress.update(task, detail=escape(detail))
            except BaseException:
                self._console.print(f"[red]✗[/] {title} [dim]{time.monotonic() - started:.1f} s[/]")
                raise
        self.seconds[title] = round(time.monotonic() - started, 1)
        self._console.print(f"[green]✓[/] {title} [dim]{self.seconds[title]} s[/]")

    def _progress(self) -> Progress:
        detail = TextColumn(
            "[dim]{task.fields[detail]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        )
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), detail)
        return Progress(
            *columns, console=self._console, transient=True, expand=True, disable=not self._console.is_terminal
        )

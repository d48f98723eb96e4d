"""What the demo prints: headings, lines, tables and a bar that moves; plain text where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

WIDTH = 120  # where there is no terminal to ask
LINE_EVERY_S = 2.0  # how often progress is a line of its own where it cannot be a bar


class ReportProgress(Protocol):
    """Shows progress: the number that is `done`, with a few `words`."""

    def __call__(self, done: int, words: str) -> None: ...


class Screen:
    """Prints to standard output, or to standard error when that is kept for JSON."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        stream = sys.stderr if to_stderr else sys.stdout
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console.width = WIDTH
        self._step = 0
        unicode = "utf" in (self._console.encoding or "").lower()
        self.good, self.bad = ("✓", "✗") if unicode else ("ok", "DIFFERS")

    def heading(self, text: str) -> None:
        """Begin the next step."""
        self._step += 1
        self._console.print()
        self._console.print(Text(f"{self._step}. {text}", style="bold"))

    def say(self, text: str = "") -> None:
        """Print a line below the heading."""
        self._console.print(Text(f"   {text}" if text else ""))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
        """Print a table; the first `left` columns are words, the others figures."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("", width=1)  # the indent of all lines
        for number, name in enumerate(columns):
            table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
        for row in rows:
            table.add_row("", *(Text(cell, style=self._style(cell)) for cell in row))
        self._console.print(table)

    def _style(self, cell: str) -> str:
        return "green" if cell.endswith(self.good) else "red" if cell.endswith(self.bad) else ""

    @contextmanager
    def progress(self, total: int, done: int) -> Generator[ReportProgress]:
        """Show progress from `done` to `total` while the context is open."""
        if not self._console.is_terminal:
            yield self._progress_lines(total)
            return
        columns = (TextColumn("  "), BarColumn(24), TaskProgressColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console, refresh_per_second=8) as bar:
            task = bar.add_task("", total=total, completed=done)
            yield lambda done, words: bar.update(task, completed=done, description=words)

    def _progress_lines(self, total: int) -> ReportProgress:
        shown = time.monotonic()

        def report(done: int, words: str) -> None:
            nonlocal shown
            if time.monotonic() - shown >= LINE_EVERY_S or done == total:
                shown = time.monotonic()
                self.say(f"{done / total:4.0%}  {words}")

        return report

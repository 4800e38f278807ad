"""How far a long job is: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from typing import Any

INTERVAL = 10.0  # seconds between plain lines


class Progress:
    """Reports to standard error. `total` is in bytes of input, None where it is not known."""

    def __init__(self, quiet: bool = False):
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._total: int | None = None
        self._bytes = self._tokens = 0
        self._started = self._spoken = time.monotonic()

    def say(self, text: str) -> None:
        """One line."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def start(self, total: int | None, done: int = 0) -> None:
        """Begin to count."""
        self._total, self._bytes, self._tokens = total, done, 0
        self._started = self._spoken = time.monotonic()
        if self._quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = [BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn()]
        self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=total, completed=done)
        self._bar.start()

    def advance(self, count: int) -> None:
        """So many more bytes of input were read."""
        self._bytes += count

    def tokens(self, count: int) -> None:
        """So many more tokens were written."""
        self._tokens += count
        now = time.monotonic()
        rate = self._tokens / max(now - self._started, 1e-9) / 1e6
        line = f"{self._tokens / 1e6:.1f}M tokens, {rate:.1f}M/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._bytes, description=line)
        elif now - self._spoken > INTERVAL:
            self._spoken = now
            share = f"{100 * self._bytes / self._total:.0f} %, " if self._total else ""
            self.say(f"tokenising: {share}{line}")

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

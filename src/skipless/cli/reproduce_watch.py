"""What `skipless reproduce` shows while it works: a bar on a terminal, a line per run elsewhere."""

import sys
import time
from pathlib import Path
from typing import Any

from skipless.recipes.reproduce.job import Job
from skipless.recipes.reproduce.record import Record
from skipless.recipes.reproduce.schedule import Watch


class Reporter(Watch):
    """Says each run that ends, and counts those that failed."""

    def __init__(self):
        self.errors: list[str] = []
        self._done, self._began = 0, time.monotonic()
        self._bar: Any = _bar() if sys.stderr.isatty() else None
        self._task = self._bar.add_task("", total=None) if self._bar is not None else None

    def started(self, job: Job) -> None:
        """On the bar only."""
        if self._bar is not None:
            self._bar.update(self._task, description=job.describe())

    def finished(self, record: Record, known: int) -> None:
        """A line with the loss, or where it diverged."""
        self._done += 1
        end = f"diverged at step {record.diverged_at}" if record.diverged else f"loss {record.train_loss:.3f}"
        longer = "" if record.multiple == 1.0 else f" ×{record.multiple:g}"
        asked = f" ({record.measure})" if record.measure else ""
        what = f"{record.item}: {record.arm}{longer}, rate {record.rate:g}, seed {record.seed}{asked}"
        self._say(f"{self._clock()} {what}: {end}, {record.seconds:.0f} s; {known} to go")
        if self._bar is not None:
            self._bar.update(self._task, total=self._done + known, completed=self._done)

    def failed(self, job: Job, error: Exception, traceback: Path) -> None:
        """A line with the error; the run is tried again by the next call."""
        self.errors.append(f"{job.describe()}: {type(error).__name__}: {error}")
        where = f" (traceback: {traceback})" if traceback.is_file() else ""
        self._say(f"{self._clock()} failed: {self.errors[-1]}{where}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _clock(self) -> str:
        seconds = round(time.monotonic() - self._began)
        return f"{seconds // 60:3d}:{seconds % 60:02d}"

    def _say(self, words: str) -> None:
        if self._bar is not None:
            self._bar.console.print(words, markup=False, highlight=False)
        else:
            print(words, file=sys.stderr, flush=True)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar

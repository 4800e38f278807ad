"""The terminal: progress bars, tables, Ctrl-C, and files a command writes."""

import functools
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from skipless import files as skipless_files

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
written: list[Path] = []  # files that this process has finished writing


@contextmanager
def handle_sigint() -> Generator[None]:
    """In here Ctrl-C ends an import at once: unwinding it could be swallowed by a library, or end in a traceback.

    Elsewhere it is a KeyboardInterrupt as usual. A process that was report_interrupt to ignore it goes on ignoring it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before != signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say()
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, before)


def report_interrupt(command: Callable[..., None], words: str | None = None) -> Callable[..., None]:
    """The command, ending with a line on Ctrl-C: `words`, for one that writes more than files of its own."""

    @functools.wraps(command)
    def run(*args, **kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:  # typer would end it without a word
            say(words)
            sys.exit(INTERRUPTED)

    return run


def say(words: str | None = None) -> None:
    """On standard error; by default which files are there."""
    files = f"written: {', '.join(map(str, written))}" if written else "nothing was written"
    print(f"skipless: {words or f'stopped; {files}'}", file=sys.stderr)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _importing(frame):
        say()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


def check_figure(path: Path) -> None:
    """Refuse, before any work is done, a figure asked for that could not be drawn or written."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--figure {path} needs matplotlib: pip install 'skipless[plot]', or leave out --figure")
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise ValueError(f"--figure is {path}; the name must end in {', '.join(FIGURE_SUFFIXES)}")
    check_target(path)


def check_target(path: Path) -> None:
    """Make the folder of a file to be written, and see that the file can go there."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not skipless_files.is_stream(path):
        path = skipless_files.linked(path).parent
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written to; choose another place")


def check_apart(outputs: Mapping[str, Path | None], inputs: Iterable[Path | str | None] = ()) -> None:
    """Refuse, before any work is done, an output that would overwrite an input or another output."""
    taken = {os.path.realpath(path): "is read" for path in inputs if path is not None}
    for flag, path in outputs.items():
        if path is None or path == Path("-") or skipless_files.is_stream(path):
            continue
        use = taken.setdefault(os.path.realpath(path), f"{flag} writes")
        if use != f"{flag} writes":
            raise ValueError(f"{flag} is {path}, which {use} too; name another file")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, and note it for whoever stops the command."""
    skipless_files.write_whole(path, data)
    written.append(path)


def print_table(console: "Console", head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    """A ruled table in a terminal, aligned plain text elsewhere. Numbers to the right; styles colour last cells."""
    if not console.is_terminal:
        console.print(text_table(head, rows), markup=False, highlight=False, soft_wrap=True)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column, title in enumerate(head):
        table.add_column(title, justify="right" if _numeric(rows, column) else "left")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*map(Text, row[:-1]), Text(row[-1], style=style))
    console.print(table)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned plain text, numbers to the right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [_numeric(rows, column) for column in range(len(widths))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a notebook."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def number(value: float | None) -> str:
    """A table's cell: three digits, or four behind the point between 0.1 and 1; a dash where there is no number."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.4f}" if 0.1 <= abs(value) < 1 else f"{value:.3g}"


def _numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(row[column][:1].isdigit() or row[column][:1] in "-" for row in rows)


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # a container's


def check_fits(parameters: int, asked: str) -> None:
    """Refuse a network whose float32 weights alone are more than the memory that is free."""
    need, free = 4 * parameters, free_memory()
    if need > free:
        raise ValueError(
            f"{asked} has {parameters / 1e9:,.2f} billion parameters, which take {need / 1e9:,.1f} GB, and "
            f"{free / 1e9:,.1f} GB of memory are free; make it smaller, e.g. with --width 256"
        )


def free_memory() -> float:
    """Bytes that can be had at most, by what the kernel and a container's limit say; ∞ where nothing does."""
    bounds = [math.inf]
    with suppress(AttributeError, ValueError, OSError):  # not POSIX
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        bounds += [1024 * int(found[1])] if found else []
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # "max"
            bounds.append(int(Path(file).read_text()))
    return min(bounds)


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

"""What commands share at the terminal: Ctrl-C, tables, progress, hints for misspelt names, and checks of outputs."""

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
from difflib import get_close_matches
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from skipless import files

if TYPE_CHECKING:
    from rich.console import Console

LARGEST_SEED = (1 << 63) - 1
INTERRUPTED = 130  # the exit code of a command that Ctrl-C has stopped
written_files: list[Path] = []  # by this process, each of them whole
_stopped_words: list[str | None] = [None]  # what the running command says on Ctrl-C, also in an import


@contextmanager
def handle_stops() -> Generator[None]:
    """While open, Ctrl-C ends an import at once: a library could swallow the exception, or fail with a traceback.

    Elsewhere it is a KeyboardInterrupt as usual. SIGTERM, by which clusters and `timeout` stop a program, is the same.
    A process that ignores a signal goes on ignoring it. One that torchrun has started leaves SIGTERM alone: it may be
    waiting for the others, where Python runs no handler.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    if "LOCAL_RANK" in os.environ:
        usual.pop(signal.SIGTERM, None)
    taken = [number for number, handler in usual.items() if signal.getsignal(number) == handler]
    for number in taken:
        signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if not taken:
            raise
        _say_stopped()
        sys.exit(INTERRUPTED)
    finally:
        for number in taken:
            signal.signal(number, usual[number])


def report_interrupt(command: Callable[..., None], words: str | None = None) -> Callable[..., None]:
    """The command, ending with one line on Ctrl-C: the interrupt's own, `words`, or the files that were written."""

    @functools.wraps(command)
    def run(*args, **kwargs) -> None:
        _stopped_words[0] = words
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as stop:  # typer would end it without a word
            _say_stopped(str(stop) or words)
            sys.exit(INTERRUPTED)

    return run


def _say_stopped(words: str | None = None) -> None:
    there = f"written: {', '.join(map(str, written_files))}" if written_files else "nothing was written"
    say(f"skipless: {words or f'stopped; {there}'}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _importing(frame):
        _say_stopped(_stopped_words[0])
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def say(words: str) -> None:
    """A line on standard error. Codes in it, as a file's name may hold to steer a terminal, are spelt out."""
    plain = "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in words)
    print(plain, file=sys.stderr, flush=True)


def print_text(console: "Console", words: str, style: str = "", *, wrap: bool = False) -> None:
    """Words as they are: no markup, and no picture for "hf:llama:". wrap: broken into lines, in a terminal."""
    soft = not (wrap and console.is_terminal)
    console.print(words, markup=False, emoji=False, highlight=False, style=style, soft_wrap=soft)


_MOST_LISTED = 30


def nearest(name: Any, known: Iterable[str]) -> str:
    """A hint for an unknown name: "did you mean 'depth'?", or, where none is near, all names in their order."""
    known = sorted(known) if isinstance(known, set | frozenset) else list(dict.fromkeys(known))
    near = near_names(str(name), known)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    more = f", … ({len(known)} in all)" if len(known) > _MOST_LISTED else ""
    return f"there are {', '.join(known[:_MOST_LISTED])}{more}"


# what nanoGPT, torch and transformers call a field
_ELSEWHERE = {
    "depth": ("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    "width": ("n_embd", "d_model", "dim", "embed_dim", "hidden_size"),
    "heads": ("n_head", "n_heads", "num_heads", "num_attention_heads"),
    "kv_heads": ("n_kv_head", "num_kv_heads", "num_key_value_heads"),
    "hidden": ("d_ff", "ffn_dim", "intermediate_size"),
    "length": ("block_size", "seq_len", "seq_length", "context_length", "max_seq_len", "max_position_embeddings"),
    "rate": ("lr", "learning_rate", "max_lr"),
    "steps": ("max_iters", "max_steps", "num_steps", "total_steps"),
    "accumulate": ("grad_accum", "gradient_accumulation_steps"),
}


def near_names(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Up to three names that are near, the nearest first: those that differ in case or in what precedes a slash.

    A field's name elsewhere is near to its name here, such as lr to rate.
    """
    known, word = list(known), name.lower()
    place, _, last = word.rpartition(".")
    for own, others in _ELSEWHERE.items():
        if last in others and (dotted := f"{place}.{own}" if place else own) in known:
            return [dotted]
    same = [each for each in known if word in (each.lower(), each.lower().rpartition("/")[2])]
    return same[:3] or get_close_matches(name, known, n=3, cutoff=cutoff)


def print_table(
    console: "Console", head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> None:
    """A table in a terminal, aligned plain text elsewhere. Numbers to the right; styles colour last cells.

    Where a terminal is too narrow, words are wrapped, and columns that still do not fit come in further tables.
    """
    if not console.is_terminal:
        print_text(console, text_table(head, rows))
        return
    from rich.table import Table
    from rich.text import Text

    for place, widths in enumerate(_side_by_side(head, rows, console.width)):
        if place:
            console.print()
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for column, width in widths.items():
            side = "right" if _numeric(rows, column) else "left"
            table.add_column(head[column], justify=side, width=width, overflow="fold")
        for row, style in zip(rows, styles or [""] * len(rows), strict=True):
            cells = [*map(Text, row[:-1]), Text(row[-1], style=style)]
            table.add_row(*(cells[column] for column in widths))
        console.print(table)


def _side_by_side(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[dict[int, int]]:
    """The widths of the columns of each table: of all of them, or of as many as fit behind the first one."""
    whole = [max(map(len, (title, *cells))) for title, *cells in zip(head, *rows, strict=True)]
    if sum(whole) + _GAP * (len(whole) - 1) <= width:
        return [dict(enumerate(whole))]
    least = [_narrowest(head[column], [row[column] for row in rows]) for column in range(len(head))]
    found, taken = [{0: least[0]}], least[0]
    for column, need in enumerate(least[1:], 1):
        if taken + _GAP + need > width and len(found[-1]) > 1:
            found.append({0: least[0]})
            taken = least[0]
        found[-1][column] = need
        taken += _GAP + need
    for widths in found:
        spare = max(width - sum(widths.values()) - _GAP * (len(widths) - 1), 0)
        for column, need in widths.items():
            widths[column] = min(whole[column], need + spare)
            spare -= widths[column] - need
    return found


_GAP = 2  # between columns
_FEW_WORDS = 20  # characters of a cell that is not wrapped


def _narrowest(title: str, cells: Sequence[str]) -> int:
    """The narrowest column in which no number and no word is cut."""
    numbers = _numeric([[cell] for cell in cells], 0)
    longest = max(map(len, cells), default=0)
    words = [word for text in (title, *cells) for word in text.split()]
    return max([longest if numbers else min(longest, _FEW_WORDS), *map(len, words)])


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
    """A table for a notebook."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def count(number: int, name: str) -> str:
    """ "1 run", "2 runs", "1,500 runs"."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def number(value: float | None) -> str:
    """A table's cell: three digits, or four behind the point between 0.1 and 1; a dash where there is no number."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.4f}" if 0.1 <= abs(value) < 1 else f"{value:.3g}"


def _numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(row[column][:1].isdigit() or row[column][:1] in "-–" for row in rows)


class Progress:
    """How far a piece of work has come, on standard error: a bar in a terminal, a line every few seconds elsewhere.

    every: seconds between lines; None: no lines, only the bar. quiet: nothing at all.
    """

    def __init__(self, *, every: float | None = 10.0, quiet: bool = False):
        self._every, self._quiet = every, quiet
        self._name, self._percent = "", False
        self._bar: Any = None
        self._total: int | None = None
        self._done, self._said, self._spoken = 0, -1, -math.inf  # what the last line said, and when
        self._first: tuple[int, float] | None = None  # where and when it was first shown, from which the pace follows

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, total: int | None = None, done: int = 0, *, percent: bool = False) -> None:
        """Begin to count, up to `total` where it is known.

        percent: as a share, for what is measured in bytes and may be over at once: then there is no line of it.
        """
        self.stop()
        self._name, self._percent = name, percent
        self._total, self._done, self._first = total, done, None
        self._spoken = time.monotonic() if percent else -math.inf
        if self._quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn(self._name), BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
        self._bar = RichProgress(*columns[not self._name :], console=Console(stderr=True), transient=True)
        self._bar.add_task("", total=total, completed=done)
        self._bar.start()

    def advance(self, count: int = 1) -> None:
        """So much more is done; it is seen when something is next shown."""
        self._done += count

    def show(self, text: str = "", *, done: int | None = None, total: int | None = None) -> None:
        """The newest state, in words: always on the bar; as a line if the last one is old, or when all is done."""
        self._done = self._done if done is None else done
        self._total = self._total if total is None else total
        now = time.monotonic()
        self._first = self._first or (self._done, now)
        if self._bar is not None:
            words = self._line(text, now)
            self._bar.update(self._bar.task_ids[0], completed=self._done, total=self._total, description=words)
            return
        if self._quiet or self._every is None:
            return
        ended = not self._percent and self._said != self._done == self._total
        if now - self._spoken > self._every or ended:
            self._said, self._spoken = self._done, now
            say(f"{self._name} {self._line(text, now)}".lstrip())

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, emoji=False, highlight=False)
        elif not self._quiet:
            say(text)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, text: str, now: float) -> str:
        parts = [text]
        if self._total:
            share = 100 * self._done / self._total
            parts.insert(0, f"{share:.0f} %" if self._percent else f"{self._done}/{self._total}")
            assert self._first is not None
            done, began = self._first
            if self._done > done:
                left = math.ceil((now - began) * (self._total - self._done) / (self._done - done))
                parts.append(f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")
        return "  ".join(part for part in parts if part)


FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


def check_figure(path: Path) -> None:
    """Refuse, before any work is done, a figure asked for that could not be drawn or written."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--figure {path} needs matplotlib: pip install 'skipless[plot]', or leave out --figure")
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise ValueError(f"--figure is {path}; the name must end in {', '.join(FIGURE_SUFFIXES)}")
    check_target(path, files.PICTURE_MARK)


def check_target(path: Path | None, mark: bytes) -> None:
    """Make the folder of a file to be written, and see that it can go there and takes no other's place.

    mark: what is in every output of its kind; a file without it is not one. None and "-", standard output, are no file.
    """
    if path is None or path == Path("-"):
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    files.check_output(path, mark)
    if not files.is_stream(path):
        path = files.linked(path).parent
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written to; choose another place")


def check_writable(folder: Path) -> None:
    """Refuse, before any work is done, a folder, there or not yet, that nothing could be written to."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise PermissionError(f"{folder} cannot be written to; choose another place")


def check_apart(outputs: Mapping[str, Path | None], inputs: Iterable[Path | str | None] = ()) -> None:
    """Refuse, before any work is done, an output that would overwrite an input or another output."""
    taken = {os.path.realpath(path): "is read" for path in inputs if path is not None}
    for flag, path in outputs.items():
        if path is None or path == Path("-") or files.is_stream(path):
            continue
        use = taken.setdefault(os.path.realpath(path), f"{flag} writes")
        if use != f"{flag} writes":
            raise ValueError(f"{flag} is {path}, which {use} too; name another file")


def write_output(path: Path, data: bytes) -> None:
    """Write a file that was asked for, whole or not at all, and note it for the line that Ctrl-C ends with."""
    files.write_whole(path, data)
    written_files.append(path)


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # a container's


def check_seed(seed: int | None, name: str = "--seed") -> None:
    """Refuse a seed that a generator of random numbers does not take."""
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"{name} is {seed}; it must lie in 0 … {LARGEST_SEED}")


def check_fits(need: float, asked: str, smaller: str, free: float | None = None) -> None:
    """Refuse, before any work is done, what needs more bytes than are free.

    need: of its largest part, at least. smaller: what to change. free: of the device, if not of this machine's memory.
    """
    free = free_memory() if free is None else free
    if need > free:
        raise ValueError(
            f"{asked} takes at least {need / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB of memory are free; {smaller}"
        )


def free_memory() -> float:
    """Bytes that are free at most, by the kernel and a container's limit; ∞ where neither says."""
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

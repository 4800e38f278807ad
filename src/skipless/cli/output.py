"""What commands write: files that are whole or not there, and tables for people or for pipes."""

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skipless.cli import stopping
from skipless.data import shards

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
    if not shards.is_stream(path):
        path = shards.linked(path).parent
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written to; choose another place")


def check_apart(outputs: Mapping[str, Path | None], inputs: Iterable[Path | str | None] = ()) -> None:
    """Refuse, before any work is done, an output that would overwrite an input or another output."""
    taken = {os.path.realpath(path): "is read" for path in inputs if path is not None}
    for flag, path in outputs.items():
        if path is None or path == Path("-") or shards.is_stream(path):
            continue
        use = taken.setdefault(os.path.realpath(path), f"{flag} writes")
        if use != f"{flag} writes":
            raise ValueError(f"{flag} is {path}, which {use} too; name another file")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, and note it for whoever stops the command."""
    shards.write_whole(path, data)
    stopping.written.append(path)


def print_table(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    """A ruled table in a terminal, aligned plain text elsewhere. Numbers to the right; styles colour last cells."""
    if not console.is_terminal:
        for line in _aligned([head, *rows]):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column, title in enumerate(head):
        table.add_column(title, justify="right" if _numeric(rows, column) else "left")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*map(Text, row[:-1]), Text(row[-1], style=style))
    console.print(table)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [_numeric(rows[1:], column) for column in range(len(widths))]
    return [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def _numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(row[column][:1].isdigit() or row[column][:1] in "-" for row in rows)

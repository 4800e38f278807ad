"""`skipless inspect` at work: measure, print, draw, write."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from skipless.analysis.inspect import inspect
from skipless.analysis.inspection import Inspection
from skipless.analysis.rounding import rounding, with_rounding
from skipless.cli.inspect_model import Request
from skipless.cli.inspect_report import strips, table
from skipless.cli.output import check_apart, check_figure, check_target, print_table, write_whole
from skipless.train.device import find_device


def run(
    request: Request,
    *,
    blocks: str | None,
    device: str,
    json_file: Path | None,
    figure: Path | None,
    half: Any = None,
) -> bool:
    """Do all that the command was asked to; whether the signal is lost."""
    to_stdout = json_file == Path("-")
    inputs = (request.text, request.corpus, request.tokenizer)
    check_apart({"--json": json_file, "--figure": figure}, inputs)
    if figure is not None:
        check_figure(figure)
    if json_file is not None and not to_stdout:
        check_target(json_file)
    place = find_device(device)
    model, encode = request.open()
    batch = request.batch(model, encode)
    found = inspect(model.to(place), batch.to(place), blocks=blocks)
    found = replace(found, model=request.model)
    if half is not None:
        found = with_rounding(found, rounding(model, batch.to(place), half, blocks=blocks))
    console = Console(stderr=to_stdout)
    show(console, found)
    if half is not None:
        share = found.blocks[-1].rounding
        _say(console, f"In {half} rounding adds {share:.3g} of what tells locations apart by the last block.")
    if to_stdout:
        sys.stdout.write(found.to_json() + "\n")
    elif json_file is not None:
        write_whole(json_file, found.to_json().encode())
        _say(console, f"data: {json_file}")
    if figure is not None:
        _draw(console, found, figure)
    return found.verdict.lost


def show(console: Console, found: Inspection) -> None:
    """The table, the strips by depth, the verdict and the advice."""
    head, rows = table(found)
    print_table(console, head, rows, ["" for _ in rows])
    console.print()
    for line in strips(found):
        console.print(line, soft_wrap=True)
    console.print()
    colour = "green" if found.verdict.kind == "preserved" else "yellow" if not found.verdict.lost else "red"
    whole = not console.is_terminal
    console.print(Text(f"{found.model}: {found.verdict.text}", style=f"bold {colour}"), soft_wrap=whole)
    if found.advice:
        console.print(Text(found.advice), soft_wrap=whole)


def _draw(console: Console, found: Inspection, path: Path) -> None:
    from skipless.analysis.figure_style import render
    from skipless.analysis.inspect_figure import inspection_figure

    write_whole(path, render(inspection_figure(found), path.suffix.lower()))
    _say(console, f"figure: {path}")


def _say(console: Console, words: str) -> None:
    console.print(Text(words), soft_wrap=True)

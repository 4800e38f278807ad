"""`skipless kernels` at work: compute with progress, print, draw, write."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from skipless.analysis.study import Study, study
from skipless.cli.kernel_report import Report, as_json, report
from skipless.cli.kernel_request import Flags, Request, resolve
from skipless.cli.output import check_apart, check_figure, check_target, print_table, write_whole

FOLDER = Path("skipless-kernels")


@dataclass(frozen=True)
class Outputs:
    """Where the figure and the data go; None for the figure means its usual place."""

    figure: Path | None = None
    no_figure: bool = False
    json_file: Path | None = None

    @property
    def json_to_stdout(self) -> bool:
        """Whether data take the place of the table on standard output."""
        return self.json_file == Path("-")

    def figure_path(self, name: str) -> Path | None:
        """The figure's place, or None where none is wanted."""
        if self.no_figure:
            if self.figure is not None:
                raise ValueError(f"--no-figure and --figure {self.figure} contradict each other: leave one out")
            return None
        return self.figure or FOLDER / f"{name.replace('/', '-')}.png"


def run(name: str, flags: Flags, outputs: Outputs) -> bool:
    """Do all that the command was asked to; whether any network loses the signal."""
    request = resolve(name, flags)
    figure = outputs.figure_path(name)
    check_apart({"--json": outputs.json_file, "--figure": figure})
    if outputs.figure is not None:
        check_figure(outputs.figure)
    elif figure is not None:
        check_target(figure)
    if outputs.json_file is not None and not outputs.json_to_stdout:
        check_target(outputs.json_file)
    studies = _compute(request)
    said = report(request, studies)
    console = Console(stderr=outputs.json_to_stdout)
    print_table(console, said.head, said.rows, said.styles)
    if said.legend:
        _note(console, said.legend)
    if outputs.json_to_stdout:
        sys.stdout.write(as_json(request, studies))
    elif outputs.json_file is not None:
        write_whole(outputs.json_file, as_json(request, studies).encode())
        _note(console, f"data: {outputs.json_file}")
    if figure is not None:
        _write_figure(console, request, studies, figure)
    _close(console, said)
    return any(each.certificate.verdict.lost for each in studies)


def _compute(request: Request) -> list[Study]:
    """Follow every network, with a bar on standard error where someone is watching."""
    watcher = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=watcher, transient=True, disable=not watcher.is_terminal) as progress:
        task = progress.add_task("", total=sum(2 * network.config.depth for network in request.networks))
        studies = []
        for network in request.networks:
            progress.update(task, description=network.label)
            studies.append(study(network, request.signals[0], lambda: progress.advance(task)))
    return studies


def _write_figure(console: Console, request: Request, studies: Sequence[Study], path: Path) -> None:
    try:
        from skipless.analysis.figure_style import render
        from skipless.cli.kernel_figure import draw
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("matplotlib", "PIL"):
            raise
        _note(Console(stderr=True), f"no figure: {missing.name} is not installed; pip install 'skipless[plot]'")
        return
    write_whole(path, render(draw(request, studies), path.suffix.lower()))
    _note(console, f"figure: {path}")


def _note(console: Console, words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def _close(console: Console, said: Report) -> None:
    console.print()
    console.print(said.closing, markup=False, highlight=False, style="bold", soft_wrap=not console.is_terminal)

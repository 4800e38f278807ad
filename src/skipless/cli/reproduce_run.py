"""`skipless reproduce` at work: find the text, run what is missing, write tables and figures."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import typer
from rich.console import Console

from skipless.cli.output import print_table
from skipless.cli.reproduce_watch import Reporter
from skipless.cli.reproduce_write import write_item, write_kernels
from skipless.recipes.reproduce.catalogue import check_arms, items_named
from skipless.recipes.reproduce.document import Summary, count
from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.job import Job, Setting
from skipless.recipes.reproduce.log import ResultsFolder
from skipless.recipes.reproduce.scale import Scale, scale_named
from skipless.recipes.reproduce.schedule import Crew, Limits
from skipless.recipes.reproduce.table import rows
from skipless.recipes.reproduce.text import Text, find_text

_MOST_SHOWN = 12


@dataclass(frozen=True)
class Request:
    """What the command was asked for."""

    items: tuple[str, ...]
    scale: str = "tiny"
    data: str | None = None
    out: Path = Path("results")
    rates: int | None = None
    seeds: int | None = None
    arms: tuple[str, ...] = field(default=())
    tables_only: bool = False


def run(
    request: Request,
    *,
    jobs: int = 1,
    budget: float | None = None,
    device: str | None = None,
    tasks: Path | None = None,
) -> bool:
    """Do all of it; whether every run that was begun ended well."""
    items, scale = items_named(list(request.items)), scale_named(request.scale)
    check_arms(items, request.arms)
    limits = Limits(jobs, float("inf") if budget is None else budget, device, tasks)
    folder = ResultsFolder(request.out, scale.name)
    with folder.locked():
        trained = [item for item in items if not item.kernels]
        setting = _setting(request, scale, folder) if trained else None
        reporter = Reporter()
        try:
            if setting is not None and not request.tables_only:
                _work(trained, setting, folder, limits, reporter, request.arms)
        except KeyboardInterrupt:
            reporter.close()
            _say("skipless: stopped; the same command goes on from there")
            _write(items, setting, folder)
            raise typer.Exit(130) from None
        finally:
            reporter.close()
        _write(items, setting, folder)
    return not reporter.errors


def _setting(request: Request, scale: Scale, folder: ResultsFolder) -> Setting:
    """The text is the one named; tables alone can do with what the logs say of it."""
    if request.tables_only and request.data is None:
        return Setting.of(scale, _logged_text(folder), request.rates, request.seeds)
    return Setting.of(scale, find_text(request.data, scale.name), request.rates, request.seeds)


def _logged_text(folder: ResultsFolder) -> Text:
    texts = folder.texts()
    if not texts:
        raise ValueError(
            f"{folder.path} has no logs of scale {folder.scale!r} to make tables from; leave out --tables-only to run"
        )
    if len(texts) > 1:
        others = ", ".join(text.name for text in texts[1:])
        _say(f"the logs hold runs on several texts; tables are of {texts[0].name}, not of {others}: --data names one")
    return texts[0]


def _work(
    items: list[Item],
    setting: Setting,
    folder: ResultsFolder,
    limits: Limits,
    reporter: Reporter,
    arms: tuple[str, ...],
) -> None:
    runnable = [item for item in items if item.measure != "tasks" or limits.tasks is not None]
    for item in items:
        if item not in runnable:
            _say(f"{item.name} is left out: it needs --tasks-folder, the folder of the tasks' .jsonl files")
    left = Crew(runnable, setting, folder, limits, reporter, arms).work()
    reporter.close()
    if left:
        are = "is" if len(left) == 1 else "are"
        _say(f"{count(len(left), 'run')} {are} still missing, and what follows from it; the same command goes on:")
        _list(left)


def _list(jobs: list[Job]) -> None:
    for job in jobs[:_MOST_SHOWN]:
        _say(f"  {job.describe()}")
    if len(jobs) > _MOST_SHOWN:
        _say(f"  and {len(jobs) - _MOST_SHOWN} more")


def _write(items: list[Item], setting: Setting | None, folder: ResultsFolder) -> None:
    """Every item's page, picture and data; the tables also on the terminal."""
    console = Console()
    for item in items:
        title = f"\n{item.title} ({item.reference})"
        if setting is None or item.kernels:
            checks, written = write_kernels(item, folder.path / item.name)
            console.print(title, markup=False, style="bold")
            for check in checks:
                _judge(console, "pass" if check.holds else "fail", f"{check.where}, {check.claim}", check.ours)
        else:
            summary, written = write_item(item, setting, folder)
            console.print(f"{title}, scale {folder.scale}", markup=False, style="bold")
            _print(console, summary)
        for path in written:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, summary: Summary) -> None:
    quantity = summary.item.quantities[0]
    lines = [row.line()[:-1] for row in rows(summary.outcomes, quantity)]
    name = quantity.replace("_", " ")
    print_table(console, ("arm", "paper", name, "steps", "time", "seeds", "rate"), lines, [""] * len(lines))
    for claim, verdict in summary.verdicts:
        _judge(console, verdict.mark, claim, verdict.detail)


def _judge(console: Console, mark: str, claim: str, detail: str) -> None:
    colour = {"pass": "green", "fail": "red"}.get(mark, "yellow")
    words = f"{mark:7s} {claim}{f' ({detail})' if detail else ''}"
    console.print(words, markup=False, highlight=False, style=colour, soft_wrap=True)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)

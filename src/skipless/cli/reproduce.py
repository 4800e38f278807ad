"""`skipless reproduce`: the paper's tables, run and written."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from skipless.console import print_table, write_whole
from skipless.paper import execute
from skipless.paper.catalogue import ITEMS, check_arms, items_named
from skipless.paper.claims import Check, kernel_checks
from skipless.paper.execute import Limits, Scheduler, Watch, unpack
from skipless.paper.experiments import SCALES, Item, Job, Scale, Setting, Text, find_text, make_job, scale_named
from skipless.paper.records import Record, ResultsFolder
from skipless.paper.runs import Outcome, missing, total
from skipless.paper.tables import (
    Summary,
    as_json,
    best_record,
    count,
    gather,
    kernels_markdown,
    markdown,
    rows,
    sample_text,
)

# A stand-in where nothing has been run: sizes and costs need no more of a text than how many tokens it knows.
_TEXT = Text("no text yet", 32_000, 0.008, 7.5, 0, "")
_BYTES = Text("no text yet", 256, 0.05, 3.2, 0, "")
_MACHINES = {"tiny": execute.CPU, "small": execute.H200, "paper": execute.H200}


def show(out: Path) -> None:
    """Print the table. Costs are of a run after another, without what items share."""
    console = Console()
    folders: dict[str, ResultsFolder] = {name: ResultsFolder(out, name) for name in SCALES}
    head = ["item", "paper", *(f"{name}: runs, {_MACHINES[name].name}" for name in SCALES), "done"]
    lines = [_line(item, folders, out) for item in ITEMS.values()]
    print_table(console, head, lines, [""] * len(lines))
    words = (
        "\nTimes are estimates from FLOP and the number of blocks, for one run after another; runs that items share "
        "are counted for each. A best rate at the edge of its grid adds a run."
    )
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def _line(item: Item, folders: dict[str, ResultsFolder], out: Path) -> list[str]:
    if item.kernels:
        there = (out / f"{item.name}.json").is_file()
        return [item.name, item.reference, *("0, 30 s" for _ in SCALES), "all" if there else "nothing"]
    costs, done = [], []
    for name, scale in SCALES.items():
        texts = folders[name].texts()
        setting = Setting.of(scale, texts[0] if texts else (_BYTES if name == "tiny" else _TEXT))
        costs.append(f"{total(item, setting)}, {_time(_seconds(item, setting, scale))}")
        if texts:
            left = len(missing([item], setting, folders[name].records))
            done.append(f"{name}: {'all' if not left else f'{left} or more missing'}")
    return [item.name, item.reference, *costs, "; ".join(done) or "nothing"]


def _seconds(item: Item, setting: Setting, scale: Scale) -> float:
    """Every arm's sweep and seeds at the usual length, and its other lengths."""
    seconds, machine = 0.0, _MACHINES[scale.name]
    for arm in item.chosen(scale):
        rate = arm.rates(scale, setting.text, 1)[0]
        usual = execute.run_seconds(make_job(item, arm, setting, rate).experiment, machine)
        count = setting.rates + setting.seeds - (0 if item.measure else 1)
        longer = [*arm.lengths(scale), *((1.5,) if item.ladder else ())]
        seconds += usual * (count + sum(multiple for multiple in longer if multiple != 1.0))
    return seconds


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


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


def write_item(item: Item, setting: Setting, folder: ResultsFolder) -> tuple[Summary, list[Path]]:
    """Write the item's page, picture and data; what they show, and where they are."""
    stem = folder.path / f"{item.name}-{folder.scale}"
    summary = gather(item, setting, folder.records)
    drawn = _draw(stem.with_suffix(".png"), lambda: _picture(summary))
    page = markdown(summary, f"{stem.name}.png" if drawn else "")
    return summary, [*_written(stem, page, as_json(summary)), *drawn]


def write_kernels(item: Item, stem: Path) -> tuple[list[Check], list[Path]]:
    """The same for the item that trains nothing."""
    checks = kernel_checks()
    drawn = _draw(stem.with_suffix(".png"), _kernel_picture)
    page = kernels_markdown(item, checks, f"{stem.name}.png" if drawn else "")
    data = {"item": item.name, "reference": item.reference, "checks": [vars(check) for check in checks]}
    return checks, [*_written(stem, page, data), *drawn]


def _written(stem: Path, page: str, data: dict[str, Any]) -> list[Path]:
    paths = [stem.parent / f"{stem.name}.md", stem.parent / f"{stem.name}.json"]
    write_whole(paths[0], page.encode())
    write_whole(paths[1], json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n")
    return paths


def _draw(path: Path, picture: Callable[[], Any]) -> list[Path]:
    """The path in a list, or an empty one where there is nothing to draw or nothing to draw with."""
    try:
        from skipless.figures.style import render

        figure = picture()
        if figure is None:
            return []
        write_whole(path, render(figure, path.suffix))
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("matplotlib", "PIL"):
            raise
        print(f"no figure: {missing.name} is not installed; pip install 'skipless[plot]'", file=sys.stderr)
        return []
    return [path]


def _picture(summary: Summary) -> Any:
    from skipless.figures.kernels import Heading
    from skipless.figures.training import ArmCurve, reproduction

    item, setting = summary.item, summary.setting
    heading = Heading(item.title, f"{item.reference}; scale {setting.scale.name}, {setting.text.name}")
    if item.measure == "probes":
        return _stages(summary, heading)
    curves = [ArmCurve(**drawn) for outcome in summary.outcomes.values() for drawn in _curves(outcome, setting.scale)]
    return reproduction(curves, setting.text.unigram, heading) if curves else None


def _curves(outcome: Outcome, scale: Scale) -> Iterator[dict[str, Any]]:
    """The arm at the usual length with its sweep, and at the longest of its own lengths that has been run."""
    arm, longest = outcome.arm, max((m for m in outcome.arm.lengths(scale) if outcome.runs.get(m)), default=1.0)
    for multiple in dict.fromkeys((1.0, longest)):
        record = best_record(outcome, multiple)
        if record is None or not record.curve:
            continue
        steps, losses = zip(*record.curve, strict=True)
        usual, sample = multiple == 1.0, outcome.sample("train_loss", multiple)
        seeds = [run for run in outcome.runs.get(multiple, {}).values() if run.key != record.key and run.curve]
        yield {
            "label": arm.label if usual else f"{arm.label}, {multiple:g}× the steps",
            "steps": steps,
            "losses": losses,
            "final": sample_text(sample, 2) if sample is not None else f"{record.train_loss:.2f} (unfinished)",
            "sweep": {rate: tried.train_loss for rate, tried in outcome.sweep.items()} if usual else {},
            "others": [tuple(zip(*run.curve, strict=True)) for run in seeds],
            "name": arm.name if usual else f"{arm.name}/×{multiple:g}",
        }


def _stages(summary: Summary, heading: Any) -> Any:
    from skipless.figures.training import kernels_by_stage

    found = [run for o in summary.outcomes.values() for run in o.runs.get(1.0, {}).values() if run.kernels]
    if not found:
        return None
    return kernels_by_stage({f"step {step}": blocks for step, blocks in unpack(found[0].kernels).items()}, heading)


def _kernel_picture() -> Any:
    """Fig. 7, whose first three rows are Fig. 1."""
    from skipless.cli.kernel_request import Flags, resolve
    from skipless.cli.kernels import draw
    from skipless.figures.kernels import study

    request = resolve("fig7", Flags())
    return draw(request, [study(network, request.signals[0]) for network in request.networks])


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
    left = Scheduler(runnable, setting, folder, limits, reporter, arms).work()
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


Names = Annotated[
    list[str] | None, typer.Argument(metavar="ITEM...", help="Items such as baselines; `all`; see --list.")
]
ScaleName = Annotated[str, typer.Option("--scale", help="tiny (a CPU), small (a GPU) or paper (App. H).")]
Data = Annotated[str | None, typer.Option(help="A folder made by `skipless prepare`, or a corpus. tiny: stdlib.")]
Out = Annotated[Path, typer.Option(help="Where logs, tables and figures go.")]
Rates = Annotated[int | None, typer.Option(help="Learning rates each arm is tried at. Default: the scale's.")]
Seeds = Annotated[int | None, typer.Option(help="Seeds at the best rate. Default: the scale's.")]
Budget = Annotated[float | None, typer.Option(help="Seconds; no run is begun that would not end or be saved in time.")]
ArmNames = Annotated[
    str, typer.Option("--arms", help="Only these arms, by comma; `all` adds those not run by default.")
]
Jobs = Annotated[int, typer.Option(help="Runs side by side, each in its own process, on one device.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")]
Tasks = Annotated[
    Path | None, typer.Option("--tasks-folder", help="Folder of the tasks' .jsonl files, for downstream.")
]
TablesOnly = Annotated[bool, typer.Option("--tables-only", help="Run nothing: make tables from the logs again.")]
List = Annotated[bool, typer.Option("--list", help="Show items, runs, what they cost and what is done.")]


def command(
    items: Names = None,
    scale: ScaleName = "tiny",
    data: Data = None,
    out: Out = Path("results"),
    seeds: Seeds = None,
    rates: Rates = None,
    budget: Budget = None,
    arms: ArmNames = "",
    jobs: Jobs = 1,
    device: Device = None,
    tasks_folder: Tasks = None,
    tables_only: TablesOnly = False,
    list_: List = False,
) -> None:
    """Reproduce tables and figures of the paper. Stop it at any time: the same command goes on.

    \b
    skipless reproduce --list
    skipless reproduce baselines orthogonal --scale small --data data/wiki --jobs 4
    skipless reproduce all --scale small --tables-only
    """

    if list_:
        show(out)
        return
    names = tuple(name.strip() for name in arms.split(",") if name.strip())
    request = Request(tuple(items or ()), scale, data, out, rates, seeds, names, tables_only)
    if not run(request, jobs=jobs, budget=budget, device=device, tasks=tasks_folder):
        raise typer.Exit(1)

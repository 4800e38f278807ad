"""`skipless reproduce`: tables of the paper, run and written."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from skipless import __version__
from skipless.cli.app import write_figure
from skipless.console import Progress, check_writable, count, nearest, print_table, say, write_output
from skipless.data.store import MANIFEST, holds_images
from skipless.files import DATA_MARK, check_folder, check_output, is_ours
from skipless.paper.experiments import SCALES, PaperTable, Scale, Setting, check_runs
from skipless.paper.records import LOGS, RUNS, Facts, ImageSet, Record, ResultsFolder, Text
from skipless.paper.runs import CPU, H200, Limits, Listener, Outcome, Run, missing, run_seconds, total
from skipless.paper.tables import (
    TABLES,
    Summary,
    as_json,
    best_record,
    gather,
    markdown,
    measured_blocks,
    rows,
    sample_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from skipless.figures.kernels import Heading

INDEX, INDEX_MARK = "README.md", b"Every table and figure of the paper"
ON_BYTES = ("tiny", "cpu")  # scales for which text is prepared as bytes
_MOST_SHOWN = 12


@dataclass(frozen=True)
class ReproduceArguments:
    """What the command was asked for."""

    tables: tuple[str, ...]
    scale: str = "tiny"
    data: str | None = None
    out: Path = Path("results")
    rates: int | None = None
    seeds: int | None = None
    arms: tuple[str, ...] = ()
    tables_only: bool = False


def run(asked: ReproduceArguments, limits: Limits) -> bool:
    """Train what is missing and write every table; whether every run that was begun ended well."""
    tables = tables_named(asked.tables)
    check_scale(tables, asked.scale)
    check_arms(tables, asked.arms)
    for name, number in (("rates", asked.rates), ("seeds", asked.seeds)):
        if number is not None:
            check_runs(name, number)
    folder = ResultsFolder(asked.out, asked.scale)
    _check_place(asked.out)
    reporter = Reporter()
    trained = [table for table in tables if not table.kernels]
    settings = _settings(asked, trained, folder)  # before the folder is made: data may be refused
    with folder.locked():
        tables = [table for table in tables if table.kernels or table.name in settings]
        try:
            if settings and not asked.tables_only:
                trained = [table for table in tables if not table.kernels]
                _train(trained, settings[trained[0].name], folder, limits, reporter, asked.arms)
        except KeyboardInterrupt:
            reporter.close()
            say("skipless: stopped; the same command goes on from there")
            _write(tables, settings, folder)
            raise typer.Exit(130) from None
        finally:
            reporter.close()
        _write(tables, settings, folder)
    return not reporter.errors


def _check_place(out: Path) -> None:
    """Refuse a folder of other files, and one that cannot be written to.

    The first of our files there is a log, or the page of kernels, which has none.
    """
    kernels = out / "kernels.json"
    page = kernels.is_file() and is_ours(kernels, DATA_MARK)
    check_folder(out, kernels.name if page else f"{LOGS}/*-*.jsonl", LOGS, RUNS)
    check_writable(out)


def tables_named(names: Sequence[str]) -> list[PaperTable]:
    """The tables of these names, each once, in the order given; "all" is every one."""
    if not names:
        raise ValueError("name a table, such as baselines; `skipless reproduce --list` shows all")
    for name in names:
        if name != "all" and name not in TABLES:
            raise ValueError(f"there is no table {name!r}; {nearest(name, TABLES)}")
    wanted = [each for name in names for each in (TABLES if name == "all" else [name])]
    return [TABLES[name] for name in dict.fromkeys(wanted)]


def check_arms(tables: Sequence[PaperTable], names: Sequence[str]) -> None:
    """Refuse a name that no chosen table has an arm of."""
    known = {arm.name for table in tables for arm in table.arms}
    for name in names:
        if name != "all" and name not in known:
            raise ValueError(f"--arms names {name!r}, which no chosen table has; {nearest(name, known)}")


def check_scale(tables: Sequence[PaperTable], name: str) -> None:
    """Refuse a scale that is none, or that no chosen table can be run at."""
    if name not in SCALES:
        raise ValueError(f"--scale is {name!r}; {nearest(name, SCALES)}")
    if not any(table.kernels or name in table.scales for table in tables):
        known = dict.fromkeys(scale for table in tables for scale in table.scales)
        raise ValueError(f"--scale is {name!r}, at which {tables[0].name} is not run; use one of {', '.join(known)}")


def _settings(asked: ReproduceArguments, tables: Sequence[PaperTable], folder: ResultsFolder) -> dict[str, Setting]:
    """The setting of every table that can be run, or written, with the data at hand, by its name; the others are named.

    Data are what --data names, tokens or images; pages alone can do with what the logs say of both.
    """
    if not tables:
        return {}
    known: dict[bool, Facts] = {}
    kinds = dict.fromkeys(table.on_images for table in tables)
    if asked.tables_only and asked.data is None:
        known = {images: found for images in kinds if (found := _logged(folder, images)) is not None}
        if not known:
            raise ValueError(
                f"{folder.path} has no logs of scale {folder.scale!r} to make tables from; leave out --tables-only to "
                "run"
            )
    else:
        found = find_data(asked.data, asked.scale, only_images=False not in kinds)
        known = {isinstance(found, ImageSet): found}
    settings = {}
    for table in tables:
        if table.on_images in known and asked.scale in table.scales:
            scale = table.scales[asked.scale]
            settings[table.name] = Setting.of(scale, known[table.on_images], asked.rates, asked.seeds)
    left = [table for table in tables if table.name not in settings]
    words = [f"{table.name} is left out: {_why_not(table, asked.scale)}" for table in left]
    if not settings:
        raise ValueError(words[0])
    if asked.tables_only and "all" in asked.tables:
        run = {record.item for record in folder.records.values()}
        bare = [
            name
            for name, setting in settings.items()  # runs that tables share are logged under one of them
            if name not in run and missing([TABLES[name]], setting, folder.records)
        ]
        settings = {name: setting for name, setting in settings.items() if name not in bare}
        if bare:
            words.append(f"left out, since they have not been run: {', '.join(bare)}; by name they are written")
    for line in words:
        say(line)
    return settings


def _why_not(table: PaperTable, scale: str) -> str:
    if scale not in table.scales:
        return f"it is not run at scale {scale!r}, but at {', '.join(table.scales)}"
    return f"it {_needs(table.on_images)}"


def _needs(images: bool) -> str:
    how = "`skipless prepare SOURCE --images`" if images else "`skipless prepare`, or text files"
    return f"needs {'images' if images else 'text'}: --data FOLDER, made by {how}"


def _logged(folder: ResultsFolder, images: bool) -> Facts | None:
    texts = folder.texts(images)
    if len(texts) > 1:
        others = ", ".join(text.name for text in texts[1:])
        kind = "sets of images" if images else "texts"
        say(f"the logs hold runs on several {kind}; tables are of {texts[0].name}, not of {others}: --data names one")
    return texts[0] if texts else None


def find_data(data: str | None, scale: str, only_images: bool = False) -> Facts:
    """What --data names: a prepared folder, or a corpus of text, which is prepared under data/ if it is not yet.

    Without it the smallest scale takes bytes of the Python standard library; the others want to be told, and so do
    tables of images.
    """
    from skipless.paper.recipes import prepared

    if data is None and (scale != "tiny" or only_images):
        raise ValueError(f"scale {scale!r} {_needs(only_images)}")
    if data is not None and holds_images(data):
        return ImageSet.read(data)
    if data is not None and (Path(data) / MANIFEST).is_file():
        return Text.read(data)
    return Text.read(prepared(data or "stdlib", 257 if scale in ON_BYTES else 32_000))


def _train(
    tables: Sequence[PaperTable],
    setting: Setting,
    folder: ResultsFolder,
    limits: Limits,
    reporter: "Reporter",
    arms: tuple[str, ...],
) -> None:
    from skipless.paper.workers import Scheduler
    from skipless.training.distributed import find_device

    find_device(limits.device)
    runnable = [table for table in tables if table.measure != "tasks" or limits.tasks is not None]
    for table in tables:
        if table not in runnable:
            say(f"{table.name} is left out: it needs --tasks-folder, the folder of the tasks' .jsonl files")
    left = Scheduler(runnable, setting, folder, limits, reporter, arms).work()
    reporter.close()
    if not left:
        return
    are = "is" if len(left) == 1 else "are"
    say(f"{count(len(left), 'run')} {are} still missing, and what follows from it; the same command goes on:")
    for each in left[:_MOST_SHOWN]:
        say(f"  {each.describe()}")
    if len(left) > _MOST_SHOWN:
        say(f"  and {len(left) - _MOST_SHOWN} more")


class Reporter(Listener):
    """Says each run that ends, and keeps the errors of those that failed."""

    def __init__(self):
        self.errors: list[str] = []
        self._done, self._began = 0, time.monotonic()
        self._progress = Progress(every=None)
        self._progress.start("")

    def started(self, run: Run) -> None:
        self._progress.show(run.describe())

    def finished(self, record: Record, known: int) -> None:
        """A line with the loss, or where it diverged."""
        self._done += 1
        end = f"diverged at step {record.diverged_at}" if record.diverged else f"loss {record.train_loss:.3f}"
        longer = "" if record.multiple == 1.0 else f" ×{record.multiple:g}"
        asked = f" ({record.measure})" if record.measure else ""
        what = f"{record.item}: {record.arm}{longer}, rate {record.rate:g}, seed {record.seed}{asked}"
        self._progress.say(f"{self._clock()} {what}: {end}, {record.seconds:.0f} s; {known} to go")
        self._progress.show(done=self._done, total=self._done + known)

    def failed(self, run: Run, error: str, traceback: Path) -> None:
        """A line with the error; the run is tried again by the next call."""
        self.errors.append(f"{run.describe()}: {error}")
        where = f" (traceback: {traceback})" if traceback.is_file() else ""
        self._progress.say(f"{self._clock()} failed: {self.errors[-1]}{where}")

    def close(self) -> None:
        self._progress.stop()

    def _clock(self) -> str:
        seconds = round(time.monotonic() - self._began)
        return f"{seconds // 60:3d}:{seconds % 60:02d}"


def _write(tables: Sequence[PaperTable], settings: Mapping[str, Setting], folder: ResultsFolder) -> None:
    """Every table's page, picture and data; the numbers also on the terminal."""
    console = Console()
    for table in tables:
        title = f"\n{table.title} ({table.reference})"
        if table.kernels:
            console.print(title, markup=False, style="bold")
            written = _write_kernels(table, folder.path / table.name, console)
        else:
            console.print(f"{title}, scale {folder.scale}", markup=False, style="bold")
            written = _write_table(table, settings[table.name], folder, console)
        for path in written:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _write_table(table: PaperTable, setting: Setting, folder: ResultsFolder, console: Console) -> list[Path]:
    stem = folder.path / f"{table.name}-{folder.scale}"
    summary = gather(table, setting, folder.records)
    drawn = write_figure(stem.with_suffix(".png"), lambda: picture(summary))
    page = markdown(summary, f"{stem.name}.png" if drawn else "")
    quantity = table.quantities[0]
    lines = [row.line()[:-1] for row in rows(summary.outcomes, quantity)]
    head = ("arm", "paper", quantity.replace("_", " "), "steps", "time", "seeds", "rate")
    print_table(console, head, lines)
    for claim, verdict in summary.verdicts:
        _print_verdict(console, verdict.mark, claim.text(), verdict.detail)
    return [*_write_pair(stem, page, as_json(summary)), *drawn]


def _write_kernels(table: PaperTable, stem: Path, console: Console) -> list[Path]:
    """The same for the table that trains nothing."""
    from skipless.paper.kernels import kernel_checks, kernels_page

    checks = kernel_checks()
    drawn = write_figure(stem.with_suffix(".png"), _kernel_picture)
    page = kernels_page(table, checks, f"{stem.name}.png" if drawn else "")
    data = {
        "skipless": __version__,
        "item": table.name,
        "reference": table.reference,
        "checks": [vars(check) for check in checks],
    }
    for check in checks:
        _print_verdict(console, "pass" if check.holds else "fail", f"{check.where}, {check.claim}", check.ours)
    return [*_write_pair(stem, page, data), *drawn]


def _write_pair(stem: Path, page: str, data: dict[str, Any]) -> list[Path]:
    paths = [stem.parent / f"{stem.name}.md", stem.parent / f"{stem.name}.json"]
    write_output(paths[0], page.encode())
    write_output(paths[1], json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n")
    return paths


def picture(summary: Summary) -> "Figure | None":
    """Training curves, the rates tried and measures by block, or kernels by stage where the table probes them."""
    from skipless.figures.kernels import Heading
    from skipless.figures.training import ArmCurve, reproduction

    table, setting = summary.table, summary.setting
    heading = Heading(table.title, f"{table.reference}; scale {setting.scale.name}, {setting.text.title}")
    if table.measure == "probes":
        return _stages(summary, heading)
    blocks = measured_blocks(summary)
    drawn = []
    for name, outcome in summary.outcomes.items():
        measured = {quantity.replace("_", " "): arms[name] for quantity, arms in blocks.items() if name in arms}
        drawn += [
            ArmCurve(**each, by_block=measured if each["name"] == name else {})
            for each in curves(outcome, setting.scale)
        ]
    return reproduction(drawn, setting.text.unigram, heading) if drawn else None


def curves(outcome: Outcome, scale: Scale) -> Iterator[dict[str, Any]]:
    """The arm after the usual steps with its sweep, and after the largest of its step multiples that has been run."""
    arm, longest = outcome.arm, max((m for m in outcome.arm.multiples_at(scale) if outcome.runs.get(m)), default=1.0)
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
            "sweep": {rate: tried.train_loss for rate, tried in outcome.rates.tried.items()} if usual else {},
            "others": [tuple(zip(*run.curve, strict=True)) for run in seeds],
            "name": arm.name if usual else f"{arm.name}/×{multiple:g}",
        }


def _stages(summary: Summary, heading: "Heading") -> "Figure | None":
    from skipless.figures.training import kernels_by_stage
    from skipless.paper.measures import unpack

    found = [run for o in summary.outcomes.values() for run in o.runs.get(1.0, {}).values() if run.kernels]
    if not found:
        return None
    return kernels_by_stage({f"step {step}": blocks for step, blocks in unpack(found[0].kernels).items()}, heading)


def _kernel_picture() -> "Figure":
    """Fig. 7, whose first three rows are Fig. 1."""
    from skipless.cli.kernels import draw
    from skipless.cli.networks import KernelsArguments, select
    from skipless.inspection.studies import study

    selection = select("fig7", KernelsArguments())
    return draw(selection, [study(network, selection.signals[0]) for network in selection.networks])


def _print_verdict(console: Console, mark: str, claim: str, detail: str) -> None:
    colour = {"pass": "green", "fail": "red"}.get(mark, "yellow")
    words = f"{mark:7s} {claim}{f' ({detail})' if detail else ''}"
    console.print(words, markup=False, highlight=False, style=colour, soft_wrap=True)


# A stand-in where nothing has been run: sizes and costs need no more of a text than how many tokens it knows.
_TEXT = Text("no text yet", 32_000, 0.008, 7.5, 0, "")
_BYTES = Text("no text yet", 256, 0.05, 3.2, 0, "")
_IMAGES = ImageSet("no images yet", 32, 3, (125.0,) * 3, (64.0,) * 3, 10, 0.148, 2.3, 0, "")
_MACHINES = {"tiny": CPU, "cpu": CPU, "small": H200, "medium": H200, "paper": H200}


def show(out: Path) -> None:
    """Print the list of tables. Costs are of one run after another, without what tables share."""
    console = Console()
    folders = {name: ResultsFolder(out, name) for name in SCALES}
    head = ["table", "paper", *(f"{name}: runs, {_MACHINES[name].name}" for name in SCALES), "done"]
    lines = [_line(table, folders, out) for table in TABLES.values()]
    print_table(console, head, lines)
    words = (
        "\nTimes are estimates from FLOP and the number of blocks, for one run after another; runs that tables share "
        "are counted for each. A best rate at the edge of its grid adds a run."
    )
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def _line(table: PaperTable, folders: dict[str, ResultsFolder], out: Path) -> list[str]:
    if table.kernels:
        there = (out / f"{table.name}.json").is_file()
        return [table.name, table.reference, *("0, 30 s" for _ in SCALES), "all" if there else "nothing"]
    costs, done = [], []
    for name in SCALES:
        if (scale := table.scales.get(name)) is None:
            costs.append("–")
            continue
        texts = folders[name].texts(table.on_images)
        stand_in = _IMAGES if table.on_images else _BYTES if name in ON_BYTES else _TEXT
        setting = Setting.of(scale, texts[0] if texts else stand_in)
        costs.append(f"{total(table, setting)}, {_time(_seconds(table, setting))}")
        if texts:
            left = len(missing([table], setting, folders[name].records))
            done.append(f"{name}: {'all' if not left else f'{left} or more missing'}")
    return [table.name, table.reference, *costs, "; ".join(done) or "nothing"]


def _seconds(table: PaperTable, setting: Setting) -> float:
    """Every arm's sweep and seeds after the usual steps, and its other step multiples."""
    seconds, scale = 0.0, setting.scale
    for arm in table.chosen(scale):
        model, train = arm.outline(scale, setting.text), scale.schedule(arm.corpus)
        usual = run_seconds(model, train, _MACHINES[scale.name])
        runs = setting.rates + setting.seeds - (0 if table.measure else 1)
        longer = [*arm.multiples_at(scale), *((1.5,) if table.step_ladder else ())]
        seconds += usual * (runs + sum(multiple for multiple in longer if multiple != 1.0))
    return seconds


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def command(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="TABLE...", help="Tables such as baselines; `all`; see --list.")
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="tiny (a test), cpu (hours), small, medium (a GPU) or paper (App. H).")
    ] = "tiny",
    data: Annotated[
        str | None, typer.Option(help="A folder made by `skipless prepare`, or a corpus. tiny: stdlib.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where logs, tables and figures go.")] = Path("results"),
    seeds: Annotated[int | None, typer.Option(help="Seeds at the best rate. Default: the scale's.")] = None,
    rates: Annotated[
        int | None, typer.Option(help="Learning rates each arm is tried at. Default: the scale's.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Seconds; no run is begun that would not end or be saved in time.")
    ] = None,
    arms: Annotated[
        str, typer.Option("--arms", help="Only these arms, by comma; `all` adds those not run by default.")
    ] = "",
    jobs: Annotated[int, typer.Option(help="Runs side by side, each in its own process, on one device.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    tasks_folder: Annotated[
        Path | None, typer.Option("--tasks-folder", help="Folder of the tasks' .jsonl files, for downstream.")
    ] = None,
    other_text: Annotated[
        str | None,
        typer.Option("--other-text", help="Text, such as a sample of C4, that every run is evaluated on too."),
    ] = None,
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="Run nothing: make tables from the logs again.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show tables, runs, what they cost and what is done.")] = False,
    index: Annotated[
        bool, typer.Option("--index", help="Write README.md in --out: every table, and whether it agrees.")
    ] = False,
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
    if index:
        from skipless.paper.index import results_index

        folders = [ResultsFolder(out, name) for name in SCALES]
        check_output(out / INDEX, INDEX_MARK)
        write_output(out / INDEX, results_index(out, folders).encode())
        print(f"wrote {out / INDEX}")
        return
    names = tuple(name.strip() for name in arms.split(",") if name.strip())
    asked = ReproduceArguments(tuple(tables or ()), scale, data, out, rates, seeds, names, tables_only)
    if other_text is not None:
        from skipless.data.text import open_corpus

        open_corpus(other_text)  # a wrong path is refused before anything is trained
    limits = Limits(jobs, float("inf") if budget is None else budget, device, tasks_folder, other_text)
    if not run(asked, limits):
        raise typer.Exit(1)

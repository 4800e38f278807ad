"""`skipless reproduce --list`: items, how many runs each takes at each scale, what they cost, and what is done."""

from pathlib import Path

from rich.console import Console

from skipless.cli.output import print_table
from skipless.recipes.reproduce import estimate
from skipless.recipes.reproduce.catalogue import ITEMS
from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.job import Setting, make_job
from skipless.recipes.reproduce.log import ResultsFolder
from skipless.recipes.reproduce.plan import missing, total
from skipless.recipes.reproduce.scale import SCALES, Scale
from skipless.recipes.reproduce.text import Text

# A stand-in where nothing has been run: sizes and costs need no more of a text than how many tokens it knows.
_TEXT = Text("no text yet", 32_000, 0.008, 7.5, 0, "")
_BYTES = Text("no text yet", 256, 0.05, 3.2, 0, "")
_MACHINES = {"tiny": estimate.CPU, "small": estimate.H200, "paper": estimate.H200}


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
        usual = estimate.run_seconds(make_job(item, arm, setting, rate).experiment, machine)
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

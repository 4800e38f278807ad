"""The table and the figure of benchmarks/anneal.py, from its log."""

import math
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from skipless.analysis.demo_figure import smoothed
from skipless.analysis.figure_style import BLUE, GREEN, MUTED, ORANGE, VERMILION, Page, render, styled

TWICE, TRAINED = "vanilla, twice the steps", "trained, then annealed"
COLOURS = {"vanilla": VERMILION, "skips": MUTED, "annealed": BLUE, TRAINED: GREEN}
WORDS = {
    "vanilla": "no skips from the start",
    "skips": "normalised skips α = .98, kept",
    "annealed": "skips from .98 to none over the first steps",
    TRAINED: "trained with skips, then as many steps again in which they fall to none",
    TWICE: "no skips from the start, for as many steps as the row above in all",
}

Record = dict[str, Any]


def write(records: list[Record], folder: Path, steps: int) -> None:
    """anneal.md and anneal.png."""
    named = [{**r, "arm": TWICE if r["steps"] > steps else r["arm"]} for r in records]
    (folder / "anneal.md").write_text(page(named, steps), encoding="utf-8")
    (folder / "anneal.png").write_bytes(render(picture(best(named)), ".png"))
    print((folder / "anneal.md").read_text(encoding="utf-8"))


def best(records: list[Record]) -> dict[str, list[Record]]:
    """Each arm's runs at its best rate, by mean validation loss over seeds."""
    found = {}
    for arm in dict.fromkeys(record["arm"] for record in records):
        by_rate: dict[float, list[Record]] = {}
        for record in (r for r in records if r["arm"] == arm):
            by_rate.setdefault(record["rate"], []).append(record)
        found[arm] = min(by_rate.values(), key=lambda runs: sum(finite(r["valid"]) for r in runs))
    return found


def finite(value: float) -> float:
    """NaN is worse than any loss."""
    return value if math.isfinite(value) else math.inf


def page(records: list[Record], steps: int) -> str:
    """The table: every arm at every rate, and what the annealed ones went through."""
    lines = ["# Skips that fall during training", ""]
    lines += [f"`python benchmarks/anneal.py --steps {steps}`: 36 blocks of width 96 on the bytes of Python's standard"]
    lines += ["library, 64 bytes × 16 rows a step, Muon, γ_L = .2, DKS-GELU, exact calibration, float32 on a CPU."]
    lines += ["Validation loss in nats per byte; the best rate of each arm is bold. Generated; do not edit.", ""]
    lines += ["| arm | steps | rate | validation loss, by seed | mean |", "|---|---|---|---|---|"]
    winners = best(records)
    chosen = {id(run) for runs in winners.values() for run in runs}
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault((record["arm"], record["rate"]), []).append(record)
    for (arm, rate), runs in groups.items():
        losses = ", ".join(f"{run['valid']:.3f}" for run in runs)
        number = f"**{loss_of(runs):.3f}**" if id(runs[0]) in chosen else f"{loss_of(runs):.3f}"
        total = runs[0]["steps"] * (2 if arm == TRAINED else 1)
        lines.append(f"| {arm}: {WORDS[arm]} | {total} | {rate:g} | {losses} | {number} |")
    return "\n".join([*lines, "", *outcome(winners), "", "![Loss and skip weight by step](anneal.png)", ""])


def outcome(winners: dict[str, list[Record]]) -> list[str]:
    """What the numbers say, in words made from them."""
    vanilla, annealed, twice = (loss_of(winners[arm]) for arm in ("vanilla", "annealed", TWICE))
    runs = winners[TRAINED]
    before, peak = mean(run["valid_before"] for run in runs), max(max(smoothed(run["loss"])) for run in runs)
    side = "above" if annealed > vanilla else "below"
    return [
        f"Annealing ends {abs(annealed - vanilla):.3f} nats {side} a network that had no skips from the start, after "
        "as many steps.",
        f"The trained network stood at {before:.3f}; its smoothed loss rose to {peak:.2f} while its skips fell, and it "
        f"ended at {loss_of(runs):.3f}, where one without skips from the start is at {twice:.3f} after as many steps.",
    ]


def loss_of(runs: list[Record]) -> float:
    """Mean validation loss over seeds."""
    return mean(run["valid"] for run in runs)


@styled
def picture(runs: dict[str, list[Record]]) -> Figure:
    """Above the smoothed training loss of both seeds, below α."""
    sheet = Page(9.2, 6.1)
    sheet.heading(0.35, "Skips that fall during training", "Training loss (nats per byte), each arm at its best rate")
    upper, lower = sheet.axes(0.7, 1.1, 6.0, 3.2), sheet.axes(0.7, 4.65, 6.0, 0.9)
    ends: list[tuple[float, str, str]] = []
    for arm, members in runs.items():
        colour, offset = COLOURS.get(arm, ORANGE), members[0]["steps"] if arm == TRAINED else 0
        for run in members:
            curve = smoothed(run["loss"])
            steps = range(offset, offset + len(curve))
            upper.plot(steps, curve, color=colour, linewidth=1.4)
            lower.plot(steps, run["alpha"], color=colour, linewidth=1.4)
        ends.append((loss_of(members), arm, colour))
    upper.set(ylim=(min(e[0] for e in ends) - 0.1, min(max(e[0] for e in ends) + 1.6, 6.0)), xticklabels=[])
    lower.set(ylim=(-0.05, 1.05), xlabel="step", ylabel="α", yticks=[0, 1])
    for axes in (upper, lower):
        axes.set_xlim(0, max(len(r["loss"]) for m in runs.values() for r in m))
        axes.grid(axis="y")
    _labels(upper, ends)
    return sheet.figure


def _labels(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Each arm's name and validation loss beside the axes, far enough apart to read."""
    low, high = axes.get_ylim()
    at = -math.inf
    for loss, arm, colour in sorted(ends):
        at = max((loss - low) / (high - low), at + 0.08)
        axes.text(1.02, at, f"{arm}: {loss:.3f}", color=colour, transform=axes.transAxes, fontsize=8.5, va="center")

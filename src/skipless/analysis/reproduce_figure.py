"""Pictures of a reproduction: training curves beside the sweep that chose their rates, and kernels during training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import NullFormatter

from skipless.analysis.figure_style import (
    BLUE,
    COSINE_COLOURS,
    FAINT,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    VERMILION,
    Page,
    styled,
)
from skipless.analysis.figures import Heading, colour_bar

_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, "#cc79a7", "#56b4e9", INK)  # Okabe & Ito 2008
_STYLES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.2, 1.2, 1.2)))
# Inches.
_LEFT, _TOP, _CURVES, _SWEEP, _GAP, _HEIGHT, _LINE = 0.65, 1.05, 5.0, 3.4, 0.75, 3.6, 0.23
_PANEL, _BETWEEN = 1.0, 0.12
_WIDTH = _LEFT + _CURVES + _GAP + _SWEEP + 0.35
_KEY, _KEY_SIZE = 0.38, 9  # where a line's words begin, and their size in points


@dataclass(frozen=True, eq=False)
class ArmCurve:
    """An arm: its smoothed training loss by step, its final loss as text, and the final loss of every rate tried.

    Diverged rates have an infinite loss; they and those above the axes are crosses at the top.
    others: steps and losses of further seeds.
    name: "kind/way"; arms of one kind share a colour, of one way a line style.
    """

    label: str
    steps: Sequence[float]
    losses: Sequence[float]
    final: str
    sweep: Mapping[float, float]
    others: Sequence[tuple[Sequence[float], Sequence[float]]] = ()
    name: str = ""

    @property
    def words(self) -> str:
        """Its line of the key."""
        return f"{self.label}: {self.final}"


@styled
def reproduction(arms: Sequence[ArmCurve], unigram: float, heading: Heading) -> Figure:
    """Left: training loss of each arm at its best rate, further seeds thinner. Right: what every rate reached.

    What is thin and what a cross means stands above the axes that have them.
    """
    below = _TOP + _HEIGHT + 0.7
    columns = 2 if all(_fits_a_column(arm.words) for arm in arms) else 1
    page = Page(_WIDTH, below + _LINE * (-(-len(arms) // columns)) + 0.2)
    page.heading(0.3, heading.title, heading.subtitle)
    ends = [losses[-1] for arm in arms for losses in (arm.losses, *(other for _, other in arm.others))]
    top = max([unigram, *ends]) + 0.4
    curves, sweep = (
        page.axes(left, _TOP, width, _HEIGHT) for left, width in ((_LEFT, _CURVES), (_LEFT + _CURVES + _GAP, _SWEEP))
    )
    for number, (arm, look) in enumerate(zip(arms, looks([arm.name or arm.label for arm in arms]), strict=True)):
        curves.plot(arm.steps, arm.losses, **look)
        for steps, losses in arm.others:
            curves.plot(steps, losses, linewidth=0.8, **look)
        _draw_sweep(sweep, arm.sweep, (top - 0.1 - 0.03 * (number % 4), top), look)
        _key(page, divmod(number, columns), below, arm, look)
    _finish(curves, sweep, unigram, (min([unigram, *ends]) - 0.3, top))
    if any(arm.others for arm in arms):
        _note(curves, "thin: further seeds")
    if not all(loss <= top for arm in arms for loss in arm.sweep.values()):
        _note(sweep, "× diverged, or ended higher")
    _rate_axis(sweep, sorted({rate for arm in arms for rate in arm.sweep}))
    return page.figure


def looks(names: Sequence[str]) -> list[dict[str, Any]]:
    """Colour and line style by name: "kind/way" has its kind's and its way's, while there are enough of both."""
    parts = [name.partition("/")[::2] for name in names]
    kinds, ways = ({part: n for n, part in enumerate(dict.fromkeys(side))} for side in zip(*parts, strict=True))
    places = [(kinds[kind], ways[way]) for kind, way in parts]
    if len(kinds) > len(_COLOURS) or len(ways) > len(_STYLES):
        places = [divmod(number, len(_COLOURS))[::-1] for number in range(len(names))]
    return [{"color": _COLOURS[kind], "linestyle": _STYLES[way % len(_STYLES)]} for kind, way in places]


def _note(axes: Axes, words: str) -> None:
    axes.text(1, 1.015, words, transform=axes.transAxes, fontsize=8.5, ha="right", va="bottom", color=MUTED)


def _draw_sweep(axes: Axes, sweep: Mapping[float, float], heights: tuple[float, float], look: dict[str, Any]) -> None:
    """A dot a rate, and a cross for each that diverged or ended above the axes. heights: of crosses, of the axes."""
    ceiling, top = heights
    rates = sorted(sweep)
    finite = [(rate, sweep[rate]) for rate in rates if sweep[rate] <= top]
    if finite:
        axes.plot(*zip(*finite, strict=True), marker="o", markersize=4, linewidth=1.2, **look)
    lost = [rate for rate in rates if not sweep[rate] <= top]
    axes.plot(lost, [ceiling] * len(lost), "x", color=look["color"], markersize=6)


def _fits_a_column(words: str) -> bool:
    return _KEY + TextPath((0, 0), words, size=_KEY_SIZE).get_extents().width / 72 < (_WIDTH - _LEFT) / 2 - 0.1


def _key(page: Page, place: tuple[int, int], top: float, arm: ArmCurve, look: dict[str, Any]) -> None:
    """The arm's line, name and final loss, in this row and column of two under the axes."""
    left, line = _LEFT + place[1] * (page.width - _LEFT) / 2, top + _LINE * place[0]
    sample = page.axes(left, line - 0.05, 0.3, 0.1)
    sample.plot([0, 1], [0.5, 0.5], **look)
    sample.set_axis_off()
    page.text(left + _KEY, line, arm.words, fontsize=_KEY_SIZE, va="center")


def _rate_axis(axes: Axes, rates: list[float]) -> None:
    """Powers of ten are named, and between them the grid's 2, 3 and 5 are marked; a narrow sweep names each rate."""
    if not rates:
        return
    low, high = rates[0] / 1.5, rates[-1] * 1.5
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    grid = [digit * 10.0**n for n in decades for digit in (1, 2, 3, 5) if low <= digit * 10.0**n <= high]
    named = grid if high < 30 * low else [10.0**n for n in decades if low <= 10.0**n <= high]
    axes.set_xlim(low, high)
    axes.set_xticks(named, [f"{rate:.0e}".replace("e-0", "e-") for rate in named])
    axes.set_xticks([rate for rate in grid if rate not in named], minor=True)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _finish(curves: Axes, sweep: Axes, unigram: float, span: tuple[float, float]) -> None:
    curves.set(xlabel="step", ylabel="training loss (smoothed)", ylim=span)
    sweep.set(xlabel="highest rate", ylabel="final training loss", xscale="log", ylim=span)
    for axes in (curves, sweep):
        axes.grid(axis="y")
        axes.axhline(unigram, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    curves.annotate(
        f"unigram entropy, {unigram:.2f}",
        (1, unigram),
        (-4, -4),  # below: what learns no more than frequencies lies just above
        xycoords=curves.get_yaxis_transform(),
        textcoords="offset points",
        fontsize=8.5,
        ha="right",
        va="top",
        color=MUTED,
    )


@styled
def kernels_by_stage(stages: Mapping[str, Mapping[int, np.ndarray]], heading: Heading) -> Figure:
    """Fig. 15: cosines between locations, one row per stage of training and one column per block."""
    blocks = list(next(iter(stages.values())))
    step = _PANEL + _BETWEEN
    below = _TOP + len(stages) * step
    page = Page(1.5 + len(blocks) * step + 0.3, below + 0.45)
    page.heading(0.3, heading.title, heading.subtitle)
    for column, block in enumerate(blocks):
        words = "input" if block == 0 else f"block {block}"
        page.text(1.5 + column * step + _PANEL / 2, _TOP - 0.08, words, fontsize=8.5, ha="center", va="bottom")
    for row, (stage, cosines) in enumerate(stages.items()):
        page.text(0.3, _TOP + row * step + _PANEL / 2, stage, fontsize=9.5, va="center")
        for column, block in enumerate(blocks):
            axes = page.axes(1.5 + column * step, _TOP + row * step, _PANEL, _PANEL)
            axes.imshow(cosines[block], vmin=0.0, vmax=1.0, cmap=COSINE_COLOURS, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set(visible=True, color=FAINT)
    lowest = min(float(np.nanmin(cosine)) for stage in stages.values() for cosine in stage.values())
    colour_bar(page, (1.5, below + 0.02, 2 * _PANEL + _BETWEEN), "cosine between two locations", lowest)
    return page.figure

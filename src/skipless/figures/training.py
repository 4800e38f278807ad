"""Figures of training: a table of the paper as curves and rates tried, kernels by stage, and the demo."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import NullFormatter

from skipless.figures.kernels import Heading, colour_bar
from skipless.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    VERMILION,
    Page,
    block_name,
    note_at,
    show_cosines,
    styled,
    verdict_mark,
)
from skipless.theory import kernels
from skipless.theory.certificate import Verdict

_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, "#cc79a7", "#56b4e9", INK)  # Okabe & Ito 2008
_STYLES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.2, 1.2, 1.2)))
# Inches.
_LEFT, _TOP, _CURVES, _SWEEP, _GAP, _HEIGHT, _LINE = 0.65, 1.05, 5.0, 3.4, 0.75, 3.6, 0.23
_BLOCKS = 2.2
_PANEL, _BETWEEN = 1.0, 0.12
_WIDTH = _LEFT + _CURVES + _GAP + _SWEEP + 0.35
_KEY, _KEY_SIZE = 0.38, 9  # where a line's words begin, and their size in points


@dataclass(frozen=True, eq=False)
class ArmCurve:
    """An arm: its smoothed training loss by step, its final loss as text, and the final loss of every rate tried.

    Diverged rates have an infinite loss; they and those above the axes are crosses at the top.
    others: steps and losses of further seeds.
    name: "kind/way"; arms of one kind share a colour, of one way a line style.
    by_block: what was measured of its blocks, by name: their numbers and the values.
    """

    label: str
    steps: Sequence[float]
    losses: Sequence[float]
    final: str
    sweep: Mapping[float, float]
    others: Sequence[tuple[Sequence[float], Sequence[float]]] = ()
    name: str = ""
    by_block: Mapping[str, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        return f"{self.label}: {self.final}"


@styled
def reproduction(arms: Sequence[ArmCurve], unigram: float, heading: Heading) -> Figure:
    """Left: training loss of each arm at its best rate, further seeds thinner. Right: what every rate reached.

    Both are drawn where arms differ: without the unigram entropy, which is then said to lie above, unless one ends near
    it. What is thin or dotted and what a cross means stands above the axes that have them. Measures by block, where
    arms have them, are a row of panels below.
    """
    measures = list(dict.fromkeys(measure for arm in arms for measure in arm.by_block))
    below = _TOP + _HEIGHT + 0.7 + (_BLOCKS + 0.95 if measures else 0.0)
    columns = 2 if all(_fits_a_column(arm.words) for arm in arms) else 1
    page = Page(_WIDTH, below + _LINE * (-(-len(arms) // columns)) + 0.2)
    page.heading(0.3, heading.title, heading.subtitle)
    ends = [losses[-1] for arm in arms for losses in (arm.losses, *(other for _, other in arm.others))]
    tried = [loss for arm in arms for loss in arm.sweep.values() if loss <= max([unigram, *ends]) + 0.4]
    spans = _span(ends, unigram), _span([*ends, *tried], unigram)
    top, ceiling = spans[1][1], spans[1][1] - 0.03 * (spans[1][1] - spans[1][0])
    curves, sweep = (
        page.axes(left, _TOP, width, _HEIGHT) for left, width in ((_LEFT, _CURVES), (_LEFT + _CURVES + _GAP, _SWEEP))
    )
    arm_looks = looks([arm.name or arm.label for arm in arms])
    for number, (arm, look) in enumerate(zip(arms, arm_looks, strict=True)):
        curves.plot(arm.steps, arm.losses, **look)
        for steps, losses in arm.others:
            curves.plot(steps, losses, linewidth=0.8, **look)
        _draw_sweep(sweep, arm.sweep, (ceiling - 0.01 * (number % 4) * (top - spans[1][0]), top), look)
        _key(page, divmod(number, columns), below, arm, look)
    _finish(curves, sweep, unigram, spans)
    curves.set_xlim(left=min(_first_seen(arm.steps, arm.losses, spans[0][1]) for arm in arms))
    if any(arm.others for arm in arms):
        _note(curves, "thin: further seeds")
    if not all(loss <= top for arm in arms for loss in arm.sweep.values()):
        _note(sweep, "× diverged, or ended higher")
    _rate_axis(sweep, sorted({rate for arm in arms for rate in arm.sweep}))
    if measures:
        _draw_blocks(page, measures, arms, arm_looks)
    return page.figure


def _draw_blocks(page: Page, measures: Sequence[str], arms: Sequence[ArmCurve], arm_looks: Sequence[dict]) -> None:
    """A panel a measure: its value by block, on a logarithmic axis, which is linear about 0 where values reach it."""
    width = (_CURVES + _GAP + _SWEEP + _GAP) / len(measures) - _GAP
    for number, measure in enumerate(measures):
        axes = page.axes(_LEFT + number * (width + _GAP), _TOP + _HEIGHT + 0.95, width, _BLOCKS)
        shown = [
            (*arm.by_block[measure], look) for arm, look in zip(arms, arm_looks, strict=True) if measure in arm.by_block
        ]
        for blocks, values, look in shown:
            axes.plot(blocks, values, linewidth=1.2, **look)
        positive = all(value > 0 for _, values, _ in shown for value in values)
        axes.set_yscale("log") if positive else axes.set_yscale("symlog", linthresh=1e-3)
        axes.set(xlabel="block")
        axes.set_title(measure, fontsize=10, loc="left")
        axes.grid(axis="y")


def looks(names: Sequence[str]) -> list[dict[str, Any]]:
    """Colour and line style by name: "kind/way" has its kind's and its way's, while there are enough of both."""
    parts = [name.partition("/")[::2] for name in names]
    kinds, ways = ({part: n for n, part in enumerate(dict.fromkeys(side))} for side in zip(*parts, strict=True))
    places = [(kinds[kind], ways[way]) for kind, way in parts]
    if len(kinds) > len(_COLOURS) or len(ways) > len(_STYLES):
        places = [divmod(number, len(_COLOURS))[::-1] for number in range(len(names))]
    return [{"color": _COLOURS[kind], "linestyle": _STYLES[way % len(_STYLES)]} for kind, way in places]


def _note(axes: Axes, words: str, left: bool = False) -> None:
    place, side = (0, "left") if left else (1, "right")
    axes.text(place, 1.015, words, transform=axes.transAxes, fontsize=8.5, ha=side, va="bottom", color=MUTED)


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


def _span(losses: Sequence[float], unigram: float) -> tuple[float, float]:
    """Heights of axes: about these losses, and up to the unigram entropy where one of them is near it."""
    low, high = min(losses), max(losses)
    room = max(0.25, 0.5 * (high - low))
    top = high + room if high + room < unigram - 0.1 else max(unigram, high) + 0.4
    return low - 0.1 * (top - low), top


def _first_seen(steps: Sequence[float], losses: Sequence[float], top: float) -> float:
    """The step at which a curve comes into sight, less a tenth of it."""
    return 0.9 * next((step for step, loss in zip(steps, losses, strict=True) if loss <= top), steps[-1])


def _finish(curves: Axes, sweep: Axes, unigram: float, spans: tuple[tuple[float, float], tuple[float, float]]) -> None:
    curves.set(xlabel="step", ylabel="training loss (smoothed)", ylim=spans[0])
    sweep.set(xlabel="highest rate", ylabel="final training loss", xscale="log", ylim=spans[1])
    for axes, (_, top) in zip((curves, sweep), spans, strict=True):
        axes.grid(axis="y")
        if unigram < top:
            axes.axhline(unigram, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    where = "dotted" if unigram < spans[0][1] else "lies above"
    _note(curves, f"unigram entropy, {unigram:.2f}, {where}", left=True)


@styled
def kernels_by_stage(stages: Mapping[str, Mapping[int, np.ndarray]], heading: Heading) -> Figure:
    """Fig. 15: cosines between locations, one row per stage of training and one column per block."""
    blocks = list(next(iter(stages.values())))
    step = _PANEL + _BETWEEN
    below = _TOP + len(stages) * step
    page = Page(1.5 + len(blocks) * step + 0.3, below + 0.45)
    page.heading(0.3, heading.title, heading.subtitle)
    for column, block in enumerate(blocks):
        at = 1.5 + column * step + _PANEL / 2
        page.text(at, _TOP - 0.08, block_name(block), fontsize=8.5, ha="center", va="bottom")
    for row, (stage, cosines) in enumerate(stages.items()):
        page.text(0.3, _TOP + row * step + _PANEL / 2, stage, fontsize=9.5, va="center")
        for column, block in enumerate(blocks):
            show_cosines(page.axes(1.5 + column * step, _TOP + row * step, _PANEL, _PANEL), cosines[block])
    lowest = min(float(np.nanmin(cosine)) for stage in stages.values() for cosine in stage.values())
    colour_bar(page, (1.5, below + 0.02, 2 * _PANEL + _BETWEEN), "cosine between two locations", lowest)
    return page.figure


# Inches. At 200 dots per inch a panel shows each of 64 locations as 3×3 whole pixels.
_DEMO_PANEL, _DEMO_GAP, _ROW = 0.96, 0.1, 1.24
_DEMO_LEFT, _DEMO_TOP, _DEMO_CURVES, _BESIDE = 0.3, 1.5, 4.3, 1.75
_DEMO_COLOURS = (MUTED, VERMILION, GREEN, BLUE)
_LOWEST, _NEAREST = 0.05, 0.075  # share of the axis between its end and the curves, and between two labels


@dataclass(frozen=True, eq=False)
class ArmPicture:
    """One network: its training losses, its measured cosines by block before and after training, its verdict.

    final is the loss that its label shows.
    """

    label: str
    details: str
    losses: np.ndarray
    final: float
    initial: Mapping[int, np.ndarray]
    trained: np.ndarray
    verdict: Verdict


@styled
def demo_picture(arms: Sequence[ArmPicture], counting: float, heading: Heading) -> Figure:
    """Left the loss by step, with `counting` (nats) as the level of symbol frequencies; right kernels by depth.

    Up to four networks: the reference, the one that fails, and those that are shown.
    """
    blocks = list(arms[0].initial)
    across = len(blocks) * (_DEMO_PANEL + _DEMO_GAP) - _DEMO_GAP
    right = _DEMO_LEFT + 0.35 + _DEMO_CURVES + _BESIDE
    page = Page(right + across + 0.4 + _DEMO_PANEL + 1.75, _DEMO_TOP + len(arms) * _ROW + 0.62)
    page.heading(_DEMO_LEFT, heading.title, heading.subtitle)
    _caption(page, _DEMO_LEFT, "What they learn", "training loss by step, in nats per byte")
    _draw_losses(page.axes(_DEMO_LEFT + 0.35, _DEMO_TOP, _DEMO_CURVES, len(arms) * _ROW - 0.2), arms, counting)
    words = f"cosine between {len(arms[0].trained)} locations of one sequence, measured after each block"
    _caption(page, right, "What reaches them through their depth", words)
    _column_heads(page, right, blocks, across)
    for number, arm in enumerate(arms):
        _draw_row(page, right, _DEMO_TOP + number * _ROW, arm, _DEMO_COLOURS[number])
    words = "1: locations cannot be told apart. Under each panel, its mean off the diagonal"
    colour_bar(page, (right, _DEMO_TOP + len(arms) * _ROW + 0.1, 2 * _DEMO_PANEL + _DEMO_GAP), words, 0.0)
    return page.figure


def smoothed(losses: np.ndarray) -> np.ndarray:
    """The exponential moving average over about a fifteenth of the run, without a bias towards its start."""
    keep = 1.0 - 1.0 / max(len(losses) / 15, 1.0)
    total, weight, means = 0.0, 0.0, []
    for loss in losses:
        total, weight = keep * total + loss, keep * weight + 1.0
        means.append(total / weight)
    return np.array(means)


def _draw_losses(axes: Axes, arms: Sequence[ArmPicture], counting: float) -> None:
    steps = max(len(arm.losses) for arm in arms)
    ends = [arm.final for arm in arms]
    low, high = min([counting, *ends]), max([counting, *ends])
    span = max(high - low, 0.5)
    axes.set(xlim=(0, steps), ylim=(low - 0.25 * span, high + 0.9 * span), xlabel="step")
    axes.grid(axis="y")
    axes.axhline(counting, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    for arm, colour in zip(arms, _DEMO_COLOURS, strict=False):
        step = np.arange(1, len(arm.losses) + 1)
        axes.plot(step, arm.losses, color=colour, linewidth=0.7, alpha=0.28, zorder=2)
        axes.plot(step, smoothed(arm.losses), color=colour, linewidth=2.4, zorder=3)
    labels = [f"{arm.label}\n{end:.2f}" for arm, end in zip(arms, ends, strict=True)]
    _label_ends(axes, labels, ends)
    box = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    look = {"color": INK, "fontsize": 8.5, "ha": "right", "va": "top", "bbox": box, "zorder": 1.5}
    note_at(axes, f"counting symbols, {counting:.2f}", counting, (-4, -8), **look)


def _label_ends(axes: Axes, labels: Sequence[str], ends: Sequence[float]) -> None:
    """Each curve's name at its end, moved apart where two would touch."""
    low, high = axes.get_ylim()
    apart, floor = 2 * _NEAREST * (high - low), low + _LOWEST * (high - low)
    places: dict[int, float] = {}
    for index in sorted(range(len(ends)), key=lambda i: ends[i]):
        places[index] = floor = max(ends[index], floor)
        floor += apart
    for index, label in enumerate(labels):
        look = {"color": _DEMO_COLOURS[index], "fontweight": "bold", "va": "center", "linespacing": 1.25}
        note_at(axes, label, places[index], (7, 0), **look, annotation_clip=False)


def _caption(page: Page, left: float, title: str, words: str) -> None:
    page.text(left, 0.98, title, fontsize=10.5, fontweight="bold", va="bottom")
    page.text(left, 1.02, words, fontsize=8.5, color=MUTED, va="top")


def _column_heads(page: Page, left: float, blocks: Sequence[int], across: float) -> None:
    places = [left + column * (_DEMO_PANEL + _DEMO_GAP) for column in range(len(blocks))] + [left + across + 0.4]
    for place, words in zip(places, [*map(block_name, blocks), f"block {blocks[-1]}, trained"], strict=True):
        page.text(place + _DEMO_PANEL / 2, _DEMO_TOP - 0.06, words, fontsize=8.5, ha="center", va="bottom")


def _draw_row(page: Page, left: float, top: float, arm: ArmPicture, colour: str) -> None:
    places = [left + column * (_DEMO_PANEL + _DEMO_GAP) for column in range(len(arm.initial))]
    last = places[-1] + _DEMO_PANEL + 0.4
    for at, cosines in zip([*places, last], [*arm.initial.values(), arm.trained], strict=True):
        show_cosines(page.axes(at, top, _DEMO_PANEL, _DEMO_PANEL), cosines)
        mean = kernels.mean_cosine(cosines) if np.isfinite(cosines).all() else float("nan")
        below = top + _DEMO_PANEL + 0.03
        page.text(at + _DEMO_PANEL / 2, below, f"{mean:.2f}", fontsize=7.5, color=MUTED, ha="center", va="top")
    beside = last + _DEMO_PANEL + 0.14
    glyph, tint = verdict_mark(arm.verdict)
    kind, _, where = arm.verdict.words.partition(" ")
    page.text(beside, top + 0.14, arm.label, fontsize=9.5, fontweight="bold", color=colour, va="center")
    page.text(beside, top + 0.28, arm.details, fontsize=8, color=MUTED, va="top", linespacing=1.35)
    page.text(
        beside, top + 0.62, f"{glyph} {kind}\n{where}".rstrip(), fontsize=9, color=tint, va="top", linespacing=1.3
    )

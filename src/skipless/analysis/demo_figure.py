"""The demonstration in one picture: what three networks learn, beside what their depth does to a signal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from skipless.analysis.figure_style import (
    BLUE,
    COSINE_COLOURS,
    FAINT,
    INK,
    MUTED,
    VERMILION,
    Page,
    styled,
    verdict_mark,
)
from skipless.analysis.figures import Heading
from skipless.analysis.study import verdict_words
from skipless.theory import kernels
from skipless.theory.certificate import Verdict

# Inches. At 200 dots per inch a panel shows each of 64 locations as 3×3 whole pixels.
_PANEL, _GAP, _ROW = 0.96, 0.1, 1.24
_LEFT, _TOP, _CURVES, _BESIDE = 0.3, 1.5, 4.3, 1.75
_COLOURS = (MUTED, VERMILION, BLUE)
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

    Three networks: the reference, the one that fails and the one that is shown, in this order.
    """
    blocks = list(arms[0].initial)
    across = len(blocks) * (_PANEL + _GAP) - _GAP
    right = _LEFT + 0.35 + _CURVES + _BESIDE
    page = Page(right + across + 0.4 + _PANEL + 1.75, _TOP + len(arms) * _ROW + 0.62)
    page.heading(_LEFT, heading.title, heading.subtitle)
    _caption(page, _LEFT, "What they learn", "training loss by step, in nats per byte")
    _draw_losses(page.axes(_LEFT + 0.35, _TOP, _CURVES, len(arms) * _ROW - 0.2), arms, counting)
    words = f"cosine between {len(arms[0].trained)} locations of one sequence, measured after each block"
    _caption(page, right, "What reaches them through their depth", words)
    _column_heads(page, right, blocks, across)
    for number, arm in enumerate(arms):
        _draw_row(page, right, _TOP + number * _ROW, arm, _COLOURS[number])
    _colour_bar(page, right, _TOP + len(arms) * _ROW + 0.1)
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
    for arm, colour in zip(arms, _COLOURS, strict=True):
        step = np.arange(1, len(arm.losses) + 1)
        axes.plot(step, arm.losses, color=colour, linewidth=0.7, alpha=0.28, zorder=2)
        axes.plot(step, smoothed(arm.losses), color=colour, linewidth=2.4, zorder=3)
    labels = [f"{arm.label}\n{end:.2f}" for arm, end in zip(arms, ends, strict=True)]
    _label_ends(axes, labels, ends)
    axes.annotate(
        f"counting symbols, {counting:.2f}",
        (1, counting),
        (-4, -8),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        color=INK,
        fontsize=8.5,
        ha="right",
        va="top",
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        zorder=1.5,
    )


def _label_ends(axes: Axes, labels: Sequence[str], ends: Sequence[float]) -> None:
    """Each curve's name at its end, moved apart where two would touch."""
    low, high = axes.get_ylim()
    apart, floor = 2 * _NEAREST * (high - low), low + _LOWEST * (high - low)
    places: dict[int, float] = {}
    for index in sorted(range(len(ends)), key=lambda i: ends[i]):
        places[index] = floor = max(ends[index], floor)
        floor += apart
    for index, label in enumerate(labels):
        axes.annotate(
            label,
            (1, places[index]),
            (7, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            color=_COLOURS[index],
            fontweight="bold",
            va="center",
            linespacing=1.25,
            annotation_clip=False,
        )


def _caption(page: Page, left: float, title: str, words: str) -> None:
    page.text(left, 0.98, title, fontsize=10.5, fontweight="bold", va="bottom")
    page.text(left, 1.02, words, fontsize=8.5, color=MUTED, va="top")


def _column_heads(page: Page, left: float, blocks: Sequence[int], across: float) -> None:
    for column, block in enumerate(blocks):
        words = "input" if block == 0 else f"block {block}"
        centre = left + column * (_PANEL + _GAP) + _PANEL / 2
        page.text(centre, _TOP - 0.06, words, fontsize=8.5, ha="center", va="bottom")
    centre = left + across + 0.4 + _PANEL / 2
    page.text(centre, _TOP - 0.06, f"block {blocks[-1]}, trained", fontsize=8.5, ha="center", va="bottom")


def _draw_row(page: Page, left: float, top: float, arm: ArmPicture, colour: str) -> None:
    places = [left + column * (_PANEL + _GAP) for column in range(len(arm.initial))]
    last = places[-1] + _PANEL + 0.4
    for at, cosines in zip([*places, last], [*arm.initial.values(), arm.trained], strict=True):
        _show(page.axes(at, top, _PANEL, _PANEL), cosines)
        mean = kernels.mean_cosine(cosines) if np.isfinite(cosines).all() else float("nan")
        page.text(at + _PANEL / 2, top + _PANEL + 0.03, f"{mean:.2f}", fontsize=7.5, color=MUTED, ha="center", va="top")
    beside = last + _PANEL + 0.14
    glyph, tint = verdict_mark(arm.verdict)
    kind, _, where = verdict_words(arm.verdict).partition(" ")
    page.text(beside, top + 0.14, arm.label, fontsize=9.5, fontweight="bold", color=colour, va="center")
    page.text(beside, top + 0.28, arm.details, fontsize=8, color=MUTED, va="top", linespacing=1.35)
    page.text(
        beside, top + 0.62, f"{glyph} {kind}\n{where}".rstrip(), fontsize=9, color=tint, va="top", linespacing=1.3
    )


def _show(axes: Axes, cosines: np.ndarray) -> None:
    axes.imshow(cosines, vmin=0.0, vmax=1.0, cmap=COSINE_COLOURS, interpolation="nearest", aspect="equal")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color=FAINT)


def _colour_bar(page: Page, left: float, top: float) -> None:
    axes = page.axes(left, top, 2 * _PANEL + _GAP, 0.1)
    scale = ScalarMappable(Normalize(0.0, 1.0), COSINE_COLOURS)
    bar = page.figure.colorbar(scale, cax=axes, orientation="horizontal", ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, pad=2)
    words = "1: locations cannot be told apart. Under each panel, its mean off the diagonal"
    page.text(left + 2 * (_PANEL + _GAP) + 0.06, top + 0.05, words, fontsize=8.5, color=INK, va="center")

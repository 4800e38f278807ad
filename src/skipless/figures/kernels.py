"""Figures of kernels over depth: a grid of networks, one network with its certificate, Fig. 5 and Fig. 6."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from skipless.figures.style import (
    BLUE,
    COSINE_COLOURS,
    FAINT,
    INK,
    MUTED,
    VERMILION,
    Page,
    block_name,
    log_if_wide,
    mean_and_largest,
    mean_and_range,
    note_at,
    saved,
    show_cosines,
    styled,
    verdict_mark,
)
from skipless.theory.certificate import BlockReport, Certificate, Thresholds, Verdict

# Inches. A panel of 1 inch at 200 dots per inch shows each of 100 locations as 2×2 whole pixels.
_PANEL, _GAP, _CAPTION = 1.0, 0.12, 0.24
_LEFT, _LABELS, _VERDICTS = 0.3, 1.8, 1.6
_TOP, _BOTTOM = 1.25, 0.65
_BAR_WORDS = "cosine between two locations; under each panel, its mean off the diagonal"


@dataclass(frozen=True, eq=False)
class GridRow:
    """One network in a grid: its name, what sets it apart, cosines by block, and the verdict."""

    label: str
    details: Sequence[str]
    cosines: dict[int, np.ndarray]
    verdict: Verdict


@dataclass(frozen=True)
class Heading:
    """Title and subtitle of a figure."""

    title: str
    subtitle: str


@styled
def kernel_grid(rows: Sequence[GridRow], heading: Heading) -> Figure:
    """Fig. 1 and 7: normalised kernels, one row per network and one column per block, on one colour scale."""
    blocks = list(rows[0].cosines)
    across = len(blocks) * (_PANEL + _GAP) - _GAP
    step = _PANEL + _CAPTION
    page = Page(_LEFT + _LABELS + across + _VERDICTS, _TOP + len(rows) * step + _BOTTOM)
    page.heading(_LEFT, heading.title, heading.subtitle)
    start = _LEFT + _LABELS
    _column_heads(page, start, _TOP, blocks)
    for number, row in enumerate(rows):
        top = _TOP + number * step
        page.text(_LEFT, top + 0.34, row.label, fontsize=11.5, fontweight="bold", va="bottom")
        page.text(_LEFT, top + 0.41, "\n".join(row.details), fontsize=8, color=MUTED, va="top", linespacing=1.35)
        _strip(page, row.cosines, start, top)
        _row_verdict(page, row.verdict, start + across + 0.18, top)
    colour_bar(page, (start, _TOP + len(rows) * step + 0.18, 3.4), _BAR_WORDS, _lowest(rows))
    return page.figure


@styled
def network_portrait(row: GridRow, certificate: Certificate, heading: Heading) -> Figure:
    """One network: its normalised kernels by depth above, the certificate's curves below."""
    blocks = list(row.cosines)
    width = 12.2
    panel = min((width - 2 * _LEFT + _GAP) / len(blocks) - _GAP, 1.75)
    below = 1.25 + panel
    page = Page(width, below + 4.0)
    page.heading(_LEFT, heading.title, heading.subtitle, row.verdict)
    _column_heads(page, _LEFT, 1.25, blocks, panel)
    _strip(page, row.cosines, _LEFT, 1.25, panel)
    colour_bar(page, (_LEFT, below + 0.4, 3.4), _BAR_WORDS, _lowest([row]))
    _curves(page, below + 1.3, certificate)
    return page.figure


@styled
def certificate_figure(certificate: Certificate, path: str | Path | None = None) -> Figure:
    """The certificate's curves in a row under its verdict."""
    page, verdict = Page(12.2, 4.1), certificate.verdict
    title = f"The signal through {certificate.reports[-1].block} blocks, in theory"
    page.heading(_LEFT, title, verdict.text, verdict)
    _curves(page, 1.35, certificate)
    return saved(page.figure, path)


@styled
def input_kernels(kernels: Sequence[np.ndarray], captions: Sequence[tuple[str, str]], heading: Heading) -> Figure:
    """Fig. 5: kernels of sequences with more and more repeated tokens, each with a caption of two lines."""
    panel, gap = 2.3, 0.3
    page = Page(2 * _LEFT + len(kernels) * (panel + gap) - gap, 1.05 + panel + 1.35)
    page.heading(_LEFT, heading.title, heading.subtitle)
    for number, (kernel, (name, detail)) in enumerate(zip(kernels, captions, strict=True)):
        left = _LEFT + number * (panel + gap)
        _show(page.axes(left, 1.0, panel, panel), kernel)
        page.text(left, 1.1 + panel, name, fontweight="bold", fontsize=11, va="top")
        page.text(left, 1.33 + panel, detail, color=MUTED, fontsize=9, va="top")
    colour_bar(page, (_LEFT, 1.78 + panel, 3.4), "cosine between two locations: 1 where their tokens agree", 0.0)
    return page.figure


@styled
def diagonal_by_depth(diagonals: dict[str, np.ndarray], heading: Heading) -> Figure:
    """Fig. 6: mean and standard deviation over locations of diag Σ_l by block, for arrays shaped (depth + 1, T)."""
    page = Page(8.6, 4.75)
    page.heading(_LEFT, heading.title, heading.subtitle)
    axes = page.axes(0.85, 1.15, 5.6, 3.0)
    looks = ((VERMILION, (0, (5, 1.6))), (BLUE, "-"))
    for (label, diagonal), (colour, dashes) in zip(diagonals.items(), looks, strict=True):
        mean, spread = diagonal.mean(axis=1), diagonal.std(axis=1)
        block = np.arange(len(mean))
        axes.fill_between(block, mean - spread, mean + spread, color=colour, alpha=0.16, linewidth=0)
        axes.plot(block, mean, color=colour, linestyle=dashes, label=label)
        words = f"{label}\n{mean[-1]:.2f} ± {spread[-1]:.2f}"
        axes.annotate(words, (block[-1], mean[-1]), (10, 0), textcoords="offset points", color=colour, va="center")
    axes.axhline(1.0, color=MUTED, linewidth=0.8, linestyle=":", zorder=0)
    axes.set(xlabel="block", ylabel="squared norm, diag Σ", xlim=(0, len(mean) - 1), ylim=(0, None))
    axes.grid(axis="y")
    return page.figure


def _curves(page: Page, top: float, certificate: Certificate) -> None:
    """Side by side: norms, mean cosine, effective rank, gradient norms; the verdict's block is marked."""
    each = (page.width - _LEFT - 0.25) / 4
    frames = [page.axes(_LEFT + 0.35 + i * each, top, each - 0.6, 2.1) for i in range(4)]
    reports = certificate.reports
    _norms(frames[0], reports)
    _cosine(frames[1], reports)
    _rank(frames[2], reports)
    _gradients(frames[3], reports)
    for axes in frames:
        axes.set(xlabel="block", xlim=(0, reports[-1].block))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.grid(axis="y")
        if certificate.verdict.block is not None:
            colour = verdict_mark(certificate.verdict)[1]
            axes.axvline(certificate.verdict.block, color=colour, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)


def _norms(axes: Axes, reports: Sequence[BlockReport]) -> None:
    """diag Σ_l: mean over locations and the range from smallest to largest."""
    low, mean, high = (_series(reports, f"diagonal_{which}") for which in ("min", "mean", "max"))
    mean_and_range(axes, low, mean, high)
    axes.set_title("squared norm, mean and range")
    log_if_wide(axes, low, high)


def _cosine(axes: Axes, reports: Sequence[BlockReport]) -> None:
    """Mean cosine off the diagonal, and the level that counts as collapse."""
    collapse = Thresholds().collapse_cosine
    axes.axhline(collapse, color=VERMILION, linewidth=1.0)
    note_at(axes, "collapse", collapse, (0, -3), color=VERMILION, fontsize=8, ha="right", va="top")
    axes.plot(_series(reports, "mean_cosine"), color=BLUE)
    axes.set(title="mean cosine", ylim=(min(0.0, float(np.nanmin(_series(reports, "mean_cosine")))), 1.03))


def _rank(axes: Axes, reports: Sequence[BlockReport]) -> None:
    """Effective rank of Σ_l, on a logarithmic axis that ends at 1."""
    axes.plot(_series(reports, "effective_rank"), color=BLUE)
    axes.set(title="effective rank", yscale="log", ylim=(0.9, None))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _gradients(axes: Axes, reports: Sequence[BlockReport]) -> None:
    """Squared gradient norm before each block, relative to the output's: mean and largest over locations."""
    mean, most = _series(reports, "backward_mean"), _series(reports, "backward_max")
    mean_and_largest(axes, mean, most)
    axes.set_title("squared gradient norm")
    axes.legend(frameon=False, fontsize=8, handlelength=1.8)
    log_if_wide(axes, mean, most)


def _series(reports: Sequence[BlockReport], name: str) -> np.ndarray:
    return np.array([getattr(report, name) for report in reports])


def _show(axes: Axes, kernel: np.ndarray) -> None:
    """A matrix without ticks; not a number is drawn hatched."""
    axes.set_facecolor("white")
    if np.isnan(kernel).all():
        axes.patch.set(hatch="///", edgecolor=FAINT)
    show_cosines(axes, kernel)


def _strip(page: Page, cosines: dict[int, np.ndarray], left: float, top: float, panel: float = _PANEL) -> None:
    for column, kernel in enumerate(cosines.values()):
        at = left + column * (panel + _GAP)
        _show(page.axes(at, top, panel, panel), kernel)
        words = f"{_mean_off_diagonal(kernel):.3f}"
        page.text(at + panel / 2, top + panel + 0.04, words, fontsize=7.5, color=MUTED, ha="center", va="top")


def _column_heads(page: Page, left: float, top: float, blocks: Sequence[int], panel: float = _PANEL) -> None:
    for column, block in enumerate(blocks):
        page.text(left + column * (panel + _GAP) + panel / 2, top - 0.08, block_name(block), ha="center", va="bottom")


def _row_verdict(page: Page, verdict: Verdict, left: float, top: float) -> None:
    glyph, colour = verdict_mark(verdict)
    middle = top + _PANEL / 2
    page.text(left, middle, glyph, fontsize=17, color=colour, va="center")
    kind, _, where = verdict.words.partition(" ")
    words = f"{kind}\n{where}" if where else kind
    page.text(left + 0.32, middle, words, fontsize=10, fontweight="bold", color=colour, va="center", linespacing=1.3)


def colour_bar(page: Page, place: tuple[float, float, float], words: str, lowest: float) -> None:
    """The scale of all panels, and beside it what they show. place: left, top and width, in inches."""
    left, top, width = place
    axes = page.axes(left, top, width, 0.12)
    scale = ScalarMappable(Normalize(0.0, 1.0), COSINE_COLOURS)
    extend = "min" if lowest < -0.01 else "neither"
    bar = page.figure.colorbar(scale, cax=axes, orientation="horizontal", extend=extend, ticks=[0, 0.25, 0.5, 0.75, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, pad=2)
    bar.ax.set_xticklabels(["0", "", "0.5", "", "1"])
    page.text(left + width + 0.2, top + 0.06, words, fontsize=8.5, color=INK, va="center")


def _mean_off_diagonal(kernel: np.ndarray) -> float:
    length = len(kernel)
    if length == 1:
        return float("nan")
    return float((kernel.sum() - np.trace(kernel)) / (length * (length - 1)))


def _lowest(rows: Sequence[GridRow]) -> float:
    return min((float(np.min(kernel)) for row in rows for kernel in row.cosines.values()), default=0.0)

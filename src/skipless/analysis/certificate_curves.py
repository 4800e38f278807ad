"""The certificate as four curves over depth: norms, cosines, rank, gradients."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from skipless.analysis.figure_style import BLUE, MUTED, VERMILION, verdict_mark
from skipless.theory.certificate import Band, BlockReport, Certificate


def draw_curves(frames: Sequence[Axes], certificate: Certificate) -> None:
    """Into four axes: norms, mean cosine, effective rank, gradient norms; the verdict's block is marked."""
    reports = certificate.reports
    draw_norms(frames[0], reports)
    draw_cosine(frames[1], reports)
    draw_rank(frames[2], reports)
    draw_gradients(frames[3], reports)
    for axes in frames:
        axes.set(xlabel="block", xlim=(0, reports[-1].block))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.grid(axis="y")
        if certificate.verdict.block is not None:
            colour = verdict_mark(certificate.verdict)[1]
            axes.axvline(certificate.verdict.block, color=colour, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)


def draw_norms(axes: Axes, reports: Sequence[BlockReport]) -> None:
    """diag Σ_l: mean over locations and the range from smallest to largest."""
    low, mean, high = (_series(reports, f"diagonal_{which}") for which in ("min", "mean", "max"))
    block = np.arange(len(reports))
    axes.fill_between(block, low, high, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(block, mean, color=BLUE)
    axes.set_title("squared norm, mean and range")
    _log_if_wide(axes, low, high)


def draw_cosine(axes: Axes, reports: Sequence[BlockReport]) -> None:
    """Mean cosine off the diagonal, and the level that counts as collapse."""
    axes.axhline(Band().collapse_cosine, color=VERMILION, linewidth=1.0)
    axes.annotate(
        "collapse",
        (1, Band().collapse_cosine),
        (0, -3),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        color=VERMILION,
        fontsize=8,
        ha="right",
        va="top",
    )
    axes.plot(_series(reports, "mean_cosine"), color=BLUE)
    axes.set(title="mean cosine", ylim=(min(0.0, float(np.nanmin(_series(reports, "mean_cosine")))), 1.03))


def draw_rank(axes: Axes, reports: Sequence[BlockReport]) -> None:
    """Effective rank of Σ_l, on a logarithmic axis that ends at 1."""
    axes.plot(_series(reports, "effective_rank"), color=BLUE)
    axes.set(title="effective rank", yscale="log", ylim=(0.9, None))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def draw_gradients(axes: Axes, reports: Sequence[BlockReport]) -> None:
    """Squared gradient norm before each block, relative to the output's: mean and largest over locations."""
    mean, most = _series(reports, "backward_mean"), _series(reports, "backward_max")
    block = np.arange(len(reports))
    axes.plot(block, most, color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)), label="largest")
    axes.plot(block, mean, color=BLUE, label="mean")
    axes.set_title("squared gradient norm")
    axes.legend(frameon=False, fontsize=8, handlelength=1.8)
    _log_if_wide(axes, mean, most)


def _series(reports: Sequence[BlockReport], name: str) -> np.ndarray:
    return np.array([getattr(report, name) for report in reports])


def _log_if_wide(axes: Axes, low: np.ndarray, high: np.ndarray) -> None:
    """A linear axis from 0, unless the values span more than a factor of 20."""
    shown = np.concatenate([low, high])
    shown = shown[np.isfinite(shown) & (shown > 0)]
    if len(shown) and shown.max() / shown.min() > 20:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, None)

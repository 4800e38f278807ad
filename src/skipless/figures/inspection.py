"""One picture of an inspection: kernels by depth, and every metric by block with theory's prediction where there is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from skipless.figures.style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    VERMILION,
    Page,
    block_name,
    log_if_wide,
    mean_and_largest,
    mean_and_range,
    saved,
    show_cosines,
    styled,
    verdict_mark,
)
from skipless.inspection.inspection import Inspection
from skipless.theory.certificate import Thresholds

_WIDTH, _LEFT, _PANELS = 12.2, 0.35, 9
_GROUPS = {
    "query": (BLUE, "-"),
    "key": (GREEN, (0, (4, 2))),
    "output": (VERMILION, "-"),
    "value": (ORANGE, (0, (4, 2))),
    "mlp": (MUTED, "-"),
}


@styled
def inspection_figure(found: Inspection, path: str | Path | None = None) -> Figure:
    """Kernels of one sequence above where they were kept; below, eight panels by block; the verdict's block marked."""
    words = _wrapped(found)
    top = 0.95 + 0.19 * len(words)
    strip = 1.45 if found.kernels is not None else 0.0
    page = Page(_WIDTH, top + strip + 5.6)
    page.heading(_LEFT, found.model, "\n".join(words), found.verdict)
    if found.kernels is not None:
        _kernels(page, found, top)
    panels = (_norms, _cosine, _ranks, _gradients, _attention, _parameters, _outliers, _locations)
    each = (_WIDTH - _LEFT - 0.2) / 4
    for number, draw in enumerate(panels):
        row, column = divmod(number, 4)
        axes = page.axes(_LEFT + 0.35 + column * each, top + strip + 0.45 + row * 2.6, each - 0.62, 1.85)
        draw(axes, found)
        axes.set(xlabel="block", xlim=(0, found.blocks[-1].block))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        if found.verdict.block is not None:
            colour = verdict_mark(found.verdict)[1]
            axes.axvline(found.verdict.block, color=colour, linewidth=1.0, linestyle=(0, (2, 2)), zorder=3)
    return saved(page.figure, path)


def _wrapped(found: Inspection, most: int = 150) -> list[str]:
    """The verdict and the advice in lines of at most `most` letters."""
    lines = [""]
    for word in f"{found.verdict.text} {found.advice}".split():
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if len(lines[-1]) + len(word) < most else [*lines, word]
    return lines


def _kernels(page: Page, found: Inspection, top: float) -> None:
    assert found.kernels is not None
    last = len(found.kernels) - 1
    chosen = np.unique(np.linspace(0, last, min(_PANELS, last + 1)).round().astype(int))
    panel = (_WIDTH - 2 * _LEFT + 0.12) / _PANELS - 0.12
    for column, block in enumerate(chosen):
        left = _LEFT + column * (panel + 0.12)
        show_cosines(page.axes(left, top, panel, panel), found.kernels[block])
        cosine = f"{found.blocks[block].cosine_mean:z.2f}".replace("nan", "–")
        page.text(left + panel / 2, top - 0.06, f"{block_name(block)}   {cosine}", fontsize=8, ha="center", va="bottom")


def _norms(axes: Axes, found: Inspection) -> None:
    low, mean, high = (_series(found, f"norm_{which}") for which in ("min", "mean", "max"))
    mean_and_range(axes, low, mean, high)
    _predicted(axes, found, "norm")
    _finish(axes, "squared norm, mean and range", low, high)


def _cosine(axes: Axes, found: Inspection) -> None:
    spread = np.array([each.cosine_quantiles for each in found.blocks])
    block = np.arange(len(spread))
    axes.fill_between(block, spread[:, 0], spread[:, -1], color=BLUE, alpha=0.14, linewidth=0)
    axes.fill_between(block, spread[:, 1], spread[:, 3], color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(_series(found, "cosine_mean"), color=BLUE)
    axes.axhline(Thresholds().collapse_cosine, color=VERMILION, linewidth=1.0)
    _predicted(axes, found, "cosine")
    lowest = np.nanmin(np.append(spread[:, 0], 0.0))
    axes.set(title="cosine: mean, 25–75 %, 5–95 %", ylim=(float(lowest), 1.03))
    axes.grid(axis="y")


def _ranks(axes: Axes, found: Inspection) -> None:
    axes.plot(_series(found, "effective_rank"), color=BLUE, label="effective")
    axes.plot(_series(found, "stable_rank"), color=ORANGE, linestyle=(0, (4, 2)), label="stable")
    axes.set(title="rank", yscale="log", ylim=(0.9, None))
    axes.yaxis.set_major_formatter("{x:g}")
    _legend(axes)


def _gradients(axes: Axes, found: Inspection) -> None:
    mean, most = _series(found, "gradient_mean"), _series(found, "gradient_max")
    mean_and_largest(axes, mean, most)
    _predicted(axes, found, "gradient")
    _finish(axes, "squared gradient norm", mean, most)
    _legend(axes)


def _attention(axes: Axes, found: Inspection) -> None:
    spread, first = _series(found, "attention_spread"), _series(found, "attention_first")
    axes.set(title="attention", ylim=(0, 1.03))
    if np.isnan(spread).all():
        axes.text(0.5, 0.5, "weights not seen", transform=axes.transAxes, ha="center", color=MUTED)
        return
    axes.plot(spread, color=BLUE, label="entropy / uniform's")
    axes.plot(first, color=ORANGE, linestyle=(0, (4, 2)), label="on the first location")
    _legend(axes)


def _parameters(axes: Axes, found: Inspection) -> None:
    shown = []
    for group, (colour, dashes) in _GROUPS.items():
        values = np.array([each.parameter_gradients.get(group, np.nan) for each in found.blocks])
        values[values <= 0] = np.nan
        if not np.isnan(values).all():
            axes.plot(values, color=colour, linestyle=dashes, label=group, linewidth=1.4)
            shown.append(values)
    _finish(axes, "gradient norm by parameter", *shown)
    if shown:
        _legend(axes, columns=2)


def _outliers(axes: Axes, found: Inspection) -> None:
    kurtosis, outlier = _series(found, "kurtosis"), _series(found, "outlier")
    axes.axhline(3.0, color=MUTED, linewidth=0.8, linestyle=":")
    axes.plot(kurtosis, color=BLUE, label="kurtosis")
    axes.plot(outlier, color=ORANGE, linestyle=(0, (4, 2)), label="largest entry / rms")
    _finish(axes, "outliers", kurtosis, outlier)
    _legend(axes)


def _locations(axes: Axes, found: Inspection) -> None:
    """Squared norm by block and location."""
    norms = found.locations.get("norm")
    axes.set_title("squared norm by location")
    if norms is None:
        return
    real = norms[np.isfinite(norms) & (norms > 0)]
    if not real.size:
        return
    low, high = float(real.min()), float(real.max())
    scale = LogNorm(low, high * 1.0001)
    picture = axes.imshow(norms.T, aspect="auto", origin="upper", cmap="magma", norm=scale, interpolation="nearest")
    axes.set_ylabel("location", labelpad=1)
    bar = axes.figure.colorbar(picture, ax=axes, fraction=0.06, pad=0.03)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.ax.yaxis.set_minor_formatter(NullFormatter())


def _predicted(axes: Axes, found: Inspection, name: str) -> None:
    values = np.array([(each.predicted or {}).get(name, np.nan) for each in found.blocks])
    if not np.isnan(values).all():
        axes.plot(values, color="black", linewidth=1.1, linestyle=":", label="theory")
        if name == "norm":
            _legend(axes)


def _series(found: Inspection, name: str) -> np.ndarray:
    values: Sequence[float | None] = [getattr(each, name) for each in found.blocks]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _finish(axes: Axes, title: str, *shown: np.ndarray) -> None:
    axes.set_title(title)
    axes.grid(axis="y")
    log_if_wide(axes, *shown)


def _legend(axes: Axes, columns: int = 1) -> None:
    axes.legend(frameon=False, fontsize=7.5, handlelength=1.8, ncols=columns)

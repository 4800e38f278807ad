"""The look of every figure: type, colours that survive colour blindness and grey, and placement in inches."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from skipless.console import FIGURE_SUFFIXES
from skipless.files import PICTURE_MARK, write_whole
from skipless.theory.certificate import Verdict

INK, MUTED, FAINT = "#1b1f24", "#5f6871", "#d5d9de"
BLUE, ORANGE, VERMILION, GREEN = "#0072b2", "#e69f00", "#d55e00", "#009e73"  # Okabe & Ito 2008

# Perceptually uniform, and bright at 1, where the eye parts a collapsed kernel (flat) from a merely smooth one.
COSINE_COLOURS = "viridis"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same picture
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.9,
    "svg.hashsalt": "skipless",
    "pdf.fonttype": 42,
}

_TITLE_SIZE = 15  # points

# Each kind has its own shape as well as its own colour.
_MARKS = {
    "preserved": ("✔", BLUE),
    "drift": ("≈", ORANGE),
    "collapse": ("✖", VERMILION),
    "explosion": ("▲", VERMILION),
    "vanishing": ("▼", VERMILION),
    "leak": ("⇄", VERMILION),
    "fault": ("◆", VERMILION),
}


def verdict_mark(verdict: Verdict) -> tuple[str, str]:
    """Glyph and colour of a verdict."""
    return _MARKS[verdict.kind]


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw under STYLE, leaving matplotlib's global settings as they were."""

    @wraps(draw)
    def wrapper(*args, **kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return wrapper


@dataclass
class Page:
    """A figure on which everything is placed in inches from the top left corner."""

    width: float
    height: float
    figure: Figure = field(init=False)

    def __post_init__(self):
        self.figure = Figure(figsize=(self.width, self.height), facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes whose frame has this top left corner and size."""
        bottom = self.height - top - height
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def text(self, left: float, top: float, words: str, **style) -> None:
        """Words at a point; γ_L and ρ_L are set as mathematics."""
        words = words.replace("γ_L", r"$\gamma_L$").replace("ρ_L", r"$\rho_L$")
        self.figure.text(left / self.width, 1 - top / self.height, words, **style)

    def heading(self, left: float, title: str, subtitle: str, verdict: Verdict | None = None) -> None:
        """Title and subtitle at the top; a verdict on the right. A title wider than the page is set smaller."""
        bold = FontProperties(family=STYLE["font.family"], weight="bold")
        inches = TextPath((0, 0), title, size=_TITLE_SIZE, prop=bold).get_extents().width / 72
        room = 0.95 * (self.width - 2 * left)  # small letters on a screen are up to a twentieth wider
        size = _TITLE_SIZE * min(1.0, room / max(inches, 1e-9))
        self.text(left, 0.22, title, fontsize=size, fontweight="bold", va="top")
        self.text(left, 0.56, subtitle, fontsize=9.5, color=MUTED, va="top", linespacing=1.4)
        if verdict is not None:
            glyph, colour = verdict_mark(verdict)
            look = {"fontsize": 13, "fontweight": "bold", "color": colour, "ha": "right", "va": "top"}
            self.text(self.width - left, 0.22, f"{glyph} {verdict.words}", **look)


def block_name(block: int) -> str:
    """What stands above the panel of a block: 0 is the input."""
    return "input" if block == 0 else f"block {block}"


def show_cosines(axes: Axes, cosines: np.ndarray) -> None:
    """A panel of cosines between locations."""
    axes.imshow(cosines, vmin=0.0, vmax=1.0, cmap=COSINE_COLOURS, interpolation="nearest", aspect="equal")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color=FAINT)


def note_at(axes: Axes, words: str, height: float, offset: tuple[float, float], **look: Any) -> None:
    """Words at the right end of the axes, so many points from a height of the data."""
    where: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    axes.annotate(words, (1, height), offset, **where, **look)


def mean_and_range(axes: Axes, low: np.ndarray, mean: np.ndarray, high: np.ndarray) -> None:
    """A curve by block, and around it from the smallest to the largest."""
    axes.fill_between(np.arange(len(mean)), low, high, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(mean, color=BLUE)


def mean_and_largest(axes: Axes, mean: np.ndarray, largest: np.ndarray) -> None:
    """Two curves by block."""
    axes.plot(largest, color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)), label="largest")
    axes.plot(mean, color=BLUE, label="mean")


def log_if_wide(axes: Axes, *shown: np.ndarray) -> None:
    """A linear axis from 0, unless the values span more than a factor of 20."""
    values = np.concatenate(shown) if shown else np.array([])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) and values.max() / values.min() > 20:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, None)


def saved(figure: Figure, path: str | Path | None) -> Figure:
    """The figure, written to `path` where one is given: .png, .pdf or .svg by its name."""
    if path is None:
        return figure
    path = Path(path)
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise ValueError(f"the figure's path is {path}; the name must end in {', '.join(FIGURE_SUFFIXES)}")
    write_whole(path, render(figure, path.suffix.lower()))
    return figure


def render(figure: Figure, suffix: str, dpi: int = 200) -> bytes:
    """The figure as a file's content: ".png", ".pdf" or ".svg". No date is put in, so equal figures are equal bytes."""
    maker = PICTURE_MARK.decode()
    undated = {".png": {}, ".pdf": {"CreationDate": None, "Creator": maker}, ".svg": {"Date": None, "Creator": maker}}
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=suffix[1:], dpi=dpi, metadata=undated[suffix])
    return _with_palette(buffer) if suffix == ".png" else buffer.getvalue()


def _with_palette(png: io.BytesIO) -> bytes:
    """A third of the size with 256 colours: the colour map has no more, and grey edges of letters find theirs."""
    small = io.BytesIO()
    with Image.open(png) as image:
        reduced = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        maker = PngInfo()
        maker.add_text("Software", PICTURE_MARK.decode())
        reduced.save(small, format="png", optimize=True, dpi=image.info["dpi"], pnginfo=maker)
    return small.getvalue()

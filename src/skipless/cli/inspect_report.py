"""What `skipless inspect` prints: a table of blocks, and a heat strip per quantity by depth."""

import math
from collections.abc import Sequence

from rich.text import Text

from skipless.analysis.inspection import BlockSignal, Inspection

_MOST_ROWS = 16
_BARS = "▁▂▃▄▅▆▇█"
_HEAT = ("#2c7bb6", "#00a6ca", "#00ccbc", "#90eb9d", "#f9d057", "#f29e2e", "#e76818", "#d7191c")


def table(found: Inspection) -> tuple[list[str], list[list[str]]]:
    """Head and rows: all blocks of a shallow network; else the ends, an even choice, and those around the verdict's."""
    ours, rounded = found.blocks[0].predicted is not None, found.blocks[-1].rounding is not None
    head = ["block", "norm²", "cosine", "eff. rank", "gradient²", "entropy", "on first", "qk grad", "kurtosis"]
    head += ["rounding"] if rounded else []
    head += ["theory: norm²", "cosine"] if ours else []
    return head, [_row(found.blocks[block], ours, rounded) for block in chosen(found)]


def chosen(found: Inspection) -> list[int]:
    """Which blocks the table shows."""
    last = found.blocks[-1].block
    if last < _MOST_ROWS:
        return list(range(last + 1))
    even = {round(step * last / (_MOST_ROWS - 5)) for step in range(_MOST_ROWS - 4)}
    at = found.verdict.block
    near = set() if at is None else {block for block in (at - 1, at, at + 1) if 0 <= block <= last}
    return sorted(even | near)


def strips(found: Inspection) -> list[Text]:
    """One line per quantity, a cell per block: taller and redder is nearer to trouble."""
    blocks = found.blocks
    cosine = [each.cosine_mean for each in blocks]
    norm = [_decades(each.norm_mean, blocks[0].norm_mean) for each in blocks]
    gradient = [_decades(each.gradient_mean, 1.0) for each in blocks]
    lines = [_strip("cosine", cosine, 1.0), _strip("norm", norm, 3.0), _strip("gradient", gradient, 6.0)]
    if blocks[-1].rounding is not None:
        lines.append(_strip("rounding", [each.rounding or 0.0 for each in blocks], 1.0))
    legend = Text("0 … depth; cosine to 1, norm² and gradient² in decades from the input's (3) and the output's (6)")
    legend.stylize("dim")
    return [*lines, legend]


def _row(each: BlockSignal, ours: bool, rounded: bool) -> list[str]:
    numbers = [each.norm_mean, each.cosine_mean, each.effective_rank, each.gradient_mean]
    more = [each.attention_entropy, each.attention_first, each.query_key_gradient, each.kurtosis]
    cells = [str(each.block), *map(_short, [*numbers, *more, *([each.rounding] if rounded else [])])]
    predicted = each.predicted or {}
    return cells + ([_short(predicted.get("norm")), _short(predicted.get("cosine"))] if ours else [])


def _short(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.4f}" if 0.1 <= abs(value) < 1 else f"{value:.3g}"


def _decades(value: float | None, unit: float) -> float:
    """How many powers of ten from the unit; NaN where that means nothing."""
    if value is None or not math.isfinite(value) or value <= 0 or unit <= 0:
        return math.nan
    return abs(math.log10(value / unit))


def _strip(name: str, values: Sequence[float], worst: float) -> Text:
    line = Text(f"{name:<9}")
    for value in values:
        if math.isnan(value):
            line.append("×", style="dim")
            continue
        level = min(int(max(value, 0.0) / worst * len(_BARS)), len(_BARS) - 1)
        line.append(_BARS[level], style=_HEAT[level])
    return line

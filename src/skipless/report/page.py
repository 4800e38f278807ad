"""One HTML file for any set of networks and runs: verdicts, kernels by depth, curves, tables. It asks for nothing else.

What is text stands in the file itself; charts and kernels are drawn by its script from data beside it. Its policy
allows that one script and no request, so that a page can be mailed, archived and opened offline.
"""

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import count
from string import Template
from typing import Any

import numpy as np

from skipless.inspection.inspection import BlockSignal, Inspection

_MARKS = {
    "preserved": "✔",
    "drift": "≈",
    "collapse": "✖",
    "explosion": "▲",
    "vanishing": "▼",
    "leak": "⇄",
    "fault": "✖",
}
_PLAIN = {
    "preserved": "healthy: the signal survives",
    "drift": "survives, but norms drift",
    "collapse": "collapse: locations are no longer told apart",
    "explosion": "explosion: numbers leave their range",
    "vanishing": "vanishing: a signal, a gradient or a weight is gone",
    "leak": "leak: a location sees what it must not",
    "fault": "fault: something in a block is not as it should be",
}
_HEADS: tuple[tuple[str, str, str], ...] = (
    ("norm² min", "norm_min", "smallest squared norm of a location over the width"),
    ("mean", "norm_mean", "mean squared norm"),
    ("max", "norm_max", "largest squared norm"),
    ("cosine", "cosine_mean", "mean cosine between two locations: 1 is collapse"),
    ("effective rank", "effective_rank", "directions in which locations differ: 1 is collapse"),
    ("stable rank", "stable_rank", "directions as strong as the strongest"),
    ("rank-one residual", "collapse", "distance from all locations being equal: 0 is collapse"),
    ("gradient²", "gradient_mean", "squared gradient norm, relative to the output's"),
    ("kurtosis", "kurtosis", "of the activations' entries: 3 for a Gaussian"),
    ("outlier", "outlier", "largest entry over the root mean square"),
    ("attention spread", "attention_spread", "entropy of attention over that of equal weights: 1 looks at all alike"),
    ("on first", "attention_first", "attention paid to the first location"),
    ("carry", "carry", "cosine between a location before and after the block: near 0 without a skip"),
)
_TALLIES = (("pass", "hold"), ("fail", "fail"), ("not run", "await their runs"))
_RUN_HEADS = ("run", "steps", "training loss (smoothed)", "validation loss", "perplexity", "accuracy")
_FAILED = ' class="lost"'


@dataclass(frozen=True)
class ResultTable:
    """A table of a reproduction: what it is of, its columns, its cells as text. claims: of claim, verdict, numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    claims: bool = False

    def __post_init__(self):
        for row in (self.head, *self.rows):
            if len(row) != len(self.head) or not all(isinstance(cell, str) for cell in row):
                raise ValueError(f"{self.title}: {list(row)!r} is no row of {len(self.head)} texts")
            if self.claims and row is not self.head and row[1] not in dict(_TALLIES):
                raise ValueError(f"{self.title}: the verdict {row[1]!r} is none of {', '.join(dict(_TALLIES))}")


def render(
    inspections: Sequence[Inspection],
    curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    title: str = "",
    results: Sequence[ResultTable] = (),
    classes: Sequence[ResultTable] = (),
) -> str:
    """The page as text. curves: by run, the records of metrics.jsonl (step, loss, ema, valid_loss, gradient).

    classes: accuracies on the classes of images. ValueError if there is nothing to show.
    """
    curves = curves or {}
    if not inspections and not curves and not results and not classes:
        raise ValueError("there is nothing to show: give at least one inspection or the records of one run")
    name = title or ("Paper and measurement" if results else _default_title(inspections, curves))
    page = files("skipless.report") / "template"
    script = "\n".join((page / name).read_text("utf-8") for name in ("charts.js", "kernels.js", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template((page / "page.html").read_text("utf-8")).substitute(
        title=escape(name),
        heading=_breakable(name),
        digest=digest,
        style=(page / "page.css").read_text("utf-8"),
        headline=escape(_tally(results) if results and not inspections else _headline(inspections, curves)),
        cards="\n".join(_card(*each) for each in zip(count(), inspections, _names(inspections), strict=False)),
        networks="" if inspections else "hidden",
        kernels="" if any(inspection.kernels is not None for inspection in inspections) else "hidden",
        curves="" if curves else "hidden",
        runs=_run_table(curves) if curves else "",
        classes="" if classes else "hidden",
        class_tables="\n".join(_result_table(table) for table in classes),
        results="" if results else "hidden",
        result_tables="\n".join(_result_table(table) for table in results),
        tables="\n".join(_table(inspection, opened=inspection in _opened(inspections)) for inspection in inspections),
        data=page_data(inspections, curves),
        script=script,
    )


def _tally(results: Sequence[ResultTable]) -> str:
    """How many of the claims stated before the runs hold."""
    marks = Counter(row[1] for table in results if table.claims for row in table.rows)
    said = [f"{marks[mark]} {words}" for mark, words in _TALLIES if marks[mark]]
    claims = f" Of {sum(marks.values())} claims stated before the runs {', '.join(said)}." if said else ""
    return f"What the paper prints, beside what was measured.{claims}"


def _default_title(inspections: Sequence[Inspection], curves: Mapping[str, Any]) -> str:
    names = [inspection.model for inspection in inspections] or list(curves)
    run = next(iter(curves)) if len(curves) == 1 else ""
    if len(names) == 1 or (run and all(name.startswith(run) for name in names)):
        return run or names[0]
    if _stacks(inspections):
        return inspections[0].model.partition(", ")[0]
    return f"{len(inspections)} networks" if inspections else f"{len(curves)} runs" if curves else "Classes of images"


def _headline(inspections: Sequence[Inspection], curves: Mapping[str, Any]) -> str:
    """The verdict over all, in one sentence."""
    if not inspections and not curves:
        return "How many images of each class a network names right, and what it takes the others for."
    if not inspections:
        return f"Training curves of {len(curves)} run{'s' * (len(curves) > 1)}."
    lost = [inspection for inspection in inspections if inspection.verdict.lost]
    if len(inspections) == 1 or (lost and _stacks(inspections)):
        inspection = inspections[0]  # of several stacks, the one at fault
        stack = f" of {inspection.model.partition(', ')[2]}" if len(inspections) > 1 else ""
        verdict = inspection.verdict
        if inspection.at_fault:
            return re.split(r"[:.] |\.$", verdict.text, maxsplit=1)[0] + "."
        where = "" if verdict.block is None else f" ({verdict.words}{stack})"
        doubts = (
            "" if lost or not inspection.doubts else f", but read the note{'s' * (len(inspection.doubts) > 1)} below"
        )
        return f"The signal {'is lost' if lost else 'reaches the end'}{where}{doubts}."
    each = "stacks of blocks" if _stacks(inspections) else "networks"
    if not lost:
        return f"The signal reaches the end of {'both' if len(inspections) == 2 else 'all'} {each}."
    return f"The signal is lost in {len(lost)} of {len(inspections)} {each}."


def _stacks(inspections: Sequence[Inspection]) -> bool:
    """Whether these are the stacks of one network."""
    first = inspections[0] if inspections else None
    return first is not None and len(inspections) == len(first.others) + 1 > 1


def _names(inspections: Sequence[Inspection]) -> list[str]:
    """What networks are called beside each other: stacks of one network by their own names."""
    names = [inspection.model for inspection in inspections]
    return [name.partition(", ")[2] or name for name in names] if _stacks(inspections) else names


def _breakable(name: str) -> str:
    """A text in HTML whose names may be broken between their words, and no number."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\w[./_])(?=[A-Za-z_])|(?<=[A-Za-z][./_])(?=\d)", "<wbr>", escape(name))


def _card(index: int, inspection: Inspection, name: str) -> str:
    """A verdict in plain words, and the box that shows or hides the network below."""
    verdict = inspection.verdict
    advice = (
        f'<p class="advice"><b>What to change:</b> {_breakable(inspection.advice)}</p>' if inspection.advice else ""
    )
    doubts = 0 if verdict.lost else len(inspection.doubts)
    doubted = f"; {doubts} thing{'s' * (doubts > 1)} to look at" * (doubts > 0)
    advice += "".join(f'<p class="advice"><b>Note:</b> {_breakable(note)}</p>' for note in inspection.notes)
    return (
        f'<article class="card {escape(verdict.kind)}"><h3><span class="mark" aria-hidden="true">'
        f"{_MARKS[verdict.kind]}</span> {_breakable(name)}</h3>"
        f'<p class="kind">{escape(_PLAIN[verdict.kind])}{doubted}</p><p>{_breakable(verdict.text)}</p>{advice}'
        f'<label class="toggle"><input type="checkbox" data-network="{index}"> '
        f'<svg class="key" data-key="{index}" width="28" height="10" aria-hidden="true"></svg> show below'
        "</label></article>"
    )


def _opened(inspections: Sequence[Inspection]) -> Sequence[Inspection]:
    """Whose numbers are open: the only network's, or those of the stack at fault."""
    alone = len(inspections) == 1 or (_stacks(inspections) and inspections[0].verdict.lost)
    return inspections[:1] if alone else ()


def _table(inspection: Inspection, opened: bool) -> str:
    """Numbers of every block; columns nobody measured are left out."""
    blocks, at = inspection.blocks, inspection.verdict.block if inspection.verdict.lost else None
    heads = [head for head in _HEADS if any(_present(getattr(block, head[1])) for block in blocks)]
    cells = "".join(f'<th scope="col" title="{escape(note)}">{escape(name)}</th>' for name, _, note in heads)
    rows = "\n".join(_row(block, [field for _, field, _ in heads], at) for block in blocks)
    return (
        f"<details{' open' * opened}><summary>{escape(inspection.model)}: {len(blocks) - 1} blocks</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Numbers of {escape(inspection.model)}"><table>'
        f'<thead><tr><th scope="col">after</th>{cells}</tr></thead><tbody>\n{rows}</tbody></table></div></details>'
    )


def _row(block: BlockSignal, fields: Sequence[str], lost_at: int | None) -> str:
    marked = block.block == lost_at
    cells = "".join(f"<td>{_short(getattr(block, field))}</td>" for field in fields)
    name = f"{'✖ ' * marked}{escape(_block_name(block))}"
    return f'<tr{_FAILED * marked}><th scope="row">{name}</th>{cells}</tr>'


def _block_name(block: BlockSignal) -> str:
    """The block's number, and the module's name where it is another."""
    number = "input" if block.block == 0 else f"block {block.block}"
    return number if block.name in ("", number) else f"{number} ({block.name})"


def _run_table(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Where each run ended. Perplexity is of text and accuracy of images: the one that no run has is left out."""
    images = {name for name, records in curves.items() if _last(records, "valid_accuracy") is not None}
    left_out = {"perplexity": images == curves.keys(), "accuracy": not images}
    kept = [index for index, name in enumerate(_RUN_HEADS) if not left_out.get(name)]
    heads = "".join(f'<th scope="col">{_RUN_HEADS[index]}</th>' for index in kept)
    rows = []
    for name, records in curves.items():
        steps = max((record["step"] for record in records if "step" in record), default=None)
        valid, accuracy = _last(records, "valid_loss"), _last(records, "valid_accuracy")
        perplexity = _last(records, "valid_perplexity")
        if perplexity is None and valid is not None and accuracy is None:
            perplexity = math.exp(min(valid, 700.0))
        shown = "–" if steps is None else f"{steps:,}".replace(",", "\N{THIN SPACE}")
        share = "–" if accuracy is None else f"{accuracy:.1%}"
        cells = [escape(name), shown, *map(_short, (_last(records, "ema", "loss"), valid, perplexity)), share]
        numbers = "".join(f"<td>{cells[index]}</td>" for index in kept[1:])
        rows.append(f'<tr><th scope="row">{cells[0]}</th>{numbers}</tr>')
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _result_table(table: ResultTable) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.head)
    rows = "".join(
        f'<tr{_FAILED * (table.claims and rest[0] == "fail")}><th scope="row">{escape(first)}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in table.rows
    )
    return (
        f"<details open><summary>{escape(table.title)}</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _last(records: Sequence[Mapping[str, Any]], *names: str) -> float | None:
    """The newest value of the first name that was ever logged."""
    for name in names:
        values = [record[name] for record in records if isinstance(record.get(name), int | float)]
        if values:
            return values[-1]
    return None


def _present(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _short(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


# A kernel of 128 locations is 8 kB; 36 blocks of them keep a page of one network below 500 kB in base64.
KERNEL_BYTES = 310_000
_WHOLE_NETWORKS = 4  # more networks share what these may take
_CURVE_POINTS = 400
_LEVELS = 254  # cosines −1 … 1 as 0 … 254; 255 is not a number
_COLUMNS = ("norm_min", "norm_mean", "norm_max", "cosine_mean", "effective_rank", "gradient_mean", "gradient_max")
_OPTIONAL = ("attention_spread", "carry", "outlier")
_CURVES = ("loss", "ema", "valid_loss", "valid_accuracy", "gradient")


def page_data(inspections: Sequence[Inspection], curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """JSON that can stand inside a script element: no <, >, & and no line separators."""
    budget = KERNEL_BYTES * min(len(inspections), _WHOLE_NETWORKS) // max(len(inspections), 1)
    names = _names(inspections)
    data = {
        "networks": [_network(*each, budget) for each in zip(inspections, names, strict=True)],
        "curves": [{"name": name, **_curve(records)} for name, records in curves.items()],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and U+2029 are escaped
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _network(inspection: Inspection, name: str, budget: int) -> dict[str, Any]:
    blocks = inspection.blocks
    columns = {name: _column([getattr(block, name) for block in blocks]) for name in (*_COLUMNS, *_OPTIONAL)}
    columns |= {"cosine_low": _quantile(blocks, 0), "cosine_high": _quantile(blocks, -1)}
    for key in ("norm", "cosine", "gradient"):
        columns[f"{key}_predicted"] = _column([(block.predicted or {}).get(key) for block in blocks])
    return {
        "name": name,
        "lost": inspection.verdict.block if inspection.verdict.lost else None,
        "blocks": [block.block for block in blocks],
        "columns": {name: values for name, values in columns.items() if any(v is not None for v in values)},
        "kernels": _kernels(inspection, budget),
    }


def _column(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or not math.isfinite(value) else float(f"{value:.4g}") for value in values]


def _quantile(blocks: Sequence[BlockSignal], index: int) -> list[float | None]:
    return _column([block.cosine_quantiles[index] if block.cosine_quantiles else None for block in blocks])


def _kernels(inspection: Inspection, budget: int) -> dict[str, Any] | None:
    """The upper triangle of each kernel kept, row by row, a byte an entry. Too much: every n-th location is shown."""
    if inspection.kernels is None:
        return None
    kept = [index for index, kernel in enumerate(inspection.kernels) if not np.isnan(kernel).all()]
    if not kept:
        return None
    stack = np.asarray(inspection.kernels, dtype=np.float64)[kept]
    stride = next(n for n in range(1, 1_000_000) if _triangle_size(-(-stack.shape[1] // n)) * len(kept) <= budget)
    stack = stack[:, ::stride, ::stride]
    side = stack.shape[1]
    level = np.round((np.clip(stack, -1.0, 1.0) + 1.0) * (_LEVELS / 2))
    level = np.where(np.isnan(level), _LEVELS + 1, level).astype(np.uint8)
    rows, columns = np.triu_indices(side)
    return {
        "side": side,
        "stride": stride,
        "blocks": [inspection.blocks[index].block for index in kept],
        "bytes": base64.b64encode(level[:, rows, columns].tobytes()).decode(),
    }


def _triangle_size(side: int) -> int:
    return side * (side + 1) // 2 if side > 1 else 0


def _curve(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each quantity as [steps, values]; a long one as means over equal stretches, its last value exact."""
    curve = {}
    for name in _CURVES:
        points = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float) and "step" in r]
        if points:
            steps, values = _thinned(np.array(points, dtype=np.float64))
            curve[name] = [np.round(steps).astype(int).tolist(), _column(values.tolist())]
    return curve


def _thinned(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(points) <= _CURVE_POINTS:
        return points[:, 0], points[:, 1]
    parts = np.array_split(points, _CURVE_POINTS)
    means = np.array([part.mean(axis=0) for part in parts])
    return np.append(means[:, 0], points[-1, 0]), np.append(means[:, 1], points[-1, 1])

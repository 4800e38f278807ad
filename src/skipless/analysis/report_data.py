"""What the page's script reads: numbers by block as plain columns, kernels as bytes, curves thinned to what shows."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skipless.analysis.inspection import BlockSignal, Inspection

# A kernel of 128 locations is 8 kB; 36 blocks of them keep a page of one network below 500 kB in base64.
KERNEL_BYTES = 310_000
_WHOLE_NETWORKS = 4  # more networks share what these may take
_CURVE_POINTS = 400
_LEVELS = 254  # cosines −1 … 1 as 0 … 254; 255 is not a number
_COLUMNS = ("norm_min", "norm_mean", "norm_max", "cosine_mean", "effective_rank", "gradient_mean", "gradient_max")
_OPTIONAL = ("attention_spread", "carry")
_CURVES = ("loss", "ema", "valid_loss", "gradient")


def page_data(inspections: Sequence[Inspection], curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """JSON that can stand inside a script element: no <, >, & and no line separators."""
    budget = KERNEL_BYTES * min(len(inspections), _WHOLE_NETWORKS) // max(len(inspections), 1)
    data = {
        "networks": [_network(inspection, budget) for inspection in inspections],
        "curves": [{"name": name, **_curve(records)} for name, records in curves.items()],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and U+2029 are escaped
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _network(inspection: Inspection, budget: int) -> dict[str, Any]:
    blocks = inspection.blocks
    columns = {name: _column([getattr(block, name) for block in blocks]) for name in (*_COLUMNS, *_OPTIONAL)}
    columns |= {"cosine_low": _quantile(blocks, 0), "cosine_high": _quantile(blocks, -1)}
    for key in ("norm", "cosine", "gradient"):
        columns[f"{key}_predicted"] = _column([(block.predicted or {}).get(key) for block in blocks])
    return {
        "name": inspection.model,
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

"""What an inspection of a network finds: per block, in plain data that tables, figures and pages read."""

import json
import math
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skipless import lazy
from skipless.console import html_table, number, text_table
from skipless.theory.certificate import Verdict, blocks_shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class BlockSignal:
    """The signal after one block (block 0 is what enters the first).

    norm_*: squared activation norm over width, the diagonal of Σ. cosine_*: between different locations of a sequence,
    with quantiles at 5, 25, 50, 75 and 95 %. collapse is the rank-one residual ‖X − 1x̄ᵀ‖/‖X‖: 0 is total collapse.
    effective_rank and stable_rank are of the first two rows. kurtosis is of the activations' entries, 3 for a Gaussian;
    outlier is the largest entry over the root mean square. gradient_*: squared gradient norm per location, relative to
    the output's mean unless that is 0 or not finite. attention_*: None where the model gives no attention weights;
    entropy is in nats, spread the same over that of uniform attention, first the weight on the first key. carry is the
    mean cosine between a location before and after the block: near 0 without a shortcut. parameter_gradients and
    parameter_sizes: norm of the gradient, and root mean square of the matrices, by kind of parameter. predicted:
    theory's diagonal, cosine and gradient at initialisation, for models of this library. rounding: what half precision
    adds, over what tells locations apart (see `rounding`); None if it was not asked for.
    """

    block: int
    name: str
    norm_min: float
    norm_mean: float
    norm_max: float
    cosine_mean: float
    cosine_quantiles: tuple[float, ...]
    effective_rank: float
    stable_rank: float
    collapse: float
    kurtosis: float
    outlier: float
    gradient_mean: float | None = None
    gradient_max: float | None = None
    attention_entropy: float | None = None
    attention_first: float | None = None
    parameter_gradients: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] | None = None
    attention_spread: float | None = None
    carry: float | None = None
    parameter_sizes: dict[str, float] = field(default_factory=dict)
    rounding: float | None = None

    @property
    def query_key_gradient(self) -> float | None:
        """Gradient norm of queries and keys over that of values and outputs: it vanishes where locations coincide.

        Noci et al. 2022. None where the gradients are not known; 0 over 0 is 0.
        """
        gradients = self.parameter_gradients
        if not {"query", "key", "value", "output"} <= set(gradients):
            return None
        content = math.hypot(gradients["value"], gradients["output"])
        scores = math.hypot(gradients["query"], gradients["key"])
        if content == 0:
            return 0.0 if scores == 0 else math.inf
        return scores / content


@dataclass(frozen=True, eq=False)
class Inspection:
    """All blocks of one network on one batch, the verdict, and kernels of one sequence for the eye. Printed, a table.

    kernels: (blocks+1, t, t) cosines of the first row, at most 128 locations; None if not kept.
    advice: what to change, in plain words, empty when healthy.
    locations: "norm" and, where gradients were taken, "gradient": (blocks+1, T), means over rows, NaN at padding.
    """

    model: str
    blocks: tuple[BlockSignal, ...]
    verdict: Verdict
    advice: str = ""
    kernels: np.ndarray | None = field(default=None, repr=False)
    locations: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def healthy(self) -> bool:
        """Whether the signal reaches the end: preserved, or merely drifting."""
        return not self.verdict.lost

    def __str__(self) -> str:
        return f"{text_table(*self.table())}\n\n{self.model}: {self.verdict.text}\n{self.advice}".rstrip()

    def _repr_html_(self) -> str:
        words = f"{self.model}: {self.verdict.text} {self.advice}".rstrip()
        return f"{html_table(*self.table())}<p>{escape(words)}</p>"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows: all blocks of a shallow network, else a choice of them."""
        ours, rounded = self.blocks[0].predicted is not None, self.blocks[-1].rounding is not None
        head = ["block", "norm²", "cosine", "eff. rank", "gradient²", "entropy", "on first", "qk grad", "kurtosis"]
        head += ["rounding"] if rounded else []
        head += ["theory: norm²", "cosine"] if ours else []
        rows = []
        for each in (self.blocks[block] for block in blocks_shown(self.blocks[-1].block, self.verdict)):
            numbers = [each.norm_mean, each.cosine_mean, each.effective_rank, each.gradient_mean]
            numbers += [each.attention_entropy, each.attention_first, each.query_key_gradient, each.kurtosis]
            numbers += [each.rounding] if rounded else []
            predicted = each.predicted or {}
            numbers += [predicted.get("norm"), predicted.get("cosine")] if ours else []
            rows.append([str(each.block), *map(number, numbers)])
        return head, rows

    def figure(self, path: str | Path | None = None) -> "Figure":
        """Kernels by depth and every number by block, drawn by matplotlib; written to `path` (.png, .pdf, .svg) too."""
        return lazy.later("skipless.figures.inspection", "inspection_figure")(self, path)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; kernels as nested lists of three digits."""
        kernels = None if self.kernels is None else np.round(self.kernels.astype(np.float64), 3).tolist()
        blocks = [asdict(block) for block in self.blocks]
        return {
            "model": self.model,
            "verdict": asdict(self.verdict),
            "advice": self.advice,
            "blocks": blocks,
            "kernels": kernels,
            "locations": {name: _rounded(values) for name, values in self.locations.items()},
        }

    def to_json(self) -> str:
        """as_dict as text, with null for what is not a finite number."""
        return json.dumps(finite(self.as_dict()), allow_nan=False, ensure_ascii=False)


def _rounded(values: np.ndarray) -> list:
    """To four significant digits."""
    return [[float(f"{value:.4g}") for value in row] for row in values]


def finite(data: Any) -> Any:
    """The same data with null for what is not a finite number, which JSON cannot write."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data

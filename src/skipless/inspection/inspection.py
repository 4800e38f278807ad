"""What an inspection of a network finds: per block, in plain data that tables, figures and pages read."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skipless import __version__, lazy
from skipless.console import html_table, number, text_table
from skipless.files import reading
from skipless.schema import build, check, shortened
from skipless.theory import kernels
from skipless.theory.certificate import Verdict, blocks_shown, judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of cosines
_NAN = float("nan")
_SOUND = "was inspected too: preserved."


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
    adds, over what tells locations apart (see `rounding`); None if it was not asked for. attention_own is the weight on
    the query's own location, attention_ahead that on the locations behind it. kept: as carry, of a location's
    difference from the mean one, or with what coefficient that passes if it is larger; near 0 without a shortcut and
    where locations change places. attached: whether what the block gives can hand a gradient back, None where that was
    not to be expected. gradient_back: as gradient_mean, of what the block hands to the one before it. gradient_zeros:
    the share of locations at which no gradient arrives. coefficient: with what factor the block passes on what it
    reads, 1 with a plain shortcut. kept_back: as kept, of the gradient that reaches the block in the one that it hands
    back. least: the smallest entry over the root mean square; 0 or more where none is negative. joined: whether what
    the block reads can hand a gradient on to the block before it, None where that is not asked.
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
    attention_own: float | None = None
    kept: float | None = None
    attached: bool | None = None
    gradient_back: float | None = None
    gradient_zeros: float | None = None
    attention_ahead: float | None = None
    coefficient: float | None = None
    kept_back: float | None = None
    least: float | None = None
    joined: bool | None = None

    @property
    def which(self) -> str:
        """The block's number and name, as sentences have them."""
        return f"{self.block} ({self.name})"

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
    notes: what else was seen, a sentence each. others: the network's other stacks of blocks, as in encoder-decoders;
    blocks and verdict are of the one at fault, or of the longest. at_fault: whether the verdict's block itself is to
    blame, rather than the place where a signal is lost that many blocks wear down.
    """

    model: str
    blocks: tuple[BlockSignal, ...]
    verdict: Verdict
    advice: str = ""
    kernels: np.ndarray | None = field(default=None, repr=False)
    locations: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    others: tuple["Inspection", ...] = field(default=(), repr=False)
    at_fault: bool = False

    @property
    def healthy(self) -> bool:
        """Whether the signal reaches the end: preserved, or merely drifting."""
        return not self.verdict.lost

    @property
    def doubts(self) -> tuple[str, ...]:
        """Notes that ask for something: all but those on other stacks that are sound."""
        return tuple(note for note in self.notes if not note.endswith(_SOUND))

    def __str__(self) -> str:
        words = [f"{self.model}: {self.verdict.text}", *([self.advice] if self.advice else []), *self.notes]
        return "\n".join([text_table(*self.table()), "", *words])

    def _repr_html_(self) -> str:
        words = " ".join([f"{self.model}: {self.verdict.text}", self.advice, *self.notes]).strip()
        return f"{html_table(*self.table())}<p>{escape(words)}</p>"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows: all blocks of a shallow network, else a choice of them. ✖ marks the one that is at fault.

        What is needed most stands at the left."""
        ours, rounded = self.blocks[0].predicted is not None, self.blocks[-1].rounding is not None
        head = ["block", "norm²", "cosine", "eff. rank", "carry", "gradient²", *["rounding"] * rounded]
        head += ["entropy", "on first", "qk grad", "kurtosis"]
        head += ["theory: norm²", "theory: cosine"] if ours else []
        rows = []
        for each in (self.blocks[block] for block in blocks_shown(self.blocks[-1].block, self.verdict)):
            numbers = [each.norm_mean, each.cosine_mean, each.effective_rank, each.carry, each.gradient_mean]
            numbers += [each.rounding] * rounded
            numbers += [each.attention_entropy, each.attention_first, each.query_key_gradient, each.kurtosis]
            predicted = each.predicted or {}
            numbers += [predicted.get("norm"), predicted.get("cosine")] if ours else []
            marked = self.verdict.lost and each.block == self.verdict.block
            rows.append([f"{'✖ ' * marked}{each.block}", *map(number, numbers)])
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
            "at_fault": self.at_fault,
            "advice": self.advice,
            "blocks": blocks,
            "kernels": kernels,
            "locations": {name: _rounded(values) for name, values in self.locations.items()},
            "notes": list(self.notes),
            "others": [other.as_dict() for other in self.others],
        }

    def to_json(self) -> str:
        """as_dict as text, after the version, with null for what is not a finite number."""
        return json.dumps({"skipless": __version__, **finite(self.as_dict())}, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Inspection":
        """The inverse of as_dict; null numbers come back as NaN, or as None where the field may lack."""
        with reading("the inspection"):
            blocks = tuple(_block(entry) for entry in data["blocks"])
            verdict, cosines = build(Verdict, data["verdict"], "the verdict", "verdict."), data.get("kernels")
            stack = None if cosines is None else np.array(cosines, dtype=np.float64)
            locations = {name: np.array(rows, dtype=np.float64) for name, rows in data.get("locations", {}).items()}
            _check_blocks(blocks, verdict, stack)
            notes = tuple(str(note) for note in data.get("notes", ()))
            others = tuple(cls.from_dict(other) for other in data.get("others", ()))
            advice = str(data.get("advice") or "")
            alone = check(data.get("at_fault", verdict.kind in ("leak", "fault")), bool, "at_fault")
            return cls(str(data["model"]), blocks, verdict, advice, stack, locations, notes, others, alone)

    @classmethod
    def of_states(cls, model: str, states: np.ndarray, *, normalised: bool = False) -> "Inspection":
        """From measured kernels Σ_0 … Σ_L, (L+1, T, T), of one sequence: everything but gradients and single entries.

        normalised as in theory.certificate: norms of a normalised stream may grow and are not judged.
        """
        states = np.asarray(states, dtype=np.float64)
        unjudged = [np.ones(states.shape[1])] * len(states)
        certificate = judge(list(states), unjudged, normalised=normalised)
        cosines = np.stack([cosines_of(state) for state in states])
        blocks = tuple(
            replace(
                _certified(asdict(at), cosine),
                stable_rank=kernels.stable_rank(state) if np.isfinite(cosine).all() else _NAN,
                collapse=kernels.rank_one_residual(state) if np.isfinite(cosine).all() else _NAN,
                gradient_mean=None,
                gradient_max=None,
            )
            for at, state, cosine in zip(certificate.reports, states, cosines, strict=True)
        )
        return cls(model, blocks, certificate.verdict, kernels=cosines)

    @classmethod
    def of_certificates(cls, data: Mapping[str, Any]) -> list["Inspection"]:
        """One per network of a `skipless kernels --json` file: theory's numbers, kernels of the blocks shown."""
        with reading("the certificate"):
            if not data["networks"]:
                raise ValueError("it has no networks")
            return [cls._of_certificate(network) for network in data["networks"]]

    @classmethod
    def _of_certificate(cls, network: Mapping[str, Any]) -> "Inspection":
        reports = network["certificate"]["reports"]
        shown = {int(block): np.array(rows, dtype=np.float64) for block, rows in network["cosines"].items()}
        blocks = tuple(_certified(at, shown.get(at["block"])) for at in reports)
        length = len(next(iter(shown.values()))) if shown else 0
        absent = np.full((length, length), np.nan)
        stack = np.stack([shown.get(at["block"], absent) for at in reports]) if shown else None
        verdict = build(Verdict, network["certificate"]["verdict"], "the verdict", "verdict.")
        _check_blocks(blocks, verdict, stack)
        return cls(str(network["label"]), blocks, verdict, kernels=stack)


def _certified(at: Mapping[str, Any], cosine: np.ndarray | None) -> BlockSignal:
    return BlockSignal(
        block=at["block"],
        name=_name(at["block"]),
        norm_min=_number(at["diagonal_min"]),
        norm_mean=_number(at["diagonal_mean"]),
        norm_max=_number(at["diagonal_max"]),
        cosine_mean=_number(at["mean_cosine"]),
        cosine_quantiles=() if cosine is None else _quantiles(cosine),
        effective_rank=_number(at["effective_rank"]),
        stable_rank=_NAN,
        collapse=_NAN,
        kurtosis=_NAN,
        outlier=_NAN,
        gradient_mean=_number(at["backward_mean"]),
        gradient_max=_number(at["backward_max"]),
    )


def _check_blocks(blocks: Sequence[BlockSignal], verdict: Verdict, stack: np.ndarray | None) -> None:
    """Refuse what no network has: blocks out of order, a verdict on one that is not there, kernels of another shape."""
    if not blocks or [block.block for block in blocks] != list(range(len(blocks))):
        raise ValueError("the blocks are not numbered 0, 1, 2, …")
    if verdict.block is not None and not 0 <= verdict.block < len(blocks):
        raise ValueError(f"the verdict is about block {verdict.block}, of {len(blocks) - 1}")
    if stack is not None and (stack.ndim != 3 or len(stack) != len(blocks) or stack.shape[1] != stack.shape[2]):
        raise ValueError(f"kernels are shaped {stack.shape}, not ({len(blocks)}, T, T)")


def _block(entry: Mapping[str, Any]) -> BlockSignal:
    known = {each.name for each in fields(BlockSignal)}
    values = {name: value for name, value in entry.items() if name in known}
    for each in fields(BlockSignal):
        if each.type is float:
            values[each.name] = _number(values[each.name])
    for name in ("parameter_gradients", "parameter_sizes", "predicted"):
        if isinstance(values.get(name), dict):
            values[name] = {kind: _number(value) for kind, value in values[name].items()}
    values["cosine_quantiles"] = tuple(_number(value) for value in values["cosine_quantiles"])
    return build(BlockSignal, values, "a block", f"block {shortened(values.get('block'))}: ")


def _number(value: Any) -> float:
    return _NAN if value is None else check(value, float, "a number")


def _name(block: int) -> str:
    return "input" if block == 0 else f"block {block}"


def cosines_of(state: np.ndarray) -> np.ndarray:
    """Cosines, or NaN throughout where a norm is zero or not finite."""
    if not (np.isfinite(state).all() and (np.diagonal(state) > 0).all()):
        return np.full_like(state, np.nan)
    return kernels.cosine(state)


def _quantiles(cosine: np.ndarray) -> tuple[float, ...]:
    above: Sequence[float] | np.ndarray = cosine[np.triu_indices(len(cosine), 1)]
    return tuple(float(q) for q in np.quantile(above, QUANTILES)) if np.isfinite(above).all() else ()


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

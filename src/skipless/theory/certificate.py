"""The certificate: what every block does to the signal, and the first block where it is lost, if any."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from skipless import lazy
from skipless.console import html_table, number, text_table
from skipless.theory import kernels, propagation
from skipless.theory.local_maps import OutOfReach
from skipless.theory.propagation import KernelLayer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VerdictKind = Literal["preserved", "drift", "collapse", "explosion", "vanishing", "leak", "fault"]


@dataclass(frozen=True)
class Thresholds:
    """What counts as lost. Norms and gradients are squared and relative to 1, the value every method aims at.

    The cosine's limit lies between networks that train (E-SPA with TAT ends at .993) and those that cannot (skipless
    standard attention passes .9998 in ten blocks).
    """

    collapse_cosine: float = 0.999
    drift: float = 4.0
    lost_norm: float = 1e3
    lost_gradient: float = 1e6


@dataclass(frozen=True)
class BlockReport:
    """The signal after one block (block 0 is the input): diagonal of Σ, cosines, rank, and gradient gain.

    The backward gain is the squared gradient norm at this point per location, for one independent unit gradient at
    every output location.
    """

    block: int
    diagonal_min: float
    diagonal_mean: float
    diagonal_max: float
    mean_cosine: float
    effective_rank: float
    backward_mean: float
    backward_max: float


@dataclass(frozen=True)
class Verdict:
    """preserved, drift (norms leave the thresholds but nothing is lost), collapse, explosion, vanishing. Measurements
    may also find a leak from the future or from another row of the batch, or a fault: a block that is unlike all others
    though the signal still passes it."""

    kind: VerdictKind
    block: int | None
    text: str

    @property
    def lost(self) -> bool:
        """Whether the signal is lost or a block is at fault, as opposed to preserved or merely drifting."""
        return self.kind not in ("preserved", "drift")

    @property
    def words(self) -> str:
        """The verdict in three or four words: "collapse at block 11"."""
        if self.block is None:
            return self.kind
        return f"{self.kind} {'from' if self.kind == 'drift' else 'at'} block {self.block}"


@dataclass(frozen=True)
class Certificate:
    """One BlockReport per block, input first, and the verdict over them. Printed, it is a table."""

    reports: tuple[BlockReport, ...]
    verdict: Verdict

    def __str__(self) -> str:
        return f"{text_table(*self._table())}\n\n{self.verdict.text}"

    def _repr_html_(self) -> str:
        return f"{html_table(*self._table())}<p>{escape(self.verdict.text)}</p>"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        head = ["block", "norm²: least", "mean", "largest", "cosine", "eff. rank", "gradient²: mean", "largest"]
        shown = [self.reports[block] for block in blocks_shown(self.reports[-1].block, self.verdict)]
        return head, [[str(each.block), *map(number, astuple(each)[1:])] for each in shown]

    def figure(self, path: str | Path | None = None) -> "Figure":
        """Norms, cosine, rank and gradients by block, drawn by matplotlib; written to `path` (.png, .pdf, .svg) too."""
        return lazy.later("skipless.figures.kernels", "certificate_figure")(self, path)

    def as_dict(self) -> dict:
        return asdict(self)


def blocks_shown(last: int, verdict: Verdict, most: int = 16) -> list[int]:
    """Rows of a table by block: all of a shallow network; else the ends, an even choice, and those by the verdict's."""
    if last < most:
        return list(range(last + 1))
    even = {round(step * last / (most - 5)) for step in range(most - 4)}
    at = verdict.block
    near = set() if at is None else {block for block in (at - 1, at, at + 1) if 0 <= block <= last}
    return sorted(even | near)


def certify(
    blocks: Sequence[KernelLayer], kernel: np.ndarray, *, normalised: bool = False, thresholds: Thresholds | None = None
) -> Certificate:
    """Propagate Σ_0 through the blocks and judge; the reports end where norms are lost, if they are.

    normalised says that every branch starts or ends with a norm, so that the diagonal of the stream is free to grow
    (as in Pre-LN) and is not judged.
    """
    thresholds = thresholds or Thresholds()

    def lost(state: np.ndarray) -> bool:
        return not normalised and not np.diagonal(state).max() < thresholds.lost_norm

    try:
        states = propagation.forward(blocks, kernel, stop=lost)
        return judge(states, propagation.backward(blocks, states), normalised=normalised, thresholds=thresholds)
    except OutOfReach:
        found = judge(*_within_reach(blocks, kernel), normalised=normalised, thresholds=thresholds)
    last = found.reports[-1]
    text = (
        f"Norms grow beyond what theory can follow in block {last.block + 1}: the squared norm before it is "
        f"{last.diagonal_max:.3g}, and the activation a kink at that scale."
    )
    return found if found.verdict.lost else replace(found, verdict=Verdict("explosion", last.block + 1, text))


def _within_reach(blocks: Sequence[KernelLayer], kernel: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Kernels and gains up to the last block through which both can be computed."""
    states = [np.asarray(kernel, dtype=np.float64)]
    with suppress(OutOfReach):
        for block in blocks:
            states.append(block.forward(states[-1]))
    while True:
        try:
            return states, propagation.backward(blocks, states)
        except OutOfReach:
            states.pop()


def judge(
    states: Sequence[np.ndarray],
    gains: Sequence[np.ndarray],
    *,
    normalised: bool = False,
    thresholds: Thresholds | None = None,
) -> Certificate:
    """The certificate of kernels Σ_0 … Σ_L and backward gains per location, predicted or measured."""
    if len(states[0]) < 2:
        raise ValueError("the kernel has 1 location; a certificate compares locations and needs at least 2")
    reports = tuple(
        _report(block, kernel, gain) for block, (kernel, gain) in enumerate(zip(states, gains, strict=True))
    )
    return Certificate(reports, _verdict(reports, normalised, thresholds or Thresholds()))


def _report(block: int, kernel: np.ndarray, gain: np.ndarray) -> BlockReport:
    diagonal = np.diagonal(kernel)
    finite = bool(np.isfinite(kernel).all() and (diagonal > 0).all())
    return BlockReport(
        block=block,
        diagonal_min=float(diagonal.min()),
        diagonal_mean=float(diagonal.mean()),
        diagonal_max=float(diagonal.max()),
        mean_cosine=kernels.mean_cosine(kernel) if finite else float("nan"),
        effective_rank=kernels.effective_rank(kernel) if finite else float("nan"),
        backward_mean=float(gain.mean()),
        backward_max=float(gain.max()),
    )


def _verdict(reports: Sequence[BlockReport], normalised: bool, limits: Thresholds) -> Verdict:
    forward = (_lost_forward(report, normalised, limits) for report in reports[1:])
    backward = (_lost_backward(report, limits) for report in reversed(reports[1:]))
    if loss := next((verdict for verdict in (*forward, *backward) if verdict), None):
        return loss
    last = reports[-1]
    for report in reports[1:]:
        if not normalised and not 1 / limits.drift <= report.diagonal_min <= report.diagonal_max <= limits.drift:
            return Verdict(
                "drift",
                report.block,
                f"{survives(last.block)}, but from block {report.block} on squared norms leave "
                f"[{1 / limits.drift:g}, {limits.drift:g}]: the diagonal ends in "
                f"[{last.diagonal_min:.3g}, {last.diagonal_max:.3g}]. In SPA calibration='exact' keeps it at 1.",
            )
    return Verdict(
        "preserved",
        None,
        f"{survives(last.block)}: mean cosine {last.mean_cosine:.3f}, effective rank {last.effective_rank:.1f}.",
    )


def survives(blocks: int) -> str:
    """How the verdict of a network begins whose signal reaches the end."""
    return f"The signal survives {f'all {blocks} blocks' if blocks > 1 else 'the one block'}"


def _lost_forward(report: BlockReport, normalised: bool, limits: Thresholds) -> Verdict | None:
    """The way in which this block has lost the signal, if it has."""
    at = f"at block {report.block}"
    if report.mean_cosine > limits.collapse_cosine:
        text = f"Rank collapse {at}: the mean cosine between locations is {report.mean_cosine:.4f}."
        return Verdict("collapse", report.block, text)
    if not normalised and not report.diagonal_max < limits.lost_norm:
        return Verdict("explosion", report.block, f"Norms explode {at}: squared norm {report.diagonal_max:.3g}.")
    if not normalised and not report.diagonal_mean > 1 / limits.lost_norm:
        return Verdict("vanishing", report.block, f"Norms vanish {at}: squared norm {report.diagonal_mean:.3g}.")
    return None


def _lost_backward(report: BlockReport, limits: Thresholds) -> Verdict | None:
    """The way in which gradients are lost on their way back to this block, if they are."""
    at = f"at block {report.block}"
    if not report.backward_mean < limits.lost_gradient:
        text = f"Gradients explode {at}: squared gradient norm {report.backward_mean:.3g} of the output's."
        return Verdict("explosion", report.block, text)
    if not report.backward_mean > 1 / limits.lost_gradient:
        text = f"Gradients vanish {at}: squared gradient norm {report.backward_mean:.3g} of the output's."
        return Verdict("vanishing", report.block, text)
    return None

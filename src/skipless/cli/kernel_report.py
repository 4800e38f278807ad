"""What `skipless kernels` says: table rows, the closing sentence, and everything as data."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from skipless import __version__
from skipless.analysis.inspection import finite
from skipless.analysis.study import InputSignal, Study, verdict_words
from skipless.cli.kernel_request import Request
from skipless.theory import kernels
from skipless.theory.certificate import BlockReport

_COLOURS = {"preserved": "green", "drift": "yellow"}


@dataclass(frozen=True)
class Report:
    """A table (with a colour for the last cell of each row), what it shows, and the sentence that ends it."""

    head: list[str]
    rows: list[list[str]]
    styles: list[str]
    closing: str
    legend: str = ""


def report(request: Request, studies: Sequence[Study]) -> Report:
    """The report that suits the request: inputs, one network by block, or networks side by side."""
    if not studies:
        return _of_inputs(request.signals)
    if len(studies) == 1:
        return _of_one(studies[0], request.blocks)
    return _of_many(studies, request.name)


def as_json(request: Request, studies: Sequence[Study]) -> str:
    """Inputs, configurations, certificates, diagonals of every Σ_l and the cosines shown, to six decimals."""
    data: dict[str, Any] = {"skipless": __version__, "name": request.name}
    if not studies:
        data["inputs"] = [{**asdict(s), "kernel": s.kernel().tolist()} for s in request.signals]
    else:
        data |= {"input": asdict(request.signals[0]), "blocks": list(request.blocks)}
        data["networks"] = [_network_data(study, request.blocks) for study in studies]
    return json.dumps(finite(data), allow_nan=False, ensure_ascii=False) + "\n"


def _network_data(study: Study, blocks: Sequence[int]) -> dict[str, Any]:
    return {
        "label": study.network.label,
        "details": study.network.details(),
        "config": study.network.config.to_dict(),
        "certificate": study.certificate.as_dict(),
        "diagonals": study.diagonals().tolist(),
        "cosines": {str(block): np.round(study.normalised(block), 6).tolist() for block in blocks},
    }


def _of_one(study: Study, blocks: Sequence[int]) -> Report:
    certificate, verdict = study.certificate, study.certificate.verdict
    head = ["block", "norm² min", "mean", "max", "mean cosine", "effective rank", "gradient² mean", "max"]
    shown = sorted({*blocks, *([verdict.block] if verdict.block is not None else [])})
    rows = [_block_row(certificate.reports[block]) for block in shown]
    title = f"{study.network.label} ({', '.join(study.network.details())})"
    return Report(head, rows, ["" for _ in rows], f"{title}: {verdict.text}")


def _block_row(at: BlockReport) -> list[str]:
    norms = [at.diagonal_min, at.diagonal_mean, at.diagonal_max]
    gains = [at.backward_mean, at.backward_max]
    middle = [f"{at.mean_cosine:.4f}", f"{at.effective_rank:.1f}"]
    return [str(at.block), *map(_short, norms), *middle, *map(_short, gains)]


def _of_many(studies: Sequence[Study], name: str) -> Report:
    last = studies[0].certificate.reports[-1].block
    head = ["network", "cosine", "rank", "norm² range", "gradient²", "verdict"]
    rows, styles = [], []
    for study in studies:
        at, verdict = study.certificate.reports[-1], study.certificate.verdict
        span = f"{_short(at.diagonal_min)} – {_short(at.diagonal_max)}"
        gain = _short(study.certificate.reports[0].backward_mean)
        numbers = [f"{at.mean_cosine:.4f}", f"{at.effective_rank:.1f}", span, gain]
        rows.append([study.network.label, *numbers, verdict_words(verdict)])
        styles.append(_COLOURS.get(verdict.kind, "red"))
    legend = f"Mean cosine, effective rank and squared norms after block {last}; squared gradient norm at the input."
    closing = _drift_sentence(studies) if name == "fig6" else _sentence(studies, last)
    return Report(head, rows, styles, closing, legend)


def _sentence(studies: Sequence[Study], last: int) -> str:
    kept = [s.network.label for s in studies if not s.certificate.verdict.lost]
    lost = [
        f"{s.network.label} ({verdict_words(s.certificate.verdict)})" for s in studies if s.certificate.verdict.lost
    ]
    parts = []
    if lost:
        parts.append(f"The signal dies in {len(lost)} of {len(studies)} networks: {'; '.join(lost)}.")
    if kept:
        parts.append(f"It survives all {last} blocks of {'; '.join(kept)}.")
    return " ".join(parts)


def _drift_sentence(studies: Sequence[Study]) -> str:
    plain, corrected = (study.diagonals()[-1] for study in studies)
    return (
        f"Without the correction for repeated tokens squared norms end at {plain.mean():.2f} ± {plain.std():.2f}; "
        f"with it at {corrected.mean():.2f} ± {corrected.std():.2f}."
    )


def _of_inputs(signals: Sequence[InputSignal]) -> Report:
    head = ["repeat rate r", "distinct tokens", "equal pairs", "effective rank"]
    rows = []
    for signal in signals:
        kernel = signal.kernel()
        distinct = np.linalg.matrix_rank(kernel)
        pairs, rank = kernels.mean_cosine(kernel), kernels.effective_rank(kernel)
        rows.append([f"{signal.repeat_rate:g}", str(distinct), f"{pairs:.4f}", f"{rank:.1f}"])
    top = rows[-1]
    closing = f"At r = {top[0]}, {signals[-1].length} locations hold {top[1]} distinct tokens: effective rank {top[3]}."
    return Report(head, rows, ["" for _ in rows], closing)


def _short(value: float) -> str:
    return f"{value:.3g}"

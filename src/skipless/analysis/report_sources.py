"""Inspections from what commands and runs leave behind: their own JSON, `skipless kernels` JSON, kernels of a probe."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from skipless.analysis.inspection import BlockSignal, Inspection
from skipless.theory import kernels
from skipless.theory.certificate import Verdict, judge

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_NAN = float("nan")


def inspection_from_dict(data: Mapping[str, Any]) -> Inspection:
    """The inverse of Inspection.as_dict; null numbers come back as NaN, or as None where the field may lack."""
    try:
        blocks = tuple(_block(entry) for entry in data["blocks"])
        verdict = Verdict(**data["verdict"])
        cosines = data.get("kernels")
        stack = None if cosines is None else np.array(cosines, dtype=np.float64)
        locations = {name: np.array(rows, dtype=np.float64) for name, rows in data.get("locations", {}).items()}
        return Inspection(str(data["model"]), blocks, verdict, str(data.get("advice") or ""), stack, locations)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the inspection is damaged or of another version ({error!r})") from error


def inspections_of_certificates(data: Mapping[str, Any]) -> list[Inspection]:
    """One inspection per network of a `skipless kernels --json` file: theory's numbers, kernels of the blocks shown."""
    try:
        return [_of_certificate(network) for network in data["networks"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the certificate is damaged or of another version ({error!r})") from error


def inspection_of_states(model: str, states: np.ndarray, *, normalised: bool = False) -> Inspection:
    """From measured kernels Σ_0 … Σ_L, (L+1, T, T), of one sequence: everything but gradients and single entries.

    normalised as in theory.certificate: norms of a normalised stream may grow and are not judged.
    """
    states = np.asarray(states, dtype=np.float64)
    unjudged = [np.ones(states.shape[1])] * len(states)
    certificate = judge(list(states), unjudged, normalised=normalised)
    cosines = np.stack([_cosines(state) for state in states])
    blocks = tuple(
        BlockSignal(
            block=at.block,
            name=_name(at.block),
            norm_min=at.diagonal_min,
            norm_mean=at.diagonal_mean,
            norm_max=at.diagonal_max,
            cosine_mean=at.mean_cosine,
            cosine_quantiles=_quantiles(cosine),
            effective_rank=at.effective_rank,
            stable_rank=kernels.stable_rank(state) if np.isfinite(cosine).all() else _NAN,
            collapse=kernels.rank_one_residual(state) if np.isfinite(cosine).all() else _NAN,
            kurtosis=_NAN,
            outlier=_NAN,
        )
        for at, state, cosine in zip(certificate.reports, states, cosines, strict=True)
    )
    return Inspection(model, blocks, certificate.verdict, kernels=cosines)


def _of_certificate(network: Mapping[str, Any]) -> Inspection:
    reports = network["certificate"]["reports"]
    kept = {int(block): np.array(rows, dtype=np.float64) for block, rows in network["cosines"].items()}
    blocks = tuple(_certified(at, kept.get(at["block"])) for at in reports)
    length = len(next(iter(kept.values()))) if kept else 0
    absent = np.full((length, length), np.nan)
    stack = np.stack([kept.get(at["block"], absent) for at in reports]) if kept else None
    return Inspection(str(network["label"]), blocks, Verdict(**network["certificate"]["verdict"]), kernels=stack)


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
        gradient_mean=at["backward_mean"],
        gradient_max=at["backward_max"],
    )


def _block(entry: Mapping[str, Any]) -> BlockSignal:
    known = {field.name for field in fields(BlockSignal)}
    values = {name: value for name, value in entry.items() if name in known}
    for name in ("norm_min", "norm_mean", "norm_max", "cosine_mean", "effective_rank", "stable_rank"):
        values[name] = _number(values[name])
    for name in ("collapse", "kurtosis", "outlier"):
        values[name] = _number(values[name])
    values["cosine_quantiles"] = tuple(_number(value) for value in values["cosine_quantiles"])
    return BlockSignal(**values)


def _number(value: Any) -> float:
    return _NAN if value is None else float(value)


def _name(block: int) -> str:
    return "input" if block == 0 else f"block {block}"


def _cosines(state: np.ndarray) -> np.ndarray:
    """Cosines, or NaN throughout where a norm is zero or not finite."""
    if not (np.isfinite(state).all() and (np.diagonal(state) > 0).all()):
        return np.full_like(state, np.nan)
    return kernels.cosine(state)


def _quantiles(cosine: np.ndarray) -> tuple[float, ...]:
    above: Sequence[float] | np.ndarray = cosine[np.triu_indices(len(cosine), 1)]
    return tuple(float(q) for q in np.quantile(above, QUANTILES)) if np.isfinite(above).all() else ()

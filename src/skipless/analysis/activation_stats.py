"""Numbers that describe one activation tensor, row by row: the memory of one T×T kernel, whatever the batch."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PICTURE = 128  # locations of the kernel that is kept for the eye


@dataclass(frozen=True, eq=False)
class ActivationStats:
    """Fields as in BlockSignal; norms by location, (T,); picture: cosines of the first row's first locations.

    Means over rows; norm_min, norm_max and outlier are extremes over them. kernel is the mean Σ, where asked for.
    """

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
    norms: np.ndarray
    picture: np.ndarray | None = None
    kernel: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Wanted:
    """What to compute: at most `rows` rows; the spectrum, whose cost is cubic in min(T, width); whether attention is
    watched; keep, (batch, T), is False at padding."""

    rows: int | None = None
    spectrum: bool = True
    picture: bool = True
    kernel: bool = False
    attention: bool = True
    keep: Tensor | None = None


@torch.no_grad()
def describe(x: Tensor, wanted: Wanted) -> ActivationStats:
    """The statistics of activations (batch, T, width), in float64 where the device has it."""
    rows = range(min(len(x), wanted.rows or len(x)))
    numbers, norms, pictures, total = [], [], [], None
    for index in rows:
        row = x[index] if wanted.keep is None else x[index][wanted.keep[index].to(x.device)]
        row = row.to(wide(x))
        gram = row @ row.T / row.shape[-1]
        numbers.append(_numbers(row, gram, wanted.spectrum))
        norms.append(_spread_out(torch.diagonal(gram), wanted.keep, index))
        if wanted.picture and index == 0:
            pictures.append(cosines(gram[:PICTURE, :PICTURE]).float().cpu().numpy())
        if wanted.kernel:
            total = gram if total is None else total + gram
    by_location = torch.stack(norms).cpu().numpy()
    return _average(
        np.array(numbers),
        _mean_over_rows(by_location),
        pictures[0] if pictures else None,
        None if total is None else (total / len(rows)).double().cpu().numpy(),
    )


def cosines(gram: Tensor) -> Tensor:
    """Σ_ij / √(Σ_ii Σ_jj); NaN where a norm is zero."""
    scale = torch.diagonal(gram).sqrt()
    return gram / (scale[:, None] * scale[None, :])


def _numbers(row: Tensor, gram: Tensor, spectrum: bool) -> list[float]:
    """[norm min, mean, max, cosine mean, five quantiles, effective rank, stable rank, collapse, kurtosis, outlier]."""
    length = len(row)
    norm = torch.diagonal(gram)
    pairs = cosines(gram)[torch.ones_like(gram, dtype=torch.bool).triu(1)]
    share = gram.mean() * length / norm.sum()
    centred = row - row.mean()
    variance = centred.square().mean()
    numbers = [
        norm.min(),
        norm.mean(),
        norm.max(),
        pairs.mean(),
        *_quantiles(pairs),
        *(_ranks(row, gram) if spectrum else (norm.new_tensor(math.nan),) * 2),
        (1.0 - share).clamp(min=0.0).sqrt(),
        centred.pow(4).mean() / variance.square(),
        row.abs().max() / row.square().mean().sqrt(),
    ]
    return torch.stack(numbers).tolist()


def _quantiles(pairs: Tensor) -> list[Tensor]:
    """By linear interpolation, as numpy; by hand because torch.quantile refuses more than 16 million values."""
    ordered = pairs.sort().values
    found = []
    for share in QUANTILES:
        at = share * (len(ordered) - 1)
        below = int(at)
        above = min(below + 1, len(ordered) - 1)
        found.append(ordered[below] + (at - below) * (ordered[above] - ordered[below]))
    return found


def _ranks(row: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """(exp of the spectrum's entropy, tr Σ / λ_max), by the smaller of XXᵀ and XᵀX, whose non-zero spectra agree."""
    small = gram if len(row) <= row.shape[-1] else row.T @ row
    if not bool(torch.isfinite(small).all()):
        nan = gram.new_tensor(math.nan)
        return nan, nan
    values = torch.linalg.eigvalsh(small).clamp(min=0.0)
    share = values / values.sum()
    return torch.special.entr(share).sum().exp(), 1.0 / share[-1]


def _spread_out(norm: Tensor, keep: Tensor | None, index: int) -> Tensor:
    """Norms at their locations, NaN at padding."""
    if keep is None:
        return norm
    whole = torch.full(keep.shape[1:], math.nan, dtype=norm.dtype, device=norm.device)
    whole[keep[index].to(norm.device)] = norm
    return whole


def _mean_over_rows(values: np.ndarray) -> np.ndarray:
    present = ~np.isnan(values)
    count = present.sum(axis=0)
    sums = np.where(present, values, 0.0).sum(axis=0)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def _average(
    numbers: np.ndarray, norms: np.ndarray, picture: np.ndarray | None, kernel: np.ndarray | None
) -> ActivationStats:
    mean = [float(value) for value in numbers.mean(axis=0)]
    return ActivationStats(
        norm_min=float(numbers[:, 0].min()),
        norm_mean=mean[1],
        norm_max=float(numbers[:, 2].max()),
        cosine_mean=mean[3],
        cosine_quantiles=tuple(mean[4:9]),
        effective_rank=mean[9],
        stable_rank=mean[10],
        collapse=mean[11],
        kurtosis=mean[12],
        outlier=float(numbers[:, 13].max()),
        norms=norms,
        picture=picture,
        kernel=kernel,
    )


def wide(x: Tensor) -> torch.dtype:
    """The dtype to measure in."""
    return torch.float32 if x.device.type == "mps" else torch.float64  # Apple's GPUs have no float64

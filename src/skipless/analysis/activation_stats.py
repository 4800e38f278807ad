"""Numbers that describe one activation tensor: a few rows at a time, in a bounded amount of memory.

Nothing here waits for a GPU: `describe` leaves its results on the device, and `Described.numbers` fetches them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skipless.analysis import spectrum

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PICTURE = 128  # locations of the kernel that is kept for the eye
SPECTRAL_ROWS = 2  # rows whose spectrum is taken: its cost is cubic, and rows of one batch differ little
_CHUNK = 2**25  # bytes of a chunk's float64 rows or kernels, of which a handful of copies exist at a time


@dataclass(frozen=True, eq=False)
class ActivationStats:
    """Fields as in BlockSignal; norms by location, (T,); picture: cosines of the first row's first locations.

    Means over rows; norm_min, norm_max and outlier are extremes over them; ranks are of the first two rows.
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


@dataclass(frozen=True, eq=False)
class Wanted:
    """What to compute: at most `rows` rows; the spectrum, whose cost is cubic in min(T, width); whether attention is
    watched; keep, (batch, T), is False at padding; given is (batch, T) of ids or mask, which tells layouts apart."""

    rows: int | None = None
    spectrum: bool = True
    picture: bool = True
    kernel: bool = False
    attention: bool = True
    keep: Tensor | None = None
    given: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Described:
    """Statistics on their device: values (rows, 12), norms (rows, T) with NaN at padding, kernel the mean Σ."""

    values: Tensor
    norms: Tensor
    ranks: Callable[[], spectrum.Ranks]
    picture: Tensor | None = None
    kernel: Tensor | None = None

    def numbers(self) -> ActivationStats:
        """Fetched and averaged over rows."""
        values = self.values.cpu().numpy()
        mean = [float(value) for value in _mean_over_rows(values)]  # a row without two non-zero locations has no cosine
        effective, stable = self.ranks()
        return ActivationStats(
            norm_min=float(values[:, 0].min()),
            norm_mean=float(values[:, 1].mean()),
            norm_max=float(values[:, 2].max()),
            cosine_mean=mean[3],
            cosine_quantiles=tuple(mean[4:9]),
            effective_rank=effective,
            stable_rank=stable,
            collapse=mean[9],
            kurtosis=mean[10],
            outlier=float(values[:, 11].max()),
            norms=_mean_over_rows(self.norms.cpu().numpy()),
            picture=None if self.picture is None else self.picture.cpu().numpy(),
        )


@torch.no_grad()
def describe(x: Tensor, wanted: Wanted) -> Described:
    """The statistics of activations (batch, T, width), in float64 where the device has it."""
    x = x[: wanted.rows] if wanted.rows else x
    values, norms, spectral, picture, total = [], [], [], None, None
    for first, rows in _chunks(x, wanted.keep):
        gram = rows @ rows.mT / rows.shape[-1]
        values.append(_values(rows, gram))
        norms.append(_spread_out(torch.diagonal(gram, dim1=-2, dim2=-1), wanted.keep, first))
        if wanted.spectrum:
            spectral += [_smaller(row, k) for row, k in zip(rows, gram, strict=True)][: SPECTRAL_ROWS - len(spectral)]
        if wanted.picture and first == 0:
            picture = cosines(gram[0, :PICTURE, :PICTURE]).float()
        if wanted.kernel:
            total = gram.sum(0) if total is None else total + gram.sum(0)
    kernel = None if total is None else total / len(x)
    return Described(torch.cat(values), torch.cat(norms), spectrum.later(spectral), picture, kernel)


def cosines(gram: Tensor) -> Tensor:
    """Σ_ij / √(Σ_ii Σ_jj); NaN where a norm is zero."""
    scale = torch.diagonal(gram, dim1=-2, dim2=-1).sqrt()
    return gram / (scale[..., :, None] * scale[..., None, :])


def _chunks(x: Tensor, keep: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """(index of the first row, rows (n, T, width)) in the wide dtype; one row at a time where padding differs."""
    if keep is not None:
        for index in range(len(x)):
            yield index, x[index][keep[index].to(x.device)][None].to(wide(x))
        return
    _, length, width = x.shape
    step = max(_CHUNK // (8 * length * max(length, width)), 1)
    for first in range(0, len(x), step):
        yield first, x[first : first + step].to(wide(x))


def _values(rows: Tensor, gram: Tensor) -> Tensor:
    """(n, 12): norm min, mean, max, cosine mean, five quantiles, collapse, kurtosis, outlier.

    Cosines are between locations that are not zero: a row of fewer than two has NaN.
    """
    length = rows.shape[-2]
    norm = torch.diagonal(gram, dim1=-2, dim2=-1)
    above, right = torch.triu_indices(length, length, 1, device=gram.device)
    apart = (norm[:, above] != 0) & (norm[:, right] != 0)
    pairs, count = cosines(gram)[:, above, right], apart.sum(-1)
    share = gram.mean((-2, -1)) * length / norm.sum(-1)
    flat = rows.flatten(1)
    square = (flat - flat.mean(-1, keepdim=True)).square_()
    return torch.stack(
        [
            norm.amin(-1),
            norm.mean(-1),
            norm.amax(-1),
            pairs.where(apart, 0.0).sum(-1) / count,
            *_quantiles(pairs, count),
            (1.0 - share).clamp(min=0.0).sqrt(),
            square.square().mean(-1) / square.mean(-1).square(),
            torch.maximum(flat.amax(-1), -flat.amin(-1)) / (norm.mean(-1)).sqrt(),
        ],
        dim=-1,
    )


def _quantiles(pairs: Tensor, count: Tensor) -> list[Tensor]:
    """Of each row's `count` cosines, the rest being NaN. By linear interpolation, as numpy; by hand because
    torch.quantile refuses more than 16 million values."""
    ordered = pairs.sort().values  # NaN last
    last = (count - 1).clamp(min=0)[:, None]
    found = []
    for share in QUANTILES:
        at = share * last.to(pairs)
        below = at.long()
        low, high = ordered.gather(1, below), ordered.gather(1, torch.minimum(below + 1, last))
        found.append((low + (at - below) * (high - low))[:, 0])
    return found


def _smaller(row: Tensor, gram: Tensor) -> Tensor:
    """The smaller of XXᵀ/d and XᵀX/d, whose non-zero spectra agree."""
    return gram if len(row) <= row.shape[-1] else row.mT @ row / row.shape[-1]


def _spread_out(norm: Tensor, keep: Tensor | None, index: int) -> Tensor:
    """Norms at their locations, NaN at padding."""
    if keep is None:
        return norm
    whole = torch.full(keep.shape[1:], math.nan, dtype=norm.dtype, device=norm.device)
    whole[keep[index].to(norm.device)] = norm[0]
    return whole[None]


def _mean_over_rows(values: np.ndarray) -> np.ndarray:
    present = ~np.isnan(values)
    count = present.sum(axis=0)
    sums = np.where(present, values, 0.0).sum(axis=0)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def wide(x: Tensor) -> torch.dtype:
    """The dtype to measure in."""
    return torch.float32 if x.device.type == "mps" else torch.float64  # Apple's GPUs have no float64

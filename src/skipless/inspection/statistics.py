"""Statistics of what flows between blocks: norms, cosines, ranks, outliers; a few rows at a time, in bounded memory.

Nothing here waits for a GPU: `describe` leaves its results on the device, and `Described.numbers` fetches them.
"""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from skipless.inspection.inspection import QUANTILES

PICTURE = 128  # locations of the kernel that is kept for the eye
SPECTRAL_ROWS = 2  # rows whose spectrum is taken: its cost is cubic, and rows of one batch differ little
_CHUNK = 2**25  # bytes of a chunk's float64 rows or kernels, of which a handful of copies exist at a time
Ranks = tuple[float, float]
_MOST_WORKERS = 8


@dataclass(frozen=True, eq=False)
class ActivationStats:
    """Fields as in BlockSignal; norms by location, (T,); picture: cosines of the first row's first locations.

    Means over rows; norm_min, norm_max, outlier and least are extremes over them; ranks are of the first two rows.
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
    least: float
    norms: np.ndarray
    picture: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class InspectOptions:
    """What to compute, of at most `rows` rows: the spectrum, whose cost is cubic in min(T, width), a picture of the
    first row's cosines, the mean kernel, attention. mask, (batch, T), is False at padding; batch_shape is (batch, T) of
    ids or mask, one_row the shape of what enters the blocks when one row runs alone: they tell layouts apart. several:
    other stacks run in the same model, so that the mask may be of another one."""

    rows: int | None = None
    spectrum: bool = True
    picture: bool = True
    kernel: bool = False
    attention: bool = True
    mask: Tensor | None = None
    batch_shape: tuple[int, int] | None = None
    one_row: tuple[int, ...] | None = None
    several: bool = False


@dataclass(frozen=True, eq=False)
class Described:
    """Statistics on their device: values (rows, 13), norms (rows, T) with NaN at padding, kernel the mean Σ."""

    values: Tensor
    norms: Tensor
    ranks: Callable[[], Ranks]
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
            least=float(values[:, 12].min()),
            norms=_mean_over_rows(self.norms.cpu().numpy()),
            picture=None if self.picture is None else self.picture.cpu().numpy(),
        )


@torch.no_grad()
def describe(x: Tensor, options: InspectOptions) -> Described:
    """The statistics of activations (batch, T, width), in float64 where the device has it."""
    x = x[: options.rows] if options.rows else x
    values, norms, spectral, picture, total = [], [], [], None, None
    for first, rows in _chunks(x, options.mask):
        gram = rows @ rows.mT / rows.shape[-1]
        values.append(_values(rows, gram))
        norms.append(_spread_out(torch.diagonal(gram, dim1=-2, dim2=-1), options.mask, first))
        if options.spectrum:
            spectral += [_smaller(row, k) for row, k in zip(rows, gram, strict=True)][: SPECTRAL_ROWS - len(spectral)]
        if options.picture and first == 0:
            picture = cosines(gram[0, :PICTURE, :PICTURE]).float()
        if options.kernel:
            total = gram.sum(0) if total is None else total + gram.sum(0)
    kernel = None if total is None else total / len(x)
    return Described(torch.cat(values), torch.cat(norms), pending_ranks(spectral), picture, kernel)


def cosines(gram: Tensor) -> Tensor:
    """Σ_ij / √(Σ_ii Σ_jj); NaN where a norm is zero."""
    scale = torch.diagonal(gram, dim1=-2, dim2=-1).sqrt()
    return gram / (scale[..., :, None] * scale[..., None, :])


def _chunks(x: Tensor, mask: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """(index of the first row, rows (n, T, width)) in the wide dtype; one row at a time where padding differs."""
    if mask is not None:
        for index in range(len(x)):
            yield index, x[index][mask[index].to(x.device)][None].to(wide(x))
        return
    _, length, width = x.shape
    step = max(_CHUNK // (8 * length * max(length, width)), 1)
    for first in range(0, len(x), step):
        yield first, x[first : first + step].to(wide(x))


def _values(rows: Tensor, gram: Tensor) -> Tensor:
    """(n, 13): norm min, mean, max, cosine mean, five quantiles, collapse, kurtosis, outlier, least.

    Cosines are between locations that are not zero: a row of fewer than two has NaN.
    """
    length = rows.shape[-2]
    norm = torch.diagonal(gram, dim1=-2, dim2=-1)
    above, right = torch.triu_indices(length, length, 1, device=gram.device)
    apart = (norm[:, above] != 0) & (norm[:, right] != 0)
    pairs, count = cosines(gram)[:, above, right], apart.sum(-1)
    share = gram.mean((-2, -1)) * length / norm.sum(-1)
    flat, scale = rows.flatten(1), norm.mean(-1).sqrt()
    least = flat.amin(-1)
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
            torch.maximum(flat.amax(-1), -least) / scale,
            least / scale,
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


def _spread_out(norm: Tensor, mask: Tensor | None, index: int) -> Tensor:
    """Norms at their locations, NaN at padding."""
    if mask is None:
        return norm
    whole = torch.full(mask.shape[1:], math.nan, dtype=norm.dtype, device=norm.device)
    whole[mask[index].to(norm.device)] = norm[0]
    return whole[None]


def _mean_over_rows(values: np.ndarray) -> np.ndarray:
    present = ~np.isnan(values)
    count = present.sum(axis=0)
    sums = np.where(present, values, 0.0).sum(axis=0)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def wide(x: Tensor) -> torch.dtype:
    """The dtype to measure in."""
    return torch.float32 if x.device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def pending_ranks(kernels: list[Tensor]) -> Callable[[], Ranks]:
    """A function that gives the mean over the kernels, each (T, T) of any size, of their two `ranks`.

    A GPU takes eigenvalues one matrix at a time, and longer than a processor does: kernels of a model on a GPU are sent
    to threads that work beside it, so that nothing waits. Each uses one core: matrices of this size gain nothing from
    more, and where other work holds some of the cores, threads that wait for each other lose all.
    """
    if not kernels or not kernels[0].is_cuda:
        found = _mean([ranks(kernel) for kernel in kernels])
        return lambda: found
    copies = [kernel.to("cpu", non_blocking=True) for kernel in kernels]
    copied = torch.cuda.current_stream(kernels[0].device).record_event()

    def work() -> Ranks:
        copied.synchronize()
        return _mean([ranks(kernel) for kernel in copies])

    return _workers().submit(work).result


@torch.no_grad()
def ranks(kernel: Tensor) -> Ranks:
    """(exp of the entropy of the spectrum, tr Σ / λ_max); NaN where the kernel is not finite or is 0."""
    if not bool(torch.isfinite(kernel).all()):
        return math.nan, math.nan
    values = torch.linalg.eigvalsh(kernel).clamp(min=0.0)
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp()), float(1.0 / share[-1])


@cache
def _workers() -> ThreadPoolExecutor:
    count = min(_MOST_WORKERS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, "skipless-spectrum", initializer=torch.set_num_threads, initargs=(1,))


def _mean(found: list[Ranks]) -> Ranks:
    count = len(found)
    return (sum(r[0] for r in found) / count, sum(r[1] for r in found) / count) if count else (math.nan, math.nan)

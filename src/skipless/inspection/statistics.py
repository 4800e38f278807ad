"""Statistics of what flows between blocks: norms, cosines, ranks, outliers; a few rows at a time, in bounded memory.

Nothing here waits for a GPU: `describe` leaves its results on the device, and `numbers_of` fetches those of all blocks
in one transfer.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
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
    """What to compute, of at most `rows` rows: a picture of the first row's cosines, the mean kernel, attention. mask,
    (batch, T), is False at padding; batch_shape is (batch, T) of ids or mask, one_row the shape of what enters the
    blocks when one row runs alone: they tell layouts apart. several: other stacks run in the same model, so that the
    mask may be of another one. streams: the mean kernel is that of each of so many equal parts of the channels,
    (streams, T, T), where heads are streams of their own."""

    rows: int | None = None
    picture: bool = True
    kernel: bool = False
    attention: bool = True
    mask: Tensor | None = None
    batch_shape: tuple[int, int] | None = None
    one_row: tuple[int, ...] | None = None
    several: bool = False
    streams: int = 1


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
        return numbers_of([self])[0]


def fetched(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Tensors on the host, in float64: one transfer for all that are on one device, whatever their shapes."""
    found: dict[int, np.ndarray] = {}
    for device in {tensor.device for tensor in tensors}:
        own = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[index].detach().flatten() for index in own]).cpu().double().numpy()
        ends = np.cumsum([tensors[index].numel() for index in own])
        for index, part in zip(own, np.split(flat, ends[:-1]), strict=True):
            found[index] = part.reshape(tensors[index].shape)
    return [found[index] for index in range(len(tensors))]


def numbers_of(described: Sequence[Described]) -> list[ActivationStats]:
    """What was described of several activations, fetched at once and averaged over rows."""
    pictures = [each.picture for each in described if each.picture is not None]
    parts = iter(fetched([part for each in described for part in (each.values, each.norms)] + pictures))
    measured = [(next(parts), next(parts)) for _ in described]
    return [
        _averaged(*pair, each.ranks(), None if each.picture is None else next(parts).astype(np.float32))
        for pair, each in zip(measured, described, strict=True)
    ]


def _averaged(values: np.ndarray, norms: np.ndarray, ranks: Ranks, picture: np.ndarray | None) -> ActivationStats:
    mean = _mean_over_rows(values).tolist()  # a row without two non-zero locations has no cosine
    return ActivationStats(
        norm_min=float(values[:, 0].min()),
        norm_mean=float(values[:, 1].mean()),
        norm_max=float(values[:, 2].max()),
        cosine_mean=mean[3],
        collapse=mean[4],
        kurtosis=mean[5],
        outlier=float(values[:, 6].max()),
        least=float(values[:, 7].min()),
        cosine_quantiles=tuple(mean[8:]),
        effective_rank=ranks[0],
        stable_rank=ranks[1],
        norms=_mean_over_rows(norms),
        picture=picture,
    )


@torch.no_grad()
def describe(x: Tensor, options: InspectOptions) -> Described:
    """The statistics of activations (batch, T, width), in float64 where the device has it."""
    x = x[: options.rows] if options.rows else x
    values, norms, spectral, picture, total, left = [], [], [], None, None, SPECTRAL_ROWS
    for first, rows in _chunks(x, options.mask):
        gram = rows @ rows.mT / rows.shape[-1]
        cosine = cosines(gram)
        values.append(_values(rows, gram, cosine))
        norms.append(_spread_out(torch.diagonal(gram, dim1=-2, dim2=-1), options.mask, first))
        if left > 0:
            spectral.append(_smaller(rows[:left], gram[:left]))
            left -= len(rows)
        if options.picture and first == 0:
            picture = cosine[0, :PICTURE, :PICTURE].float()
        if options.kernel:
            found = gram.sum(0) if options.streams == 1 else _by_stream(rows, options.streams).sum(0)
            total = found if total is None else total + found
    kernel = None if total is None else total / len(x)
    return Described(torch.cat(values), torch.cat(norms), pending_ranks(spectral), picture, kernel)


def _by_stream(rows: Tensor, streams: int) -> Tensor:
    """Σ of each of so many equal parts of the channels, (rows, streams, T, T)."""
    parts = rows.unflatten(-1, (streams, -1)).transpose(1, 2)
    return parts @ parts.mT / parts.shape[-1]


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


def _values(rows: Tensor, gram: Tensor, cosine: Tensor) -> Tensor:
    """(n, 13): norm min, mean, max, cosine mean, collapse, kurtosis, outlier, least, five quantiles of cosines.

    Cosines are between locations that are not zero: a row of fewer than two has NaN.
    """
    length = rows.shape[-2]
    norm = torch.diagonal(gram, dim1=-2, dim2=-1)
    above, right = torch.triu_indices(length, length, 1, device=gram.device)
    pairs, alive, total = cosine[:, above, right], (norm != 0).sum(-1), norm.sum(-1)
    count = alive * (alive - 1) // 2
    share = gram.sum((-2, -1)) / (length * total)
    flat, scale = rows.flatten(1), (total / length).sqrt()
    (least, most), (low, high) = flat.aminmax(dim=-1), norm.aminmax(dim=-1)
    square = (flat - flat.mean(-1, keepdim=True)).square_()
    numbers = [
        low,
        total / length,
        high,
        pairs.nansum(-1) / count + 0.0 * total,  # NaN where an entry is not finite, not only where a norm is zero
        (1.0 - share).clamp(min=0.0).sqrt(),
        square.square().mean(-1) / square.mean(-1).square(),
        torch.maximum(most, -least) / scale,
        least / scale,
    ]
    return torch.cat([torch.stack(numbers, dim=-1), _quantiles(pairs, count)], dim=-1)


def _quantiles(pairs: Tensor, count: Tensor) -> Tensor:
    """(n, 5), of each row's `count` cosines, the rest being NaN. By linear interpolation, as numpy; by hand because
    torch.quantile refuses more than 16 million values."""
    ordered = pairs.sort().values  # NaN last
    last = (count - 1).clamp(min=0)[:, None]
    at = last * _shares(pairs.device, pairs.dtype)
    below = at.long()
    return torch.lerp(ordered.gather(1, below), ordered.gather(1, torch.minimum(below + 1, last)), at.frac())


@cache
def _shares(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(QUANTILES, device=device, dtype=dtype)


def _smaller(rows: Tensor, gram: Tensor) -> Tensor:
    """The smaller of XXᵀ/d and XᵀX/d, whose non-zero spectra agree."""
    return gram if rows.shape[-2] <= rows.shape[-1] else rows.mT @ rows / rows.shape[-1]


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


def pending_ranks(kernels: Sequence[Tensor]) -> Callable[[], Ranks]:
    """A function that gives the mean over the kernels, each (n, T, T) of any size, of their two `ranks`.

    A GPU takes eigenvalues one matrix at a time, and longer than a processor does: kernels of a model on a GPU are sent
    to threads that work beside it, so that nothing waits. Each uses one core: matrices of this size gain nothing from
    more, and where other work holds some of the cores, threads that wait for each other lose all.
    """
    if not kernels[0].is_cuda:
        found = _mean_ranks(kernels)
        return lambda: found
    copies = [kernel.to("cpu", non_blocking=True) for kernel in kernels]
    copied = torch.cuda.current_stream(kernels[0].device).record_event()

    def work() -> Ranks:
        copied.synchronize()
        return _mean_ranks(copies)

    return _workers().submit(work).result


@torch.no_grad()
def ranks(kernels: Tensor) -> Tensor:
    """(n, 2) of kernels (n, T, T): exp of the entropy of the spectrum, and tr Σ / λ_max; NaN where a kernel is not
    finite or is 0."""
    finite = torch.isfinite(kernels).flatten(1).all(1)
    values = torch.linalg.eigvalsh(kernels.where(finite[:, None, None], 0.0)).clamp(min=0.0)
    share = values / values.sum(-1, keepdim=True)
    return torch.stack([torch.special.entr(share).sum(-1).exp(), 1.0 / share[:, -1]], dim=-1)


@cache
def _workers() -> ThreadPoolExecutor:
    count = min(_MOST_WORKERS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, "skipless-spectrum", initializer=torch.set_num_threads, initargs=(1,))


def _mean_ranks(kernels: Sequence[Tensor]) -> Ranks:
    effective, stable = torch.cat([ranks(kernel) for kernel in kernels]).mean(0).tolist()
    return effective, stable

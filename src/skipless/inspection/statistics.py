"""Statistics of what flows between blocks: norms, cosines, ranks, and theory's prediction of them."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from skipless.nn.block import Activation
from skipless.ops.bias import BiasVectors
from skipless.theory import local_maps
from skipless.theory.activations import ShapedActivation
from skipless.theory.propagation import Attend, Chain, KernelLayer, MirroredMlp, Mlp, Normalise, Residual
from skipless.theory.shapes import AttentionShape, IdentityShape

Ranks = tuple[float, float]
_MOST_WORKERS = 8


def later(kernels: list[Tensor]) -> Callable[[], Ranks]:
    """A function that gives the mean over the kernels, each (T, T) of any size, of their two `ranks`."""
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
    return Described(torch.cat(values), torch.cat(norms), later(spectral), picture, kernel)


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


_PARSEVAL = 1e-12  # as in theory.local_maps
_NEGLIGIBLE = 1e-13
_MOST_TERMS = 256


@torch.no_grad()
def predict(layers: Sequence[KernelLayer], kernel: Tensor) -> list[dict[str, float]]:
    """Mean norm, mean cosine and mean gradient gain of Σ_0, Σ_1, …, up to the last kernel that is finite with norms
    above 0. kernel is Σ_0, (T, T) in float64. Gains count from the last block: they are NaN if it is not reached.
    """
    states = [kernel]
    for layer in layers:
        state = _forward(layer, states[-1])
        if not bool((torch.isfinite(state).all()) & (torch.diagonal(state) > 0).all()):
            break
        states.append(state)
    gains = [torch.full_like(kernel[0], math.nan) for _ in states]
    if len(states) > len(layers):
        gradient = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        gains[-1] = torch.diagonal(gradient)
        for index in range(len(layers) - 1, -1, -1):
            gradient = _backward(layers[index], gradient, states[index])
            gains[index] = torch.diagonal(gradient)
    pairs = zip(states, gains, strict=True)
    rows = torch.stack([torch.stack([torch.diagonal(s).mean(), _mean_cosine(s), g.mean()]) for s, g in pairs])
    return [dict(zip(("norm", "cosine", "gradient"), row, strict=True)) for row in rows.tolist()]


def _forward(layer: KernelLayer, kernel: Tensor) -> Tensor:
    match layer:
        case Attend():
            heads = _heads(layer.shape, kernel)
            return (heads @ kernel @ heads.mT).mean(0)
        case Mlp():
            return _mapped(layer, 0, kernel)
        case MirroredMlp():
            return kernel
        case Normalise():
            scale = torch.diagonal(kernel).sqrt()
            return kernel / torch.outer(scale, scale)
        case Residual():
            return layer.skip.shortcut**2 * kernel + layer.skip.residual**2 * _forward(layer.branch, kernel)
        case Chain():
            for each in layer.layers:
                kernel = _forward(each, kernel)
            return kernel
    raise TypeError(f"{type(layer).__name__} has no map of kernels here; add it to analysis.prediction")


def _backward(layer: KernelLayer, gradient: Tensor, kernel: Tensor) -> Tensor:
    """G at the input from G at the output, given Σ at the input."""
    match layer:
        case Attend():
            heads = _heads(layer.shape, kernel)
            return (heads.mT @ gradient @ heads).mean(0)
        case Mlp():
            return gradient * _mapped(layer, 1, kernel)
        case MirroredMlp():
            return gradient
        case Normalise():
            scale = torch.diagonal(kernel).sqrt()
            return gradient / torch.outer(scale, scale)
        case Residual():
            through = _backward(layer.branch, gradient, kernel)
            return layer.skip.shortcut**2 * gradient + layer.skip.residual**2 * through
        case Chain():
            inputs = [kernel]
            for each in layer.layers[:-1]:
                inputs.append(_forward(each, inputs[-1]))
            for each, before in zip(reversed(layer.layers), reversed(inputs), strict=True):
                gradient = _backward(each, gradient, before)
            return gradient
    raise TypeError(f"{type(layer).__name__} has no map of gradients here; add it to analysis.prediction")


def _heads(shape: AttentionShape, like: Tensor) -> Tensor:
    """A per head, (1 or heads, T, T)."""
    length = len(like)
    if isinstance(shape, IdentityShape):
        return torch.eye(length, dtype=like.dtype, device=like.device)[None]
    parts = BiasVectors.of(shape, length, like.device, like.dtype)
    here = torch.arange(length, device=like.device)
    bias, row_scale = parts.between(here, here)
    if shape.causal:
        bias = bias.masked_fill(here[:, None] < here, -math.inf)
    return bias.softmax(-1) * row_scale[:, None]


def _mapped(layer: Mlp, order: int, kernel: Tensor) -> Tensor:
    """σ²E[φ⁽ᵏ⁾(u)φ⁽ᵏ⁾(v)], k = `order`: by Mehler's series where at most 256 terms reach rounding, else by theory's own
    maps, which have closed forms for kinks and for large variances, on the processor."""
    found = None if layer.activation.rectified else _series(layer.activation, order, torch.diagonal(kernel))
    if found is None:
        exact: Callable = local_maps.derivative_kernel_map if order else local_maps.kernel_map
        return torch.from_numpy(exact(layer.activation, kernel.cpu().numpy(), layer.weight_gain)).to(kernel)
    coefficients, square = found
    scale = torch.diagonal(kernel).sqrt()
    cosine = (kernel / torch.outer(scale, scale)).clamp(-1.0, 1.0).fill_diagonal_(0.0)
    total = _mehler_sum(coefficients, square, cosine)
    return layer.weight_gain**2 * total.diagonal_scatter(square)


def _mehler_sum(coefficients: Tensor, square: Tensor, cosine: Tensor) -> Tensor:
    """Σ_k a_k(i) a_k(j) c_ij^k over the k that matter, by Horner's rule."""
    exponents = torch.arange(coefficients.shape[1], device=cosine.device)
    share = (coefficients.square() / square[:, None]).amax(0) * cosine.abs().amax() ** exponents
    kept = torch.nonzero(share > _NEGLIGIBLE / len(share)).flatten().tolist()
    gaps = [after - before for before, after in zip([0, *kept], kept, strict=False)]
    powers = {gap: cosine**gap for gap in set(gaps) if gap}
    total = torch.zeros_like(cosine)
    for k, gap in zip(reversed(kept), reversed(gaps), strict=True):
        total.addr_(coefficients[:, k], coefficients[:, k])
        if gap:
            total.mul_(powers[gap])
    return total


def _series(activation: ShapedActivation, order: int, variance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Hermite coefficients (T, terms) of φ⁽ᵒʳᵈᵉʳ⁾(√q x) and E[φ⁽ᵒʳᵈᵉʳ⁾²], or None where 256 terms are too few."""
    spread = abs(activation.input_scale) * math.sqrt(float(variance.max()))
    if spread > 2.0:
        return None
    nodes, weights = (_on(array, variance) for array in local_maps.nodes())
    values = _predicted_values(activation, order, variance.sqrt()[:, None] * nodes)
    square = values.square() @ weights
    terms = 64
    while terms <= _MOST_TERMS:
        coefficients = values @ _on(local_maps.weighted_hermite(local_maps.ORDER, terms), variance)
        missing = (square - coefficients.square().sum(-1)).abs()
        if bool((missing <= _PARSEVAL * square).all()):
            return coefficients, square
        terms *= 2
    return None


def _predicted_values(activation: ShapedActivation, order: int, x: Tensor) -> Tensor:
    if order == 0:
        return Activation(activation)(x)
    with torch.enable_grad():
        x = x.requires_grad_()
        return torch.autograd.grad(Activation(activation)(x).sum(), x)[0]


def _on(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.tensor(array, dtype=like.dtype, device=like.device)


def _mean_cosine(kernel: Tensor) -> Tensor:
    scale = torch.diagonal(kernel).rsqrt()
    length = len(kernel)
    return ((scale @ kernel @ scale) - length) / (length * (length - 1))

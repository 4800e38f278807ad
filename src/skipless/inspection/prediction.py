"""What theory predicts of a network by depth, in torch on the device of the measurement beside which it stands."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from skipless.nn.block import Activation
from skipless.ops.bias import BiasVectors
from skipless.theory import local_maps
from skipless.theory.activations import ShapedActivation
from skipless.theory.propagation import (
    Attend,
    AttendByHead,
    AttendInput,
    Chain,
    KernelLayer,
    MirroredMlp,
    Mlp,
    Normalise,
    Residual,
)
from skipless.theory.shapes import AttentionShape, IdentityShape

_PARSEVAL = 1e-12  # as in theory.local_maps
_NEGLIGIBLE = 1e-13
_MOST_TERMS = 256


@torch.no_grad()
def predict(layers: Sequence[KernelLayer], kernel: Tensor) -> list[dict[str, float]]:
    """Mean norm, mean cosine and mean gradient gain of Σ_0, Σ_1, …, up to the last kernel that is finite with norms
    above 0. kernel is Σ_0, (T, T) in float64, or that of each head where heads are streams of their own. Gains count
    from the last block: they are NaN if it is not reached.
    """
    state, states, shapes = kernel, [_whole(kernel)], _Shapes(_whole(kernel))
    for layer in layers:
        state = _forward(layer, state, shapes)
        states.append(_whole(state))
    sound = torch.stack([torch.isfinite(state).all() & (torch.diagonal(state) > 0).all() for state in states[1:]])
    states = states[: 1 + int(sound.long().cumprod(0).sum())]
    gains = [torch.full_like(states[0][0], math.nan) for _ in states]
    if len(states) > len(layers):
        gradient = torch.eye(len(states[0]), dtype=kernel.dtype, device=kernel.device)
        gains[-1] = torch.diagonal(gradient)
        for index in range(len(layers) - 1, -1, -1):
            gradient = _backward(layers[index], gradient, states[index], shapes)
            gains[index] = torch.diagonal(_whole(gradient))
    pairs = zip(states, gains, strict=True)
    rows = torch.stack([torch.stack([torch.diagonal(s).mean(), _mean_cosine(s), g.mean()]) for s, g in pairs])
    return [dict(zip(("norm", "cosine", "gradient"), row, strict=True)) for row in rows.tolist()]


def _whole(kernel: Tensor) -> Tensor:
    """theory.propagation.whole: the mean over heads, where there is one of each."""
    return kernel if kernel.dim() == 2 else kernel.mean(0)


def _forward(layer: KernelLayer, kernel: Tensor, shapes: "_Shapes") -> Tensor:
    match layer:
        case Attend():
            heads = shapes.heads(layer.shape)
            return (heads @ kernel @ heads.mT).mean(0)
        case AttendByHead():
            heads = shapes.heads(layer.shape)
            return heads @ kernel @ heads.mT
        case AttendInput():
            mixing = _mixing(layer, kernel, shapes)
            return (mixing @ kernel @ mixing.mT).mean(0)
        case Mlp():
            return _mapped(layer, 0, kernel)
        case MirroredMlp():
            return kernel
        case Normalise():
            scale = torch.diagonal(kernel).sqrt()
            return kernel / torch.outer(scale, scale)
        case Residual():
            return layer.skip.shortcut**2 * kernel + layer.skip.residual**2 * _forward(layer.branch, kernel, shapes)
        case Chain():
            for each in layer.layers:
                kernel = _forward(each, kernel, shapes)
            return kernel
    raise TypeError(f"{type(layer).__name__} has no map of kernels here; add it to inspection.prediction")


def _backward(layer: KernelLayer, gradient: Tensor, kernel: Tensor, shapes: "_Shapes") -> Tensor:
    """G at the input from G at the output, given Σ at the input."""
    match layer:
        case Attend():
            heads = shapes.heads(layer.shape)
            return (heads.mT @ gradient @ heads).mean(0)
        case AttendByHead():
            heads = shapes.heads(layer.shape)
            return heads.mT @ gradient @ heads
        case AttendInput():
            mixing = _mixing(layer, kernel, shapes)
            return (mixing.mT @ gradient @ mixing).mean(0)
        case Mlp():
            return gradient * _mapped(layer, 1, kernel)
        case MirroredMlp():
            return gradient
        case Normalise():
            scale = torch.diagonal(kernel).sqrt()
            return gradient / torch.outer(scale, scale)
        case Residual():
            through = _backward(layer.branch, gradient, kernel, shapes)
            return layer.skip.shortcut**2 * gradient + layer.skip.residual**2 * through
        case Chain():
            inputs = [kernel]
            for each in layer.layers[:-1]:
                inputs.append(_forward(each, inputs[-1], shapes))
            for each, before in zip(reversed(layer.layers), reversed(inputs), strict=True):
                gradient = _backward(each, gradient, before, shapes)
            return gradient
    raise TypeError(f"{type(layer).__name__} has no map of gradients here; add it to inspection.prediction")


def _mixing(layer: AttendInput, kernel: Tensor, shapes: "_Shapes") -> Tensor:
    """αI + βA_h of each head, with A_h·diag(Σ)^−½ for A_h behind a norm."""
    heads = shapes.heads(layer.shape)
    heads = heads / torch.diagonal(kernel).sqrt() if layer.normalised else heads
    own = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    return layer.skip.shortcut * own + layer.skip.residual * heads


class _Shapes:
    """Attention of every shape, made once for both directions; as many matrices are held as kernels are."""

    def __init__(self, like: Tensor):
        self.like, self._found = like, {}

    def heads(self, shape: AttentionShape) -> Tensor:
        """A per head, (1 or heads, T, T)."""
        if id(shape) not in self._found:
            self._found[id(shape)] = self._made(shape), shape
        return self._found[id(shape)][0]

    def _made(self, shape: AttentionShape) -> Tensor:
        like, length = self.like, len(self.like)
        if isinstance(shape, IdentityShape):
            return torch.eye(length, dtype=like.dtype, device=like.device)[None]
        vectors = BiasVectors.of(shape, length, like.device, like.dtype)
        here = torch.arange(length, device=like.device)
        bias, row_scale = vectors.between(here, here)
        if shape.causal:
            bias = bias.masked_fill(here[:, None] < here, -math.inf)
        return bias.softmax(-1) * row_scale


def _mapped(layer: Mlp, order: int, kernel: Tensor) -> Tensor:
    """σ²E[φ⁽ᵏ⁾(u)φ⁽ᵏ⁾(v)], k = `order`: by Mehler's series where at most 256 terms reach rounding, else by theory's own
    maps, which have closed forms for kinks and for large variances, on the processor."""
    variance = torch.diagonal(kernel)
    scale = variance.sqrt()
    cosine = (kernel / torch.outer(scale, scale)).clamp(-1.0, 1.0).fill_diagonal_(0.0)
    found = None if layer.activation.rectified else _series(layer.activation, order, variance, cosine)
    if found is None:
        exact: Callable = local_maps.derivative_kernel_map if order else local_maps.kernel_map
        values = kernel.cpu().numpy()
        if not np.isfinite(values).all():
            return torch.full_like(kernel, math.nan)
        return torch.from_numpy(exact(layer.activation, values, layer.weight_gain)).to(kernel)
    total = _mehler_sum(found, cosine)
    return layer.weight_gain**2 * total.diagonal_scatter(found.square)


@dataclass(frozen=True, eq=False)
class _Series:
    """Hermite coefficients (T, terms) of φ⁽ᵒʳᵈᵉʳ⁾(√q x), E[φ⁽ᵒʳᵈᵉʳ⁾²], and the terms that matter."""

    coefficients: Tensor
    square: Tensor
    kept: list[int]


def _mehler_sum(series: _Series, cosine: Tensor) -> Tensor:
    """Σ_k a_k(i) a_k(j) c_ij^k over the k that matter, by Horner's rule."""
    kept, columns = series.kept, series.coefficients.unbind(1)
    gaps = [after - before for before, after in zip([0, *kept], kept, strict=False)]
    powers = {gap: cosine**gap for gap in set(gaps) if gap}
    total = torch.zeros_like(cosine)
    for k, gap in zip(reversed(kept), reversed(gaps), strict=True):
        total.addr_(columns[k], columns[k])
        if gap:
            total.mul_(powers[gap])
    return total


def _series(activation: ShapedActivation, order: int, variance: Tensor, cosine: Tensor) -> _Series | None:
    """None where 256 terms are too few. What decides is read off the device once for each number of terms."""
    nodes, weights = _quadrature(variance.device, variance.dtype)
    values = _predicted_values(activation, order, variance.sqrt()[:, None] * nodes)
    square = values.square() @ weights
    terms, widest = 64, cosine.abs().amax()
    while terms <= _MOST_TERMS:
        coefficients = values @ _polynomials(terms, variance.device, variance.dtype)
        squares = coefficients.square()
        missing = ((square - squares.sum(-1)).abs() / square).amax()  # by Parseval's identity
        share = (squares / square[:, None]).amax(0) * widest ** torch.arange(terms, device=cosine.device)
        largest, left, *shares = torch.cat([torch.stack([variance.amax(), missing]), share]).tolist()
        if not abs(activation.input_scale) * math.sqrt(max(largest, 0.0)) <= 2.0:
            return None
        if left <= _PARSEVAL:
            return _Series(coefficients, square, [k for k, each in enumerate(shares) if each > _NEGLIGIBLE / terms])
        terms *= 2
    return None


@cache
def _quadrature(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    nodes, weights = local_maps.nodes()
    return torch.tensor(nodes, dtype=dtype, device=device), torch.tensor(weights, dtype=dtype, device=device)


@cache
def _polynomials(terms: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(local_maps.weighted_hermite(local_maps.ORDER, terms), dtype=dtype, device=device)


def _predicted_values(activation: ShapedActivation, order: int, x: Tensor) -> Tensor:
    if order == 0:
        return Activation(activation)(x)
    with torch.enable_grad():
        x = x.requires_grad_()
        return torch.autograd.grad(Activation(activation)(x).sum(), x)[0]


def _mean_cosine(kernel: Tensor) -> Tensor:
    scale = torch.diagonal(kernel).rsqrt()
    length = len(kernel)
    return ((scale @ kernel @ scale) - length) / (length * (length - 1))

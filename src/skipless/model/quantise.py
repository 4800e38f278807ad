"""Matrices, and what enters them, rounded to few bits and computed with as they then are: what is lost, not the speed.

Round to nearest, without calibration data, so that networks and not methods of repair are compared. One scale for each
row of a matrix and each location of an activation, or one for the whole tensor:

    int8, int4    s = max|x| / 127.5 (7.5), x̂ = s·clamp(round(x/s)): torchao's symmetric integers
    fp8           s = max|x| / 448, x/s as float8 e4m3
    nf4           64 numbers share a scale, and each takes the nearest of 16 quantiles of a normal distribution
                  (Dettmers et al. 2023, arXiv:2305.14314); bitsandbytes' "nf4"

Embedding, unembedding, norms and biases stay as they are.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from scipy.special import ndtri
from torch import Tensor, nn

from skipless.console import nearest

_FP8_LARGEST = 448.0
_NF4_BLOCK = 64
Rounded = Callable[[Tensor, bool], Tensor]  # of a tensor, with one scale for all of it or one for each row


def integers(x: Tensor, bits: int, per_tensor: bool = False) -> Tensor:
    """x rounded to 2^bits evenly spaced levels around 0."""
    top = 2 ** (bits - 1)
    scale = _largest(x, per_tensor) / (top - 0.5)
    return (x / scale).round().clamp(-top, top - 1) * scale


def fp8(x: Tensor, per_tensor: bool = False) -> Tensor:
    """x rounded to float8 e4m3: three bits of mantissa, whose largest number is 448."""
    scale = _largest(x, per_tensor) / _FP8_LARGEST
    return (x / scale).clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).to(x.dtype) * scale


def nf4(x: Tensor, per_tensor: bool = False) -> Tensor:
    """x rounded to 4-bit normal floats in blocks of 64, in the order in which a matrix is stored."""
    flat = x.flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % _NF4_BLOCK)).view(-1, _NF4_BLOCK)
    scale = _largest(blocks, per_tensor)
    levels = torch.tensor(nf4_levels(), dtype=x.dtype, device=x.device)
    found = torch.bucketize(blocks / scale, (levels[1:] + levels[:-1]) / 2.0)
    return (levels[found] * scale).flatten()[: len(flat)].view_as(x)


@cache
def nf4_levels() -> tuple[float, ...]:
    """The 16 numbers of nf4: quantiles of the normal distribution, 8 above 0 and 7 below, the largest scaled to 1."""
    last = 1.0 - (1.0 / 30.0 + 1.0 / 32.0) / 2.0
    sides = [[float(ndtri(0.5 + (last - 0.5) * k / n)) / float(ndtri(last)) for k in range(1, n + 1)] for n in (7, 8)]
    return tuple([-level for level in reversed(sides[0])] + [0.0] + sides[1])


def _largest(x: Tensor, per_tensor: bool) -> Tensor:
    """max|x| of each row or of all; 1 where all is 0, which any scale leaves at 0."""
    size = x.abs().amax() if per_tensor else x.abs().amax(dim=-1, keepdim=True)
    return torch.where(size == 0, torch.ones_like(size), size)


@dataclass(frozen=True)
class Quantisation:
    """How matrices are rounded, and how their inputs are, if at all."""

    name: str
    words: str
    weights: Rounded
    inputs: Rounded | None = None
    per_tensor: bool = False


def _integers(bits: int) -> Rounded:
    return lambda x, per_tensor: integers(x, bits, per_tensor)


_int8, _int4 = _integers(8), _integers(4)
QUANTISATIONS = {
    each.name: each
    for each in (
        Quantisation("int8", "weights and activations in int8 (W8A8)", _int8, _int8),
        Quantisation("int8-tensor", "W8A8, one scale a tensor", _int8, _int8, per_tensor=True),
        Quantisation("int8-weights", "weights in int8 (W8A16)", _int8),
        Quantisation("int8-weights-tensor", "W8A16, one scale a tensor", _int8, per_tensor=True),
        Quantisation("int4-weights", "weights in int4 (W4A16)", _int4),
        Quantisation("int4-weights-tensor", "W4A16, one scale a tensor", _int4, per_tensor=True),
        Quantisation("nf4", "weights in 4-bit normal floats", nf4),
        Quantisation("fp8", "weights and activations in float8 e4m3", fp8, fp8),
        Quantisation("fp8-tensor", "float8 e4m3, one scale a tensor", fp8, fp8, per_tensor=True),
    )
}


def quantisation(name: str) -> Quantisation:
    """The quantisation of this name; ValueError names the nearest."""
    if name not in QUANTISATIONS:
        raise ValueError(f"there is no quantisation {name!r}; {nearest(name, QUANTISATIONS)}")
    return QUANTISATIONS[name]


@contextmanager
def quantised(blocks: Iterable[nn.Module], how: Quantisation | str) -> Generator[None]:
    """While open, every nn.Linear in these modules, such as model.blocks, computes as if rounded so."""
    how = quantisation(how) if isinstance(how, str) else how
    layers = [layer for block in blocks for layer in block.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ValueError(
            "there is no nn.Linear to quantise: matrices of other modules, as GPT-2's Conv1D, are not known"
        )
    weights = {id(layer.weight): layer.weight for layer in layers}.values()  # a shared one once
    before = [weight.data for weight in weights]
    hooks = []
    try:
        for weight in weights:
            weight.data = _exactly(weight.data, how.weights, how.per_tensor)
        if (inputs := how.inputs) is not None:
            hooks = [
                layer.register_forward_pre_hook(lambda _, args: (_exactly(args[0], inputs, how.per_tensor), *args[1:]))
                for layer in layers
            ]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weight, data in zip(weights, before, strict=True):
            weight.data = data


def _exactly(x: Tensor, rounded: Rounded, per_tensor: bool) -> Tensor:
    """Rounded in float32 or better, then in the tensor's own precision."""
    return rounded(x.detach().to(torch.promote_types(x.dtype, torch.float32)), per_tensor).to(x.dtype)

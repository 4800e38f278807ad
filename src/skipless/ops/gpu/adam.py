"""Adam on the GPU: one kernel for all parameters of a group, and one for the norm of their gradients."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_AT_ONCE = 8  # tensors in one launch: enough to fill a GPU with matrices, few enough to compile in a second


class Moments(NamedTuple):
    """What an update of one tensor touches: count (of steps, this one included) is a tensor of one number.

    The gradient may be in less precision; half is the half-precision copy of value, or value itself.
    """

    count: Tensor
    value: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    half: Tensor


class Constants(NamedTuple):
    """A group's settings; the rate and the scale of gradients are tensors of one number."""

    rate: Tensor
    scale: Tensor
    betas: tuple[float, float]
    eps: float
    decay: float = 0.0
    decoupled: bool = False


def update(moments: Sequence[Moments], constants: Constants) -> None:
    """Kingma and Ba's Algorithm 1 on each, in place; with copies all of one precision, and one kind of gradient."""
    rate, scale, (first, second), eps, decay, decoupled = constants
    kernel: Any = _update  # the decorated function takes more than its signature says
    for start in range(0, len(moments), _AT_ONCE):
        part = moments[start : start + _AT_ONCE]
        sizes = tuple(each.value.numel() for each in part)
        ends, blocks = [], 0
        for size in sizes:
            blocks += -(-size // _BLOCK)
            ends.append(blocks)
        columns = tuple(zip(*part, strict=True))
        kernel[(blocks,)](
            *columns,
            sizes,
            tuple(ends),
            rate,
            scale,
            second,
            1.0 - first,  # here, in float64: the kernel's float32 would round β₂ before taking it from 1
            1.0 - second,
            math.log(first),
            math.log(second),
            eps,
            decay,
            COUNT=len(part),
            DECAYS=decay != 0.0,
            DECOUPLED=decoupled,
            HALF=part[0].half is not part[0].value,
            BLOCK=_BLOCK,
            num_warps=4,
        )


@triton.jit
def _update(
    counts, values, gradients, means, squares, halves, sizes, ends, rate, scale, second, new_first, new_second,
    log_first, log_second, eps, decay,
    COUNT: tl.constexpr, DECAYS: tl.constexpr, DECOUPLED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    eta = tl.load(rate)
    factor = tl.load(scale)
    shrink = 1.0 - eta * decay
    start = 0
    for index in tl.static_range(COUNT):
        if (program >= start) & (program < ends[index]):
            steps = tl.load(counts[index])
            step_size = eta / _one_minus_exp(steps * log_first)
            spread = tl.sqrt(_one_minus_exp(steps * log_second))
            offsets = (program - start).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < sizes[index]
            value = tl.load(values[index] + offsets, mask=inside)
            gradient = tl.load(gradients[index] + offsets, mask=inside).to(tl.float32) * factor
            mean = tl.load(means[index] + offsets, mask=inside)
            square = tl.load(squares[index] + offsets, mask=inside)
            if DECAYS:
                if DECOUPLED:
                    value *= shrink
                else:
                    gradient += decay * value
            mean += new_first * (gradient - mean)
            square = second * square + new_second * gradient * gradient
            value -= step_size * mean / (tl.sqrt(square) / spread + eps)
            tl.store(values[index] + offsets, value, mask=inside)
            tl.store(means[index] + offsets, mean, mask=inside)
            tl.store(squares[index] + offsets, square, mask=inside)
            if HALF:
                tl.store(halves[index] + offsets, value.to(halves[index].dtype.element_ty), mask=inside)
        start = ends[index]


@triton.jit
def _one_minus_exp(x):
    """1 − eˣ for x ≤ 0, without cancelling near 0: bias corrections after few steps."""
    series = 1.0 + x / 8.0
    for term in tl.static_range(6):
        series = 1.0 + x / (7.0 - term) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


_NORM_BLOCK = 8192  # numbers of one program
_NORMS_AT_ONCE = 16  # tensors in one launch


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """√Σx² over contiguous tensors of one dtype and device, in float32."""
    kernel: Any = _squares  # the decorated function takes more than its signature says
    counts = [-(-tensor.numel() // _NORM_BLOCK) for tensor in tensors]
    sums = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    first = 0
    for start in range(0, len(tensors), _NORMS_AT_ONCE):
        part, ends = (
            tensors[start : start + _NORMS_AT_ONCE],
            tuple(itertools.accumulate(counts[start : start + _NORMS_AT_ONCE])),
        )
        if not ends[-1]:  # all empty
            continue
        kernel[(ends[-1],)](
            tuple(part), tuple(tensor.numel() for tensor in part), ends, sums[first:],
            COUNT=len(part), BLOCK=_NORM_BLOCK, num_warps=8,
        )  # fmt: skip
        first += ends[-1]
    return sums.sum().sqrt()


@triton.jit
def _squares(tensors, sizes, ends, sums, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Σx² of one block of one tensor."""
    program = tl.program_id(0)
    start = 0
    for index in tl.static_range(COUNT):
        if (program >= start) & (program < ends[index]):
            offsets = (program - start).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(tensors[index] + offsets, mask=offsets < sizes[index], other=0.0).to(tl.float32)
            tl.store(sums + program, tl.sum(x * x, 0))
        start = ends[index]

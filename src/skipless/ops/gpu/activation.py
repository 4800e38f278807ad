"""γ(φ(α(x + b) + β) + δ) for the exact GELU, and its gradients: two GPU kernels, and the torch operators they are.

In the kernels w = z·√(log₂e/2) stands for the Gaussian's argument z, so that √(2π)·pdf(z) = 2^(−w²).
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

# Φ(−|z|)·2^(w²) = P(s), s = 1/√(1 + A|w| + B·w²). A, B and P's six coefficients together are the minimax of the
# relative error, 6.8e-7, over every z whose 2^(−w²) float32 holds, |z| < 13.2: found by Remez' exchange over the nine
# points where the error alternates. An rsqrt is one instruction of the GPU, where even an inexact division is nine.
COEFFICIENTS = (0.1272689154, 0.02134127891, 0.1286145071, 0.1038207438, 0.1190082181, -5.400121395e-05)  # s⁵ … s⁰
LINEAR, SQUARE = 0.6550054978, 0.1213603578
UNIT = math.sqrt(math.log2(math.e) / 2)

_C5, _C4, _C3, _C2, _C1, _C0 = map(tl.constexpr, COEFFICIENTS)
_LINEAR, _SQUARE = tl.constexpr(LINEAR), tl.constexpr(SQUARE)
_FAR = tl.constexpr(16.0)  # by 12.3 2^(−w²) is 0, and infinity times that would be NaN
_DENSITY = tl.constexpr(1 / (UNIT * math.sqrt(2 * math.pi)))  # z·pdf(z) = this·w·2^(−w²)

# A warp has 256 columns of a row, 16 bytes to a thread. A program goes down GROUP rows, ROWS at a time, while the next
# two lots are on their way to shared memory: left to order plain loads, the compiler puts some after the arithmetic.
# With 64 registers to a thread an H200 holds all 64 × 16 programs of 8192 × 4096 entries at once.
COLUMNS, GROUP, WARPS, REGISTERS = 256, 128, 4, 64
FORWARD_ROWS, BACKWARD_ROWS = 16, 8
_STAGES = tl.constexpr(3)


@triton.jit
def _tail(w):
    """(min(|w|, far), P, 2^(−w²)): Φ(−|z|) is the product of the last two. NaN is NaN in the last."""
    size = tl.minimum(tl.abs(w), _FAR)
    s = tl.rsqrt(size * (size * _SQUARE + _LINEAR) + 1.0)
    ratio = ((((_C5 * s + _C4) * s + _C3) * s + _C2) * s + _C1) * s + _C0
    return size, ratio, tl.exp2(-(w * w))


@triton.jit
def _column_shift(bias, columns, inside, scale, shift, BIASED: tl.constexpr):
    """scale·b + shift of these columns, so that w = scale·x + this."""
    if BIASED:
        return tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32) * scale + shift
    return tl.zeros_like(columns).to(tl.float32) + shift


@triton.jit
def _tile(rows, n, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """(group, where it starts, rows in it, columns) of this program: GROUP rows or what is left, COLUMNS columns."""
    across = tl.cdiv(n, COLUMNS)
    group = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    return group, group.to(tl.int64) * GROUP * n, tl.minimum(rows - group * GROUP, GROUP), column


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x, bias, y, rows, n, scale, shift, out_scale, out_shift,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP rows of y. zΦ(z) = max(z, 0) − |z|Φ(−|z|), on both sides of 0."""
    _, start, count, column = _tile(rows, n, GROUP, COLUMNS)
    moved = _column_shift(bias, column, column < n, scale, shift, BIASED)
    x, y = x + start, y + start
    for top in tl.range(0, count, ROWS, num_stages=_STAGES):
        row = top + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < n)[None, :]
        at = row[:, None] * n + column[None, :]
        w = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale + moved[None, :]
        size, ratio, density = _tail(w)
        value = (tl.maximum(w, 0.0) - size * (ratio * density)) * out_scale + out_shift
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy, x, bias, dx, sums, rows, n, scale, shift, out_scale,
    BIASED: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """GROUP rows of dx = dy·out_scale·(Φ(z) + z·pdf(z)), and their sum, in float32, before dx is rounded."""
    group, start, count, column = _tile(rows, n, GROUP, COLUMNS)
    moved = _column_shift(bias, column, column < n, scale, shift, BIASED)
    dy, x, dx = dy + start, x + start, dx + start
    total = tl.zeros((WARPS, COLUMNS), dtype=tl.float32)
    for top in tl.range(0, count, ROWS, num_stages=_STAGES):
        row = top + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < n)[None, :]
        at = row[:, None] * n + column[None, :]
        w = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale + moved[None, :]
        upstream = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        size, ratio, density = _tail(w)
        left = (ratio - size * _DENSITY) * density  # the slope at −|z|; at |z| it is one minus that
        slope = upstream * out_scale * tl.where(w < 0, left, 1.0 - left)
        tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=inside)
        if SUMS:
            total += tl.sum(tl.reshape(slope, (ROWS // WARPS, WARPS, COLUMNS)), 0)  # over the rows of one thread
    if SUMS:
        tl.store(sums + group.to(tl.int64) * n + column, tl.sum(total, 0), mask=column < n)


def _tiles(rows: int, n: int) -> int:
    return -(-rows // GROUP) * -(-n // COLUMNS)  # on the host triton.cdiv takes microseconds


@library.custom_op("skipless::biased_gelu", mutates_args=())
def biased_gelu(
    x: Tensor, bias: Tensor | None, input_scale: float, input_shift: float, output_shift: float, output_scale: float
) -> Tensor:
    """γ(φ(α(x + b) + β) + δ), computed in float32 and returned in x's dtype; x (…, n)."""
    kernel: Any = forward_kernel  # the decorated function takes more than its signature says
    x, bias, n = x.contiguous(), _contiguous(bias), x.shape[-1]
    y, rows = torch.empty_like(x), x.numel() // n
    if rows:
        with torch.cuda.device_of(x):
            kernel[(_tiles(rows, n),)](
                x, bias, y, rows, n, input_scale * UNIT, input_shift * UNIT, output_scale / UNIT,
                output_scale * output_shift, BIASED=bias is not None, ROWS=FORWARD_ROWS, COLUMNS=COLUMNS, GROUP=GROUP,
                num_warps=WARPS,
            )  # fmt: skip
    return y


@library.custom_op("skipless::biased_gelu_backward", mutates_args=())
def biased_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, input_scale: float, input_shift: float, output_scale: float, sums: bool
) -> tuple[Tensor, Tensor]:
    """(dx in x's dtype, its sums over each GROUP rows in float32; without `sums` there are none of these)."""
    kernel: Any = backward_kernel
    dy, x, bias, n = dy.contiguous(), x.contiguous(), _contiguous(bias), x.shape[-1]
    dx, totals = _gradients(x, sums)
    rows = x.numel() // n
    if rows:
        with torch.cuda.device_of(x):
            kernel[(_tiles(rows, n),)](
                dy, x, bias, dx, totals, rows, n, input_scale * UNIT, input_shift * UNIT, output_scale * input_scale,
                BIASED=bias is not None, SUMS=sums, ROWS=BACKWARD_ROWS, COLUMNS=COLUMNS, GROUP=GROUP, WARPS=WARPS,
                num_warps=WARPS, maxnreg=REGISTERS,
            )  # fmt: skip
    return dx, totals


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _gradients(x: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    """Empty, to be filled: dx, and the sums of its groups."""
    n = x.shape[-1]
    groups = -(-(x.numel() // n) // GROUP) if sums else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty((groups, n), dtype=torch.float32)


@biased_gelu.register_fake
def _(x, bias, input_scale, input_shift, output_shift, output_scale):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@biased_gelu_backward.register_fake
def _(dy, x, bias, input_scale, input_shift, output_scale, sums):
    return _gradients(x, sums)


def _save(ctx, inputs, output) -> None:
    x, bias, input_scale, input_shift, _, output_scale = inputs
    ctx.save_for_backward(x, bias)
    ctx.constants = input_scale, input_shift, output_scale


def _differentiate(ctx, dy: Tensor):
    x, bias = ctx.saved_tensors
    of_x, of_bias = ctx.needs_input_grad[:2]
    dx, totals = biased_gelu_backward(dy, x, bias, *ctx.constants, of_bias)
    return dx if of_x else None, totals.sum(0).to(bias.dtype) if of_bias else None, None, None, None, None


library.register_autograd("skipless::biased_gelu", _differentiate, setup_context=_save)

"""Attention from one product qkv of queries, keys and values, with rotary positions, as a torch operator.

The kernels take the rotation's gradient while they hold dq and dk, and write all three gradients into that of qkv: no
further pass over memory rotates them back or joins them. Values that are not in the product, because they have no
matrix or a frozen one, are an argument of their own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from skipless.ops.bias import KernelBias
from skipless.ops.gpu.launch import (
    Angles,
    KernelInputs,
    aligned,
    empty_by_gain,
    gain_gradient,
    layout_of,
    run_backward,
    run_forward,
    sizes,
)

_ENTRIES = 2048  # of each half in a program: two accesses of 16 bytes to a thread in half precision
_WARPS = 4


@triton.jit
def rotate(
    source, strides, angles, rotated, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the length·HEADS rows that one batch row has: pairs (c, c + WIDTH/2) rotated by their token's angles."""
    HALF: tl.constexpr = WIDTH // 2
    number, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = number * BLOCK + tl.arange(0, BLOCK)
    inside = (row < length * HEADS)[:, None]
    token, pair = row // HEADS, tl.arange(0, HALF)[None, :]
    start = source + batch * strides[0] + token.to(tl.int64) * strides[1] + row % HEADS * WIDTH
    first = tl.load(start[:, None] + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start[:, None] + (pair + HALF), mask=inside, other=0.0).to(tl.float32)
    angle = batch * angles.batch_stride + token.to(tl.int64)[:, None] * HALF + pair
    c, s = tl.load(angles.cos + angle, mask=inside, other=0.0), tl.load(angles.sin + angle, mask=inside, other=0.0)
    at = rotated + (batch * length * HEADS + row)[:, None] * WIDTH + pair
    tl.store(at, (first * c - second * s).to(rotated.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (first * s + second * c).to(rotated.dtype.element_ty), mask=inside)


def _run_rotate(qkv: Tensor, angles: Angles, rotated: Tensor) -> None:
    """Fill rotated with the rotated heads of queries and keys."""
    kernel: Any = rotate  # the decorated function takes more than its signature says
    batch, length, heads, width = rotated.shape
    block = _ENTRIES // (width // 2)
    kernel[-(-length * heads // block), batch](
        qkv, qkv.stride()[:2], angles, rotated, length, HEADS=heads, WIDTH=width, BLOCK=block, num_warps=_WARPS
    )


def _by_head(product: Tensor, width: int, *heads: int) -> tuple[Tensor, ...]:
    """The slices of (batch, T, heads·width), contiguous, as (batch, heads, T, width), where they lie."""
    batch, length, features = product.shape
    return product.view(batch, length, features // width, width).transpose(1, 2).split_with_sizes(heads, 1)


def _angles(cos: Tensor, sin: Tensor) -> Angles:
    cos, sin = cos.contiguous(), sin.contiguous()
    return Angles(cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0))


def _empty(qkv: Tensor, heads: int, kv_heads: int, values: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, rotated), to be filled."""
    batch, length, features = qkv.shape
    width = features // (heads + (2 if values is None else 1) * kv_heads)
    out = qkv.new_empty(batch, length, heads, width).transpose(1, 2)
    lse = qkv.new_empty(batch, heads, length, dtype=torch.float32)
    return out, lse, qkv.new_empty(batch, length, heads + kv_heads, width)


def _inputs(
    qkv: Tensor, values: Tensor | None, rotated: Tensor, heads: int, kv_heads: int,
    bias: KernelBias, layout: list[Tensor], causal: bool,
) -> KernelInputs:  # fmt: skip
    """KernelInputs with queries and keys from `rotated`, and values from `values` or else from the product."""
    width = rotated.shape[3]
    q, k = rotated.transpose(1, 2).split_with_sizes((heads, kv_heads), 1)  # aligned, as new memory is
    v = _by_head(qkv, width, heads + kv_heads, kv_heads)[1] if values is None else values
    return KernelInputs(q, k, aligned(v), bias, layout_of(layout), causal)


def _empty_gradients(qkv: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for the gradients by `qkv` and by `values`, laid out as products are; without values the second is empty."""
    first = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    if values is None:
        return first, qkv.new_empty(0)
    batch, heads, length, width = values.shape
    return first, values.new_empty(batch, length, heads, width).transpose(1, 2)


@library.custom_op("skipless::rotary_attention", mutates_args=())
def rotary_attention(
    qkv: Tensor, values: Tensor | None, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    slope: Tensor, column: Tensor, diagonal: Tensor, row_scale: Tensor, row: Tensor | None, gain: Tensor | None,
    layout: list[Tensor], causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse − log₂D in exponents of 2, rotated queries and keys side by side).

    qkv: (batch, T, (heads + 2·kv_heads)·head_width). cos, sin: (batch or 1, 1, T, head_width/2) in float32.
    values: None, or (batch, kv_heads, T, head_width), and qkv then has (heads + kv_heads)·head_width features.
    """
    qkv, bias = qkv.contiguous(), KernelBias(slope, column, diagonal, row_scale, row, gain)
    out, lse, rotated = _empty(qkv, heads, kv_heads, values)
    launch = sizes(rotated.shape[3], rotated.dtype).forward
    with torch.cuda.device_of(qkv):
        _run_rotate(qkv, _angles(cos, sin), rotated)
        run_forward(_inputs(qkv, values, rotated, heads, kv_heads, bias, layout, causal), out, lse, launch)
    return out, lse, rotated


@library.custom_op("skipless::rotary_attention_backward", mutates_args=())
def rotary_attention_backward(
    dout: Tensor, qkv: Tensor, values: Tensor | None, cos: Tensor, sin: Tensor, rotated: Tensor, out: Tensor,
    lse: Tensor, heads: int, kv_heads: int,
    slope: Tensor, column: Tensor, diagonal: Tensor, row_scale: Tensor, row: Tensor | None, gain: Tensor | None,
    layout: list[Tensor], causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by `qkv` and by `values`, and what `gain_gradient` sums. One that is not needed has no entries."""
    qkv, bias = qkv.contiguous(), KernelBias(slope, column, diagonal, row_scale, row, gain)
    gradient, by_values = _empty_gradients(qkv, values)
    width = rotated.shape[3]
    if values is None:
        gradients = _by_head(gradient, width, heads, kv_heads, kv_heads)
    else:
        gradients = (*_by_head(gradient, width, heads, kv_heads), by_values)
    inputs = _inputs(qkv, values, rotated, heads, kv_heads, bias, layout, causal)
    by_gain = empty_by_gain(out, rotated.shape[1], gain)
    with torch.cuda.device_of(qkv):
        run_backward(inputs, out, aligned(dout), lse, gradients, by_gain, _angles(cos, sin))
    return gradient, by_values, by_gain


@rotary_attention.register_fake
def _(qkv, values, cos, sin, heads, kv_heads, *rest):
    return _empty(qkv, heads, kv_heads, values)


@rotary_attention_backward.register_fake
def _(dout, qkv, values, cos, sin, rotated, out, *rest):
    gain = rest[-3]
    return *_empty_gradients(qkv, values), empty_by_gain(out, rotated.shape[1], gain)


def _save(ctx, inputs, output) -> None:
    qkv, values, cos, sin, heads, kv_heads, *bias, layout, causal = inputs
    out, lse, rotated = output
    ctx.save_for_backward(qkv, values, cos, sin, rotated, out, lse, *bias, *layout)
    ctx.constants = heads, kv_heads, causal


def _differentiate(ctx, dout: Tensor, dlse: Tensor, drotated: Tensor):
    qkv, values, cos, sin, rotated, out, lse, slope, column, diagonal, row_scale, row, gain, *layout = ctx.saved_tensors
    heads, kv_heads, causal = ctx.constants
    bias = KernelBias(slope, column, diagonal, row_scale, row, gain)
    gradient, by_values, by_gain = rotary_attention_backward(
        dout, qkv, values, cos, sin, rotated, out, lse, heads, kv_heads, *bias, layout, causal
    )
    by_values = None if values is None else by_values
    of_bias = *[None] * (len(bias) - 1), gain_gradient(by_gain, gain)
    return gradient, by_values, None, None, None, None, *of_bias, [None] * len(layout), None


library.register_autograd("skipless::rotary_attention", _differentiate, setup_context=_save)

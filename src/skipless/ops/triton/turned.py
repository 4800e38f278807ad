"""Attention from one joined product of queries, keys and values, with rotary positions, as a torch operator.

The rotation's gradient is taken where the kernels hold dq and dk, and all three gradients are written where the joined
product's belongs: no pass over memory turns them back or puts them side by side. Values that are not in the product,
since they have no matrix or one that is not trained, come beside it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from skipless.ops.triton.launch import Call, aligned, run_backward, run_forward
from skipless.ops.triton.sizes import sizes

_ENTRIES = 2048  # of each half in a program: two accesses of 16 bytes to a thread in half precision
_WARPS = 4


@triton.jit
def rotate(
    source, strides, cos, sin, table_stride, turned, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the length·HEADS rows that one batch row has: pairs (c, c + WIDTH/2) turned by their token's angles."""
    HALF: tl.constexpr = WIDTH // 2
    number, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = number * BLOCK + tl.arange(0, BLOCK)
    inside = (row < length * HEADS)[:, None]
    token, pair = row // HEADS, tl.arange(0, HALF)[None, :]
    start = source + batch * strides[0] + token.to(tl.int64) * strides[1] + row % HEADS * WIDTH
    first = tl.load(start[:, None] + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start[:, None] + (pair + HALF), mask=inside, other=0.0).to(tl.float32)
    angle = batch * table_stride + token.to(tl.int64)[:, None] * HALF + pair
    c, s = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
    at = turned + (batch * length * HEADS + row)[:, None] * WIDTH + pair
    tl.store(at, (first * c - second * s).to(turned.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (first * s + second * c).to(turned.dtype.element_ty), mask=inside)


def _run_rotate(together: Tensor, tables: tuple, turned: Tensor) -> None:
    """Fill turned with the rotated heads of queries and keys."""
    kernel: Any = rotate  # the decorated function takes more than its signature says
    batch, length, heads, width = turned.shape
    block = _ENTRIES // (width // 2)
    kernel[triton.cdiv(length * heads, block), batch](
        together, together.stride()[:2], *tables, turned, length, HEADS=heads, WIDTH=width, BLOCK=block,
        num_warps=_WARPS,
    )  # fmt: skip


def _by_head(joined: Tensor, width: int, *heads: int) -> tuple[Tensor, ...]:
    """The parts of (batch, T, heads·width) as (batch, heads, T, width), where they lie."""
    return tuple(part.transpose(1, 2) for part in joined.unflatten(-1, (-1, width)).split(heads, dim=2))


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int]:
    """cos, sin and the stride of their batch, 0 where one row serves all."""
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0)


def _empty(together: Tensor, heads: int, kv_heads: int, values: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, turned), to be filled."""
    batch, length, features = together.shape
    width = features // (heads + (2 if values is None else 1) * kv_heads)
    out = together.new_empty(batch, length, heads, width).transpose(1, 2)
    lse = together.new_empty(batch, heads, length, dtype=torch.float32)
    return out, lse, together.new_empty(batch, length, heads + kv_heads, width)


def _call(together: Tensor, values: Tensor | None, turned: Tensor, heads: int, kv_heads: int, *rest) -> Call:
    """The problem with queries and keys from `turned`, and values where the product put them, or from `values`."""
    width = turned.shape[3]
    q, k = _by_head(turned.flatten(2), width, heads, kv_heads)
    v = _by_head(together, width, heads + kv_heads, kv_heads)[1] if values is None else values
    return Call(aligned(q), aligned(k), aligned(v), *rest)


def _empty_gradients(together: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
    """Those by `together` and by `values`, laid out as products are; without values the second has no entries."""
    first = torch.empty_like(together, memory_format=torch.contiguous_format)
    if values is None:
        return first, together.new_empty(0)
    batch, heads, length, width = values.shape
    return first, values.new_empty(batch, length, heads, width).transpose(1, 2)


@library.custom_op("skipless::turned_attention", mutates_args=())
def turned_attention(
    together: Tensor, values: Tensor | None, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    vectors: list[Tensor], row: Tensor | None, places: list[Tensor], causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse − log₂D in exponents of 2, rotated queries and keys side by side).

    together: (batch, T, (heads + 2·kv_heads)·head_width). cos, sin: (batch or 1, 1, T, head_width/2) in float32.
    values: None, or (batch, kv_heads, T, head_width), and together then has (heads + kv_heads)·head_width features.
    """
    together = together.contiguous()
    out, lse, turned = _empty(together, heads, kv_heads, values)
    launch = sizes(turned.shape[3], turned.dtype).forward
    with torch.cuda.device_of(together):
        _run_rotate(together, _tables(cos, sin), turned)
        call = _call(together, values, turned, heads, kv_heads, vectors, row, places, causal)
        run_forward(call, out, lse, launch)
    return out, lse, turned


@library.custom_op("skipless::turned_attention_backward", mutates_args=())
def turned_attention_backward(
    dout: Tensor, together: Tensor, values: Tensor | None, cos: Tensor, sin: Tensor, turned: Tensor, out: Tensor,
    lse: Tensor, heads: int, kv_heads: int, vectors: list[Tensor], row: Tensor | None, places: list[Tensor],
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients by `together` and by `values`; the second has no entries where there are none."""
    together = together.contiguous()
    gradient, by_values = _empty_gradients(together, values)
    width = turned.shape[3]
    if values is None:
        parts = _by_head(gradient, width, heads, kv_heads, kv_heads)
    else:
        parts = (*_by_head(gradient, width, heads, kv_heads), by_values)
    call = _call(together, values, turned, heads, kv_heads, vectors, row, places, causal)
    with torch.cuda.device_of(together):
        run_backward(call, out, aligned(dout), lse, parts, _tables(cos, sin))
    return gradient, by_values


@turned_attention.register_fake
def _(together, values, cos, sin, heads, kv_heads, vectors, row, places, causal):
    return _empty(together, heads, kv_heads, values)


@turned_attention_backward.register_fake
def _(dout, together, values, cos, sin, turned, out, lse, heads, kv_heads, vectors, row, places, causal):
    return _empty_gradients(together, values)


def _save(ctx, inputs, output) -> None:
    together, values, cos, sin, heads, kv_heads, vectors, row, places, causal = inputs
    out, lse, turned = output
    ctx.save_for_backward(together, cos, sin, turned, out, lse, row, values, *vectors, *places)
    ctx.constants = heads, kv_heads, causal


def _differentiate(ctx, dout: Tensor, dlse: Tensor, dturned: Tensor):
    together, cos, sin, turned, out, lse, row, values, slope, column, diagonal, row_scale, *places = ctx.saved_tensors
    heads, kv_heads, causal = ctx.constants
    gradient, by_values = turned_attention_backward(
        dout, together, values, cos, sin, turned, out, lse, heads, kv_heads,
        [slope, column, diagonal, row_scale], row, places, causal,
    )  # fmt: skip
    by_values = None if values is None else by_values
    return gradient, by_values, None, None, None, None, [None] * 4, None, [None] * len(places), None


library.register_autograd("skipless::turned_attention", _differentiate, setup_context=_save)

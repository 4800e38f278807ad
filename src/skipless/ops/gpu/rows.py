"""Rows of a head as the attention kernels meet them: where a token stands, and BLOCK tokens' features in memory."""

import triton
import triton.language as tl


@triton.jit
def locate(side, batch, index, length, past, LAYOUT: tl.constexpr):
    """(location, document) at `index`; without a layout locations count on from `past`. Beyond the end: document −1."""
    if LAYOUT:
        row = side + batch.to(tl.int64) * 2 * length
        inside = index < length
        location = tl.load(row + index, mask=inside, other=0)
        document = tl.load(row + length + index, mask=inside, other=-1)
    else:
        location = index + past
        document = tl.where(index < length, 0, -1)
    return location, document


@triton.jit
def head_of(tensor, strides, batch, head):
    """Where one head of one row of the batch begins."""
    return tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def rows_from(start, stride, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Where BLOCK rows of a head lie, from row `first` on: one long offset for all, and short ones within."""
    return start + tl.cast(first, tl.int64) * stride + tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, WIDTH)


@triton.jit
def load_rows(start, stride, first, length, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """BLOCK rows of a head, (BLOCK, WIDTH); zeros beyond its end. For what a program reads once."""
    at = rows_from(start, stride, first, BLOCK, WIDTH)
    return tl.load(at, mask=first + tl.arange(0, BLOCK)[:, None] < length, other=0.0)


@triton.jit
def store_rows(tensor, strides, batch, head, first, length, values, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write BLOCK rows of a head, those inside its length."""
    at = rows_from(head_of(tensor, strides, batch, head), strides[2], first, BLOCK, WIDTH)
    tl.store(at, values.to(tensor.dtype.element_ty), mask=first + tl.arange(0, BLOCK)[:, None] < length)


@triton.jit
def store_unrotated(
    tensor, strides, batch, head, first, length, values, angles, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
):  # fmt: skip
    """`store_rows`; where ROTARY, of a gradient by rotated rows, which becomes that by the rows before their rotation.

    angles: cos and sin of each token, (batch, length, WIDTH/2), and the stride of their batch. The pairs
    (c, c + WIDTH/2) are rotated back in float32, before they are rounded.
    """
    if ROTARY:
        HALF: tl.constexpr = WIDTH // 2
        a, b = tl.split(tl.permute(tl.reshape(values, (BLOCK, 2, HALF)), (0, 2, 1)))
        row = batch.to(tl.int64) * angles.batch_stride
        cos = load_rows(angles.cos + row, HALF, first, length, BLOCK, HALF)
        sin = load_rows(angles.sin + row, HALF, first, length, BLOCK, HALF)
        store_rows(tensor, strides, batch, head, first, length, a * cos + b * sin, BLOCK, HALF)
        store_rows(tensor + HALF, strides, batch, head, first, length, b * cos - a * sin, BLOCK, HALF)
    else:
        store_rows(tensor, strides, batch, head, first, length, values, BLOCK, WIDTH)


@triton.jit
def stream(source, batch, head, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """`load_rows` through a tensor descriptor, which a copy engine serves where there is one: for what a loop reads."""
    return source.load([batch, head, tl.cast(first, tl.int32), 0]).reshape(BLOCK, WIDTH)

"""What one tile of shaped attention computes, shared by the forward and the backward kernel.

All exponents are of 2. A tile may lie either way, queries down or across: i belongs to queries, j to keys, and every
vector comes shaped to broadcast.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def turn(tiles, order):
    """(tile, head, batch) of this program, where order = (heads, heads in a section of them, whatever their batch).

    Sections come one after another, so that what a section reads stays in the cache; in each all first tiles, then all
    second ones: under a causal mask tiles differ in length, and the GPU is filled best with the longest first.
    """
    heads, section = order
    before = tl.program_id(0) // (tiles * section) * section
    size = tl.minimum(section, tl.num_programs(0) // tiles - before)
    within = tl.program_id(0) - before * tiles
    row = before + within % size
    return within // size, row % heads, row // heads


@triton.jit
def entries(vector, locations, count):
    """vector[locations]·log₂e, the last of `count` entries standing for all beyond it."""
    return tl.load(vector + tl.minimum(locations, count - 1)).to(tl.float32) * LOG2E


@triton.jit
def place(places, batch, index, length, past, LAYOUT: tl.constexpr):
    """(location, document) at `index`; without a layout locations count on from `past`. Beyond the end: document −1."""
    if LAYOUT:
        row = places + batch.to(tl.int64) * 2 * length
        inside = index < length
        location = tl.load(row + index, mask=inside, other=0)
        document = tl.load(row + length + index, mask=inside, other=-1)
    else:
        location = index + past
        document = tl.where(index < length, 0, -1)
    return location, document


@triton.jit
def visible(i, j, i_document, j_document, CAUSAL: tl.constexpr, LAYOUT: tl.constexpr):
    """Whether query i sees key j. Queries beyond the end see something, without a layout: nobody reads their rows."""
    if LAYOUT:
        seen = (i_document == j_document) & (i_document >= 0)
    else:
        seen = j_document >= 0
    if CAUSAL:
        seen = seen & (j <= i)
    return seen


@triton.jit
def relative(column, j, slope, origin, RELATIVE: tl.constexpr):
    """column_j; where RELATIVE, to a tile of queries that starts at `origin`: column_j − slope·(origin − j)."""
    if RELATIVE:
        return column + slope * (j - origin).to(tl.float32)
    else:
        return column


@triton.jit
def key_column(column, j, slope, origin, count, RELATIVE: tl.constexpr):
    """`relative` of the vector's entries."""
    return relative(entries(column, j, count), j, slope, origin, RELATIVE)


@triton.jit
def row_frame(i, slope, origin, RELATIVE: tl.constexpr):
    """What the relative form leaves out of row i, a constant that the softmax forgets: slope·(i − origin)."""
    if RELATIVE:
        return slope * (i - origin).to(tl.float32)
    else:
        return tl.zeros_like(i).to(tl.float32)


@triton.jit
def exponent(
    scores, i, j, column, diagonal, slope, seen, ROW: tl.constexpr, RELATIVE: tl.constexpr, EDGE: tl.constexpr
):
    """scores + B, up to the frame of the row. Shapes with a row term (ROW) add nothing: `factor` multiplies instead.

    Relative to the tile, B is one number per key, so that it costs the addition that scaling the scores fuses with.
    """
    if not ROW:
        if RELATIVE:
            bias = column
        else:
            bias = column - slope * tl.abs(i - j).to(tl.float32)
        if EDGE:
            bias = tl.where(i == j, diagonal, bias)
        scores = scores + bias
    if EDGE:
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def factor(i, j, column, row, diagonal, EDGE: tl.constexpr):
    """exp(B) of a shape with a row term: 2^column + 2^row, a sum of vectors, so that no logarithm is taken."""
    product = tl.exp2(column) + tl.exp2(row)
    if EDGE:
        product = tl.where(i == j, tl.exp2(diagonal), product)
    return product


@triton.jit
def near_bias(i, j, column, row, diagonal, EDGE: tl.constexpr):
    """B of a shape with a row term to within 1: enough to choose the running maximum by."""
    bias = tl.maximum(column, row)
    if EDGE:
        bias = tl.where(i == j, diagonal, bias)
    return bias


@triton.jit
def head_of(tensor, strides, batch, head):
    """Where one head of one row of the batch begins."""
    return tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def rows_from(start, stride, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Where BLOCK rows of a head lie, from row `first` on: one long offset for all, and short ones within."""
    return start + tl.cast(first, tl.int64) * stride + tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, WIDTH)


@triton.jit
def tokens(start, stride, first, length, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """BLOCK rows of a head, (BLOCK, WIDTH); zeros beyond its end. For what a program reads once."""
    at = rows_from(start, stride, first, BLOCK, WIDTH)
    return tl.load(at, mask=first + tl.arange(0, BLOCK)[:, None] < length, other=0.0)


@triton.jit
def keep(tensor, strides, batch, head, first, length, values, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write BLOCK rows of a head, those inside its length."""
    at = rows_from(head_of(tensor, strides, batch, head), strides[2], first, BLOCK, WIDTH)
    tl.store(at, values.to(tensor.dtype.element_ty), mask=first + tl.arange(0, BLOCK)[:, None] < length)


@triton.jit
def keep_turned(
    tensor, strides, batch, head, first, length, values, tables, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """`keep`; where TURN, of a gradient by rotated rows, which becomes that by the rows before their rotation.

    tables: cos and sin of each token, (batch, length, WIDTH/2), and the stride of their batch. The pairs
    (c, c + WIDTH/2) are turned back in float32, before they are rounded.
    """
    if TURN:
        HALF: tl.constexpr = WIDTH // 2
        a, b = tl.split(tl.permute(tl.reshape(values, (BLOCK, 2, HALF)), (0, 2, 1)))
        row = batch.to(tl.int64) * tables[2]
        cos = tokens(tables[0] + row, HALF, first, length, BLOCK, HALF)
        sin = tokens(tables[1] + row, HALF, first, length, BLOCK, HALF)
        keep(tensor, strides, batch, head, first, length, a * cos + b * sin, BLOCK, HALF)
        keep(tensor + HALF, strides, batch, head, first, length, b * cos - a * sin, BLOCK, HALF)
    else:
        keep(tensor, strides, batch, head, first, length, values, BLOCK, WIDTH)


@triton.jit
def stream(source, batch, head, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The same through a tensor descriptor, which the copy engine serves where there is one: for what a loop reads."""
    return source.load([batch, head, tl.cast(first, tl.int32), 0]).reshape(BLOCK, WIDTH)

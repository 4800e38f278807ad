"""The query side of the backward pass where the key side has kept the gradients of the scores: one product a tile."""

import triton
import triton.language as tl

from skipless.ops.triton import tile
from skipless.ops.triton.backward import products_of_rows


@triton.jit
def row_products(
    out, dout, strides, delta, row_scale, length, count, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """δ of one tile of queries. strides: of out, dout."""
    number, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = number * BLOCK_M
    index = start + tl.arange(0, BLOCK_M)
    out = tile.tokens(tile.head_of(out, strides[0], batch, head), strides[0][2], start, length, BLOCK_M, WIDTH)
    dout = tile.tokens(tile.head_of(dout, strides[1], batch, head), strides[1][2], start, length, BLOCK_M, WIDTH)
    products = products_of_rows(out, dout, row_scale, index, count)
    line = (batch.to(tl.int64) * tl.num_programs(1) + head) * length
    tl.store(delta + line + index, products, mask=index < length)


@triton.jit
def query_side(
    dq, strides, scores, k, length, scale, tables, GROUPS: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, the last first. scores, (batch·heads, keys, queries), and k are tensor descriptors.

    BLOCK_M must be the keys of the key side's tiles, and BLOCK_N divide it: then all that is read has been written.
    """
    number, head, batch = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = number * BLOCK_M
    last = length
    if CAUSAL:
        last = tl.minimum(length, start + BLOCK_M)
    line = batch * tl.num_programs(1) + head
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for first in tl.range(0, last, BLOCK_N):
        ds = scores.load([line, first, start]).reshape(BLOCK_N, BLOCK_M)
        keys = tile.stream(k, batch, head // GROUPS, first, BLOCK_N, WIDTH)
        total = tl.dot(tl.trans(ds), keys, total)
    tile.keep_turned(dq, strides, batch, head, start, length, total * scale, tables, BLOCK_M, WIDTH, TURN)

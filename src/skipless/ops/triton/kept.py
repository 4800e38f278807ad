"""The query side of the backward pass where the key side has kept the gradients of the scores: one product a tile."""

import triton
import triton.language as tl

from skipless.ops.triton import tile
from skipless.ops.triton.backward import products_of_rows
from skipless.ops.triton.forward import key_span


@triton.jit
def row_products(
    out, dout, strides, delta, row_scale, places, length, past, count,
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """δ of one tile of queries. strides: of out, dout."""
    number, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = number * BLOCK_M
    index = start + tl.arange(0, BLOCK_M)
    out = tile.tokens(tile.head_of(out, strides[0], batch, head), strides[0][2], start, length, BLOCK_M, WIDTH)
    dout = tile.tokens(tile.head_of(dout, strides[1], batch, head), strides[1][2], start, length, BLOCK_M, WIDTH)
    i, _ = tile.place(places, batch, index, length, past, LAYOUT)
    products = products_of_rows(out, dout, row_scale, i, count)
    line = (batch.to(tl.int64) * tl.num_programs(1) + head) * length
    tl.store(delta + line + index, products, mask=index < length)


@triton.jit
def query_side(
    dq, strides, scores, k, layout, q_length, k_length, scale, order, tables,
    GROUPS: tl.constexpr, CAUSAL: tl.constexpr, LAYOUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, RANGE: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, the last first. scores, (batch·heads, keys, queries), and k are tensor descriptors.

    BLOCK_M must be the keys of the key side's tiles, and BLOCK_N divide it: then all that is read has been written. A
    layout's stretch of keys may hold tiles that nobody sees and nobody wrote: there what is not seen is left out.
    """
    tiles = tl.cdiv(q_length, BLOCK_M)
    place, head, batch = tile.turn(tiles, order)
    number = tiles - 1 - place
    start, past = number * BLOCK_M, k_length - q_length
    first, _, last = key_span(layout[2], batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE)
    i, i_document = tile.place(layout[0], batch, start + tl.arange(0, BLOCK_M), q_length, past, LAYOUT)
    line = batch * order[0] + head
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for left in tl.range(first, last, BLOCK_N):
        ds = scores.load([line, tl.cast(left, tl.int32), start]).reshape(BLOCK_N, BLOCK_M)
        if LAYOUT:
            j, j_document = tile.place(layout[1], batch, left + tl.arange(0, BLOCK_N), k_length, 0, LAYOUT)
            seen = tile.visible(i[None, :], j[:, None], i_document[None, :], j_document[:, None], CAUSAL, LAYOUT)
            ds = tl.where(seen, ds, 0.0)
        keys = tile.stream(k, batch, head // GROUPS, left, BLOCK_N, WIDTH)
        total = tl.dot(tl.trans(ds), keys, total)
    tile.keep_turned(dq, strides, batch, head, start, q_length, total * scale, tables, BLOCK_M, WIDTH, TURN)

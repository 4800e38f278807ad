"""Shaped attention backward on the GPU: gradients of queries, keys and values, from saved or recomputed scores."""

import triton
import triton.language as tl

from skipless.ops.gpu import attention
from skipless.ops.gpu.attention import key_span, query_rows


@triton.jit
def products_of_rows(out, dout, row_scale, i, count):
    """δ of a tile of queries."""
    size = tl.load(row_scale + tl.minimum(i, count - 1)).to(tl.float32)
    return tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1) / size


@triton.jit
def fold_queries(
    state, k, v, columns, tensors, kept, vectors, layout, span, scale,
    CAUSAL: tl.constexpr, ROW: tl.constexpr, LAYOUT: tl.constexpr, RELATIVE: tl.constexpr, EDGE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Take a span of queries into state = (dk, dv) of a tile of keys. Tiles lie with keys down, queries across.

    Where KEEP, ds is written to kept = (tensor descriptor, its line, the first key) for the query side.
    """
    dk, dv = state
    j, j_document, column = columns
    q, dout, head, lse, delta, length, past = tensors
    diagonal, row, count, slope = vectors
    places, batch = layout
    for start in tl.range(span[0], span[1], BLOCK_M):
        index = start + tl.arange(0, BLOCK_M)
        origin = start + past
        i, i_document = attention.place(places, batch, index, length, past, LAYOUT)
        frame = attention.row_frame(i, slope, origin, RELATIVE)
        i_own = (attention.entries(diagonal, i, count) + frame)[None, :]
        i_row = attention.entries(row, i, count)[None, :]
        sums = tl.load(lse + index, mask=index < length, other=float("inf")) + frame
        products = tl.load(delta + index, mask=index < length, other=0.0)
        i, i_document = i[None, :], i_document[None, :]
        terms = attention.relative(column, j, slope, origin, RELATIVE)
        seen = attention.visible(i, j, i_document, j_document, CAUSAL, LAYOUT)
        queries = attention.stream(q, batch, head, start, BLOCK_M, WIDTH)
        scores = tl.dot(k, tl.trans(queries), input_precision=PRECISION) * scale
        scores = attention.exponent(scores, i, j, terms, i_own, slope, seen, ROW, RELATIVE, EDGE)
        weights = tl.exp2(scores - sums[None, :])
        if ROW:
            weights = weights * attention.factor(i, j, terms, i_row, i_own, EDGE)
        upstream = attention.stream(dout, batch, head, start, BLOCK_M, WIDTH)
        dv = tl.dot(weights.to(k.dtype), upstream, dv, input_precision=PRECISION)
        ds = weights * (tl.dot(v, tl.trans(upstream), input_precision=PRECISION) - products[None, :])
        ds = ds.to(k.dtype)
        if KEEP:
            kept[0].store([kept[1], kept[2], start], ds.reshape(1, BLOCK_N, BLOCK_M))
        dk = tl.dot(ds, queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def query_span(ranges, batch, number, q_length, k_length, CAUSAL: tl.constexpr, LAYOUT: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr):  # fmt: skip
    """(first, edge, last): a tile of keys is seen by queries first … last−1, and up to `edge` they need the mask."""
    first = 0
    last = q_length
    edge = q_length
    if LAYOUT:
        at = ranges + (batch * tl.cdiv(k_length, RANGE) + number * BLOCK_N // RANGE) * 2
        first, last = tl.load(at), tl.load(at + 1)
        edge = last
    elif CAUSAL:
        start = number * BLOCK_N - (k_length - q_length)
        first = tl.maximum(start, 0) // BLOCK_M * BLOCK_M
        edge = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N, 0), BLOCK_M) * BLOCK_M, q_length)
    return first, edge, last


@triton.jit
def key_side(
    k, v, strides, q, dout, scores, sums, gradients, shape, layout, q_length, k_length, count, scale, order, tables,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr, LAYOUT: tl.constexpr,
    RELATIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr,
    PRECISION: tl.constexpr, TURN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, from all query heads that share it. The first tile, the longest, comes first.

    q and dout are tensor descriptors. sums: lse, δ. gradients: dk, dv. strides: of k, v, dk, dv.
    Where TURN, q and k come rotated, and dk is turned back by the tables of `tile.keep_turned`. Where KEEP, gradients
    of the scores go to the tensor descriptor `scores`, (batch·query heads, keys, queries).
    """
    number, head, batch = attention.turn(tl.cdiv(k_length, BLOCK_N), order)
    slopes, column, diagonal, row, _ = shape
    start = number * BLOCK_N
    j, document = attention.place(layout[1], batch, start + tl.arange(0, BLOCK_N), k_length, 0, LAYOUT)
    columns = (j[:, None], document[:, None], attention.entries(column, j, count)[:, None])
    k = attention.tokens(attention.head_of(k, strides[0], batch, head), strides[0][2], start, k_length, BLOCK_N, WIDTH)
    v = attention.tokens(attention.head_of(v, strides[1], batch, head), strides[1][2], start, k_length, BLOCK_N, WIDTH)
    first, edge, last = query_span(
        layout[3], batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE
    )
    state = (tl.zeros((BLOCK_N, WIDTH), tl.float32), tl.zeros((BLOCK_N, WIDTH), tl.float32))
    for member in range(GROUPS):
        one = head * GROUPS + member
        slope = tl.load(slopes + one * SLOPES).to(tl.float32) * attention.LOG2E
        line = batch * order[0] * GROUPS + one
        keeping = (scores, line, start)
        line = line.to(tl.int64) * q_length
        sources = (q, dout, one, sums[0] + line, sums[1] + line, q_length, k_length - q_length)
        vectors, places = (diagonal, row, count, slope), (layout[0], batch)
        state = fold_queries(state, k, v, columns, sources, keeping, vectors, places, (first, edge), scale, CAUSAL, ROW,
                             LAYOUT, RELATIVE, True, WIDTH, BLOCK_M, BLOCK_N, PRECISION, KEEP)  # fmt: skip
        if CAUSAL and not LAYOUT:
            state = fold_queries(state, k, v, columns, sources, keeping, vectors, places, (edge, last), scale, CAUSAL,
                                 ROW, LAYOUT, RELATIVE, False, WIDTH, BLOCK_M, BLOCK_N, PRECISION, KEEP)  # fmt: skip
    dk = state[0] * (scale / attention.LOG2E)
    attention.keep_turned(gradients[0], strides[2], batch, head, start, k_length, dk, tables, BLOCK_N, WIDTH, TURN)
    attention.keep(gradients[1], strides[3], batch, head, start, k_length, state[1], BLOCK_N, WIDTH)


@triton.jit
def gather_keys(
    dq, q, upstream, rows, tensors, vectors, layout, span, scale,
    CAUSAL: tl.constexpr, ROW: tl.constexpr, LAYOUT: tl.constexpr, RELATIVE: tl.constexpr, EDGE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take a span of keys into dq of a tile of queries. upstream: dout, lse, δ of its rows."""
    dout, sums, products = upstream
    i, i_document, row, diagonal, origin = rows
    k, v, head, length = tensors
    column, count, slope = vectors
    places, batch = layout
    for start in tl.range(span[0], span[1], BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        j, j_document = attention.place(places, batch, index, length, 0, LAYOUT)
        j, j_document = j[None, :], j_document[None, :]
        terms = attention.key_column(column, j, slope, origin, count, RELATIVE)
        seen = attention.visible(i, j, i_document, j_document, CAUSAL, LAYOUT)
        keys = attention.stream(k, batch, head, start, BLOCK_N, WIDTH)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        scores = attention.exponent(scores, i, j, terms, diagonal, slope, seen, ROW, RELATIVE, EDGE)
        weights = tl.exp2(scores - sums)
        if ROW:
            weights = weights * attention.factor(i, j, terms, row, diagonal, EDGE)
        values = attention.stream(v, batch, head, start, BLOCK_N, WIDTH)
        ds = weights * (tl.dot(dout, tl.trans(values), input_precision=PRECISION) - products)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_side(
    q, out, dout, dq, strides, k, v, sums, shape, layout, q_length, k_length, count, scale, order, tables,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr, LAYOUT: tl.constexpr,
    RELATIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr,
    PRECISION: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, the last tile first; and its δ, which the key side reads.

    k and v are tensor descriptors. sums: lse, δ. strides: of q, out, dout, dq. tables, TURN: as key_side's.
    """
    tiles = tl.cdiv(q_length, BLOCK_M)
    place, head, batch = attention.turn(tiles, order)
    number = tiles - 1 - place
    slope, index, i, rows = query_rows(
        shape, layout, number, head, batch, q_length, k_length, count, SLOPES, LAYOUT, RELATIVE, BLOCK_M
    )
    start = number * BLOCK_M
    q = attention.tokens(attention.head_of(q, strides[0], batch, head), strides[0][2], start, q_length, BLOCK_M, WIDTH)
    out = attention.tokens(
        attention.head_of(out, strides[1], batch, head), strides[1][2], start, q_length, BLOCK_M, WIDTH
    )
    dout = attention.tokens(
        attention.head_of(dout, strides[2], batch, head), strides[2][2], start, q_length, BLOCK_M, WIDTH
    )
    line = (batch.to(tl.int64) * order[0] + head) * q_length
    inside = index < q_length
    lse = tl.load(sums[0] + line + index, mask=inside, other=float("inf"))
    lse += attention.row_frame(i, slope, rows[4], RELATIVE)
    products = products_of_rows(out, dout, shape[4], i, count)
    tl.store(sums[1] + line + index, products, mask=inside)
    upstream = (dout, lse[:, None], products[:, None])
    sources, vectors, places = (k, v, head // GROUPS, k_length), (shape[1], count, slope), (layout[1], batch)
    first, edge, last = key_span(layout[2], batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    if CAUSAL and not LAYOUT:
        total = gather_keys(total, q, upstream, rows, sources, vectors, places, (first, edge), scale, CAUSAL, ROW,
                            LAYOUT, RELATIVE, False, WIDTH, BLOCK_N, PRECISION)  # fmt: skip
    total = gather_keys(total, q, upstream, rows, sources, vectors, places, (edge, last), scale, CAUSAL, ROW, LAYOUT,
                        RELATIVE, True, WIDTH, BLOCK_N, PRECISION)  # fmt: skip
    total *= scale / attention.LOG2E
    attention.keep_turned(dq, strides[3], batch, head, start, q_length, total, tables, BLOCK_M, WIDTH, TURN)


@triton.jit
def row_products(
    out, dout, strides, delta, row_scale, places, length, past, count,
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """δ of one tile of queries. strides: of out, dout."""
    number, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = number * BLOCK_M
    index = start + tl.arange(0, BLOCK_M)
    out = attention.tokens(
        attention.head_of(out, strides[0], batch, head), strides[0][2], start, length, BLOCK_M, WIDTH
    )
    dout = attention.tokens(
        attention.head_of(dout, strides[1], batch, head), strides[1][2], start, length, BLOCK_M, WIDTH
    )
    i, _ = attention.place(places, batch, index, length, past, LAYOUT)
    products = products_of_rows(out, dout, row_scale, i, count)
    line = (batch.to(tl.int64) * tl.num_programs(1) + head) * length
    tl.store(delta + line + index, products, mask=index < length)


@triton.jit
def query_side_from_saved(
    dq, strides, scores, k, layout, q_length, k_length, scale, order, tables,
    GROUPS: tl.constexpr, CAUSAL: tl.constexpr, LAYOUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, RANGE: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, the last first. scores, (batch·heads, keys, queries), and k are tensor descriptors.

    BLOCK_M must be the keys of the key side's tiles, and BLOCK_N divide it: then all that is read has been written. A
    layout's stretch of keys may hold tiles that nobody sees and nobody wrote: there what is not seen is left out.
    """
    tiles = tl.cdiv(q_length, BLOCK_M)
    place, head, batch = attention.turn(tiles, order)
    number = tiles - 1 - place
    start, past = number * BLOCK_M, k_length - q_length
    first, _, last = key_span(layout[2], batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE)
    i, i_document = attention.place(layout[0], batch, start + tl.arange(0, BLOCK_M), q_length, past, LAYOUT)
    line = batch * order[0] + head
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for left in tl.range(first, last, BLOCK_N):
        ds = scores.load([line, tl.cast(left, tl.int32), start]).reshape(BLOCK_N, BLOCK_M)
        if LAYOUT:
            j, j_document = attention.place(layout[1], batch, left + tl.arange(0, BLOCK_N), k_length, 0, LAYOUT)
            seen = attention.visible(i[None, :], j[:, None], i_document[None, :], j_document[:, None], CAUSAL, LAYOUT)
            ds = tl.where(seen, ds, 0.0)
        keys = attention.stream(k, batch, head // GROUPS, left, BLOCK_N, WIDTH)
        total = tl.dot(tl.trans(ds), keys, total)
    attention.keep_turned(dq, strides, batch, head, start, q_length, total * scale, tables, BLOCK_M, WIDTH, TURN)

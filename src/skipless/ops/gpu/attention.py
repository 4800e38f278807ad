"""Shaped attention on the GPU, forward and backward: tiles of scores, the bias of Theorem 3 added in registers.

Theorem 3 (E-SPA from decay γ to γ') is A = D·softmax(B) with, up to a constant in each row of B,

    B_ij = −γ'(i−j) + column_j  (j < i),     B_ii = diagonal_i,     D_i = row_scale_i.

theory/exponential.py computes the vectors (log_columns, row_sums), ops/bias.py makes tensors of them, and kernels get
them as `bias` (ops.bias.KernelBias). The terms are these lines, in exponents of 2:

    γ'                  query_rows, key_side: slope = bias.slope·log₂e
    column_j            entries(bias.column, j, count), in key_column and key_side
    −γ'(i−j)+column_j   exponent: column − slope·|i−j|. Or, to half precision's rounding, RELATIVE to the first query of
                        the tile: relative has column_j − γ'(origin−j), and row_frame the rest of the row, γ'(i−origin)
    B_ii                exponent: where i == j, diagonal. Only EDGE tiles meet the diagonal
    j ≤ i               visible, and exponent's −∞; key_span and query_span leave out what nobody sees
    D_i                 forward: size / total. The backward pass finds it in lse − log₂D, and in products_of_rows

A gain g on B, one per head, multiplies in `exponent`; what is left out of a row is then g times the frame. Its gradient
Σ ds·B is summed by the key side, where ds is at hand.

Shapes with a row term (U-SPA, Theorem 1: exp B_ij = exp column_j + exp row_i) multiply by `factor` instead, and take no
gain.
"""

import triton
import triton.language as tl

from skipless.ops.gpu.rows import head_of, load_rows, locate, store_rows, store_unrotated, stream

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def program_coordinates(tiles, order):
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
def gain_of(bias, head, GAINS: tl.constexpr):
    """g of a query head; GAINS is 0 where B has none, 1 where all heads share one, 2 where each has its own."""
    if GAINS:
        return tl.load(bias.gain + head * (GAINS - 1)).to(tl.float32)
    else:
        return 1.0


@triton.jit
def plain_bias(i, j, column, diagonal, slope, EDGE: tl.constexpr):
    """B of a shape without a row term."""
    bias = column - slope * tl.abs(i - j).to(tl.float32)
    if EDGE:
        bias = tl.where(i == j, diagonal, bias)
    return bias


@triton.jit
def exponent(
    scores, i, j, column, diagonal, slope, gain, seen, ROW: tl.constexpr, RELATIVE: tl.constexpr, EDGE: tl.constexpr
):
    """scores + g·B, up to the frame of the row. Shapes with a row term (ROW) add nothing: `factor` multiplies instead.

    Relative to the tile, B is one number per key, so that it costs the addition that scaling the scores fuses with.
    """
    if not ROW:
        if RELATIVE:
            bias = tl.where(i == j, diagonal, column) if EDGE else column
        else:
            bias = plain_bias(i, j, column, diagonal, slope, EDGE)
        scores = scores + gain * bias
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
def fold_keys(
    state, q, rows, tensors, vectors, layout, span, scale,
    CAUSAL: tl.constexpr, ROW: tl.constexpr, LAYOUT: tl.constexpr, RELATIVE: tl.constexpr, EDGE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take a span of keys into state = (sum of weighted values, sum of weights, running maximum).

    Only an EDGE tile, which meets the diagonal or the end, is masked.
    """
    acc, total, top = state
    i, i_document, row, diagonal, origin = rows
    k, v, head, length = tensors
    column, count, slope, gain = vectors
    side, batch = layout
    for start in tl.range(span[0], span[1], BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        j, j_document = locate(side, batch, index, length, 0, LAYOUT)
        j, j_document = j[None, :], j_document[None, :]
        terms = key_column(column, j, slope, origin, count, RELATIVE)
        seen = visible(i, j, i_document, j_document, CAUSAL, LAYOUT)
        keys = stream(k, batch, head, start, BLOCK_N, WIDTH)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        scores = exponent(scores, i, j, terms, diagonal, slope, gain, seen, ROW, RELATIVE, EDGE)
        peak = scores
        if ROW:
            peak = scores + near_bias(i, j, terms, row, diagonal, EDGE)
        highest = tl.maximum(top, tl.max(peak, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest) if EDGE else highest
        weights = tl.exp2(scores - shift[:, None])
        if ROW:
            weights = weights * factor(i, j, terms, row, diagonal, EDGE)
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        values = stream(v, batch, head, start, BLOCK_N, WIDTH)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        top = highest
    return acc, total, top


@triton.jit
def key_span(layout, batch, number, q_length, k_length, CAUSAL: tl.constexpr, LAYOUT: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr):  # fmt: skip
    """(first, edge, last): a tile of queries sees keys first … last−1, and from `edge` on they need the mask."""
    first = 0
    last = k_length
    edge = 0
    if LAYOUT:
        blocks = tl.cdiv(q_length, RANGE)
        at = layout.key_ranges + (batch * blocks + number * BLOCK_M // RANGE) * 2
        first, last = tl.load(at), tl.load(at + 1)
        edge = first
    elif CAUSAL:
        origin = number * BLOCK_M + k_length - q_length
        edge = origin // BLOCK_N * BLOCK_N
        last = tl.minimum(k_length, origin + BLOCK_M)
    return first, edge, last


@triton.jit
def query_rows(
    bias, layout, number, head, batch, q_length, k_length, count,
    SLOPES: tl.constexpr, LAYOUT: tl.constexpr, RELATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What a tile of queries knows of itself: slope, indices, and (i, document, row, diagonal, origin) as columns.

    The diagonal is in the row's frame, before any gain.
    """
    past = k_length - q_length
    slope = tl.load(bias.slope + head * SLOPES).to(tl.float32) * LOG2E
    origin = number * BLOCK_M + past
    index = number * BLOCK_M + tl.arange(0, BLOCK_M)
    i, document = locate(layout.queries, batch, index, q_length, past, LAYOUT)
    own = entries(bias.diagonal, i, count) + row_frame(i, slope, origin, RELATIVE)
    rows = (i[:, None], document[:, None], entries(bias.row, i, count)[:, None], own[:, None], origin)
    return slope, index, i, rows


@triton.jit
def forward(
    q, out, strides, k, v, lse, bias, layout, q_length, k_length, count, scale, order,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, GAINS: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr,
    LAYOUT: tl.constexpr, RELATIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries: its output, and lse − log₂D, which is all that the backward pass needs of D.

    The last tile comes first: under a causal mask it is the longest. A query that sees nothing gives 0.
    """
    tiles = tl.cdiv(q_length, BLOCK_M)
    tile, head, batch = program_coordinates(tiles, order)
    number = tiles - 1 - tile
    slope, index, i, rows = query_rows(
        bias, layout, number, head, batch, q_length, k_length, count, SLOPES, LAYOUT, RELATIVE, BLOCK_M
    )
    start = number * BLOCK_M
    q = load_rows(head_of(q, strides[0], batch, head), strides[0][2], start, q_length, BLOCK_M, WIDTH)
    sources = (k, v, head // GROUPS, k_length)
    gain = gain_of(bias, head, GAINS)
    vectors, side = (bias.column, count, slope, gain), (layout.keys, batch)
    first, edge, last = key_span(layout, batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE)
    state = (tl.zeros((BLOCK_M, WIDTH), tl.float32), tl.zeros((BLOCK_M,), tl.float32),
             tl.full((BLOCK_M,), float("-inf"), tl.float32))  # fmt: skip
    if CAUSAL and not LAYOUT:
        state = fold_keys(state, q, rows, sources, vectors, side, (first, edge), scale, CAUSAL, ROW, LAYOUT, RELATIVE,
                          False, WIDTH, BLOCK_N, PRECISION)  # fmt: skip
    acc, total, top = fold_keys(state, q, rows, sources, vectors, side, (edge, last), scale, CAUSAL, ROW, LAYOUT,
                                RELATIVE, True, WIDTH, BLOCK_N, PRECISION)  # fmt: skip
    seen = total > 0.0
    size = tl.load(bias.row_scale + tl.minimum(i, count - 1)).to(tl.float32)
    total = tl.where(seen, total, 1.0)
    values = acc * tl.where(seen, size / total, 0.0)[:, None]
    store_rows(out, strides[1], batch, head, start, q_length, values, BLOCK_M, WIDTH)
    sums = top + tl.log2(total) - tl.log2(size) - gain * row_frame(i, slope, rows[4], RELATIVE)
    at = lse + (batch.to(tl.int64) * order[0] + head) * q_length + index
    tl.store(at, tl.where(seen, sums, float("inf")), mask=index < q_length)


@triton.jit
def products_of_rows(out, dout, row_scale, i, count):
    """δ of a tile of queries."""
    size = tl.load(row_scale + tl.minimum(i, count - 1)).to(tl.float32)
    return tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1) / size


@triton.jit
def fold_queries(
    state, k, v, columns, tensors, saved, vectors, layout, span, scale,
    GAINS: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr, LAYOUT: tl.constexpr, RELATIVE: tl.constexpr,
    EDGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """Take a span of queries into state = (dk, dv, Σ ds·B) of a tile of keys. Tiles have keys down, queries across.

    Where SAVE, ds is written to saved = (tensor descriptor, its line, the first key) for the query side.
    """
    dk, dv, products_with_bias = state
    j, j_document, column = columns
    q, dout, head, lse, delta, length, past = tensors
    diagonal, row, count, slope, gain = vectors
    side, batch = layout
    for start in tl.range(span[0], span[1], BLOCK_M):
        index = start + tl.arange(0, BLOCK_M)
        origin = start + past
        i, i_document = locate(side, batch, index, length, past, LAYOUT)
        frame = row_frame(i, slope, origin, RELATIVE)
        i_diagonal = entries(diagonal, i, count)
        i_own = (i_diagonal + frame)[None, :]
        i_row = entries(row, i, count)[None, :]
        sums = tl.load(lse + index, mask=index < length, other=float("inf")) + gain * frame
        products = tl.load(delta + index, mask=index < length, other=0.0)
        i, i_document = i[None, :], i_document[None, :]
        terms = relative(column, j, slope, origin, RELATIVE)
        seen = visible(i, j, i_document, j_document, CAUSAL, LAYOUT)
        queries = stream(q, batch, head, start, BLOCK_M, WIDTH)
        scores = tl.dot(k, tl.trans(queries), input_precision=PRECISION) * scale
        scores = exponent(scores, i, j, terms, i_own, slope, gain, seen, ROW, RELATIVE, EDGE)
        weights = tl.exp2(scores - sums[None, :])
        if ROW:
            weights = weights * factor(i, j, terms, i_row, i_own, EDGE)
        upstream = stream(dout, batch, head, start, BLOCK_M, WIDTH)
        dv = tl.dot(weights.to(k.dtype), upstream, dv, input_precision=PRECISION)
        ds = weights * (tl.dot(v, tl.trans(upstream), input_precision=PRECISION) - products[None, :])
        if GAINS:
            products_with_bias += tl.sum(ds * plain_bias(i, j, column, i_diagonal[None, :], slope, EDGE), 1)
        ds = ds.to(k.dtype)
        if SAVE:
            saved[0].store([saved[1], saved[2], start], ds.reshape(1, BLOCK_N, BLOCK_M))
        dk = tl.dot(ds, queries, dk, input_precision=PRECISION)
    return dk, dv, products_with_bias


@triton.jit
def query_span(layout, batch, number, q_length, k_length, CAUSAL: tl.constexpr, LAYOUT: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr):  # fmt: skip
    """(first, edge, last): a tile of keys is seen by queries first … last−1, and up to `edge` they need the mask."""
    first = 0
    last = q_length
    edge = q_length
    if LAYOUT:
        at = layout.query_ranges + (batch * tl.cdiv(k_length, RANGE) + number * BLOCK_N // RANGE) * 2
        first, last = tl.load(at), tl.load(at + 1)
        edge = last
    elif CAUSAL:
        start = number * BLOCK_N - (k_length - q_length)
        first = tl.maximum(start, 0) // BLOCK_M * BLOCK_M
        edge = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N, 0), BLOCK_M) * BLOCK_M, q_length)
    return first, edge, last


@triton.jit
def key_side(
    k, v, strides, q, dout, scores, sums, gradients, by_gain, bias, layout, q_length, k_length, count, scale, order,
    angles,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, GAINS: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr,
    LAYOUT: tl.constexpr, RELATIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr, PRECISION: tl.constexpr, ROTARY: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, from all query heads that share it. The first tile, the longest, comes first.

    q and dout are tensor descriptors. sums: lse, δ. gradients: dk, dv. strides: of k, v, dk, dv. by_gain: Σ ds·B in
    exponents of 2 of each key and query head, (batch, query heads, keys), where B has a gain.
    Where ROTARY, q and k come rotated, and dk is rotated back by the angles of `store_unrotated`. Where SAVE, gradients
    of the scores go to the tensor descriptor `scores`, (batch·query heads, keys, queries).
    """
    number, head, batch = program_coordinates(tl.cdiv(k_length, BLOCK_N), order)
    start = number * BLOCK_N
    j, document = locate(layout.keys, batch, start + tl.arange(0, BLOCK_N), k_length, 0, LAYOUT)
    columns = (j[:, None], document[:, None], entries(bias.column, j, count)[:, None])
    k = load_rows(head_of(k, strides[0], batch, head), strides[0][2], start, k_length, BLOCK_N, WIDTH)
    v = load_rows(head_of(v, strides[1], batch, head), strides[1][2], start, k_length, BLOCK_N, WIDTH)
    first, edge, last = query_span(layout, batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE)
    dk, dv = tl.zeros((BLOCK_N, WIDTH), tl.float32), tl.zeros((BLOCK_N, WIDTH), tl.float32)
    for member in range(GROUPS):
        one = head * GROUPS + member
        slope = tl.load(bias.slope + one * SLOPES).to(tl.float32) * LOG2E
        gain = gain_of(bias, one, GAINS)
        line = batch * order[0] * GROUPS + one
        saved = (scores, line, start)
        line = line.to(tl.int64) * q_length
        sources = (q, dout, one, sums[0] + line, sums[1] + line, q_length, k_length - q_length)
        vectors, side = (bias.diagonal, bias.row, count, slope, gain), (layout.queries, batch)
        state = (dk, dv, tl.zeros((BLOCK_N,), tl.float32))
        state = fold_queries(state, k, v, columns, sources, saved, vectors, side, (first, edge), scale, GAINS, CAUSAL,
                             ROW, LAYOUT, RELATIVE, True, WIDTH, BLOCK_M, BLOCK_N, PRECISION, SAVE)  # fmt: skip
        if CAUSAL and not LAYOUT:
            state = fold_queries(state, k, v, columns, sources, saved, vectors, side, (edge, last), scale, GAINS,
                                 CAUSAL, ROW, LAYOUT, RELATIVE, False, WIDTH, BLOCK_M, BLOCK_N, PRECISION,
                                 SAVE)  # fmt: skip
        dk, dv, products_with_bias = state
        if GAINS:
            index = start + tl.arange(0, BLOCK_N)
            at = by_gain + (batch * order[0] * GROUPS + one).to(tl.int64) * k_length + index
            tl.store(at, products_with_bias, mask=index < k_length)
    dk *= scale / LOG2E
    store_unrotated(gradients[0], strides[2], batch, head, start, k_length, dk, angles, BLOCK_N, WIDTH, ROTARY)
    store_rows(gradients[1], strides[3], batch, head, start, k_length, dv, BLOCK_N, WIDTH)


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
    column, count, slope, gain = vectors
    side, batch = layout
    for start in tl.range(span[0], span[1], BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        j, j_document = locate(side, batch, index, length, 0, LAYOUT)
        j, j_document = j[None, :], j_document[None, :]
        terms = key_column(column, j, slope, origin, count, RELATIVE)
        seen = visible(i, j, i_document, j_document, CAUSAL, LAYOUT)
        keys = stream(k, batch, head, start, BLOCK_N, WIDTH)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        scores = exponent(scores, i, j, terms, diagonal, slope, gain, seen, ROW, RELATIVE, EDGE)
        weights = tl.exp2(scores - sums)
        if ROW:
            weights = weights * factor(i, j, terms, row, diagonal, EDGE)
        values = stream(v, batch, head, start, BLOCK_N, WIDTH)
        ds = weights * (tl.dot(dout, tl.trans(values), input_precision=PRECISION) - products)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_side(
    q, out, dout, dq, strides, k, v, sums, bias, layout, q_length, k_length, count, scale, order, angles,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, GAINS: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr,
    LAYOUT: tl.constexpr, RELATIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr, PRECISION: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, the last tile first; and its δ, which the key side reads.

    k and v are tensor descriptors. sums: lse, δ. strides: of q, out, dout, dq. angles, ROTARY: as key_side's.
    """
    tiles = tl.cdiv(q_length, BLOCK_M)
    tile, head, batch = program_coordinates(tiles, order)
    number = tiles - 1 - tile
    slope, index, i, rows = query_rows(
        bias, layout, number, head, batch, q_length, k_length, count, SLOPES, LAYOUT, RELATIVE, BLOCK_M
    )
    start = number * BLOCK_M
    q = load_rows(head_of(q, strides[0], batch, head), strides[0][2], start, q_length, BLOCK_M, WIDTH)
    out = load_rows(head_of(out, strides[1], batch, head), strides[1][2], start, q_length, BLOCK_M, WIDTH)
    dout = load_rows(head_of(dout, strides[2], batch, head), strides[2][2], start, q_length, BLOCK_M, WIDTH)
    line = (batch.to(tl.int64) * order[0] + head) * q_length
    inside = index < q_length
    lse = tl.load(sums[0] + line + index, mask=inside, other=float("inf"))
    gain = gain_of(bias, head, GAINS)
    lse += gain * row_frame(i, slope, rows[4], RELATIVE)
    products = products_of_rows(out, dout, bias.row_scale, i, count)
    tl.store(sums[1] + line + index, products, mask=inside)
    upstream = (dout, lse[:, None], products[:, None])
    sources, side = (k, v, head // GROUPS, k_length), (layout.keys, batch)
    vectors = (bias.column, count, slope, gain)
    first, edge, last = key_span(layout, batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    if CAUSAL and not LAYOUT:
        total = gather_keys(total, q, upstream, rows, sources, vectors, side, (first, edge), scale, CAUSAL, ROW,
                            LAYOUT, RELATIVE, False, WIDTH, BLOCK_N, PRECISION)  # fmt: skip
    total = gather_keys(total, q, upstream, rows, sources, vectors, side, (edge, last), scale, CAUSAL, ROW, LAYOUT,
                        RELATIVE, True, WIDTH, BLOCK_N, PRECISION)  # fmt: skip
    total *= scale / LOG2E
    store_unrotated(dq, strides[3], batch, head, start, q_length, total, angles, BLOCK_M, WIDTH, ROTARY)


@triton.jit
def row_products(
    out, dout, strides, delta, row_scale, queries, length, past, count,
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """δ of one tile of queries. strides: of out, dout."""
    number, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = number * BLOCK_M
    index = start + tl.arange(0, BLOCK_M)
    out = load_rows(head_of(out, strides[0], batch, head), strides[0][2], start, length, BLOCK_M, WIDTH)
    dout = load_rows(head_of(dout, strides[1], batch, head), strides[1][2], start, length, BLOCK_M, WIDTH)
    i, _ = locate(queries, batch, index, length, past, LAYOUT)
    products = products_of_rows(out, dout, row_scale, i, count)
    line = (batch.to(tl.int64) * tl.num_programs(1) + head) * length
    tl.store(delta + line + index, products, mask=index < length)


@triton.jit
def query_side_from_saved(
    dq, strides, scores, k, layout, q_length, k_length, scale, order, angles,
    GROUPS: tl.constexpr, CAUSAL: tl.constexpr, LAYOUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, RANGE: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, the last first. scores, (batch·heads, keys, queries), and k are tensor descriptors.

    BLOCK_M must be the keys of the key side's tiles, and BLOCK_N divide it: then all that is read has been written. A
    layout's stretch of keys may hold tiles that nobody sees and nobody wrote: there what is not seen is left out.
    """
    tiles = tl.cdiv(q_length, BLOCK_M)
    tile, head, batch = program_coordinates(tiles, order)
    number = tiles - 1 - tile
    start, past = number * BLOCK_M, k_length - q_length
    first, _, last = key_span(layout, batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE)
    i, i_document = locate(layout.queries, batch, start + tl.arange(0, BLOCK_M), q_length, past, LAYOUT)
    line = batch * order[0] + head
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for left in tl.range(first, last, BLOCK_N):
        ds = scores.load([line, tl.cast(left, tl.int32), start]).reshape(BLOCK_N, BLOCK_M)
        if LAYOUT:
            j, j_document = locate(layout.keys, batch, left + tl.arange(0, BLOCK_N), k_length, 0, LAYOUT)
            seen = visible(i[None, :], j[:, None], i_document[None, :], j_document[:, None], CAUSAL, LAYOUT)
            ds = tl.where(seen, ds, 0.0)
        keys = stream(k, batch, head // GROUPS, left, BLOCK_N, WIDTH)
        total = tl.dot(tl.trans(ds), keys, total)
    store_unrotated(dq, strides, batch, head, start, q_length, total * scale, angles, BLOCK_M, WIDTH, ROTARY)

"""The forward kernel: D·softmax(q kᵀ·scale + B)·v by tiles of queries, one pass over the keys that each tile sees."""

import triton
import triton.language as tl

from skipless.ops.triton import tile


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
    column, count, slope = vectors
    places, batch = layout
    for start in tl.range(span[0], span[1], BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        j, j_document = tile.place(places, batch, index, length, 0, LAYOUT)
        j, j_document = j[None, :], j_document[None, :]
        terms = tile.key_column(column, j, slope, origin, count, RELATIVE)
        seen = tile.visible(i, j, i_document, j_document, CAUSAL, LAYOUT)
        keys = tile.stream(k, batch, head, start, BLOCK_N, WIDTH)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tile.exponent(scores, i, j, terms, diagonal, slope, seen, ROW, RELATIVE, EDGE)
        peak = scores
        if ROW:
            peak = scores + tile.near_bias(i, j, terms, row, diagonal, EDGE)
        highest = tl.maximum(top, tl.max(peak, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest) if EDGE else highest
        weights = tl.exp2(scores - shift[:, None])
        if ROW:
            weights = weights * tile.factor(i, j, terms, row, diagonal, EDGE)
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        values = tile.stream(v, batch, head, start, BLOCK_N, WIDTH)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        top = highest
    return acc, total, top


@triton.jit
def key_span(ranges, batch, number, q_length, k_length, CAUSAL: tl.constexpr, LAYOUT: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr):  # fmt: skip
    """(first, edge, last): a tile of queries sees keys first … last−1, and from `edge` on they need the mask."""
    first = 0
    last = k_length
    edge = 0
    if LAYOUT:
        blocks = tl.cdiv(q_length, RANGE)
        at = ranges + (batch * blocks + number * BLOCK_M // RANGE) * 2
        first, last = tl.load(at), tl.load(at + 1)
        edge = first
    elif CAUSAL:
        origin = number * BLOCK_M + k_length - q_length
        edge = origin // BLOCK_N * BLOCK_N
        last = tl.minimum(k_length, origin + BLOCK_M)
    return first, edge, last


@triton.jit
def query_rows(
    shape, layout, number, head, batch, q_length, k_length, count,
    SLOPES: tl.constexpr, LAYOUT: tl.constexpr, RELATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What a tile of queries knows of itself: slope, indices, and (i, document, row, diagonal, origin) as columns."""
    slopes, _, diagonal, row, _ = shape
    past = k_length - q_length
    slope = tl.load(slopes + head * SLOPES).to(tl.float32) * tile.LOG2E
    origin = number * BLOCK_M + past
    index = number * BLOCK_M + tl.arange(0, BLOCK_M)
    i, document = tile.place(layout[0], batch, index, q_length, past, LAYOUT)
    own = tile.entries(diagonal, i, count) + tile.row_frame(i, slope, origin, RELATIVE)
    rows = (i[:, None], document[:, None], tile.entries(row, i, count)[:, None], own[:, None], origin)
    return slope, index, i, rows


@triton.jit
def forward(
    q, out, strides, k, v, lse, shape, layout, q_length, k_length, count, scale, order,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr, LAYOUT: tl.constexpr,
    RELATIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries: its output, and lse − log₂D, which is all that the backward pass needs of D.

    The last tile comes first: under a causal mask it is the longest. A query that sees nothing gives 0.
    """
    tiles = tl.cdiv(q_length, BLOCK_M)
    place, head, batch = tile.turn(tiles, order)
    number = tiles - 1 - place
    slope, index, i, rows = query_rows(
        shape, layout, number, head, batch, q_length, k_length, count, SLOPES, LAYOUT, RELATIVE, BLOCK_M
    )
    start = number * BLOCK_M
    q = tile.tokens(tile.head_of(q, strides[0], batch, head), strides[0][2], start, q_length, BLOCK_M, WIDTH)
    sources = (k, v, head // GROUPS, k_length)
    vectors, places = (shape[1], count, slope), (layout[1], batch)
    first, edge, last = key_span(layout[2], batch, number, q_length, k_length, CAUSAL, LAYOUT, BLOCK_M, BLOCK_N, RANGE)
    state = (tl.zeros((BLOCK_M, WIDTH), tl.float32), tl.zeros((BLOCK_M,), tl.float32),
             tl.full((BLOCK_M,), float("-inf"), tl.float32))  # fmt: skip
    if CAUSAL and not LAYOUT:
        state = fold_keys(state, q, rows, sources, vectors, places, (first, edge), scale, CAUSAL, ROW, LAYOUT, RELATIVE,
                          False, WIDTH, BLOCK_N, PRECISION)  # fmt: skip
    acc, total, top = fold_keys(state, q, rows, sources, vectors, places, (edge, last), scale, CAUSAL, ROW, LAYOUT,
                                RELATIVE, True, WIDTH, BLOCK_N, PRECISION)  # fmt: skip
    seen = total > 0.0
    size = tl.load(shape[4] + tl.minimum(i, count - 1)).to(tl.float32)
    total = tl.where(seen, total, 1.0)
    values = acc * tl.where(seen, size / total, 0.0)[:, None]
    tile.keep(out, strides[1], batch, head, start, q_length, values, BLOCK_M, WIDTH)
    sums = top + tl.log2(total) - tl.log2(size) - tile.row_frame(i, slope, rows[4], RELATIVE)
    at = lse + (batch.to(tl.int64) * order[0] + head) * q_length + index
    tl.store(at, tl.where(seen, sums, float("inf")), mask=index < q_length)

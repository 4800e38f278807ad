"""Shaped attention forward on the GPU: tiles of scores with the bias of Theorem 3 added in registers."""

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
        j, j_document = place(places, batch, index, length, 0, LAYOUT)
        j, j_document = j[None, :], j_document[None, :]
        terms = key_column(column, j, slope, origin, count, RELATIVE)
        seen = visible(i, j, i_document, j_document, CAUSAL, LAYOUT)
        keys = stream(k, batch, head, start, BLOCK_N, WIDTH)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        scores = exponent(scores, i, j, terms, diagonal, slope, seen, ROW, RELATIVE, EDGE)
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
    slope = tl.load(slopes + head * SLOPES).to(tl.float32) * LOG2E
    origin = number * BLOCK_M + past
    index = number * BLOCK_M + tl.arange(0, BLOCK_M)
    i, document = place(layout[0], batch, index, q_length, past, LAYOUT)
    own = entries(diagonal, i, count) + row_frame(i, slope, origin, RELATIVE)
    rows = (i[:, None], document[:, None], entries(row, i, count)[:, None], own[:, None], origin)
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
    place, head, batch = turn(tiles, order)
    number = tiles - 1 - place
    slope, index, i, rows = query_rows(
        shape, layout, number, head, batch, q_length, k_length, count, SLOPES, LAYOUT, RELATIVE, BLOCK_M
    )
    start = number * BLOCK_M
    q = tokens(head_of(q, strides[0], batch, head), strides[0][2], start, q_length, BLOCK_M, WIDTH)
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
    keep(out, strides[1], batch, head, start, q_length, values, BLOCK_M, WIDTH)
    sums = top + tl.log2(total) - tl.log2(size) - row_frame(i, slope, rows[4], RELATIVE)
    at = lse + (batch.to(tl.int64) * order[0] + head) * q_length + index
    tl.store(at, tl.where(seen, sums, float("inf")), mask=index < q_length)

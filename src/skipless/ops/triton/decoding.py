"""The decoding kernel: a few queries against many keys, which several programs share between them.

All query heads of one key head are rows of one tile, so that keys and values are read once. Each program takes a share
of the keys, and a second kernel joins the shares by their maxima, as the forward kernel joins tiles. A share of all
keys needs no joining.
"""

import triton
import triton.language as tl

from skipless.ops.triton import tile


@triton.jit
def query_rows(shape, queries, head, batch, length, past, count, GROUPS: tl.constexpr, SLOPES: tl.constexpr,
               LAYOUT: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Row r is query r mod T_q of query head r div T_q: its head, index, slope and (i, document, row, diagonal)."""
    r = tl.arange(0, ROWS)
    member, index = r // length, r % length
    one = head * GROUPS + tl.minimum(member, GROUPS - 1)
    slope = tl.load(shape[0] + one * SLOPES).to(tl.float32) * tile.LOG2E
    i, document = tile.place(queries, batch, index, length, past, LAYOUT)
    row, diagonal = tile.entries(shape[3], i, count), tile.entries(shape[2], i, count)
    return one, index, slope[:, None], (i[:, None], document[:, None], row[:, None], diagonal[:, None])


@triton.jit
def weigh(scores, own, places, columns, slope, top, count, CAUSAL: tl.constexpr, ROW: tl.constexpr,
          LAYOUT: tl.constexpr):  # fmt: skip
    """The softmax's numerators of a tile, below the maximum so far; what that shrinks earlier ones by; the maximum."""
    i, document, row, diagonal = own
    j, j_document = places[0][None, :], places[1][None, :]
    terms = tile.entries(columns, j, count)
    seen = tile.visible(i, j, document, j_document, CAUSAL, LAYOUT)
    scores = tile.exponent(scores, i, j, terms, diagonal, slope, seen, ROW, False, True)
    peak = scores + tile.near_bias(i, j, terms, row, diagonal, True) if ROW else scores
    highest = tl.maximum(top, tl.max(peak, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    if ROW:
        weights = weights * tile.factor(i, j, terms, row, diagonal, True)
    return weights, tl.exp2(top - shift), highest


@triton.jit
def write(acc, total, out, strides, one, index, batch, i, sizes, count, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """D·acc/total into the rows' places."""
    size = tl.load(sizes + tl.minimum(i, count - 1)).to(tl.float32)
    values = tl.where(total[:, None] > 0.0, acc / tl.where(total > 0.0, total, 1.0)[:, None] * size, 0.0)
    at = out + batch.to(tl.int64) * strides[0] + one[:, None] * strides[1] + index[:, None] * strides[2]
    inside = tl.arange(0, ROWS)[:, None] < rows
    tl.store(at + tl.arange(0, WIDTH)[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def share(
    q, k, v, out, strides, shares, shape, layout, q_length, k_length, each, count, scale,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr, LAYOUT: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One share of `each` keys of one key head: sums of weighted values, of weights, and the maximum, by row.

    ALONE: it is all keys, and the output is written at once.
    """
    number, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past = k_length - q_length
    one, index, slope, own = query_rows(
        shape, layout[0], head, batch, q_length, past, count, GROUPS, SLOPES, LAYOUT, ROWS
    )
    features, r = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROWS)
    at = q + batch.to(tl.int64) * strides[0][0] + one[:, None] * strides[0][1] + index[:, None] * strides[0][2]
    queries = tl.load(at + features, mask=r[:, None] < GROUPS * q_length, other=0.0)
    k, v = tile.head_of(k, strides[1], batch, head), tile.head_of(v, strides[2], batch, head)
    acc, total = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for start in tl.range(number * each, tl.minimum((number + 1) * each, k_length), BLOCK_N):
        keys = tile.tokens(k, strides[1][2], start, k_length, BLOCK_N, WIDTH)
        values = tile.tokens(v, strides[2][2], start, k_length, BLOCK_N, WIDTH)
        places = tile.place(layout[1], batch, start + tl.arange(0, BLOCK_N), k_length, 0, LAYOUT)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        weights, shrink, top = weigh(scores, own, places, shape[1], slope, top, count, CAUSAL, ROW, LAYOUT)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    if ALONE:
        write(acc, total, out, strides[3], one, index, batch, own[0], shape[4], count, GROUPS * q_length, WIDTH, ROWS)
    else:
        slot = ((batch * tl.num_programs(1) + head) * tl.num_programs(0) + number) * ROWS + r
        tl.store(shares[0] + slot[:, None] * WIDTH + features, acc)
        tl.store(shares[1] + slot, total)
        tl.store(shares[2] + slot, top)


@triton.jit
def join(
    shares, out, strides, shape, queries, q_length, past, count, number,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, LAYOUT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The output of one key head's rows, from all `number` shares."""
    head, batch = tl.program_id(0), tl.program_id(1)
    one, index, _, own = query_rows(shape, queries, head, batch, q_length, past, count, GROUPS, SLOPES, LAYOUT, ROWS)
    features, r = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROWS)
    acc, total = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for share in tl.range(0, number):
        slot = ((batch * tl.num_programs(0) + head) * number + share) * ROWS + r
        peak = tl.load(shares[2] + slot)
        highest = tl.maximum(top, peak)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        old, new = tl.exp2(top - shift), tl.exp2(peak - shift)
        acc = acc * old[:, None] + tl.load(shares[0] + slot[:, None] * WIDTH + features) * new[:, None]
        total = total * old + tl.load(shares[1] + slot) * new
        top = highest
    write(acc, total, out, strides, one, index, batch, own[0], shape[4], count, GROUPS * q_length, WIDTH, ROWS)

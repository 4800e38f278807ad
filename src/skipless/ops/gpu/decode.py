"""Attention of one new token to its cache on the GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from skipless.ops.bias import KernelBias
from skipless.ops.gpu import attention
from skipless.ops.gpu.launch import KernelInputs, by_token, strides_of
from skipless.ops.gpu.rows import head_of, load_rows, locate
from skipless.ops.layout import KernelLayout


@triton.jit
def query_rows(bias, queries, head, batch, length, past, count, GROUPS: tl.constexpr, SLOPES: tl.constexpr,
               GAINS: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Row r is query r mod T_q of query head r div T_q: its head, index, (slope, gain) and (i, document, …)."""
    r = tl.arange(0, ROWS)
    member, index = r // length, r % length
    one = head * GROUPS + tl.minimum(member, GROUPS - 1)
    slope = tl.load(bias.slope + one * SLOPES).to(tl.float32) * attention.LOG2E
    gain = tl.zeros_like(slope) + attention.gain_of(bias, one, GAINS)
    i, document = locate(queries, batch, index, length, past, LAYOUT)
    row, diagonal = attention.entries(bias.row, i, count), attention.entries(bias.diagonal, i, count)
    own = (i[:, None], document[:, None], row[:, None], diagonal[:, None])
    return one, index, (slope[:, None], gain[:, None]), own


@triton.jit
def weigh(scores, own, locations, columns, factors, top, count, CAUSAL: tl.constexpr, ROW: tl.constexpr,
          LAYOUT: tl.constexpr):  # fmt: skip
    """The softmax's numerators of a tile, below the maximum so far; what that shrinks earlier ones by; the maximum."""
    i, document, row, diagonal = own
    j, j_document = locations[0][None, :], locations[1][None, :]
    terms = attention.entries(columns, j, count)
    seen = attention.visible(i, j, document, j_document, CAUSAL, LAYOUT)
    slope, gain = factors
    scores = attention.exponent(scores, i, j, terms, diagonal, slope, gain, seen, ROW, False, True)
    peak = scores + attention.near_bias(i, j, terms, row, diagonal, True) if ROW else scores
    highest = tl.maximum(top, tl.max(peak, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    if ROW:
        weights = weights * attention.factor(i, j, terms, row, diagonal, True)
    return weights, tl.exp2(top - shift), highest


@triton.jit
def write(acc, total, out, strides, one, index, batch, i, sizes, count, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """D·acc/total into the rows of the output."""
    size = tl.load(sizes + tl.minimum(i, count - 1)).to(tl.float32)
    values = tl.where(total[:, None] > 0.0, acc / tl.where(total > 0.0, total, 1.0)[:, None] * size, 0.0)
    at = out + batch.to(tl.int64) * strides[0] + one[:, None] * strides[1] + index[:, None] * strides[2]
    inside = tl.arange(0, ROWS)[:, None] < rows
    tl.store(at + tl.arange(0, WIDTH)[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def share(
    q, k, v, out, strides, shares, bias, layout, q_length, k_length, each, count, scale,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, GAINS: tl.constexpr, CAUSAL: tl.constexpr, ROW: tl.constexpr,
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """One share of `each` keys of one key head: sums of weighted values, of weights, and the maximum, by row.

    ALONE: it is all keys, and the output is written at once.
    """
    number, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past = k_length - q_length
    one, index, factors, own = query_rows(
        bias, layout.queries, head, batch, q_length, past, count, GROUPS, SLOPES, GAINS, LAYOUT, ROWS
    )
    features, r = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROWS)
    at = q + batch.to(tl.int64) * strides[0][0] + one[:, None] * strides[0][1] + index[:, None] * strides[0][2]
    queries = tl.load(at + features, mask=r[:, None] < GROUPS * q_length, other=0.0)
    k, v = head_of(k, strides[1], batch, head), head_of(v, strides[2], batch, head)
    acc, total = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for start in tl.range(number * each, tl.minimum((number + 1) * each, k_length), BLOCK_N):
        keys = load_rows(k, strides[1][2], start, k_length, BLOCK_N, WIDTH)
        values = load_rows(v, strides[2][2], start, k_length, BLOCK_N, WIDTH)
        locations = locate(layout.keys, batch, start + tl.arange(0, BLOCK_N), k_length, 0, LAYOUT)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        weights, shrink, top = weigh(scores, own, locations, bias.column, factors, top, count, CAUSAL, ROW, LAYOUT)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    if ALONE:
        write(
            acc,
            total,
            out,
            strides[3],
            one,
            index,
            batch,
            own[0],
            bias.row_scale,
            count,
            GROUPS * q_length,
            WIDTH,
            ROWS,
        )
    else:
        slot = ((batch * tl.num_programs(1) + head) * tl.num_programs(0) + number) * ROWS + r
        tl.store(shares[0] + slot[:, None] * WIDTH + features, acc)
        tl.store(shares[1] + slot, total)
        tl.store(shares[2] + slot, top)


@triton.jit
def join(
    shares, out, strides, bias, queries, q_length, past, count, number,
    GROUPS: tl.constexpr, SLOPES: tl.constexpr, GAINS: tl.constexpr, LAYOUT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The output of one key head's rows, from all `number` shares."""
    head, batch = tl.program_id(0), tl.program_id(1)
    one, index, _, own = query_rows(
        bias, queries, head, batch, q_length, past, count, GROUPS, SLOPES, GAINS, LAYOUT, ROWS
    )
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
    write(acc, total, out, strides, one, index, batch, own[0], bias.row_scale, count, GROUPS * q_length, WIDTH, ROWS)


_KEYS_PER_TILE = 64
_KEYS_PER_SHARE = 256  # at least: less is not worth a second kernel
_LAUNCH: dict = {"BLOCK_N": _KEYS_PER_TILE, "num_warps": 4, "num_stages": 2}
_PROGRAMS = 264  # two for each multiprocessor of a large GPU


def shares_of(keys: int, heads: int, batch: int) -> tuple[int, int]:
    """(how many shares, keys in each, whole tiles): enough to fill a GPU, where there are keys enough."""
    wanted = min(-(-keys // _KEYS_PER_SHARE), max(1, _PROGRAMS // (heads * batch)))
    tiles = -(-keys // _KEYS_PER_TILE)
    each = -(-tiles // wanted) * _KEYS_PER_TILE
    return -(-keys // each), each


@library.custom_op("skipless::shaped_decoding", mutates_args=())
def shaped_decoding(
    q: Tensor, k: Tensor, v: Tensor,
    slope: Tensor, column: Tensor, diagonal: Tensor, row_scale: Tensor, row: Tensor | None, gain: Tensor | None,
    sides: list[Tensor], causal: bool,
) -> Tensor:  # fmt: skip
    """The output alone. Arguments as those of skipless::shaped_attention, but of the layout only queries and keys."""
    bias = KernelBias(slope, column, diagonal, row_scale, row, gain)
    layout = KernelLayout(*sides, *sides) if sides else None
    inputs, out = KernelInputs(q, k, v, bias, layout, causal), by_token(q)
    batch, heads, length, width = k.shape
    rows = max(16, 1 << (q.shape[2] * inputs.groups - 1).bit_length())
    number, each = shares_of(length, heads, batch)
    alone, sizes = number == 1, (batch, heads, number, rows)
    shares = tuple(q.new_empty(size, dtype=torch.float32) for size in ((*sizes, width), sizes, sizes) if not alone)
    bias, layout, q_length, k_length, count, scale = inputs.common
    constants: dict = {n: x for n, x in inputs.constants.items() if n not in ("RELATIVE", "RANGE")}
    constants |= {"ROWS": rows, "ALONE": alone}
    joining: dict = {n: x for n, x in constants.items() if n not in ("CAUSAL", "ROW", "PRECISION", "ALONE")}
    with torch.cuda.device_of(q):
        share[number, heads, batch](
            q, k, v, out, strides_of(q, k, v, out), shares or (out, out, out), bias, layout, q_length, k_length, each,
            count, scale, **constants, **_LAUNCH,
        )  # fmt: skip
        if not alone:
            past = k_length - q_length
            join[heads, batch](
                shares, out, strides_of(out)[0], bias, layout.queries, q_length, past, count, number, **joining
            )
    return out


@shaped_decoding.register_fake
def _(q, *rest):
    return by_token(q)

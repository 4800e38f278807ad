"""How the attention kernels are launched: sizes, and the operator torch sees."""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, library
from triton.tools.tensor_descriptor import TensorDescriptor

from skipless.ops.gpu import attention_backward
from skipless.ops.gpu import attention_backward as gradient
from skipless.ops.gpu.attention import LOG2E, forward
from skipless.ops.layout import BLOCK


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: tiles of `queries` × `keys`, warps per program, and stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Sizes:
    """The forward kernel's tiles, and the backward's: those of its key side and those of its query side.

    kept: the query side's where the key side keeps the gradients of the scores; its queries are the key side's keys.
    """

    forward: Launch
    key_side: Launch
    query_side: Launch
    kept: Launch


def sizes(head_width: int, dtype: torch.dtype) -> Sizes:
    """The tiles for a head width, by benchmarks/tune_attention.py."""
    if dtype == torch.float32:
        return Sizes(Launch(32, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1))
    if head_width <= 64:
        return Sizes(Launch(64, 128, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3), Launch(64, 64, 4, 3))
    if head_width <= 128:
        return Sizes(Launch(64, 64, 4, 3), Launch(32, 64, 4, 3), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3))
    return Sizes(Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 2))


# Gradients of scores that a backward pass may keep, so that one of its two sides need not compute them again.
KEPT_BYTES = 512 * 2**20
# What heads whose longest tiles come first, side by side, may read, so that it stays in the cache. By
# benchmarks/tune_attention.py: on an H200 10 % of attention at T=512 and 15 % at 2048; 16 MiB do the same, 4 less.
_SECTION_BYTES = 8 * 2**20
_FEWEST_HEADS = 4  # of which scores are kept: tiles of fewer leave multiprocessors idle while the longest one runs
_ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class Call:
    """One attention problem, in the kernels' terms. vectors: slope, column, diagonal, row_scale. places: 0 or 4."""

    q: Tensor
    k: Tensor
    v: Tensor
    vectors: list[Tensor]
    row: Tensor | None
    places: list[Tensor]
    causal: bool

    def part(self, rows: slice, heads: slice) -> "Call":
        """The same for some rows of the batch and some key heads, with the query heads that share them."""
        slopes, those = self.vectors[0], self.query_heads(heads)
        return replace(
            self, q=self.q[rows, those], k=self.k[rows, heads], v=self.v[rows, heads],
            vectors=[slopes[those] if slopes.numel() > 1 else slopes, *self.vectors[1:]],
            places=[t[rows] for t in self.places],
        )  # fmt: skip

    def query_heads(self, heads: slice) -> slice:
        """Those that share some key heads."""
        return slice(heads.start * self.groups, heads.stop * self.groups)

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    def common(self) -> tuple:
        """(shape, layout, T_q, T_k, entries of a vector, scale·log₂e) in the kernels' order."""
        slope, column, diagonal, row_scale = self.vectors
        shape = (slope, column, diagonal, column if self.row is None else self.row, row_scale)
        layout = tuple(self.places) if self.places else (column,) * 4
        scale = self.q.shape[3] ** -0.5 * LOG2E.value
        return shape, layout, self.q.shape[2], self.k.shape[2], column.shape[0], scale

    def constants(self) -> dict:
        """What the kernels are compiled for."""
        half = self.q.dtype != torch.float32
        return {
            "GROUPS": self.groups,
            "SLOPES": int(self.vectors[0].numel() > 1),
            "CAUSAL": self.causal,
            "ROW": self.row is not None,
            "LAYOUT": bool(self.places),
            # a frame per tile costs an exponent up to 1e-5: less than bfloat16 keeps of a weight, more than float32
            "RELATIVE": half and self.causal and not self.places and self.row is None,
            "WIDTH": self.q.shape[3],
            "RANGE": BLOCK,
            "PRECISION": "tf32" if half else "ieee",
        }


def run_forward(call: Call, out: Tensor, lse: Tensor, launch: Launch) -> None:
    """Fill out and lse."""
    shape, layout, *rest = call.common()
    q, k, v = call.q, call.k, call.v
    grid, order = _programs(q, launch.queries, k)
    forward[grid](
        q, out, strides_of(q, out), _descriptor(k, launch.keys), _descriptor(v, launch.keys), lse, shape, layout, *rest,
        **order, **call.constants(), **_options(launch),
    )  # fmt: skip


def run_backward(
    call: Call, out: Tensor, dout: Tensor, lse: Tensor, gradients: tuple, tables: tuple | None = None
) -> None:
    """Fill dq, dk and dv; dq and dk by what was rotated, where there are tables of the rotation."""
    sums, size, (rows, heads) = (lse, torch.empty_like(lse)), sizes(call.q.shape[3], call.q.dtype), kept_at_once(call)
    if not rows:
        run_query_side(call, out, dout, sums, gradients[0], size.query_side, tables)
        run_key_side(call, dout, sums, gradients[1:], size.key_side, tables)
        return
    run_row_products(call, out, dout, sums[1], size.kept)
    scores = _scores(call, rows, heads)
    (batch, kv_heads), (dq, dk, dv) = call.k.shape[:2], gradients
    starts = itertools.product(range(0, batch, rows), range(0, kv_heads, heads))
    for some, keys in ((slice(row, row + rows), slice(head, head + heads)) for row, head in starts):
        queries, part = call.query_heads(keys), call.part(some, keys)
        turning = tables if tables is None or not tables[2] else (*(t[some] for t in tables[:2]), tables[2])
        own_sums, own = tuple(t[some, queries] for t in sums), (dk[some, keys], dv[some, keys])
        run_key_side(part, dout[some, queries], own_sums, own, size.key_side, turning, scores)
        run_kept_query_side(part, scores, dq[some, queries], size.kept, turning)


def kept_at_once(call: Call) -> tuple[int, int]:
    """How many rows of the batch and key heads at a time keep the gradients of their scores; 0, 0 where none do.

    All heads of some rows, or else some heads of one row, if they are enough to fill a GPU. Tiles that are read must
    have been written: those of a causal mask that starts at the first key have, and with places what is not seen is
    left out.
    """
    (batch, _, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
    if call.q.dtype == torch.float32 or (queries != keys and not call.places):
        return 0, 0
    fit = KEPT_BYTES // (call.groups * keys * _padded(queries) * call.q.element_size())
    if fit >= kv_heads:
        return min(batch, fit // kv_heads), kv_heads
    if fit * call.groups < _FEWEST_HEADS:
        return 0, 0
    return 1, -(-kv_heads // -(-kv_heads // fit))  # as many each time


def _scores(call: Call, rows: int, heads: int) -> Tensor:
    """Room for the gradients of scores of so many rows and key heads, (rows·query heads, keys, queries)."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    return call.q.new_empty(rows * heads * call.groups, keys, _padded(queries))[..., :queries]


def _padded(length: int) -> int:
    """The copy engine wants rows at multiples of 16 bytes."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def run_row_products(call: Call, out: Tensor, dout: Tensor, delta: Tensor, launch: Launch) -> None:
    """Fill δ."""
    batch, heads, length, width = call.q.shape
    row_scale, past = call.vectors[3], call.k.shape[2] - length
    constants: dict = {"LAYOUT": bool(call.places), "WIDTH": width, "BLOCK_M": launch.queries}
    constants["num_warps"] = launch.warps
    attention_backward.row_products[_tiles(length, launch.queries), heads, batch](
        out, dout, strides_of(out, dout), delta, row_scale, call.common()[1][0], length, past, row_scale.shape[0],
        **constants,
    )  # fmt: skip


def run_key_side(
    call: Call, dout: Tensor, sums: tuple, gradients: tuple, launch: Launch, tables: tuple | None = None,
    scores: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill dk and dv, from lse and δ; by k before its rotation where there are tables of one. And scores, if given."""
    shape, layout, *rest = call.common()
    q, k, v = call.q, call.k, call.v
    keep = _descriptor(q, launch.queries) if scores is None else _tile_of_scores(scores, launch)
    grid, order = _programs(k, launch.keys, q)
    gradient.key_side[grid](
        k, v, strides_of(k, v, *gradients), _descriptor(q, launch.queries), _descriptor(dout, launch.queries), keep,
        sums, gradients, shape, layout, *rest, **order, **_turning(tables, sums), **_keeping(scores),
        **call.constants(), **_options(launch),
    )  # fmt: skip


def run_query_side(
    call: Call, out: Tensor, dout: Tensor, sums: tuple, dq: Tensor, launch: Launch, tables: tuple | None = None
) -> None:
    """Fill dq and δ, from lse; dq by q before its rotation where there are tables of one."""
    shape, layout, *rest = call.common()
    q, k, v = call.q, call.k, call.v
    grid, order = _programs(q, launch.queries, k)
    gradient.query_side[grid](
        q, out, dout, dq, strides_of(q, out, dout, dq), _descriptor(k, launch.keys), _descriptor(v, launch.keys),
        sums, shape, layout, *rest, **order, **_turning(tables, sums), **call.constants(), **_options(launch),
    )  # fmt: skip


def run_kept_query_side(call: Call, scores: Tensor, dq: Tensor, launch: Launch, tables: tuple | None = None) -> None:
    """Fill dq from the gradients of scores that the key side has kept."""
    q, k, wanted = call.q, call.k, ("GROUPS", "CAUSAL", "LAYOUT", "WIDTH", "RANGE")
    constants = {name: value for name, value in call.constants().items() if name in wanted}
    grid, order = _programs(q, launch.queries, k)
    attention_backward.query_side_from_saved[grid](
        dq, strides_of(dq)[0], _tile_of_scores(scores, launch), _descriptor(k, launch.keys), call.common()[1],
        q.shape[2], k.shape[2], q.shape[3] ** -0.5, **order, **_turning(tables, (dq, dq)), **constants,
        **_options(launch),
    )  # fmt: skip


def _tile_of_scores(scores: Tensor, launch: Launch) -> TensorDescriptor:
    return TensorDescriptor(scores, list(scores.shape), list(scores.stride()), [1, launch.keys, launch.queries])


def _programs(own: Tensor, rows: int, read: Tensor) -> tuple[tuple[int], dict]:
    """(grid, order for `tile.turn`): programs by tiles of so many rows of `own`; each reads two tensors like `read`."""
    batch, heads, length, _ = own.shape
    of_head = 2 * read.shape[2] * read.shape[3] * read.element_size() * max(1, read.shape[1] // heads)
    order = heads, max(1, _SECTION_BYTES // of_head)
    return (_tiles(length, rows) * heads * batch,), {"order": order}


def _turning(tables: tuple | None, sums: tuple) -> dict:
    """tables: cos, sin and the stride of their batch. Kernels that turn nothing are given what they do not read."""
    return {"tables": tables or (*sums, 0), "TURN": tables is not None}


def _keeping(scores: Tensor | None) -> dict:
    return {"KEEP": scores is not None}


def _options(launch: Launch) -> dict:
    return {
        "BLOCK_M": launch.queries,
        "BLOCK_N": launch.keys,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def strides_of(*tensors: Tensor) -> tuple:
    """Those of batch, head and token, of each."""
    return tuple(tuple(t.stride()[:3]) for t in tensors)


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """For loads of `rows` tokens of one head at a time."""
    width = tensor.shape[3]
    # the stride of an axis of one entry says nothing, and torch may set it to anything
    strides = [s if n > 1 else width for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, width])


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that the copy engine can read: features side by side, rows at multiples of 16 bytes."""
    size = tensor.element_size()
    strides = [s for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if n > 1]
    whole = all(s and s * size % _ALIGNMENT == 0 for s in strides) and tensor.stride(3) == 1
    return (
        tensor if whole and tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)
    )


def _like(tensor: Tensor) -> Tensor:
    """Empty, in the tensor's own order where its features lie side by side, as the kernels write them."""
    return torch.empty_like(tensor) if tensor.stride(3) == 1 else tensor.new_empty(tensor.shape)


def by_token(q: Tensor) -> Tensor:
    """Empty, with the heads of a token side by side, as the matrix after attention reads them."""
    batch, heads, length, width = q.shape
    return q.new_empty(batch, length, heads, width).transpose(1, 2)


@library.custom_op("skipless::shaped_attention", mutates_args=())
def shaped_attention(
    q: Tensor, k: Tensor, v: Tensor, vectors: list[Tensor], row: Tensor | None, places: list[Tensor], causal: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse − log₂D in exponents of 2)."""
    out = by_token(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    call = Call(aligned(q), aligned(k), aligned(v), vectors, row, places, causal)
    with torch.cuda.device_of(q):
        run_forward(call, out, lse, sizes(q.shape[3], q.dtype).forward)
    return out, lse


@library.custom_op("skipless::shaped_attention_backward", mutates_args=())
def shaped_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    vectors: list[Tensor], row: Tensor | None, places: list[Tensor], causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv)."""
    gradients = _like(q), _like(k), _like(v)
    call = Call(aligned(q), aligned(k), aligned(v), vectors, row, places, causal)
    with torch.cuda.device_of(q):
        run_backward(call, out, aligned(dout), lse, gradients)
    return gradients


@shaped_attention.register_fake
def _(q, k, v, vectors, row, places, causal):
    return by_token(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@shaped_attention_backward.register_fake
def _(dout, q, k, v, out, lse, vectors, row, places, causal):
    return _like(q), _like(k), _like(v)


def _save(ctx, inputs, output) -> None:
    q, k, v, vectors, row, places, causal = inputs
    ctx.save_for_backward(q, k, v, *output, row, *vectors, *places)
    ctx.causal = causal


def _differentiate(ctx, dout: Tensor, dlse: Tensor):
    q, k, v, out, lse, row, slope, column, diagonal, row_scale, *places = ctx.saved_tensors
    vectors = [slope, column, diagonal, row_scale]
    gradients = shaped_attention_backward(dout, q, k, v, out, lse, vectors, row, places, ctx.causal)
    return *gradients, [None] * 4, None, [None] * len(places), None


library.register_autograd("skipless::shaped_attention", _differentiate, setup_context=_save)

"""How the attention kernels are launched: sizes of tiles, arguments, and the operator that torch sees."""

import itertools
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor, library
from triton.tools.tensor_descriptor import TensorDescriptor

from skipless.ops.bias import KernelBias
from skipless.ops.gpu import attention
from skipless.ops.gpu.attention import LOG2E
from skipless.ops.layout import BLOCK, KernelLayout


@dataclass(frozen=True)
class Launch:
    """How a GPU kernel is launched: tiles of `queries` × `keys`, warps per program, and stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Sizes:
    """Tiles of the forward kernel, and of the backward pass: those of its key side and those of its query side.

    saved: the query side's where the key side saves the gradients of the scores; its queries are the key side's keys.
    """

    forward: Launch
    key_side: Launch
    query_side: Launch
    saved: Launch


@cache
def sizes(head_width: int, dtype: torch.dtype) -> Sizes:
    """The tiles for a head width, by benchmarks/tune_attention.py."""
    if dtype == torch.float32:
        return Sizes(Launch(32, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1))
    if head_width <= 64:
        return Sizes(Launch(64, 128, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3), Launch(64, 64, 4, 3))
    if head_width <= 128:
        return Sizes(Launch(64, 64, 4, 3), Launch(32, 64, 4, 3), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3))
    return Sizes(Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 2))


# Gradients of scores that a backward pass may save, so that one of its two sides need not compute them again.
SAVED_SCORES_BYTES = 512 * 2**20
# Heads run side by side, their longest tiles first; as many as together read no more than this, which then stays in the
# cache. By benchmarks/tune_attention.py that is worth 10 % of attention at T=512 on an H200, and 15 % at 2048; 16 MiB
# do the same, 4 less.
_SECTION_BYTES = 8 * 2**20
_FEWEST_HEADS = 4  # of which scores are saved: tiles of fewer leave multiprocessors idle while the longest one runs
_ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """One attention problem, in the kernels' terms. layout is None where locations are in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: KernelBias
    layout: KernelLayout | None
    causal: bool

    def part(self, rows: slice, heads: slice) -> "KernelInputs":
        """The problem of some rows of the batch and some key heads, with the query heads that share them."""
        bias, those = self.bias, self.query_heads(heads)
        slope = bias.slope if bias.slope.numel() == 1 else bias.slope[those]
        gain = bias.gain if bias.gain is None or bias.gain.numel() == 1 else bias.gain[those]
        return replace(
            self, q=self.q[rows, those], k=self.k[rows, heads], v=self.v[rows, heads],
            bias=bias._replace(slope=slope, gain=gain),
            layout=None if self.layout is None else KernelLayout(*(t[rows] for t in self.layout)),
        )  # fmt: skip

    def query_heads(self, heads: slice) -> slice:
        """The query heads that share some key heads."""
        return slice(heads.start * self.groups, heads.stop * self.groups)

    @cached_property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @cached_property
    def common(self) -> tuple:
        """(bias, layout, T_q, T_k, entries of a vector, scale·log₂e) in the kernels' order.

        Kernels that need no row term, gain or layout are given tensors that they do not read.
        """
        bias, column = self.bias, self.bias.column
        row, gain = (column if one is None else one for one in (bias.row, bias.gain))
        bias = KernelBias(bias.slope, column, bias.diagonal, bias.row_scale, row, gain)
        scale = self.q.shape[3] ** -0.5 * LOG2E.value
        layout = self.layout or KernelLayout(column, column, column, column)
        return bias, layout, self.q.shape[2], self.k.shape[2], column.shape[0], scale

    @cached_property
    def constants(self) -> dict:
        """What the kernels are compiled for."""
        half = self.q.dtype != torch.float32
        return {
            "GROUPS": self.groups,
            "SLOPES": int(self.bias.slope.numel() > 1),
            "GAINS": 0 if self.bias.gain is None else 1 + int(self.bias.gain.numel() > 1),
            "CAUSAL": self.causal,
            "ROW": self.bias.row is not None,
            "LAYOUT": self.layout is not None,
            # a frame per tile costs an exponent up to 1e-5: less than bfloat16 keeps of a weight, more than float32
            "RELATIVE": half and self.causal and self.layout is None and self.bias.row is None,
            "WIDTH": self.q.shape[3],
            "RANGE": BLOCK,
            "PRECISION": "tf32" if half else "ieee",
        }


class Angles(NamedTuple):
    """cos and sin of every token's rotation, (batch or 1, T, head_width/2), and the stride of their batch, 0 for 1."""

    cos: Tensor
    sin: Tensor
    batch_stride: int

    def of_rows(self, rows: slice) -> "Angles":
        return Angles(self.cos[rows], self.sin[rows], self.batch_stride) if self.batch_stride else self


def run_forward(inputs: KernelInputs, out: Tensor, lse: Tensor, launch: Launch) -> None:
    """Fill out and lse."""
    bias, layout, *rest = inputs.common
    q, k, v = inputs.q, inputs.k, inputs.v
    grid, order = _programs(q, launch.queries, k)
    attention.forward[grid](
        q, out, strides_of(q, out), _descriptor(k, launch.keys), _descriptor(v, launch.keys), lse, bias, layout, *rest,
        **order, **inputs.constants, **_options(launch),
    )  # fmt: skip


def run_backward(
    inputs: KernelInputs,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    gradients: tuple,
    by_gain: Tensor,
    angles: Angles | None = None,
) -> None:
    """Fill dq, dk and dv, dq and dk by what was rotated where there are angles; and by_gain where B has a gain."""
    sums, size = (lse, torch.empty_like(lse)), sizes(inputs.q.shape[3], inputs.q.dtype)
    rows, heads = saved_at_once(inputs)
    if not rows:
        run_query_side(inputs, out, dout, sums, gradients[0], size.query_side, angles)
        run_key_side(inputs, dout, sums, gradients[1:], by_gain, size.key_side, angles)
        return
    run_row_products(inputs, out, dout, sums[1], size.saved)
    scores = _scores(inputs, rows, heads)
    (batch, kv_heads), (dq, dk, dv) = inputs.k.shape[:2], gradients
    if (rows, heads) == (batch, kv_heads):  # all at once, without slices of everything, which take the host's time
        run_key_side(inputs, dout, sums, (dk, dv), by_gain, size.key_side, angles, scores)
        run_query_side_from_saved(inputs, scores, dq, size.saved, angles)
        return
    starts = itertools.product(range(0, batch, rows), range(0, kv_heads, heads))
    for some, keys in ((slice(row, row + rows), slice(head, head + heads)) for row, head in starts):
        queries, part = inputs.query_heads(keys), inputs.part(some, keys)
        own_angles = None if angles is None else angles.of_rows(some)
        own_sums, own = tuple(t[some, queries] for t in sums), (dk[some, keys], dv[some, keys])
        own_by_gain = by_gain[some, queries] if by_gain.numel() else by_gain
        run_key_side(part, dout[some, queries], own_sums, own, own_by_gain, size.key_side, own_angles, scores)
        run_query_side_from_saved(part, scores, dq[some, queries], size.saved, own_angles)


def saved_at_once(inputs: KernelInputs) -> tuple[int, int]:
    """How many rows of the batch and key heads at a time save the gradients of their scores; 0, 0 where none do.

    All heads of some rows, or else some heads of one row, if they are enough to fill a GPU. Tiles that are read must
    have been written: those of a causal mask that starts at the first key have, and with a layout what is not seen is
    left out.
    """
    (batch, _, queries, _), (_, kv_heads, keys, _) = inputs.q.shape, inputs.k.shape
    if inputs.q.dtype == torch.float32 or (queries != keys and inputs.layout is None):
        return 0, 0
    fit = SAVED_SCORES_BYTES // (inputs.groups * keys * _padded(queries) * inputs.q.element_size())
    if fit >= kv_heads:
        return min(batch, fit // kv_heads), kv_heads
    if fit * inputs.groups < _FEWEST_HEADS:
        return 0, 0
    return 1, -(-kv_heads // -(-kv_heads // fit))  # as many each time


def _scores(inputs: KernelInputs, rows: int, heads: int) -> Tensor:
    """Room for the gradients of scores of so many rows and key heads, (rows·query heads, keys, queries)."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    return inputs.q.new_empty(rows * heads * inputs.groups, keys, _padded(queries))[..., :queries]


def _padded(length: int) -> int:
    """The copy engine wants rows at multiples of 16 bytes."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def run_row_products(inputs: KernelInputs, out: Tensor, dout: Tensor, delta: Tensor, launch: Launch) -> None:
    """Fill δ."""
    batch, heads, length, width = inputs.q.shape
    row_scale, past, layout = inputs.bias.row_scale, inputs.k.shape[2] - length, inputs.common[1]
    constants: dict = {"LAYOUT": inputs.layout is not None, "WIDTH": width, "BLOCK_M": launch.queries}
    constants["num_warps"] = launch.warps
    attention.row_products[_tiles(length, launch.queries), heads, batch](
        out, dout, strides_of(out, dout), delta, row_scale, layout.queries, length, past, row_scale.shape[0],
        **constants,
    )  # fmt: skip


def run_key_side(
    inputs: KernelInputs, dout: Tensor, sums: tuple, gradients: tuple, by_gain: Tensor, launch: Launch,
    angles: Angles | None = None, scores: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill dk and dv, from lse and δ; by k before its rotation where there are angles. And scores, if given.

    by_gain: what `gain_gradient` sums, to be filled too where B has a gain.
    """
    bias, layout, *rest = inputs.common
    q, k, v = inputs.q, inputs.k, inputs.v
    saved = _descriptor(q, launch.queries) if scores is None else _tile_of_scores(scores, launch)
    constants: dict = {**inputs.constants, "SAVE": scores is not None}
    grid, order = _programs(k, launch.keys, q)
    attention.key_side[grid](
        k, v, strides_of(k, v, *gradients), _descriptor(q, launch.queries), _descriptor(dout, launch.queries), saved,
        sums, gradients, by_gain, bias, layout, *rest, **order, **_rotary(angles, sums), **constants,
        **_options(launch),
    )  # fmt: skip


def run_query_side(
    inputs: KernelInputs,
    out: Tensor,
    dout: Tensor,
    sums: tuple,
    dq: Tensor,
    launch: Launch,
    angles: Angles | None = None,
) -> None:
    """Fill dq and δ, from lse; dq by q before its rotation where there are angles."""
    bias, layout, *rest = inputs.common
    q, k, v = inputs.q, inputs.k, inputs.v
    grid, order = _programs(q, launch.queries, k)
    attention.query_side[grid](
        q, out, dout, dq, strides_of(q, out, dout, dq), _descriptor(k, launch.keys), _descriptor(v, launch.keys),
        sums, bias, layout, *rest, **order, **_rotary(angles, sums), **inputs.constants, **_options(launch),
    )  # fmt: skip


def run_query_side_from_saved(
    inputs: KernelInputs, scores: Tensor, dq: Tensor, launch: Launch, angles: Angles | None = None
) -> None:
    """Fill dq from the gradients of scores that the key side has saved."""
    q, k, wanted = inputs.q, inputs.k, ("GROUPS", "CAUSAL", "LAYOUT", "WIDTH", "RANGE")
    constants = {name: value for name, value in inputs.constants.items() if name in wanted}
    grid, order = _programs(q, launch.queries, k)
    attention.query_side_from_saved[grid](
        dq, strides_of(dq)[0], _tile_of_scores(scores, launch), _descriptor(k, launch.keys), inputs.common[1],
        q.shape[2], k.shape[2], q.shape[3] ** -0.5, **order, **_rotary(angles, (dq, dq)), **constants,
        **_options(launch),
    )  # fmt: skip


def _tile_of_scores(scores: Tensor, launch: Launch) -> TensorDescriptor:
    return TensorDescriptor(scores, list(scores.shape), list(scores.stride()), [1, launch.keys, launch.queries])


def _programs(own: Tensor, rows: int, read: Tensor) -> tuple[tuple[int], dict]:
    """(grid, order for `program_coordinates`): a program per `rows` of own, which reads two tensors like `read`."""
    batch, heads, length, _ = own.shape
    of_head = 2 * read.shape[2] * read.shape[3] * read.element_size() * max(1, read.shape[1] // heads)
    order = heads, max(1, _SECTION_BYTES // of_head)
    return (_tiles(length, rows) * heads * batch,), {"order": order}


def _rotary(angles: Angles | None, sums: tuple) -> dict:
    """Kernels that rotate nothing are given tensors that they do not read."""
    return {"angles": angles or Angles(*sums, 0), "ROTARY": angles is not None}


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
    """The strides of batch, head and token of each tensor."""
    return tuple(tuple(t.stride()[:3]) for t in tensors)


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor that loads `rows` tokens of one head at a time."""
    width = tensor.shape[3]
    # the stride of an axis of one entry says nothing, and torch may set it to anything
    strides = [s if n > 1 else width for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, width])


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that the copy engine can read: features side by side, rows at multiples of 16 bytes."""
    *strides, features = tensor.stride()
    entries = _ALIGNMENT // tensor.element_size()
    whole = features == 1 and tensor.data_ptr() % _ALIGNMENT == 0
    for length, stride in zip(tensor.shape, strides, strict=False):
        whole = whole and (length == 1 or (stride > 0 and stride % entries == 0))
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _like(tensor: Tensor) -> Tensor:
    """Empty, in the tensor's own order where its features lie side by side, as the kernels write them."""
    return torch.empty_like(tensor) if tensor.stride(3) == 1 else tensor.new_empty(tensor.shape)


def by_token(q: Tensor) -> Tensor:
    """Empty, with the heads of a token side by side, as the matrix after attention reads them."""
    batch, heads, length, width = q.shape
    return q.new_empty(batch, length, heads, width).transpose(1, 2)


def empty_by_gain(queries: Tensor, keys: int, gain: Tensor | None) -> Tensor:
    """Room for a number of each key and query head, (batch, heads, keys); without a gain no entries."""
    size = (0,) if gain is None else (*queries.shape[:2], keys)
    return queries.new_empty(size, dtype=torch.float32)


def gain_gradient(by_gain: Tensor, gain: Tensor | None) -> Tensor | None:
    """dg = Σ ds·B of each head, from the key side's sums in exponents of 2."""
    if gain is None:
        return None
    heads = by_gain.sum((0, 2)) / LOG2E.value
    return (heads if gain.numel() > 1 else heads.sum()).reshape(gain.shape).to(gain.dtype)


def layout_of(tensors: list[Tensor]) -> KernelLayout | None:
    """The layout of an operator's argument, a list that is empty where locations are in order."""
    return KernelLayout(*tensors) if tensors else None


@library.custom_op("skipless::shaped_attention", mutates_args=())
def shaped_attention(
    q: Tensor, k: Tensor, v: Tensor,
    slope: Tensor, column: Tensor, diagonal: Tensor, row_scale: Tensor, row: Tensor | None, gain: Tensor | None,
    layout: list[Tensor], causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse − log₂D in exponents of 2). The bias is a KernelBias; layout is empty, or a KernelLayout."""
    out = by_token(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    bias = KernelBias(slope, column, diagonal, row_scale, row, gain)
    inputs = KernelInputs(aligned(q), aligned(k), aligned(v), bias, layout_of(layout), causal)
    with torch.cuda.device_of(q):
        run_forward(inputs, out, lse, sizes(q.shape[3], q.dtype).forward)
    return out, lse


@library.custom_op("skipless::shaped_attention_backward", mutates_args=())
def shaped_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    slope: Tensor, column: Tensor, diagonal: Tensor, row_scale: Tensor, row: Tensor | None, gain: Tensor | None,
    layout: list[Tensor], causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, by_gain): see `gain_gradient`."""
    gradients, by_gain = (_like(q), _like(k), _like(v)), empty_by_gain(q, k.shape[2], gain)
    bias = KernelBias(slope, column, diagonal, row_scale, row, gain)
    inputs = KernelInputs(aligned(q), aligned(k), aligned(v), bias, layout_of(layout), causal)
    with torch.cuda.device_of(q):
        run_backward(inputs, out, aligned(dout), lse, gradients, by_gain)
    return *gradients, by_gain


@shaped_attention.register_fake
def _(q, *rest):
    return by_token(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@shaped_attention_backward.register_fake
def _(dout, q, k, v, *rest):
    gain = rest[-3]
    return _like(q), _like(k), _like(v), empty_by_gain(q, k.shape[2], gain)


def _save(ctx, inputs, output) -> None:
    q, k, v, *bias, layout, causal = inputs
    ctx.save_for_backward(q, k, v, *output, *bias, *layout)
    ctx.set_materialize_grads(False)
    ctx.causal = causal


def _differentiate(ctx, dout: Tensor | None, dlse: Tensor | None):
    if dout is None:  # as where the gradient is the definition's, to be differentiated again
        return *[None] * 9, [None] * (len(ctx.saved_tensors) - 11), None
    q, k, v, out, lse, slope, column, diagonal, row_scale, row, gain, *layout = ctx.saved_tensors
    bias = KernelBias(slope, column, diagonal, row_scale, row, gain)
    *gradients, by_gain = shaped_attention_backward(dout, q, k, v, out, lse, *bias, layout, ctx.causal)
    return *gradients, *[None] * (len(bias) - 1), gain_gradient(by_gain, gain), [None] * len(layout), None


library.register_autograd("skipless::shaped_attention", _differentiate, setup_context=_save)

"""The kernels as torch operators, which torch.compile keeps whole and autograd knows the gradient of."""

from dataclasses import dataclass

import torch
from torch import Tensor, library
from triton.tools.tensor_descriptor import TensorDescriptor

from skipless.ops.blocks import BLOCK
from skipless.ops.triton import backward as gradient
from skipless.ops.triton.forward import forward
from skipless.ops.triton.sizes import Launch, sizes
from skipless.ops.triton.tile import LOG2E

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
    forward[_tiles(q.shape[2], launch.queries), q.shape[1], q.shape[0]](
        q, out, strides_of(q, out), _descriptor(k, launch.keys), _descriptor(v, launch.keys), lse, shape, layout, *rest,
        **call.constants(), **_options(launch),
    )  # fmt: skip


def run_key_side(
    call: Call, dout: Tensor, sums: tuple, gradients: tuple, launch: Launch, tables: tuple | None = None
) -> None:
    """Fill dk and dv, from lse and δ; by k before its rotation where there are tables of one."""
    shape, layout, *rest = call.common()
    q, k, v = call.q, call.k, call.v
    gradient.key_side[_tiles(k.shape[2], launch.keys), k.shape[1], k.shape[0]](
        k, v, strides_of(k, v, *gradients), _descriptor(q, launch.queries), _descriptor(dout, launch.queries),
        sums, gradients, shape, layout, *rest, **_turning(tables, sums), **call.constants(), **_options(launch),
    )  # fmt: skip


def run_query_side(
    call: Call, out: Tensor, dout: Tensor, sums: tuple, dq: Tensor, launch: Launch, tables: tuple | None = None
) -> None:
    """Fill dq and δ, from lse; dq by q before its rotation where there are tables of one."""
    shape, layout, *rest = call.common()
    q, k, v = call.q, call.k, call.v
    gradient.query_side[_tiles(q.shape[2], launch.queries), q.shape[1], q.shape[0]](
        q, out, dout, dq, strides_of(q, out, dout, dq), _descriptor(k, launch.keys), _descriptor(v, launch.keys),
        sums, shape, layout, *rest, **_turning(tables, sums), **call.constants(), **_options(launch),
    )  # fmt: skip


def _turning(tables: tuple | None, sums: tuple) -> dict:
    """tables: cos, sin and the stride of their batch. Kernels that turn nothing are given what they do not read."""
    return {"tables": tables or (*sums, 0), "TURN": tables is not None}


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
    gradients, delta = (_like(q), _like(k), _like(v)), torch.empty_like(lse)
    call, dout = Call(aligned(q), aligned(k), aligned(v), vectors, row, places, causal), aligned(dout)
    size = sizes(q.shape[3], q.dtype)
    with torch.cuda.device_of(q):
        run_query_side(call, out, dout, (lse, delta), gradients[0], size.query_side)
        run_key_side(call, dout, (lse, delta), gradients[1:], size.key_side)
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

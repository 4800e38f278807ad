"""The kernels as torch operators, which torch.compile keeps whole and autograd knows the gradient of."""

import torch
from torch import Tensor, library

from skipless.ops.triton.launch import Call, aligned, run_backward, run_forward
from skipless.ops.triton.sizes import sizes


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

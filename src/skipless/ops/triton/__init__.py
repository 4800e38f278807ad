"""Shaped attention as fused Triton kernels, forward and backward: the bias costs one fused multiply-add per score."""

import importlib.util

import torch
from torch import Tensor

from skipless.ops.layout import Layout
from skipless.ops.request import Request
from skipless.ops.triton.places import places, sides

INSTALLED = importlib.util.find_spec("triton") is not None
_WIDTHS = (16, 32, 64, 128, 256)


def attend(request: Request) -> Tensor:
    """D·softmax(q kᵀ·scale + B)·v. Needs O(T) beside q, k, v and the output: one number per query, and the vectors.

    Its gradients take up to launch.KEPT_BYTES besides, for those of the scores.
    """
    from skipless.ops.triton import decode, op

    q, k, v, parts = request.q, request.k, request.v, request.parts
    vectors = _vectors(request)
    if decode.applies(q, k, request.needs_grad) and q.stride(3) == k.stride(3) == v.stride(3) == 1:
        placed = [] if request.in_order or request.layout is None else [*sides(request.layout, q.shape[0])] * 2
        return decode.shaped_decoding(q, k, v, vectors, parts.row, placed, parts.causal)
    return op.shaped_attention(q, k, v, vectors, parts.row, _placed(request), parts.causal)[0]


def attend_turned(request: Request, together: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`attend` with q and k rotated first: q, k, v are the parts of `together` (batch, T, features), in this order.

    Where together has room for q and k alone, v is read as it is.
    """
    from skipless.ops.triton import turned

    heads, kv_heads, parts = request.q.shape[1], request.k.shape[1], request.parts
    values = request.v if together.shape[2] == (heads + kv_heads) * request.q.shape[3] else None
    return turned.turned_attention(
        together, values, cos, sin, heads, kv_heads, _vectors(request), parts.row, _placed(request), parts.causal
    )[0]


def prepare(request: Request) -> Layout | None:
    """Find what each block of a layout sees now, for all blocks of a network to share."""
    _placed(request)
    return request.layout


def refusal(request: Request) -> str | None:
    """Why the Triton kernels cannot run this, or None."""
    q, parts = request.q, request.parts
    if request.score_bias is not None:
        return "score_bias is a dense T×T term, which the kernels are there to avoid"
    if parts.table is not None:
        return "this shape is a dense table, and the kernels compute the bias from O(T) vectors"
    if request.bias_gain is not None:
        return "bias_gain would need a gradient of its own, which the kernels do not form"
    if q.dtype == torch.float64:
        return "the kernels take float32, bfloat16 and float16, and q is float64"
    if q.shape[3] not in _WIDTHS:
        return f"head_width is {q.shape[3]}, and the kernels take {', '.join(map(str, _WIDTHS))}"
    if not INSTALLED:
        return "the package triton is not installed; it comes with torch's CUDA builds"
    if not (q.is_cuda or _interpreted()):
        return f"q is on {q.device.type}; on a CPU the kernels run only under TRITON_INTERPRET=1, to be tested"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        return "Triton's interpreter does not multiply in bfloat16, and gives wrong numbers"
    return None


def _vectors(request: Request) -> list[Tensor]:
    parts = request.parts
    return [t.contiguous() for t in (parts.slope, parts.column, parts.diagonal, parts.row_scale)]


def _placed(request: Request) -> list[Tensor]:
    """The layout's tensors, none where locations are in order."""
    if request.layout is None or request.in_order:
        return []
    return list(places(request.layout, request.q.shape[0], request.parts.causal))


def _interpreted() -> bool:
    from skipless.ops.triton.forward import forward

    return type(forward).__name__ == "InterpretedFunction"

"""Shaped attention as fused GPU kernels, forward and backward: the bias costs one fused multiply-add per score."""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from skipless.ops.inputs import Request
from skipless.ops.layout import BLOCK, PADDING, Layout, visited

T = TypeVar("T")


class KernelLayout(NamedTuple):
    """queries (batch, 2, T_q) and keys (batch, 2, T_k): locations, then documents. key_ranges (batch, query blocks, 2)
    and query_ranges (batch, key blocks, 2): first and one past the last index, of which the blocks in between may be
    empty."""

    queries: Tensor
    keys: Tensor
    key_ranges: Tensor
    query_ranges: Tensor


def places(layout: Layout, batch: int, causal: bool) -> KernelLayout:
    """Of a layout with one row for each row of the batch; kept in the layout's memo for the other blocks."""
    layout = layout.for_rows(batch)

    def make() -> KernelLayout:
        partial, full = visited(layout, causal)
        seen = partial | full
        keys = _ranges(seen, layout.key_locations.shape[1])
        return KernelLayout(*sides(layout, batch), keys, _ranges(seen.mT, layout.query_locations.shape[1]))

    return _kept(layout, ("triton", causal), make)


def sides(layout: Layout, batch: int) -> tuple[Tensor, Tensor]:
    """Queries and keys alone: what decoding needs, which visits every key."""
    layout = layout.for_rows(batch)

    def make() -> tuple[Tensor, Tensor]:
        queries = _side(layout.query_locations, layout.query_documents)
        return queries, _side(layout.key_locations, layout.key_documents)

    return _kept(layout, ("triton", "sides"), make)


def _kept(layout: Layout, key: tuple, make: Callable[[], T]) -> T:
    if key in layout.memo:
        return layout.memo[key]
    made = make()
    if not torch.compiler.is_compiling():
        layout.memo[key] = made
    return made


def _side(locations: Tensor, documents: Tensor | None) -> Tensor:
    documents = torch.zeros_like(locations) if documents is None else documents.clamp(min=PADDING)
    return torch.stack([locations, documents], dim=1).to(torch.int32).contiguous()


def _ranges(seen: Tensor, length: int) -> Tensor:
    """(first, one past the last) index of what each row of blocks sees; (0, 0) where it sees nothing."""
    blocks = seen.shape[-1]
    here = torch.arange(blocks, device=seen.device)
    first = torch.where(seen, here, blocks).amin(-1)
    last = torch.where(seen, here + 1, 0).amax(-1)
    first = torch.minimum(first, last)
    return torch.stack([first * BLOCK, (last * BLOCK).clamp(max=length)], dim=-1).to(torch.int32).contiguous()


INSTALLED = importlib.util.find_spec("triton") is not None
_WIDTHS = (16, 32, 64, 128, 256)


def attend(request: Request) -> Tensor:
    """D·softmax(q kᵀ·scale + B)·v. Needs O(T) beside q, k, v and the output: one number per query, and the vectors.

    Its gradients take up to launch.KEPT_BYTES besides, for those of the scores.
    """
    from skipless.ops.gpu import decode, launch

    q, k, v, parts = request.q, request.k, request.v, request.parts
    vectors = _vectors(request)
    if decode.applies(q, k, request.needs_grad) and q.stride(3) == k.stride(3) == v.stride(3) == 1:
        placed = [] if request.in_order or request.layout is None else [*sides(request.layout, q.shape[0])] * 2
        return decode.shaped_decoding(q, k, v, vectors, parts.row, placed, parts.causal)
    return launch.shaped_attention(q, k, v, vectors, parts.row, _placed(request), parts.causal)[0]


def attend_turned(request: Request, together: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`attend` with q and k rotated first: q, k, v are the parts of `together` (batch, T, features), in this order.

    Where together has room for q and k alone, v is read as it is.
    """
    from skipless.ops.gpu import rotary

    heads, kv_heads, parts = request.q.shape[1], request.k.shape[1], request.parts
    values = request.v if together.shape[2] == (heads + kv_heads) * request.q.shape[3] else None
    return rotary.turned_attention(
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
    from skipless.ops.gpu.attention import forward

    return type(forward).__name__ == "InterpretedFunction"

"""Shaped attention through FlexAttention: the bias is computed inside the kernel from O(T) vectors, no T×T tensor."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from skipless.ops import layout as ops_layout
from skipless.ops.bias import span, take
from skipless.ops.inputs import Request
from skipless.ops.layout import Layout

# Compiled kernels kept, one per signature (batch, heads, lengths, dtype, kind of shape). Past torch's own limit of 8
# FlexAttention would run its eager form, with T×T scores, and say nothing: here the limit is high and meeting it fails.
_SIGNATURES = 128
# From this head_width on torch 2.11 takes tiles of 128 × 128, three at a time: 240 KB with a table; an H200 has 227.
_WIDE = 64

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(request: Request) -> Tensor:
    """D·flex_attention(q, k, v), its score modification adding g·B.

    Slopes, vectors and gain are captured as tensors, so that all blocks of a network share one compiled kernel.
    """
    q = request.q
    layout = None if request.layout is None or request.in_order else request.layout.for_rows(q.shape[0])
    tensors = (q, request.k, request.v)
    if not request.needs_grad:  # torch's CPU kernel refuses leaves that would have a gradient, under no_grad too
        tensors = tuple(tensor.detach() for tensor in tensors)
    values = _run(*tensors, _score_mod(request, layout), _block_mask(request, layout), request.groups > 1)
    row_scale = _along_queries(request, layout, request.parts.row_scale).to(request.compute_dtype)
    row_scale = row_scale[:, None] if layout is None else row_scale[:, None, :, None]
    return (values.to(request.compute_dtype) * row_scale).to(q.dtype)


def prepare(request: Request) -> Layout | None:
    """Build the block mask now, for all blocks to find in the layout that is returned.

    Inside a compiled block the mask would be built again by every block, which takes longer than attention to 512
    locations.
    """
    layout, causal = request.layout, request.parts.causal
    if layout is None and causal:
        layout = request.placed()
    if layout is not None and (causal or layout.past is None):
        ops_layout.block_mask(layout.for_rows(request.q.shape[0]), causal)
    return layout


def refusal(request: Request) -> str | None:
    """Why FlexAttention cannot run this, or None."""
    if request.score_bias is not None:
        return "score_bias is a dense T×T term, which flex is there to avoid"
    if request.q.dtype == torch.float64:
        return "flex compiles for float32, bfloat16 and float16, and q is float64"
    if request.needs_grad and not request.q.is_cuda:
        return f"FlexAttention has no backward pass on {request.q.device.type}, and a gradient is required"
    if torch.compiler.is_compiling() and not request.q.is_cuda:
        return f"torch's {request.q.device.type} FlexAttention cannot be part of a larger compiled function"
    if _is_wrong_on_cpu(request):
        return (
            f"torch's CPU FlexAttention gives wrong numbers for {request.k.shape[2]} keys of head_width "
            f"{request.q.shape[3]} (below 32, with 8 keys modulo 16)"
        )
    if torch.compiler.is_compiling() and not _is_prepared(request):
        return "a mask of documents cannot be built inside a compiled function (torch 2.11 reads beyond it): prepare it"
    if request.q.is_cuda and request.q.shape[3] < 16:
        return f"FlexAttention needs a head_width of at least 16 on a GPU, and it is {request.q.shape[3]}"
    if request.q.is_cuda and request.parts.table is not None and request.q.shape[3] >= _WIDE:
        return (
            f"with a dense table and a head_width of {request.q.shape[3]} (up to {_WIDE - 1} works) torch's kernel for "
            "FlexAttention takes more shared memory than a GPU has"
        )
    return None


def _is_prepared(request: Request) -> bool:
    """Whether the layout, if it is more than locations in order, holds its mask already."""
    if request.layout is None or request.in_order or request.layout.past is not None:
        return True
    return ("flex", request.parts.causal) in request.layout.for_rows(request.q.shape[0]).memo


def _is_wrong_on_cpu(request: Request) -> bool:
    """Seen in torch 2.13: noise or NaN, without any score modification too, against scaled_dot_product_attention."""
    return request.k.shape[2] % 16 == 8 and request.q.shape[3] < 32 and not request.q.is_cuda


def _attention(q: Tensor, k: Tensor, v: Tensor, score_mod, block_mask, enable_gqa: bool) -> Tensor:
    out = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=enable_gqa)
    assert isinstance(out, Tensor)
    return out


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_attention, dynamic=False, fullgraph=True)


def _run(*arguments) -> Tensor:
    if torch.compiler.is_compiling():
        return _attention(*arguments)
    from torch._dynamo.exc import FailOnRecompileLimitHit  # loads the compiler, which takes seconds

    with torch._dynamo.config.patch(recompile_limit=_SIGNATURES, fail_on_recompile_limit_hit=True):
        try:
            return _compiled()(*arguments)
        except FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"flex has compiled for {_SIGNATURES} signatures (batch, heads, lengths, dtype, kind of shape) and "
                "keeps no more; pad sequences to a few lengths, or use impl='sdpa', which does not compile"
            ) from error


def _block_mask(request: Request, layout: Layout | None):
    causal = request.parts.causal
    if layout is not None:
        return ops_layout.block_mask(layout, causal)
    if not causal:
        return None
    if request.layout is not None:
        return ops_layout.block_mask(request.layout, causal)
    return ops_layout.causal_block_mask(request.q.shape[2], request.k.shape[2], request.q.device)


def _score_mod(request: Request, layout: Layout | None) -> ScoreMod | None:
    """score + g·B_ij at (b, h, query, key); None for plain attention, whose B is 0. layout None: locations in order."""
    if request.parts.plain and request.bias_gain is None:
        return None
    bias = _table_bias(request, layout) if request.parts.table is not None else _compact_bias(request, layout)

    def plus_bias(score, b, h, query, key):
        return score + bias(b, h, query, key)

    if request.bias_gain is None:
        return plus_bias
    # one entry per query although the gain has one per head: its gradient is then summed by torch, not by additions
    # of every tile into the same few numbers
    gain = _per_head(request, request.bias_gain)[None, :, None].expand(request.q.shape[:3]).contiguous()

    def plus_scaled_bias(score, b, h, query, key):
        value = bias(b, h, query, key)
        absent = value == -torch.inf  # only in tables; gain·(−∞) could be NaN
        scaled = score + gain[b, h, query] * torch.where(absent, 0.0, value)
        return torch.where(absent, -torch.inf, scaled)

    return plus_scaled_bias


def _compact_bias(request: Request, layout: Layout | None):
    parts, past = request.parts, request.k.shape[2] - request.q.shape[2]
    slope = _per_head(request, parts.slope)
    diagonal = _along_queries(request, layout, parts.diagonal)
    row = None if parts.row is None else _along_queries(request, layout, parts.row)
    keys = request.k.shape[2]
    column = span(parts.column, 0, keys) if layout is None else take(parts.column, layout.key_locations)

    def bias(b, h, query, key):
        if layout is None:
            distance = query + past - key
        else:
            distance = layout.query_locations[b, query] - layout.key_locations[b, key]
        other = _at(column, b, key) - slope[h] * distance.abs()
        if row is not None:
            own = _at(row, b, query)
            # logaddexp, stable and with one exponential
            other = torch.maximum(other, own) + torch.log1p(torch.exp(-(other - own).abs()))
        return torch.where(distance == 0, _at(diagonal, b, query), other)

    return bias


def _table_bias(request: Request, layout: Layout | None):
    table, past = request.parts.table, request.k.shape[2] - request.q.shape[2]
    assert table is not None

    def bias(b, h, query, key):
        if layout is None:
            return table[query + past, key]
        return table[layout.query_locations[b, query], layout.key_locations[b, key]]

    return bias


def _along_queries(request: Request, layout: Layout | None, vector: Tensor) -> Tensor:
    """The vector laid out along the queries: (T_q,), or (batch, T_q) where rows differ."""
    if layout is not None:
        return take(vector, layout.query_locations)
    queries = request.q.shape[2]
    return span(vector, request.k.shape[2] - queries, queries)


def _at(vector: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return vector[index] if vector.dim() == 1 else vector[b, index]


def _per_head(request: Request, value: Tensor) -> Tensor:
    """(heads,) on the device: one signature for shared and per-head values."""
    return value.to(request.q.device, request.parts.dtype).reshape(-1).expand(request.q.shape[1]).contiguous()

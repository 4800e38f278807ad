"""Shaped attention through FlexAttention: the bias is computed inside the kernel from O(T) vectors, no T×T tensor."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from skipless.ops import layout as ops_layout
from skipless.ops.bias import AttentionInputs, span, take
from skipless.ops.layout import Layout

# Compiled kernels held, one per signature (batch, heads, lengths, dtype, kind of shape). Past torch's own limit of 8
# FlexAttention would run its eager form, with T×T scores, and say nothing: here the limit is high and meeting it fails.
_SIGNATURES = 128
# From this head_width on torch 2.11 takes tiles of 128 × 128, three at a time: 240 KB with a table; an H200 has 227.
_WIDE = 64

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(inputs: AttentionInputs) -> Tensor:
    """D·flex_attention(q, k, v), its score modification adding g·B.

    Slopes, vectors and gain are captured as tensors, so that all blocks of a network share one compiled kernel.
    """
    q = inputs.q
    layout = None if inputs.layout is None or inputs.in_order else inputs.layout.for_rows(q.shape[0])
    tensors = (q, inputs.k, inputs.v)
    if not inputs.needs_grad:  # torch's CPU kernel refuses leaves that would have a gradient, under no_grad too
        tensors = tuple(tensor.detach() for tensor in tensors)
    values = _run(*tensors, _score_mod(inputs, layout), _block_mask(inputs, layout), inputs.groups > 1)
    row_scale = _along_queries(inputs, layout, inputs.bias.row_scale).to(inputs.compute_dtype)
    row_scale = row_scale[:, None] if layout is None else row_scale[:, None, :, None]
    return (values.to(inputs.compute_dtype) * row_scale).to(q.dtype)


def prepare(inputs: AttentionInputs) -> Layout | None:
    """Build the block mask now, for all blocks to find in the layout that is returned.

    Inside a compiled block the mask would be built again by every block, which takes longer than attention to 512
    locations.
    """
    layout, causal = inputs.layout, inputs.bias.causal
    if layout is None and causal:
        layout = inputs.effective_layout()
    if layout is not None and (causal or layout.past is None):
        ops_layout.block_mask(layout.for_rows(inputs.q.shape[0]), causal)
    return layout


def why_not(inputs: AttentionInputs) -> str | None:
    """Why FlexAttention cannot run this, or None."""
    if inputs.score_bias is not None:
        return "score_bias is a dense T×T term, which flex is there to avoid"
    if inputs.q.dtype == torch.float64:
        return "flex compiles for float32, bfloat16 and float16, and q is float64"
    if inputs.needs_grad and not inputs.q.is_cuda:
        return f"FlexAttention has no backward pass on {inputs.q.device.type}, and a gradient is required"
    if torch.compiler.is_compiling() and not inputs.q.is_cuda:
        return f"torch's {inputs.q.device.type} FlexAttention cannot be part of a larger compiled function"
    if inputs.k.shape[2] % 16 == 8 and inputs.q.shape[3] < 32 and not inputs.q.is_cuda:
        # seen in torch 2.13: noise or NaN, without any score modification too
        return (
            f"torch's CPU FlexAttention gives wrong numbers for {inputs.k.shape[2]} keys of head_width "
            f"{inputs.q.shape[3]} (below 32, with 8 keys modulo 16)"
        )
    if torch.compiler.is_compiling() and not _is_prepared(inputs):
        return "a mask of documents cannot be built inside a compiled function (torch 2.11 reads beyond it): prepare it"
    if inputs.q.is_cuda and inputs.q.shape[3] < 16:
        return f"FlexAttention needs a head_width of at least 16 on a GPU, and it is {inputs.q.shape[3]}"
    if inputs.q.is_cuda and inputs.bias.table is not None and inputs.q.shape[3] >= _WIDE:
        return (
            f"with a dense table and a head_width of {inputs.q.shape[3]} (up to {_WIDE - 1} works) torch's kernel for "
            "FlexAttention takes more shared memory than a GPU has"
        )
    return None


def _is_prepared(inputs: AttentionInputs) -> bool:
    """Whether the layout, if it is more than locations in order, holds its mask already."""
    if inputs.layout is None or inputs.in_order or inputs.layout.past is not None:
        return True
    return ("flex", inputs.bias.causal) in inputs.layout.for_rows(inputs.q.shape[0]).memo


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


def _block_mask(inputs: AttentionInputs, layout: Layout | None):
    causal = inputs.bias.causal
    if layout is not None:
        return ops_layout.block_mask(layout, causal)
    if not causal:
        return None
    if inputs.layout is not None:
        return ops_layout.block_mask(inputs.layout, causal)
    return ops_layout.causal_block_mask(inputs.q.shape[2], inputs.k.shape[2], inputs.q.device)


def _score_mod(inputs: AttentionInputs, layout: Layout | None) -> ScoreMod | None:
    """score + g·B_ij at (b, h, query, key); None for plain attention, whose B is 0. layout None: locations in order."""
    if inputs.bias.plain and inputs.bias_gain is None:
        return None
    bias = _table_bias(inputs, layout) if inputs.bias.table is not None else _compact_bias(inputs, layout)

    def plus_bias(score, b, h, query, key):
        return score + bias(b, h, query, key)

    if inputs.bias_gain is None:
        return plus_bias
    # one entry per query although the gain has one per head: its gradient is then summed by torch, not by additions
    # of every tile into the same few numbers
    gain = _per_head(inputs, inputs.bias_gain)[None, :, None].expand(inputs.q.shape[:3]).contiguous()

    def plus_scaled_bias(score, b, h, query, key):
        value = bias(b, h, query, key)
        absent = value == -torch.inf  # only in tables; gain·(−∞) could be NaN
        scaled = score + gain[b, h, query] * torch.where(absent, 0.0, value)
        return torch.where(absent, -torch.inf, scaled)

    return plus_scaled_bias


def _compact_bias(inputs: AttentionInputs, layout: Layout | None):
    vectors, past = inputs.bias, inputs.k.shape[2] - inputs.q.shape[2]
    slope = _per_head(inputs, vectors.slope)
    diagonal = _along_queries(inputs, layout, vectors.diagonal)
    row = None if vectors.row is None else _along_queries(inputs, layout, vectors.row)
    keys = inputs.k.shape[2]
    column = span(vectors.column, 0, keys) if layout is None else take(vectors.column, layout.key_locations)

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


def _table_bias(inputs: AttentionInputs, layout: Layout | None):
    table, past = inputs.bias.table, inputs.k.shape[2] - inputs.q.shape[2]
    assert table is not None

    def bias(b, h, query, key):
        if layout is None:
            return table[query + past, key]
        return table[layout.query_locations[b, query], layout.key_locations[b, key]]

    return bias


def _along_queries(inputs: AttentionInputs, layout: Layout | None, vector: Tensor) -> Tensor:
    """The vector laid out along the queries: (T_q,), or (batch, T_q) where rows differ."""
    if layout is not None:
        return take(vector, layout.query_locations)
    queries = inputs.q.shape[2]
    return span(vector, inputs.k.shape[2] - queries, queries)


def _at(vector: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return vector[index] if vector.dim() == 1 else vector[b, index]


def _per_head(inputs: AttentionInputs, value: Tensor) -> Tensor:
    """(heads,) on the device: one signature for shared and per-head values."""
    return value.to(inputs.q.device, inputs.bias.dtype).reshape(-1).expand(inputs.q.shape[1]).contiguous()

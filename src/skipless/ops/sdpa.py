"""Shaped attention through torch's scaled_dot_product_attention, with a dense bias: quick for short sequences."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from skipless.ops.inputs import Request
from skipless.ops.reference import score_terms


def attend(request: Request) -> Tensor:
    """D·sdpa(q, k, v, bias), which forms the T_q×T_k bias in float32 (float64 for float64 q).

    Half-precision q, k and v are cast up, since torch wants the bias in their dtype and bfloat16 moves B by up to 6e-2
    (float32: 1e-6). Plain attention over whole sequences has no bias, and runs as torch runs it.
    For float32 on a GPU torch's fused kernels are left out: their error is more than twice that of plain arithmetic.
    """
    q, k, v = request.q, request.k, request.v
    scale, grouped = request.scale, request.groups > 1
    if needs_no_bias(request):
        causal = request.parts.causal and q.shape[2] > 1
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    term, visible, row_scale = score_terms(request)
    seen = visible.any(dim=-1, keepdim=True)
    # a row that sees nothing gets a bias of 0 and is dropped below: −∞ throughout would be NaN
    mask = term.masked_fill(~visible, -torch.inf).masked_fill(~seen, 0.0)
    mask = mask.expand(q.shape[0], -1, -1, -1).expand(-1, q.shape[1], -1, -1)
    q, k, v = (t.to(request.compute_dtype) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH) if _fused_is_rough(request) else nullcontext():
        values = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return (values * (row_scale * seen)).to(request.q.dtype)


def refusal(request: Request) -> str | None:
    """It runs everything; at length T it holds T² floats per distinct row of the layout and slope."""
    return None


def needs_no_bias(request: Request) -> bool:
    """Whether this is torch's own attention: no bias, no row scale, and a whole sequence or its last query."""
    no_terms = request.in_order and request.bias_gain is None and request.score_bias is None
    whole = request.q.shape[2] in (1, request.k.shape[2]) or not request.parts.causal
    return request.parts.plain and no_terms and whole and not _fused_is_rough(request)


def _fused_is_rough(request: Request) -> bool:
    return request.q.is_cuda and request.q.dtype == torch.float32

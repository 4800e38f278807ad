"""The oracle: shaped attention as its formula reads, dense, in any dtype."""

import torch
from torch import Tensor

from skipless.ops.request import Request


def attend(request: Request) -> Tensor:
    """D·softmax(mask(q kᵀ/√head_width + g·B + score_bias))·v.

    In half precision the two matrix products round to q's dtype, as a plain implementation would; scores, bias and
    softmax are float32.
    """
    q, dtype = request.q, request.compute_dtype
    k, v = (t.repeat_interleave(request.groups, dim=1) for t in (request.k, request.v))
    term, visible, row_scale = score_terms(request)
    scores = (q @ k.mT).to(dtype) * request.scale + term
    seen = visible.any(dim=-1, keepdim=True)
    # a row that sees nothing takes the softmax of zeros and is dropped below: −∞ throughout would be NaN
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~seen, 0.0)
    values = scores.softmax(dim=-1).to(v.dtype) @ v
    return (values.to(dtype) * (row_scale * seen)).to(q.dtype)


def refusal(request: Request) -> str | None:
    """The reference runs everything."""
    return None


def score_terms(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """(g·B + score_bias, visible, D): what is added to the scores, finite; where they count; and the row scale.

    Shaped to broadcast against (batch, heads, T_q, T_k). A table's −∞ counts as a mask, so that no gain multiplies it.
    """
    dtype, layout = request.compute_dtype, request.placed()
    bias, row_scale = request.parts.between(layout.query_locations, layout.key_locations)
    bias = bias.to(dtype)
    visible = layout.visible(request.parts.causal)[:, None]
    if request.parts.table is not None:
        absent = bias == -torch.inf
        visible, bias = visible & ~absent, bias.masked_fill(absent, 0.0)
    if request.bias_gain is not None:
        bias = request.bias_gain.to(dtype).reshape(-1, 1, 1) * bias
    if request.score_bias is not None:
        bias = bias + request.score_bias.to(dtype)
    return bias, visible, row_scale.to(dtype)[:, None, :, None]

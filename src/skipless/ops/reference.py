"""Shaped attention with a dense bias: its definition in plain torch, and torch's own kernels."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from skipless.ops.bias import AttentionInputs


def attend(inputs: AttentionInputs) -> Tensor:
    """D·softmax(mask(q kᵀ/√head_width + g·B + score_bias))·v.

    In half precision the two matrix products round to q's dtype, as a plain implementation would; scores, bias and
    softmax are float32.
    """
    return attend_with_weights(inputs)[0]


def attend_with_weights(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """attend, and the rows of its softmax before D: (batch, heads, T_q, T_k), 0 in rows that see nothing."""
    q, dtype = inputs.q, inputs.compute_dtype
    k, v = (t.repeat_interleave(inputs.groups, dim=1) for t in (inputs.k, inputs.v))
    term, visible, row_scale = score_terms(inputs)
    scores = (q @ k.mT).to(dtype) * inputs.scale + term
    seen = visible.any(dim=-1, keepdim=True)
    # a row that sees nothing takes the softmax of zeros and is dropped then: −∞ throughout would be NaN
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~seen, 0.0)
    weights = scores.softmax(dim=-1).masked_fill(~seen, 0.0).to(v.dtype)
    return ((weights @ v).to(dtype) * row_scale).to(q.dtype), weights


def score_terms(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(g·B + score_bias, visible, D): what is added to the scores, finite; where they count; and the row scale.

    Shaped to broadcast against (batch, heads, T_q, T_k). A table's −∞ counts as a mask, so that no gain multiplies it.
    """
    dtype, layout = inputs.compute_dtype, inputs.effective_layout()
    bias, row_scale = inputs.bias.between(layout.query_locations, layout.key_locations)
    bias = bias.to(dtype)
    visible = layout.visible(inputs.bias.causal)[:, None]
    if inputs.bias.table is not None:
        absent = bias == -torch.inf
        visible, bias = visible & ~absent, bias.masked_fill(absent, 0.0)
    if inputs.bias_gain is not None:
        bias = inputs.bias_gain.to(dtype).reshape(-1, 1, 1) * bias
    if inputs.score_bias is not None:
        bias = bias + inputs.score_bias.to(dtype)
    return bias, visible, row_scale.to(dtype)


def attend_by_sdpa(inputs: AttentionInputs) -> Tensor:
    """D·sdpa(q, k, v, bias) by torch's scaled_dot_product_attention.

    The T_q×T_k bias is formed in float32 (float64 for float64 q). Half-precision q, k and v are cast up, since torch
    wants the bias in their dtype and bfloat16 moves B by up to 6e-2 (float32: 1e-6). Plain attention over whole
    sequences has no bias, and runs as torch runs it.
    With a bias `backends_with_bias` says which of torch's kernels may run.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    scale, grouped = inputs.scale, inputs.groups > 1
    if needs_no_bias(inputs):
        causal = bool(inputs.bias.causal and q.shape[2] > 1)
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    term, visible, row_scale = score_terms(inputs)
    seen = visible.any(dim=-1, keepdim=True)
    # a row that sees nothing gets a bias of 0 and is dropped below: −∞ throughout would be NaN
    mask = term.masked_fill(~visible, -torch.inf).masked_fill(~seen, 0.0)
    mask = mask.expand(q.shape[0], -1, -1, -1).expand(-1, q.shape[1], -1, -1)
    q, k, v = (t.to(inputs.compute_dtype) for t in (q, k, v))
    allowed = backends_with_bias(inputs.q)
    with nullcontext() if allowed is None else sdpa_kernel(allowed):
        values = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return (values * (row_scale * seen)).to(inputs.q.dtype)


def backends_with_bias(q: Tensor) -> list[SDPBackend] | None:
    """Those of torch's kernels that may add a bias to the scores of q; None on a CPU, where torch chooses.

    Never cuDNN's. It reads a float32 bias as if it were q's half precision, and gives wrong numbers (pytorch#191612);
    and from torch 2.11 on its dq is NaN where T % 128 = 64 and a row's log-sum-exp is below −88 (pytorch#196678).
    attend_by_sdpa casts half precision up, which cuDNN does not take: this holds whatever is cast.
    For float32 plain arithmetic alone: the error of the fused kernels is more than twice as large.
    """
    if not q.is_cuda:
        return None
    if q.dtype == torch.float32:
        return [SDPBackend.MATH]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def needs_no_bias(inputs: AttentionInputs) -> bool:
    """Whether this is torch's own attention: no bias, no row scale, and a whole sequence or its last query."""
    no_terms = inputs.in_order and inputs.bias_gain is None and inputs.score_bias is None
    whole = inputs.q.shape[2] in (1, inputs.k.shape[2]) or not inputs.bias.causal
    rough = inputs.q.is_cuda and inputs.q.dtype == torch.float32  # torch's fused kernels: see backends_with_bias
    return inputs.bias.plain and no_terms and whole and not rough

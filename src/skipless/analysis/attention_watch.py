"""Seeing attention weights without asking the model for them: torch's own attention and softmax calls are watched.

Weights are recomputed from q and k one head at a time and thrown away, so nothing is kept for the backward pass.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skipless.analysis.activation_stats import wide

MOST_ROWS, MOST_QUERIES = 2, 512
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class AttentionStats:
    """Means over the queries that see more than one key, all heads and the first rows: entropy in nats; spread, the
    entropy over that of a uniform distribution on the keys seen; first, the weight on the first key."""

    entropy: float
    spread: float
    first: float


class AttentionWatch(TorchFunctionMode):
    """While open, `found[block]` is filled from the first attention inside each block that `current()` names."""

    def __init__(self, current: Callable[[], int | None]):
        super().__init__()
        self.current, self.found = current, dict[int, AttentionStats]()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        block = self.current()
        if block is not None and block not in self.found:
            stats = _seen(func, args, kwargs, out)
            if stats is not None:
                self.found[block] = stats
        return out


@torch.no_grad()
def _seen(func, args: tuple, kwargs: dict, out) -> AttentionStats | None:
    if func is F.scaled_dot_product_attention:
        return _of_call(*args, **kwargs)
    if func is F.multi_head_attention_forward:
        return _of_torch_module(inspect.signature(func).bind(*args, **kwargs).arguments)
    square = isinstance(out, Tensor) and out.dim() in (3, 4) and out.shape[-1] == out.shape[-2] > 1
    if func in _SOFTMAX and square:
        weights = out[:MOST_ROWS].flatten(0, -3)
        return _average([_of_weights(head[_queries(head)], head[_queries(head)] > 0) for head in weights])
    return None


def _of_call(  # noqa: PLR0913  (torch's own signature)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionStats | None:
    """From the arguments of scaled_dot_product_attention, query shaped (batch, heads, T_q, head_width)."""
    q, k = query, key
    if q.dim() != 4 or k.shape[2] < 2:
        return None
    group = q.shape[1] // k.shape[1]
    terms = attn_mask.expand(len(q), q.shape[1], q.shape[2], k.shape[2]) if attn_mask is not None else None
    found = []
    for row in range(min(len(q), MOST_ROWS)):
        for head in range(q.shape[1]):
            queries = _queries(q[row, head])
            scores = q[row, head][queries].to(wide(q)) @ k[row, head // group].to(wide(q)).T
            scores *= scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
            visible = torch.ones_like(scores, dtype=torch.bool)
            if is_causal:
                visible &= queries[:, None] >= torch.arange(k.shape[2], device=q.device)
            if terms is not None:
                term = terms[row, head][queries]
                visible &= term if term.dtype == torch.bool else term > torch.finfo(term.dtype).min
                scores = scores if term.dtype == torch.bool else scores + term.to(scores.dtype)
            found.append(_of_weights(scores.masked_fill(~visible, -math.inf).softmax(-1), visible))
    return _average(found)


def _of_torch_module(given: dict) -> AttentionStats | None:
    """From the arguments of nn.MultiheadAttention's function, (T, batch, width); q and k are projected again."""
    heads, weight, bias = given["num_heads"], given["in_proj_weight"], given["in_proj_bias"]
    if weight is None or given.get("key_padding_mask") is not None:
        return None
    q, k = given["query"][:, :MOST_ROWS], given["key"][:, :MOST_ROWS]
    if q.dim() != 3:
        return None
    weights, biases = weight.chunk(3), bias.chunk(3) if bias is not None else (None,) * 3
    q, k = (
        F.linear(x, w, b).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip((q, k), weights, biases, strict=False)
    )
    mask = given.get("attn_mask")
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, heads))[:MOST_ROWS]
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask  # there True hides
    return _of_call(q, k, k, attn_mask=mask, is_causal=bool(given.get("is_causal")) and mask is None)


def _queries(rows: Tensor) -> Tensor:
    """Indices of at most MOST_QUERIES queries, evenly spread."""
    count = rows.shape[0]
    if count <= MOST_QUERIES:
        return torch.arange(count, device=rows.device)
    return torch.linspace(0, count - 1, MOST_QUERIES, device=rows.device).round().long()


def _of_weights(weights: Tensor, visible: Tensor) -> list[float]:
    """[entropy, spread, weight on the first key], means over queries that see two keys or more."""
    keys = visible.sum(-1)
    choosing = keys > 1
    weights, keys = weights[choosing].to(wide(weights)), keys[choosing].to(wide(weights))
    entropy = torch.special.entr(weights).sum(-1)
    return torch.stack([entropy.mean(), (entropy / keys.log()).mean(), weights[:, 0].mean()]).tolist()


def _average(found: list[list[float]]) -> AttentionStats:
    count = len(found)
    return AttentionStats(*(sum(values) / count for values in zip(*found, strict=True)))

"""Attention weights, their spread and their sinks, seen without asking the model for them.

This library's attention is asked for its queries and keys; of any other, torch's own attention and softmax calls are
watched. Weights of two rows and at most 512 queries are computed once more, in float64, 64 MB at a time. Nothing is
stored for the backward pass.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skipless.inspection.statistics import wide
from skipless.nn.attention import ShapedAttention
from skipless.nn.position import Positions
from skipless.ops import reference
from skipless.ops.attention import Rotation
from skipless.ops.bias import AttentionInputs
from skipless.ops.layout import Layout

MOST_ROWS, MOST_QUERIES = 2, 512
_CHUNK = 2**26  # bytes of one chunk's float64 scores

Weights = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class AttentionStats:
    """Means over the queries that see more than one key, all heads and the first rows: entropy in nats; spread, the
    entropy over that of a uniform distribution on the keys seen; first, own and ahead, the weight on the first key, on
    the query's own location and on what follows it."""

    entropy: float
    spread: float
    first: float
    own: float
    ahead: float

    @classmethod
    def of(cls, sums: Tensor | np.ndarray) -> "AttentionStats":
        """From what `summed` gave."""
        *totals, count = sums.tolist()
        return cls(*(total / count if count else float("nan") for total in totals))


def summed(shape: tuple[int, int, int, int], weights: Weights, device: torch.device) -> Tensor:
    """[Σ entropy, Σ spread, Σ first, Σ own, Σ ahead, count] of attention of `shape` (rows, heads, queries, keys).

    weights(rows, queries) gives, for some rows of the batch and the indices of some queries, the weights (rows, heads,
    queries, keys), where nothing is seen any numbers at all, and which keys are visible, broadcastable to them.
    """
    rows, heads, queries, keys = shape
    chosen, rows = evenly(queries, device), min(rows, MOST_ROWS)
    step = max(_CHUNK // (8 * heads * keys), 1)
    together = max(step // max(len(chosen), 1), 1)
    parts = [
        _sums(*weights(slice(first, min(first + together, rows)), some), some + keys - queries)
        for first in range(0, rows, together)
        for some in chosen.split(step)
    ]
    return torch.stack(parts).sum(0)


def evenly(count: int, device: torch.device) -> Tensor:
    """Indices of at most MOST_QUERIES of `count` queries, evenly spread."""
    if count <= MOST_QUERIES:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, MOST_QUERIES, device=device).round().long()


def _sums(weights: Tensor, visible: Tensor, places: Tensor) -> Tensor:
    weights = weights.to(wide(weights))
    keys = visible.sum(-1)
    entropy = torch.special.entr(weights).sum(-1)
    own = weights.gather(-1, places.clamp(min=0)[:, None].expand(*weights.shape[:-1], 1))[..., 0]
    later = torch.arange(weights.shape[-1], device=weights.device) > places[:, None]
    ahead = weights.where(later & visible, 0.0).sum(-1)
    spread = entropy / keys.clamp(min=2).to(entropy.dtype).log()
    values = torch.stack([entropy, spread, weights[..., 0], own, ahead, torch.ones_like(entropy)])
    return values.where(keys > 1, 0.0).flatten(1).sum(-1)


SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class AttentionWatch(TorchFunctionMode):
    """While open, `found[block]` is filled from the first attention inside each block that `current()` names."""

    def __init__(self, current: Callable[[], int | None], found: dict[int, Tensor] | None = None):
        super().__init__()
        self.current = current
        self.found: dict[int, Tensor] = {} if found is None else found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        block = self.current()
        if block is not None and block not in self.found:
            sums = _seen(func, args, kwargs, out)
            if sums is not None:
                self.found[block] = sums
        return out


@torch.no_grad()
def of_shaped(module: ShapedAttention, x: Tensor, positions: Positions | None = None) -> Tensor:
    """Sums as of `summed` for this library's attention, whichever implementation runs it, FlexAttention too.

    Queries and keys of the first rows are projected once more.
    """
    inputs = module.inputs(x[:MOST_ROWS], None if positions is None else _first_rows(positions))
    layout, terms = inputs.effective_layout(), inputs.score_bias

    def weights(rows: slice, queries: Tensor) -> tuple[Tensor, Tensor]:
        own = slice(None) if len(layout.query_locations) == 1 else rows  # a layout of one row stands for all
        part = replace(
            inputs,
            q=inputs.q[rows][:, :, queries].to(wide(x)),
            k=inputs.k[rows].to(wide(x)),
            layout=_cut(layout, own, queries),
            score_bias=None if terms is None else terms[rows][:, :, queries],
        )
        return _reference_weights(part)

    batch, heads, length, _ = inputs.q.shape
    return summed((batch, heads, length, inputs.k.shape[2]), weights, x.device)


def _reference_weights(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """(softmax of the scores, what is visible), by the definition."""
    term, visible, _ = reference.score_terms(inputs)
    keys = inputs.k.repeat_interleave(inputs.groups, dim=1)
    scores = (inputs.q @ keys.mT) * inputs.scale + term
    return scores.masked_fill(~visible, -math.inf).softmax(-1), visible


def _first_rows(positions: Positions) -> Positions:
    layout, rotation = positions.layout, positions.rotation
    return Positions(
        None if layout is None else _cut(layout, slice(MOST_ROWS), slice(None)),
        None if rotation is None else Rotation(rotation.cos[:MOST_ROWS], rotation.sin[:MOST_ROWS]),
    )


def _cut(layout: Layout, rows: slice, queries: Tensor | slice) -> Layout:
    own, others = layout.query_documents, layout.key_documents
    return Layout(
        layout.query_locations[rows][:, queries],
        layout.key_locations[rows],
        None if own is None else own[rows][:, queries],
        None if others is None else others[rows],
        layout.extent,
    )


@torch.no_grad()
def _seen(func, args: tuple, kwargs: dict, out) -> Tensor | None:
    if func is F.scaled_dot_product_attention:
        return _of_call(*args, **kwargs)
    if func is F.multi_head_attention_forward:
        return _of_torch_module(inspect.signature(func).bind(*args, **kwargs).arguments)
    square = isinstance(out, Tensor) and out.dim() in (3, 4) and out.shape[-1] == out.shape[-2] > 1
    if func in SOFTMAX and square and _over_keys(args, kwargs, out.dim()):
        given = args[0] if args else kwargs["input"]
        scores = given if out.dim() == 4 else given[None, :MOST_ROWS]
        rows, heads, length, _ = scores.shape

        def weights(rows: slice, queries: Tensor) -> tuple[Tensor, Tensor]:
            some = scores[rows][:, :, queries]
            return some.to(wide(some)).softmax(-1), some > torch.finfo(scores.dtype).min / 2  # it may saturate at zero

        return summed((rows, heads, length, length), weights, out.device)
    return None


def _over_keys(args: tuple, kwargs: dict, dimensions: int) -> bool:
    """Whether a softmax runs over its last axis."""
    axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return axis in (-1, dimensions - 1)


def _of_call(  # noqa: PLR0913  (torch's own signature)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """From the arguments of scaled_dot_product_attention, query shaped (batch, heads, T_q, head_width)."""
    q, k = query, key
    if q.dim() != 4 or k.shape[2] < 2:
        return None
    group, factor = q.shape[1] // k.shape[1], scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
    shape = (len(q), q.shape[1], q.shape[2], k.shape[2])
    terms = attn_mask.expand(shape) if attn_mask is not None else None

    def weights(rows: slice, queries: Tensor) -> tuple[Tensor, Tensor]:
        keys = k[rows].to(wide(q)).repeat_interleave(group, dim=1)
        scores = (q[rows][:, :, queries].to(wide(q)) @ keys.mT) * factor
        visible = torch.ones_like(scores[:, :1], dtype=torch.bool)
        if is_causal:
            visible = visible & (queries[:, None] >= torch.arange(k.shape[2], device=q.device))
        if terms is not None:
            term = terms[rows][:, :, queries]
            visible = visible & (term if term.dtype == torch.bool else term > torch.finfo(term.dtype).min)
            scores = scores if term.dtype == torch.bool else scores + term.to(scores.dtype)
        return scores.masked_fill(~visible, -math.inf).softmax(-1), visible

    return summed(shape, weights, q.device)


def _of_torch_module(given: dict) -> Tensor | None:
    """From the arguments of nn.MultiheadAttention's function, (T, batch, width); q and k are projected again."""
    heads, weight, bias = given["num_heads"], given["in_proj_weight"], given["in_proj_bias"]
    apart = given.get("use_separate_proj_weight", False)
    if (weight is None and not apart) or given.get("key_padding_mask") is not None:
        return None
    q, k = given["query"][:, :MOST_ROWS], given["key"][:, :MOST_ROWS]
    if q.dim() != 3:
        return None
    weights = (given["q_proj_weight"], given["k_proj_weight"]) if apart else weight.chunk(3)
    biases = bias.chunk(3) if bias is not None else (None,) * 3
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

"""shaped_attention: softmax attention that starts from a given attention matrix. Semantics and dispatch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from skipless.ops import flex, reference, sdpa, triton
from skipless.ops.layout import Layout
from skipless.ops.parts import ShapeParts
from skipless.ops.request import Request
from skipless.theory.shapes import AttentionShape

logger = logging.getLogger("skipless")

Impl = Literal["auto", "reference", "sdpa", "flex", "triton"]


@dataclass(frozen=True)
class Implementation:
    """attend computes a checked Request; refusal says in words why it cannot, or None.

    prepare does what all blocks of a network share, for one block's request, and returns the layout for all.
    """

    attend: Callable[[Request], Tensor]
    refusal: Callable[[Request], str | None]
    prepare: Callable[[Request], Layout | None] = lambda request: request.layout


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(reference.attend, reference.refusal),
    "sdpa": Implementation(sdpa.attend, sdpa.refusal),
    "flex": Implementation(flex.attend, flex.refusal, flex.prepare),
    "triton": Implementation(triton.attend, triton.refusal, triton.prepare),
}

# "auto" on a CPU: up to this many keys a dense bias (64 MB in float32) is quicker than compiling a kernel.
_DENSE_KEYS = 4096
# "auto": up to this many queries is decoding, where flex would compile anew for every length.
_DECODING_QUERIES = 16

_announced: set[tuple[str, str]] = set()


def shaped_attention(  # noqa: PLR0913  (three tensors, the shape and four options: one call is one formula)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: AttentionShape | ShapeParts,
    *,
    impl: Impl | str = "auto",
    layout: Layout | None = None,
    bias_gain: Tensor | float | None = None,
    score_bias: Tensor | None = None,
) -> Tensor:
    """D·softmax(mask(q kᵀ/√head_width + g·B + score_bias))·v, with A = D·softmax(B) the shape's attention matrix.

    With q = 0 this is A·v: the network starts with the attention that preserves its signal. He et al. 2023, Sec. 3.3.

    q: (batch, heads, T_q, head_width). k, v: (batch, kv_heads, T_k, head_width); heads is a multiple of kv_heads, and
        consecutive query heads share one (grouped queries). One dtype, which is also the output's.
    shape: an AttentionShape, whose O(T) parts are then built on every call, or the ShapeParts that a module keeps.
    layout: where queries and keys stand; None means keys at 0 … T_k−1 and queries at the last T_q of them, so decoding
        against a cache needs none. Padding queries give 0.
    bias_gain: g, one number or one per head; it may require a gradient. D does not follow it.
    score_bias: a dense term that broadcasts to (batch, heads, T_q, T_k), for positions encoded in the scores.
    impl: "reference" (dense, the definition), "sdpa" (torch's fused kernel with a dense bias), "flex" (FlexAttention,
        no T×T tensor), "triton" (kernels of our own; T×T only in gradients of short rows, 512 MiB at most), or "auto",
        which logs its choice and reason under "skipless". An explicit impl that cannot run raises RuntimeError.

    Autocast does not reach inside: it would cast the bias to half precision, which moves B by up to 6e-2.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if isinstance(shape, AttentionShape):
        extent = k.shape[-2] if layout is None or layout.extent is None else layout.extent
        shape = ShapeParts.of(shape, extent, q.device, dtype)
    if isinstance(bias_gain, int | float):
        bias_gain = torch.tensor(float(bias_gain), device=q.device, dtype=dtype)
    request = Request(q, k, v, shape, layout, bias_gain, score_bias).check()
    with torch.autocast(q.device.type, enabled=False):
        return _implementation(impl, request).attend(request)


def turned_attention(request: Request, together: Tensor, cos: Tensor, sin: Tensor, impl: str) -> Tensor | None:
    """shaped_attention(rotated q, rotated k, v, …) by one operator, whose gradient is that of `together` at once.

    The request's q, k and v are the parts of together (batch, T, features), in this order and not rotated; or q and k
    alone are, and v is a tensor of its own. cos and sin: (batch or 1, 1, T, head_width/2). None where `impl` means
    other kernels than "triton", or those refuse this.
    """
    batch, _, length, width = request.check().q.shape
    fits = cos.shape == sin.shape and cos.shape[0] in (1, batch) and cos.shape[1:] == (1, length, width // 2)
    name = choose(request)[0] if impl == "auto" else impl
    if not fits or name != "triton" or triton.refusal(request) is not None:
        return None
    with torch.autocast(together.device.type, enabled=False):
        return triton.attend_turned(request, together, cos, sin)


def _implementation(impl: str, request: Request) -> Implementation:
    """The one that was asked for, if it can run this; or what "auto" chooses."""
    if impl == "auto":
        return IMPLEMENTATIONS[_announce(*choose(request))]
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; use 'auto' or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    if why := IMPLEMENTATIONS[impl].refusal(request):
        raise RuntimeError(f"impl={impl!r} cannot run this: {why}; use impl={choose(request)[0]!r}")
    return IMPLEMENTATIONS[impl]


def prepare(request: Request, impl: str) -> Layout | None:
    """Do once what every block of a network would do for this request, outside what is compiled; the layout to use."""
    name = choose(request)[0] if impl == "auto" else impl
    return IMPLEMENTATIONS[name].prepare(request) if name in IMPLEMENTATIONS else request.layout


def choose(request: Request) -> tuple[str, str]:
    """What impl="auto" runs, and why."""
    queries, keys = request.q.shape[2], request.k.shape[2]
    if request.q.is_cuda and not sdpa.needs_no_bias(request):
        if (why := triton.refusal(request)) is None:
            return "triton", "on a GPU the fused kernels are the fastest, and their memory grows with T"
        if queries > _DECODING_QUERIES and flex.refusal(request) is None:
            return "flex", f"triton cannot: {why}"
    if (why := flex.refusal(request)) is not None:
        return "sdpa", f"flex cannot: {why}"
    if sdpa.needs_no_bias(request):
        return "sdpa", "plain attention needs no bias, so torch's own kernels run it as they are"
    if request.q.is_cuda or queries <= _DECODING_QUERIES < keys:
        return "sdpa", f"at most {_DECODING_QUERIES} queries (decoding): a dense bias is small"
    if keys <= _DENSE_KEYS:
        return "sdpa", f"on a CPU a dense bias of at most {_DENSE_KEYS} keys is quicker than compiling"
    return "flex", f"no T×T tensor for more than {_DENSE_KEYS} keys"


def _announce(name: str, reason: str) -> str:
    if not torch.compiler.is_compiling() and (name, reason) not in _announced:
        _announced.add((name, reason))
        logger.info("impl='auto' runs %r: %s", name, reason)
    return name

"""Request: one call of shaped_attention, checked once, as every implementation receives it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from skipless.ops.bias import BiasVectors
from skipless.ops.layout import Layout

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Request:
    """Checked arguments. bias_gain is None, a 0-d tensor or one number per query head."""

    q: Tensor
    k: Tensor
    v: Tensor
    parts: BiasVectors
    layout: Layout | None = None
    bias_gain: Tensor | None = None
    score_bias: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of scores, bias and softmax: float32 for half-precision q, else q's own."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def needs_grad(self) -> bool:
        tensors = (self.q, self.k, self.v, self.bias_gain, self.score_bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    @property
    def in_order(self) -> bool:
        """Whether keys stand at 0 … T_k−1 and queries at the last T_q of them: no layout, or one that says as much."""
        return self.layout is None or self.layout.past is not None

    def placed(self) -> Layout:
        """The layout, or what None means: keys at 0 … T_k−1, queries at the last T_q of them."""
        if self.layout is not None:
            return self.layout
        queries, keys = self.q.shape[2], self.k.shape[2]
        return Layout.continuing(keys - queries, queries, self.q.device)

    def check(self) -> "Request":
        """Itself, or the ValueError that says what is wrong."""
        _check_tensors(self.q, self.k, self.v)
        _check_parts(self)
        if self.layout is not None:
            _check_layout(self, self.layout)
        elif self.q.shape[2] > self.k.shape[2]:
            raise ValueError(
                f"there are {self.q.shape[2]} queries and {self.k.shape[2]} keys; without a layout the queries are the "
                f"last of the keys' locations: give at most {self.k.shape[2]} queries, or a Layout"
            )
        _check_terms(self)
        return self


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    seen = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"got {seen}; all three must be (batch, heads, length, head_width)")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"got {seen}; k and v must have one shape, and share batch and head_width with q")
    if min(*q.shape, *k.shape) < 1:
        raise ValueError(f"got {seen}; no dimension may be empty")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads and k {k.shape[1]}; query heads must be a multiple of key heads: "
            f"use {q.shape[1] // k.shape[1] * k.shape[1] or k.shape[1]} query heads"
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; cast them to one dtype first")
    if q.dtype not in _DTYPES:
        raise ValueError(
            f"q is {q.dtype}; attention runs in {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
        )
    if not (q.device == k.device == v.device):
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")


def _check_parts(request: Request) -> None:
    parts, q = request.parts, request.q
    if parts.device != q.device:
        raise ValueError(
            f"the shape's parts are on {parts.device} and q on {q.device}; use parts.to({str(q.device)!r})"
        )
    for name, tensor in parts.tensors().items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} of the shape is {tensor.dtype}, which moves the bias by up to 6e-2; keep the parts in float32 "
                "(module.to(bfloat16) casts buffers too: restore them afterwards)"
            )
    if parts.slope.numel() not in (1, q.shape[1]):
        raise ValueError(
            f"the shape has {parts.slope.numel()} slopes and q {q.shape[1]} heads; build it with heads={q.shape[1]}"
        )
    _check_reach(request)


def _check_reach(request: Request) -> None:
    parts, keys = request.parts, request.k.shape[2]
    if parts.reach is None:
        return
    if parts.exact_reach and not (request.in_order and request.q.shape[2] == keys == parts.reach):
        layout = "no layout" if request.in_order else "a layout"
        raise ValueError(
            f"{request.q.shape[2]} queries and {keys} keys with {layout}, but this non-causal shape depends on the "
            f"length: it serves whole sequences of {parts.reach} without a layout; build it with length={keys}"
        )
    needed = keys if request.layout is None or request.layout.extent is None else request.layout.extent
    if needed > parts.reach:
        raise ValueError(
            f"locations reach {needed}, but the shape's parts were built for {parts.reach}; "
            f"use BiasVectors.of(shape, {needed})"
        )


def _check_layout(request: Request, layout: Layout) -> None:
    for side, locations, tensor in (
        ("query", layout.query_locations, request.q),
        ("key", layout.key_locations, request.k),
    ):
        batch, length = tensor.shape[0], tensor.shape[2]
        if locations.shape[0] not in (1, batch) or locations.shape[1] != length:
            raise ValueError(
                f"the layout's {side}_locations are shaped {tuple(locations.shape)}; with {side} tensors "
                f"{tuple(tensor.shape)} they must be ({batch}, {length}) or (1, {length})"
            )
        if locations.device != tensor.device:
            raise ValueError(
                f"the layout is on {locations.device} and q on {tensor.device}; build it on {tensor.device}"
            )


def _check_terms(request: Request) -> None:
    gain, bias, heads = request.bias_gain, request.score_bias, request.q.shape[1]
    if gain is not None and gain.shape not in ((), (1,), (heads,)):
        raise ValueError(f"bias_gain is shaped {tuple(gain.shape)}; use one number, or one per head: ({heads},)")
    if bias is None:
        return
    full = (request.q.shape[0], heads, request.q.shape[2], request.k.shape[2])
    if bias.dim() > 4 or any(have not in (1, want) for have, want in zip(bias.shape[::-1], full[::-1], strict=False)):
        raise ValueError(
            f"score_bias is shaped {tuple(bias.shape)}; it must broadcast to (batch, heads, T_q, T_k) = {full}"
        )

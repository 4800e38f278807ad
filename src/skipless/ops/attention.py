"""shaped_attention: softmax attention that starts from a given attention matrix. Semantics, and which code runs it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from skipless.ops import flex, gpu, reference
from skipless.ops.bias import AttentionInputs, BiasVectors, check_kinds
from skipless.ops.layout import Layout, kernel_layout, kernel_sides
from skipless.ops.modes import is_traced, is_transformed, without_autocast
from skipless.theory.shapes import AttentionShape

logger = logging.getLogger("skipless")

Impl = Literal["auto", "reference", "sdpa", "flex", "triton"]


class Rotation:
    """Rotary positions: cos and sin of every location's angles, (batch or 1, 1, T, head_width/2), once per forward."""

    def __init__(self, cos: Tensor, sin: Tensor):
        self.cos, self.sin = cos, sin

    @classmethod
    def at(cls, locations: Tensor, head_width: int, base: float = 10_000.0) -> "Rotation":
        """Angles location·base^{−2k/head_width}. Su et al. 2021. In float32: bfloat16 cannot count past 256."""
        if head_width % 2:
            raise ValueError(f"head_width is {head_width}; rotary positions need an even one: use {head_width + 1}")
        pair = torch.arange(0, head_width, 2, device=locations.device, dtype=torch.float32)
        angle = locations[:, None, :, None].float() * base ** (-pair / head_width)
        return cls(angle.cos(), angle.sin())

    @classmethod
    def on_grid(cls, side: int, head_width: int, base: float, device: torch.device | str | None = None) -> "Rotation":
        """Locations in reading order over `side` rows and columns: one half of the pairs turns by the row, one by the
        column.
        """
        if head_width % 4:
            raise ValueError(
                f"head_width is {head_width}; two axes need a multiple of 4: use {-(-head_width // 4) * 4}"
            )
        number = torch.arange(side * side, device=device)
        axes = [cls.at(place[None], head_width // 2, base) for place in (number // side, number % side)]
        return cls(*(torch.cat([getattr(axis, name) for axis in axes], dim=-1) for name in ("cos", "sin")))

    def to(self, device: torch.device | str | int) -> "Rotation":
        """The rotation on another device; itself if it is there already."""
        cos = self.cos.to(device)
        return self if cos is self.cos else Rotation(cos, self.sin.to(device))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (k, k + head_width/2) of x (batch, heads, T, head_width)."""
        first, second = x.float().chunk(2, dim=-1) if x.dtype != torch.float64 else x.chunk(2, dim=-1)
        rotated = torch.cat([first * self.cos - second * self.sin, first * self.sin + second * self.cos], dim=-1)
        return rotated.to(x.dtype)


def shaped_attention(  # noqa: PLR0913  (three tensors, the shape and the options: one call is one formula)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: AttentionShape | BiasVectors,
    *,
    impl: Impl | str = "auto",
    layout: Layout | None = None,
    bias_gain: Tensor | float | None = None,
    score_bias: Tensor | None = None,
    rotation: Rotation | None = None,
    qkv: Tensor | None = None,
    decoding: bool = False,
) -> Tensor:
    """D·softmax(mask(q kᵀ/√head_width + g·B + score_bias))·v, with A = D·softmax(B) the shape's attention matrix.

    With q = 0 this is A·v: the network starts with the attention that preserves its signal. He et al. 2023, Sec. 3.3.

    q: (batch, heads, T_q, head_width). k, v: (batch, kv_heads, T_k, head_width); heads is a multiple of kv_heads, and
        consecutive query heads share one (grouped queries). One dtype, which is also the output's.
    shape: an AttentionShape, whose O(T) vectors are then built on every call, or the BiasVectors that a module holds.
    layout: where queries and keys stand; None means both at 0 … T−1, or with decoding=True queries at the last T_q of
        the keys' locations, as against a cache. Padding queries give 0.
    bias_gain: g, one number or one per head; it may require a gradient. D does not follow it.
    score_bias: a dense term that broadcasts to (batch, heads, T_q, T_k), for positions encoded in the scores.
    rotation: rotary positions; q and k are rotated first.
    qkv: the product (batch, T, features) that q, k and v, or q and k alone, are slices of, in this order. The GPU
        kernels then rotate by themselves and give its gradient at once: see `rotary_attention`.
    impl: "reference" (dense, the definition), "sdpa" (torch's fused kernel with a dense bias), "flex" (FlexAttention,
        no T×T tensor), "triton" (GPU kernels of our own; T×T only in gradients of short rows, 512 MiB at most), or
        "auto", which logs its choice and reason under "skipless". An impl that cannot run this raises RuntimeError.
        Gradients that are differentiated again are the definition's. Under "flex" and with a score_bias, which would
        have to be stored once more, torch says that it has none, unless impl is "reference".

    Autocast does not reach inside: it would cast the bias to half precision, which moves B by up to 6e-2.
    """
    check_kinds(q, k, v, shape, bias_gain, score_bias)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if isinstance(shape, AttentionShape):
        extent = k.shape[-2] if layout is None or layout.extent is None else layout.extent
        shape = BiasVectors.of(shape, extent, q.device, dtype)
    if isinstance(bias_gain, int | float):
        bias_gain = torch.tensor(float(bias_gain), device=q.device, dtype=dtype)
    inputs = AttentionInputs(q, k, v, shape, layout, bias_gain, score_bias, decoding).check()
    with without_autocast(q.device):
        if rotation is not None:
            if qkv is not None and (out := rotary_attention(inputs, qkv, rotation, impl)) is not None:
                return out
            q, k = rotation.rotate(q), rotation.rotate(k)
            inputs = replace(inputs, q=q, k=k)
        attend = _implementation(impl, inputs).attend
        out = torch.cat([attend(part) for part in inputs.by_run()], dim=1) if shape.runs else attend(inputs)
    if is_traced() or attend is reference.attend or score_bias is not None or not inputs.needs_grad:
        return out
    return _TwiceDifferentiable.apply(out, q, k, v, bias_gain, inputs)


class _TwiceDifferentiable(torch.autograd.Function):
    """`out` as it is. Where its gradient is recorded, by create_graph=True, it is that of the definition: those of
    fused kernels have no gradients themselves."""

    @staticmethod
    def forward(ctx, out: Tensor, q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None, inputs: AttentionInputs):
        ctx.save_for_backward(q, k, v, gain)
        ctx.shape, ctx.layout, ctx.decoding = inputs.bias, inputs.layout, inputs.decoding
        return out.view_as(out)

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        if not torch.is_grad_enabled():
            return upstream[0], *[None] * 5
        # as views, whose gradients end here: keys may be made of the queries
        tensors: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
        q, k, v, gain = tensors
        with without_autocast(q.device):
            out = reference.attend(AttentionInputs(q, k, v, ctx.shape, ctx.layout, gain, decoding=ctx.decoding))
        needed = ctx.needs_input_grad[1:5]
        wanted = [t for t, asked in zip(tensors, needed, strict=True) if asked]
        slopes = iter(torch.autograd.grad(out, wanted, upstream[0], create_graph=True))
        return None, *(next(slopes) if asked else None for asked in needed), None


def rotary_attention(inputs: AttentionInputs, qkv: Tensor, rotation: Rotation, impl: str) -> Tensor | None:
    """shaped_attention(rotated q, rotated k, v, …) by one operator, whose gradient is that of `qkv` at once.

    It spares the backward pass the rotation's own gradient, and a concatenation. The inputs' q, k and v are slices of
    qkv (batch, T, features), in this order and not rotated; or q and k alone are, and v is a tensor of its own.
    None where `impl` means other code than the GPU kernels, those cannot run this, or heads have shapes of their own.
    """
    cos, sin = rotation.cos, rotation.sin
    batch, heads, length, width = inputs.q.shape
    fits = cos.shape == sin.shape and cos.shape[0] in (1, batch) and cos.shape[1:] == (1, length, width // 2)
    name = choose(inputs)[0] if impl == "auto" else impl
    if not fits or name != "triton" or inputs.bias.runs or why_not_triton(inputs) is not None:
        return None
    from skipless.ops.gpu import rotary

    kv_heads = inputs.k.shape[1]
    values = inputs.v if qkv.shape[2] == (heads + kv_heads) * width else None
    bias, layout = inputs.bias.for_kernels(inputs.bias_gain), _layout_for_kernels(inputs)
    return rotary.rotary_attention(qkv, values, cos, sin, heads, kv_heads, *bias, layout, inputs.bias.causal)[0]


def attend_by_triton(inputs: AttentionInputs) -> Tensor:
    """Attention by GPU kernels of our own. Beside q, k, v and the output they store one number per query.

    Its gradients take up to launch.SAVED_SCORES_BYTES besides, for those of the scores.
    """
    from skipless.ops.gpu import decode, launch

    q, k, v, causal = inputs.q, inputs.k, inputs.v, inputs.bias.causal
    bias = inputs.bias.for_kernels(inputs.bias_gain)
    if is_decoding(inputs) and q.stride(3) == k.stride(3) == v.stride(3) == 1:
        any_layout = inputs.layout is not None and not inputs.in_order
        sides = [*kernel_sides(inputs.layout, q.shape[0])] if any_layout else []
        return decode.shaped_decoding(q, k, v, *bias, sides, causal)
    return launch.shaped_attention(q, k, v, *bias, _layout_for_kernels(inputs), causal)[0]


def is_decoding(inputs: AttentionInputs) -> bool:
    """Whether these are few queries of which no gradient is asked: their rows must fit one tile of a GPU kernel."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    return not inputs.needs_grad and queries * inputs.groups <= _DECODING_ROWS and queries < keys


def why_not_triton(inputs: AttentionInputs) -> str | None:
    """Why the GPU kernels cannot run this, or None."""
    q = inputs.q
    if inputs.score_bias is not None:
        return "score_bias is a dense T×T term, which the GPU kernels are there to avoid"
    if inputs.bias.table is not None:
        return "this shape is a dense table, and the GPU kernels compute the bias from O(T) vectors"
    if inputs.bias_gain is not None and inputs.bias.row is not None:
        return "bias_gain on a shape with a row term (U-SPA) is a power of a sum, which the GPU kernels do not form"
    if inputs.bias.sloped_rows:
        return "this shape has both a slope and a row term, and the GPU kernels compute one or the other"
    if q.dtype == torch.float64:
        return "the GPU kernels take float32, bfloat16 and float16, and q is float64"
    if q.shape[3] not in _HEAD_WIDTHS:
        return f"head_width is {q.shape[3]}, and the GPU kernels take {', '.join(map(str, _HEAD_WIDTHS))}"
    if not gpu.INSTALLED:
        return "the package triton is not installed; it comes with torch's CUDA builds"
    if not (q.is_cuda or _interpreted()):
        return f"q is on {q.device.type}; on a CPU the GPU kernels run only under TRITON_INTERPRET=1, to be tested"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        return "Triton's interpreter does not multiply in bfloat16, and gives wrong numbers"
    return None


def prepare_triton(inputs: AttentionInputs) -> Layout | None:
    """Find what each block of a layout sees now, for all blocks of a network to share."""
    _layout_for_kernels(inputs)
    return inputs.layout


def _layout_for_kernels(inputs: AttentionInputs) -> list[Tensor]:
    """The fields of a KernelLayout, none where locations are in order."""
    if inputs.layout is None or inputs.in_order:
        return []
    return list(kernel_layout(inputs.layout, inputs.q.shape[0], inputs.bias.causal))


def _interpreted() -> bool:
    from skipless.ops.gpu.attention import forward

    return type(forward).__name__ == "InterpretedFunction"


@dataclass(frozen=True)
class Implementation:
    """attend computes checked inputs; why_not says in words why it cannot, or None.

    prepare does what all blocks of a network share, for one block's inputs, and returns the layout for all.
    """

    attend: Callable[[AttentionInputs], Tensor]
    why_not: Callable[[AttentionInputs], str | None] = lambda inputs: None
    prepare: Callable[[AttentionInputs], Layout | None] = lambda inputs: inputs.layout


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(reference.attend),
    "sdpa": Implementation(reference.attend_by_sdpa),
    "flex": Implementation(flex.attend, flex.why_not, flex.prepare),
    "triton": Implementation(attend_by_triton, why_not_triton, prepare_triton),
}

_HEAD_WIDTHS = (16, 32, 64, 128, 256)  # of the GPU kernels
_DECODING_ROWS = 64  # queries times query heads that share a key head: a tile of the GPU kernel for decoding
# "auto" on a CPU: up to this many keys a dense bias (64 MB in float32) is quicker than compiling.
_DENSE_KEYS = 4096
# "auto": up to this many queries is decoding, where flex would compile anew for every length.
_DECODING_QUERIES = 16

_announced: set[tuple[str, str]] = set()


def prepare(inputs: AttentionInputs, impl: str) -> Layout | None:
    """Do once what every block of a network would do for these inputs, outside what is compiled; the layout to use."""
    name = choose(inputs)[0] if impl == "auto" else impl
    return IMPLEMENTATIONS[name].prepare(inputs) if name in IMPLEMENTATIONS else inputs.layout


def choose(inputs: AttentionInputs) -> tuple[str, str]:
    """What impl="auto" runs, and why."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    if is_transformed():
        return "reference", "of the definition torch.func has every derivative, and fused kernels have one"
    if reference.needs_no_bias(inputs):
        return "sdpa", "plain attention needs no bias, so torch's own kernels run it as they are"
    if inputs.q.is_cuda:
        if (why := why_not_triton(inputs)) is None:
            return "triton", "on a GPU the fused kernels are the fastest, and store at most 512 MiB of scores"
        if (why_flex := flex.why_not(inputs)) is not None:
            return "sdpa", f"flex cannot: {why_flex}"
        if queries > _DECODING_QUERIES:
            return "flex", f"triton cannot: {why}"
    elif torch.compiler.is_compiling():  # the choice must not depend on lengths, which an exported program leaves open
        return "sdpa", "what is traced on a CPU attends by a dense bias, at any length"
    if inputs.q.is_cuda or queries <= _DECODING_QUERIES < keys:
        return "sdpa", f"at most {_DECODING_QUERIES} queries (decoding): a dense bias is small"
    if keys <= _DENSE_KEYS:
        return "sdpa", f"on a CPU a dense bias of at most {_DENSE_KEYS} keys is quicker than compiling"
    if (why := flex.why_not(inputs)) is not None:
        return "sdpa", f"flex cannot: {why}"
    return "flex", f"no T×T tensor for more than {_DENSE_KEYS} keys"


def _implementation(impl: str, inputs: AttentionInputs) -> Implementation:
    """The one that was asked for, if it can run this; or what "auto" chooses."""
    if impl == "auto":
        name, reason = choose(inputs)
        if not torch.compiler.is_compiling() and (name, reason) not in _announced:
            _announced.add((name, reason))
            logger.info("impl='auto' runs %r: %s", name, reason)
        return IMPLEMENTATIONS[name]
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; use 'auto' or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    if why := IMPLEMENTATIONS[impl].why_not(inputs):
        raise RuntimeError(f"impl={impl!r} cannot run this: {why}; use impl={choose(inputs)[0]!r}")
    return IMPLEMENTATIONS[impl]

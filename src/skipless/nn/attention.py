"""Multi-head attention that starts from a given AttentionShape. He et al. 2023, Sec. 3.3 and Algorithm 1."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from skipless.nn import init
from skipless.nn.bare import is_bare
from skipless.nn.linear import applied
from skipless.nn.position import RelativePosition, Rotation
from skipless.ops import attention
from skipless.ops.attention import shaped_attention
from skipless.ops.layout import Layout
from skipless.ops.parts import ShapeParts
from skipless.ops.request import Request
from skipless.theory.shapes import AttentionShape, IdentityShape, PlainShape
from skipless.theory.tables import DenseShape, RescaledShape

QueryKeyInit = Literal["zero-query", "zero-key", "small", "normal"]
ValueOutput = Literal["trained", "identity"]

_SHORTEST_STORED = 512


class LayerCache(Protocol):
    """Keys and values of one block, kept between decoding steps."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new ones and return all, (batch, kv_heads, T_k, head_width)."""
        ...


@dataclass(frozen=True, eq=False)
class Placement:
    """Where this forward's tokens stand: what attention of every block shares."""

    layout: Layout | None = None
    rotation: Rotation | None = None

    def to(self, device: torch.device | str | int, **_) -> "Placement":
        """On another device: a model spread over several calls this before each block."""
        return Placement(
            self.layout.to(device) if self.layout is not None else None,
            self.rotation.to(device) if self.rotation is not None else None,
        )


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is built, apart from its sizes."""

    position: Literal["rope", "relative", "none"] = "rope"
    bias_gain: bool = False
    value_gain_per_head: bool = False
    value_output: ValueOutput = "trained"
    impl: str = "auto"


class ShapedAttention(nn.Module):
    """D·softmax(QKᵀ/√d_k + B)·V per head, then W_O; exactly A·V·W_O while QKᵀ = 0.

    An IdentityShape makes it Value-SkipInit: (αI + βA)V with trainable α = 1, β = 0 and plain attention (Sec. 3.1).
    With value_output="identity" W_V and W_O are absent: values are the input split by head, the output is the heads
    side by side. B and D are not trained; bias_gain adds one trainable factor on B per head, starting at 1.
    They are derived from `shape`, never saved, and stay in float32 when the module is cast.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        shape: AttentionShape,
        kv_heads: int | None = None,
        options: AttentionOptions | None = None,
    ):
        super().__init__()
        kv_heads = kv_heads or heads
        if width % heads or heads % kv_heads:
            raise ValueError(
                f"width={width}, heads={heads}, kv_heads={kv_heads}; heads must divide width, and kv_heads heads"
            )
        self.options = options or AttentionOptions()
        if self.options.value_output == "identity" and kv_heads != heads:
            raise ValueError(
                f"kv_heads={kv_heads} with value_output='identity': values are then all {heads} heads of the input, "
                f"and the kernels of attention take as many key heads; use kv_heads={heads}"
            )
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.query = nn.Linear(width, heads * self.head_width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        trained = self.options.value_output == "trained"
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False) if trained else nn.Identity()
        self.output = nn.Linear(heads * self.head_width, width, bias=False) if trained else nn.Identity()
        self.shape = shape
        gains = heads if self.options.value_gain_per_head else 1
        self.value_gains = nn.Parameter(torch.ones(gains)) if isinstance(shape, IdentityShape) else None
        self.attention_gains = nn.Parameter(torch.zeros(gains)) if isinstance(shape, IdentityShape) else None
        self.bias_gain = nn.Parameter(torch.ones(heads)) if self.options.bias_gain else None
        relative = self.options.position == "relative"
        self.relative = RelativePosition(width, heads, self.head_width) if relative else None
        self.joined: nn.Parameter | None = None
        self._parts: ShapeParts | None = None

    def reset_parameters(self, query_key: QueryKeyInit = "zero-query", orthogonal: bool = True, scale: float = 0.1):
        """Initialise all weights; query_key says how the query-key product starts at (or near) zero. Sec. 3.3.

        "small" makes both matrices `scale` times their usual initialisation; "normal" leaves them as they are.
        """
        fill = init.orthogonal_ if orthogonal else init.gaussian_
        gain = {"zero-query": (0.0, 1.0), "zero-key": (1.0, 0.0), "small": (scale, scale), "normal": (1.0, 1.0)}
        query_gain, key_gain = gain[query_key]
        for layer, factor in ((self.query, query_gain), (self.key, key_gain), (self.value, 1.0), (self.output, 1.0)):
            if isinstance(layer, nn.Linear):
                fill(layer.weight, factor) if factor else nn.init.zeros_(layer.weight)
        if self.value_gains is not None and self.attention_gains is not None:
            nn.init.ones_(self.value_gains)
            nn.init.zeros_(self.attention_gains)
        if self.bias_gain is not None:
            nn.init.ones_(self.bias_gain)
        if self.relative is not None:
            self.relative.reset_parameters(key_gain)

    def forward(self, x: Tensor, placement: Placement | None = None, cache: LayerCache | None = None) -> Tensor:
        """x (batch, T, width). With a cache the T tokens follow those it holds."""
        placement = placement or self._default_placement(x)
        together = self._joined(x)
        mixed = self._turned(x, together, placement) if together is not None and cache is None else None
        if mixed is None:
            mixed = self._mixed(x, together, placement, cache)
        return applied(mixed.transpose(1, 2).flatten(2).to(x.dtype), self.output)[0]

    def _mixed(self, x: Tensor, together: Tensor | None, placement: Placement, cache: LayerCache | None) -> Tensor:
        """What the heads attend to, (batch, heads, T, head_width)."""
        q, k, v = self._projected(x, together, placement)
        keys, values = cache.append(k, v) if cache is not None else (k, v)
        mixed = shaped_attention(
            q,
            keys,
            values,
            self._parts_for(x, keys, placement),
            impl=self.options.impl,
            layout=placement.layout,
            bias_gain=self.bias_gain,
            score_bias=self._relative_scores(q, keys, placement),
        )
        if self.value_gains is not None and self.attention_gains is not None:
            own = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
            mixed = self.value_gains[:, None, None] * own + self.attention_gains[:, None, None] * mixed
        return mixed

    def _turned(self, x: Tensor, together: Tensor, placement: Placement) -> Tensor | None:
        """The same by one operator that rotates, attends and gives the joined product's gradient; None where it cannot.

        It spares the backward pass the rotation's own gradient, and a concatenation.
        """
        rotation, gains = placement.rotation, (self.value_gains, self.bias_gain)
        if rotation is None or self.relative is not None or any(gain is not None for gain in gains):
            return None
        q, k, v = self._by_head(x, together)
        request = Request(q, k, v, self._parts_for(x, k, placement), placement.layout)
        return attention.turned_attention(request, together, rotation.cos, rotation.sin, self.options.impl)

    def request(self, x: Tensor, placement: Placement | None = None) -> Request:
        """What forward asks of shaped_attention for x, for those who look inside; no cache, and nothing is attended."""
        placement = placement or self._default_placement(x)
        q, k, v = self._projected(x, self._joined(x), placement)
        parts = self._parts_for(x, k, placement)
        return Request(q, k, v, parts, placement.layout, self.bias_gain, self._relative_scores(q, k, placement))

    def parts(self, length: int, device: torch.device, dtype: torch.dtype) -> ShapeParts:
        """The shape's tensors for `length` locations: kept, and rebuilt when the device, dtype or length outgrows them.

        Vectors are stored at one length for all blocks, the next power of two, so that compiled blocks share a graph.
        """
        kept = self._parts
        if kept is None or kept.device != device or kept.dtype != dtype or not _serves(kept, length):
            shape = PlainShape(self.shape.causal) if isinstance(self.shape, IdentityShape) else self.shape
            with torch.inference_mode(False):  # kept, and training may come after
                self._parts = kept = _build_parts(shape, length, device, dtype)
        return kept

    @torch.no_grad()
    def change_shape(self, shape: AttentionShape) -> None:
        """Attend by another shape of the same kind from now on, the weights being what they are.

        The tensors of the old one are overwritten where they lie: kernels and graphs that hold them see the change.
        """
        if type(shape) is not type(self.shape) or shape.causal != self.shape.causal:
            raise ValueError(
                f"the shape is a {_kind(self.shape)} and {_kind(shape)} would take its place; keep the kind"
            )
        self.shape, kept = shape, self._parts
        if kept is None:
            return
        new = _build_parts(shape, kept.reach or _SHORTEST_STORED, kept.device, kept.dtype).tensors()
        old = kept.tensors()
        if {n: t.shape for n, t in new.items()} != {n: t.shape for n, t in old.items()}:
            self._parts = None
            return
        for name, tensor in new.items():
            old[name].copy_(tensor)

    def _joined(self, x: Tensor) -> Tensor | None:
        """x times several matrices as one product: in compiled training, where joining the weights costs nothing.

        Modules in their place, or hooks on them, are called as they are.
        """
        layers = self.joined_layers()
        plain = bool(layers) and all(is_bare(layer) for layer in layers)
        if not (plain and torch.compiler.is_compiling() and torch.is_grad_enabled()):
            return None
        joined = torch.cat([layer.weight for layer in layers]) if self.joined is None else self.joined
        return nn.functional.linear(x, joined)

    def joined_layers(self) -> tuple[nn.Linear, ...]:
        """Those whose products of one input may be one; where their matrices are kept side by side, in `joined`.

        Queries, keys and values; or queries and keys, where values have no matrix, or one that alone is frozen or alone
        is trained: one product of matrices of both kinds would compute gradients that nobody wants.
        """
        joined: list[nn.Linear] = []
        for layer in (self.query, self.key, self.value):
            if type(layer) is not nn.Linear or layer.weight.requires_grad != self.query.weight.requires_grad:
                break
            joined.append(layer)
        return tuple(joined) if len(joined) > 1 else ()

    def _by_head(self, x: Tensor, together: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values by head, as they lie in the joined product where there is one."""
        layers = (self.query, self.key, self.value)
        if together is None:
            q, k, v = applied(x, *layers)
        else:
            widths = [layer.out_features for layer in self.joined_layers()]
            q, k, *rest = together.split(widths, dim=-1)
            v = rest[0] if rest else self.value(x)
        # autocast has cast queries and keys, but not values that are the input itself
        return self._split(q), self._split(k), self._split(v.to(k.dtype))

    def _projected(self, x: Tensor, together: Tensor | None, placement: Placement) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head; the first two are rotated."""
        q, k, v = self._by_head(x, together)
        if placement.rotation is not None:
            q, k = placement.rotation.rotate(q), placement.rotation.rotate(k)
        return q, k, v

    def prepare(self, x: Tensor, layout: Layout | None) -> Layout | None:
        """What all blocks share of attention to x (batch, T, width), done once; returns the layout to hand them."""
        if self.relative is not None:
            return layout
        length = x.shape[1] if layout is None else layout.extent or x.shape[1]
        parts = self.parts(length, x.device, torch.promote_types(x.dtype, torch.float32))
        one = x.new_empty(1, 1, 1, 1)
        q, k = (one.expand(x.shape[0], heads, x.shape[1], self.head_width) for heads in (self.heads, self.kv_heads))
        return attention.prepare(Request(q, k, k, parts, layout, self.bias_gain), self.options.impl)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def _default_placement(self, x: Tensor) -> Placement:
        if self.options.position != "rope":
            return Placement()
        locations = torch.arange(x.shape[1], device=x.device)[None]
        return Placement(rotation=Rotation.at(locations, self.head_width))

    def _parts_for(self, x: Tensor, keys: Tensor, placement: Placement) -> ShapeParts:
        extent = keys.shape[2] if placement.layout is None else placement.layout.extent or keys.shape[2]
        return self.parts(extent, x.device, torch.promote_types(x.dtype, torch.float32))

    def _relative_scores(self, q: Tensor, keys: Tensor, placement: Placement) -> Tensor | None:
        if self.relative is None:
            return None
        layout = placement.layout or Layout.continuing(keys.shape[2] - q.shape[2], q.shape[2], q.device)
        return self.relative(q, keys, layout.query_locations, layout.key_locations)


def _kind(shape: AttentionShape) -> str:
    return f"{'causal' if shape.causal else 'non-causal'} {type(shape).__name__}"


def _serves(parts: ShapeParts, length: int) -> bool:
    if parts.reach is None:
        return True
    return length == parts.reach if parts.exact_reach else length <= parts.reach


def _build_parts(shape: AttentionShape, length: int, device: torch.device, dtype: torch.dtype) -> ShapeParts:
    """Parts for at least `length` locations, every vector written out to one stored length."""
    if not shape.causal:
        return ShapeParts.of(shape, length, device, dtype)
    if isinstance(shape, DenseShape | RescaledShape):
        # all that is calibrated, at once: decoding would otherwise rebuild the table for every token
        calibrated = len(shape.matrix if isinstance(shape, DenseShape) else shape.scales)
        return ShapeParts.of(shape, max(length, calibrated), device, dtype)
    stored = max(_SHORTEST_STORED, 2 ** (length - 1).bit_length())
    parts = ShapeParts.of(shape, stored, device, dtype)
    vectors = {name: t for name, t in parts.tensors().items() if name != "slope" and 1 < len(t) < stored}
    return parts.with_tensors(**{n: torch.cat([t, t[-1:].expand(stored - len(t))]) for n, t in vectors.items()})

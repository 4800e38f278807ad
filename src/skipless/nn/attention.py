"""Multi-head attention that starts from a given AttentionShape. He et al. 2023, Sec. 3.3 and Algorithm 1."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from skipless.nn import init
from skipless.nn.position import Positions, RelativePosition
from skipless.ops import attention
from skipless.ops.attention import Rotation, shaped_attention
from skipless.ops.bias import AttentionInputs, BiasVectors
from skipless.ops.layout import Layout
from skipless.ops.linear import joint_layers, project, project_jointly
from skipless.schema import check, check_own
from skipless.theory.feasibility import nearest_divisor
from skipless.theory.propagation import QueryKeyInit, ValueOutput
from skipless.theory.shapes import AttentionShape, IdentityShape, PlainShape, ShapeByHead

_SHORTEST_STORED = 4096  # 48 KB a block, built in a millisecond


class LayerCache(Protocol):
    """Keys and values of one block, held between decoding steps."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new ones and return all, (batch, their heads, T_k, head_width)."""
        ...


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is built, apart from its sizes."""

    position: Literal["rope", "relative", "none"] = "rope"
    bias_gain: bool = False
    value_gain_per_head: bool = False
    value_output: ValueOutput = "trained"
    readers: int = 0
    impl: str = "auto"

    def __post_init__(self):
        check_own(self, "options.")
        if self.readers < 0:
            raise ValueError(f"options.readers is {self.readers}; it must be at least 0, which means none")


class ShapedAttention(nn.Module):
    """D·softmax(QKᵀ/√d_k + B)·V per head, then W_O; exactly A·V·W_O while QKᵀ = 0.

    An IdentityShape makes it Value-SkipInit: (αI + βA)V with trainable α = 1, β = 0 and plain attention (Sec. 3.1).
    With value_output="identity" W_V and W_O are absent: values are the input split by head, the output is the heads
    side by side, and kv_heads counts keys alone. B and D are not trained; bias_gain adds one trainable factor on B per
    head, starting at 1. They are derived from `shape`, never saved, and stay in float32 when the module is cast.

    readers are heads beyond those: they have W_V and W_O of their own and add W_O's product to what the others carry.
    W_O starts at 0, so that the shape is the whole of attention at the start, and their gain on B at 0: a reader looks
    at all locations alike. A head that looks elsewhere no longer gives up its part of the stream.
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
        width, heads, kv_heads = _checked_sizes(width, heads, heads if kv_heads is None else kv_heads)
        _check_shape(shape)
        self.options = check(options or AttentionOptions(), AttentionOptions, "options")
        readers, trained = self.options.readers, self.options.value_output == "trained"
        if readers and (trained or not self.options.bias_gain or kv_heads != heads):
            raise ValueError(
                f"readers={readers} stand beside heads that carry their input and share no keys: use "
                f"value_output='identity', bias_gain=True and kv_heads={heads}"
            )
        if isinstance(shape, ShapeByHead) and (shape.heads != heads or readers):
            raise ValueError(
                f"a shape by head for {shape.heads} heads with heads={heads} and readers={readers}: give a shape for "
                "each head, and no readers, which have none of their own"
            )
        self.width = width
        self.heads, self.kv_heads, self.head_width = heads + readers, kv_heads + readers, width // heads
        self.query = nn.Linear(width, self.heads * self.head_width, bias=False)
        self.key = nn.Linear(width, self.kv_heads * self.head_width, bias=False)
        values, outputs = (kv_heads, heads) if trained else (readers, readers)
        self.value = nn.Linear(width, values * self.head_width, bias=False) if values else nn.Identity()
        self.output = nn.Linear(outputs * self.head_width, width, bias=False) if outputs else nn.Identity()
        self.shape = shape
        gains = heads if self.options.value_gain_per_head else 1
        self.value_gains = nn.Parameter(torch.ones(gains)) if isinstance(shape, IdentityShape) else None
        self.attention_gains = nn.Parameter(torch.zeros(gains)) if isinstance(shape, IdentityShape) else None
        self.bias_gain = nn.Parameter(torch.ones(self.heads)) if self.options.bias_gain else None
        relative = self.options.position == "relative"
        self.relative = RelativePosition(width, heads, self.head_width) if relative else None
        self.qkv_weight: nn.Parameter | None = None
        self.sharded = False  # True where the matrices are whole only while they are used, as under FSDP2
        self._bias: BiasVectors | None = None
        self._store_bias()
        self.register_load_state_dict_post_hook(_store_bias_of)  # parameters may come from the meta device there

    def reset_parameters(self, query_key: QueryKeyInit = "zero-query", orthogonal: bool = True, scale: float = 0.1):
        """Initialise all weights; query_key says how the query-key product starts at (or near) zero. Sec. 3.3.

        "small" makes both matrices `scale` times their usual initialisation; "normal" leaves them as they are.
        """
        check(query_key, QueryKeyInit, "query_key")
        fill = init.orthogonal_ if orthogonal else init.gaussian_
        gain = {"zero-query": (0.0, 1.0), "zero-key": (1.0, 0.0), "small": (scale, scale), "normal": (1.0, 1.0)}
        query_gain, key_gain = gain[query_key]
        output_gain = 0.0 if self.options.readers else 1.0
        factors = (query_gain, key_gain, 1.0, output_gain)
        for layer, factor in zip((self.query, self.key, self.value, self.output), factors, strict=True):
            if isinstance(layer, nn.Linear):
                fill(layer.weight, factor) if factor else nn.init.zeros_(layer.weight)
        if self.value_gains is not None and self.attention_gains is not None:
            nn.init.ones_(self.value_gains)
            nn.init.zeros_(self.attention_gains)
        if self.bias_gain is not None:
            nn.init.ones_(self.bias_gain)
            nn.init.zeros_(self.bias_gain[self.heads - self.options.readers :])
        if self.relative is not None:
            self.relative.reset_parameters(key_gain)

    def forward(
        self, x: Tensor, positions: Positions | Layout | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """x (batch, T, width). With a cache the T tokens follow those it holds.

        positions without a rotation, a Layout, or None: rotary positions follow from the layout or the order.
        qkv is the product that q, k and v are slices of, or None: with it and a rotation a fused GPU kernel may read
        the product itself and rotate on the way.
        """
        positions = self._placed(x, positions, cache)
        q, k, v, qkv = self._project(x)
        keys, values, rotation = k, v, positions.rotation
        if cache is not None:  # which holds rotated keys
            (q, k), rotation = _rotated(q, k, rotation), None
            keys, values = cache.append(k, v)
        keys = _for_each(values, keys)
        mixed = shaped_attention(
            q, keys, values, self._bias_for(x, keys, positions), impl=self.options.impl, layout=positions.layout,
            bias_gain=self.bias_gain, score_bias=self._relative_scores(q, keys, positions), rotation=rotation, qkv=qkv,
            decoding=cache is not None,
        )  # fmt: skip
        return self.finish(mixed, v, x.dtype)

    def finish(self, mixed: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        """W_O on the heads side by side; in Value-SkipInit on αV + β·mixed, with v the values of x alone.

        With readers W_O multiplies their heads alone, and the product is added to the other heads.
        """
        if self.value_gains is not None and self.attention_gains is not None:
            own = v.repeat_interleave(self.heads // v.shape[1], dim=1)
            mixed = self.value_gains[:, None, None] * own + self.attention_gains[:, None, None] * mixed
        mixed = mixed.transpose(1, 2).flatten(2).to(dtype)
        if not self.options.readers:
            return project(mixed, self.output)[0]
        carried, read = mixed.split([self.query.in_features, self.output.in_features], dim=-1)
        return carried + project(read, self.output)[0]

    def inputs(
        self, x: Tensor, positions: Positions | None = None, held: tuple[Tensor, Tensor] | None = None
    ) -> AttentionInputs:
        """What forward hands to shaped_attention for x, with q and k rotated. For inspection: attention does not run.

        held: the keys and values of a cache that has already stored those of x.
        """
        positions = self._placed(x, positions)
        q, k, v, _ = self._project(x)
        q, k = _rotated(q, k, positions.rotation)
        k, v = held or (k, v)
        k = _for_each(v, k)
        scores = self._relative_scores(q, k, positions)
        return AttentionInputs(q, k, v, self._bias_for(x, k, positions), positions.layout, self.bias_gain, scores)

    def bias(self, length: int, device: torch.device, dtype: torch.dtype) -> BiasVectors:
        """The shape's vectors for `length` locations. They are stored, and built anew for another device, another
        dtype or a longer input.

        All blocks store vectors of one length, the next power of two, so that compiled blocks share a graph. They are
        built outside of a graph: with torch.compile(fullgraph=True) run once as it is what is longer than 4096.
        """
        stored = self._bias
        if stored is None or stored.device != device or stored.dtype != dtype or not _reaches(stored, length):
            shape = PlainShape(self.shape.causal) if isinstance(self.shape, IdentityShape) else self.shape
            build = _build_bias
            if torch.compiler.is_compiling():
                build = _build_untraced
                torch._dynamo.graph_break(
                    msg=f"this ShapedAttention has not yet met {length} locations: call it once on as many outside of "
                    "torch.compile, and a graph will find its shape"
                )
            with torch.inference_mode(False):  # training may come after, with the same vectors
                self._bias = stored = build(shape, length, device, dtype)
        return stored

    def _apply(self, fn, recurse: bool = True):
        """Move the shape's vectors with the parameters."""
        super()._apply(fn, recurse)
        self._store_bias()
        return self

    def _store_bias(self) -> None:
        """Build the shape's vectors where the parameters are, so that torch.compile and torch.export find them.

        Tables, and vectors of one length alone, are built when they are used.
        """
        parameter, stored = next(self.parameters(), None), self._bias
        if parameter is None or parameter.is_meta or not parameter.is_floating_point():
            return
        if stored is not None or (self.shape.causal and not self.shape.tabled):
            reach = 1 if stored is None else stored.reach or 1
            self.bias(reach, parameter.device, torch.promote_types(parameter.dtype, torch.float32))

    def prepare(self, x: Tensor, layout: Layout | None) -> Layout | None:
        """Do once what all blocks share of attention to x (batch, T, width). Returns the layout to hand to them."""
        if self.relative is not None:
            return layout
        length = x.shape[1] if layout is None else layout.extent or x.shape[1]
        bias = self.bias(length, x.device, torch.promote_types(x.dtype, torch.float32))
        one = x.new_empty(1, 1, 1, 1)
        shared = self.kv_heads if self.options.value_output == "trained" else self.heads
        q, k = (one.expand(x.shape[0], heads, x.shape[1], self.head_width) for heads in (self.heads, shared))
        return attention.prepare(AttentionInputs(q, k, k, bias, layout, self.bias_gain), self.options.impl)

    def qkv_layers(self) -> tuple[nn.Linear, ...]:
        """The layers whose products of x may be one: queries, keys and, where they have such a matrix, values."""
        return joint_layers(self.query, self.key, *(() if self.options.readers else (self.value,)))

    def set_qkv_weight(self, weight: nn.Parameter | None) -> None:
        """Multiply by `weight` in place of the matrices of qkv_layers(): it holds them one below the other.

        The module does not own it, and lists no such parameter. None: the layers' own matrices.
        """
        object.__setattr__(self, "qkv_weight", weight)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values by head; and the product that they are slices of, if nothing else reads it."""
        layers = self.qkv_layers()
        qkv = project_jointly(x, layers, self.qkv_weight, sharded=self.sharded)
        if qkv is None:
            q, k, v = project(x, self.query, self.key, self.value)
        else:
            q, k, *rest = qkv.split([layer.out_features for layer in layers], dim=-1)
            v = rest[0] if rest else project(x, self.value)[0]
        # autocast has cast queries and keys, but not values that are the input itself
        v = torch.cat([x.to(k.dtype), v], dim=-1) if self.options.readers else v
        q, k, v = (t.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for t in (q, k, v.to(k.dtype)))
        return q, k, v, qkv if self.value_gains is None and k.shape[1] == v.shape[1] else None

    def _placed(self, x: Tensor, positions: Positions | Layout | None, cache: LayerCache | None = None) -> Positions:
        """`positions`, with the rotation that they leave out; the tokens of x are in order where nothing says more."""
        if x.dim() != 3 or x.shape[2] != self.width:
            raise ValueError(f"x is shaped {tuple(x.shape)}; it must be (batch, T, {self.width})")
        if isinstance(positions, Layout):
            positions = Positions(positions)
        if not isinstance(positions, Positions | None):
            raise ValueError(
                f"positions are a {type(positions).__name__}; they must be a Layout, Positions or None: queries, keys "
                "and values are all of x, and a mask of padding is Layout.left_padded(mask)"
            )
        positions = positions or Positions()
        if self.options.position != "rope" or positions.rotation is not None:
            return positions
        return Positions(positions.layout, Rotation.at(self._locations(x, positions.layout, cache), self.head_width))

    def _locations(self, x: Tensor, layout: Layout | None, cache: LayerCache | None) -> Tensor:
        if layout is not None:
            return layout.query_locations
        past = 0 if cache is None else getattr(cache, "length", None)
        if past is None:
            raise ValueError(
                f"the cache is a {type(cache).__name__}, which has no `length` that says how many locations it holds: "
                "give it one, or give positions"
            )
        return torch.arange(past, past + x.shape[1], device=x.device)[None]

    def _bias_for(self, x: Tensor, keys: Tensor, positions: Positions) -> BiasVectors:
        extent = keys.shape[2] if positions.layout is None else positions.layout.extent or keys.shape[2]
        return self.bias(extent, x.device, torch.promote_types(x.dtype, torch.float32))

    def _relative_scores(self, q: Tensor, keys: Tensor, positions: Positions) -> Tensor | None:
        if self.relative is None:
            return None
        layout = positions.layout or Layout.continuing(keys.shape[2] - q.shape[2], q.shape[2], q.device)
        return self.relative(q, keys, layout)


def _checked_sizes(width: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
    given = {"width": width, "heads": heads, "kv_heads": kv_heads}
    width, heads, kv_heads = (check(size, int, name) for name, size in given.items())
    if min(width, heads, kv_heads) < 1 or width % heads or heads % kv_heads:
        fit = max(heads, 1)
        raise ValueError(
            f"width={width}, heads={heads}, kv_heads={kv_heads}; heads must divide width, and kv_heads heads: "
            f"width={max(round(width / fit), 1) * fit}, heads={fit}, kv_heads={nearest_divisor(fit, kv_heads)} do"
        )
    return width, heads, kv_heads


def _check_shape(shape: AttentionShape) -> None:
    if not isinstance(shape, AttentionShape):
        raise ValueError(
            f"shape is a {type(shape).__name__}; it must be the AttentionShape of one block: ExponentialSPA("
            "repeat_rate=0.008).shapes(depth=12)[3] is that of the fourth of twelve, and DenseShape(matrix) takes a "
            "matrix"
        )


def _rotated(q: Tensor, k: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    return (q, k) if rotation is None else (rotation.rotate(q), rotation.rotate(k))


def _for_each(values: Tensor, keys: Tensor) -> Tensor:
    """The keys, repeated for each head of values: grouped queries share keys, but not values that are the input."""
    groups = values.shape[1] // keys.shape[1]
    return keys if groups == 1 else keys.repeat_interleave(groups, dim=1)


def _store_bias_of(attention: ShapedAttention, _) -> None:
    attention._store_bias()


def _reaches(bias: BiasVectors, length: int) -> bool:
    if bias.reach is None:
        return True
    return length == bias.reach if bias.exact_reach else length <= bias.reach


def _build_bias(shape: AttentionShape, length: int, device: torch.device, dtype: torch.dtype) -> BiasVectors:
    """Vectors for at least `length` locations, all written out to one stored length."""
    if not shape.causal:
        return BiasVectors.of(shape, length, device, dtype)
    if shape.limit is not None:
        # all that is calibrated, at once: decoding would otherwise rebuild the table for every token
        return BiasVectors.of(shape, max(length, shape.limit), device, dtype)
    return BiasVectors.of(shape, max(_SHORTEST_STORED, 2 ** (length - 1).bit_length()), device, dtype)


# torch.compile would make kernels of the theory's NumPy, for minutes; its own decorator loads the compiler at once
_build_untraced = torch._disable_dynamo(_build_bias)

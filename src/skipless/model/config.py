"""ModelConfig: everything that defines a network, frozen, checked, and plain JSON; and the shapes of its blocks.

Every refusal names the value seen, the rule, and a value that works.
"""

import dataclasses
import json
import logging
import math
import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from skipless.files import parse_json
from skipless.schema import build, check_names, check_own, shortened
from skipless.theory.activations import ShapedActivation, base_name, odd_factor
from skipless.theory.feasibility import nearest_divisor
from skipless.theory.local_maps import variance_gain
from skipless.theory.propagation import (
    KernelLayer,
    MirroredMlp,
    Mlp,
    NormPlacement,
    QueryKeyInit,
    Skip,
    ValueOutput,
    sub_block,
)
from skipless.theory.schemes import SCHEMES, ExponentialSPA, Scheme, StandardAttention
from skipless.theory.shapes import (
    AttentionShape,
    DenseShape,
    ShapeByHead,
    SymmetricExponentialShape,
    TableShape,
)
from skipless.theory.shaping import default_activation, name_of, named_activation

logger = logging.getLogger("skipless")
Position = Literal["rope", "relative", "none"]
Head = Literal["lm", "token", "pooled"]


@dataclass(frozen=True)
class Images:
    """Square images as a network takes them: their size, and the patches that are its locations, in reading order.

    Pixels are numbers of 0 … 255. mean and std are those of each channel over the training images, and the network sees
    (pixel − mean)/std. Defaults: CIFAR-10 in patches of 4 × 4.
    """

    side: int = 32
    patch: int = 4
    channels: int = 3
    mean: tuple[float, ...] = (125.3, 122.9, 113.9)
    std: tuple[float, ...] = (62.5, 61.9, 66.5)

    def __post_init__(self):
        check_own(self, "images.")
        for name in ("side", "patch", "channels"):
            if not 1 <= getattr(self, name) <= 1 << 16:
                raise ValueError(f"images.{name} is {getattr(self, name)}; it must lie in 1 … {1 << 16:,}")
        if self.side % self.patch:
            fits = nearest_divisor(self.side, self.patch)
            raise ValueError(
                f"images.patch={self.patch} does not divide images.side={self.side}; the nearest is {fits}"
            )
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != self.channels or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"images.{name} is {values}; it must be a finite number for each of {self.channels} channels"
                )
        if min(self.std) <= 0.0:
            raise ValueError(f"images.std is {self.std}; every channel's must be above 0 (64 is usual)")
        if min(self.std) < 1e-6 or max(map(abs, (*self.mean, *self.std))) > 1e6:
            seen = f"images.mean is {self.mean} and images.std {self.std}"
            raise ValueError(f"{seen}; pixels are numbers of 0 … 255 (128 and 64 are usual)")

    @property
    def grid(self) -> int:
        """Patches in a row, and in a column."""
        return self.side // self.patch

    @property
    def length(self) -> int:
        """Patches of an image: locations of the network."""
        return self.grid**2

    @property
    def patch_numbers(self) -> int:
        return self.channels * self.patch**2


@dataclass(frozen=True)
class ModelConfig:
    """A transformer of the paper or a relative of it. Defaults: vanilla E-SPA, 36 blocks of width 1024.

    activation may be given by name ("dks-gelu", "tat-leaky_relu", "gelu", …), or as a function that
    `register_activation` has named; the solved constants are stored, so that loading needs no solver. None means
    dks-gelu, in networks too shallow for ξ = 5 with the largest ξ that they allow; plain gelu for mirrored MLPs.
    hidden=0 means attention-only, with no activation to solve. length is the training length: calibrations and presets
    use it, and only calibrations "exact" and "mlp-aware" forbid longer sequences.
    query_key None means zero-query for SPA, normal otherwise. mlp_init None means as `init`; "mirrored" pairs hidden
    units of opposite sign, so that every MLP starts as an exact rotation of its input (docs/derivations.md).
    value_output="identity" leaves W_V and W_O out: attention mixes the input itself, split by head.
    kv_heads below heads then shares keys alone: values stay all heads of the input. readers adds so many heads with W_V
    and W_O of their own, whose W_O starts at 0, to those that carry the input (docs/derivations.md).
    tied_head=False gives a language model an unembedding of its own in place of the embedding's rows.
    images: patches of them are the locations, in place of tokens; length is their number, vocab_size is not used, and
    rotary positions turn by row and column.
    """

    vocab_size: int = 32_000
    width: int = 1024
    depth: int = 36
    heads: int = 8
    kv_heads: int | None = None
    hidden: int | None = None
    length: int = 512
    scheme: Scheme = field(default_factory=lambda: ExponentialSPA(repeat_rate=0.008))
    attention_skip: Skip = field(default_factory=Skip)
    mlp_skip: Skip = field(default_factory=Skip)
    norm: NormPlacement = "none"
    activation: ShapedActivation | str | None = None
    position: Position = "rope"
    rope_base: float = 10_000.0
    query_key: QueryKeyInit | None = None
    query_key_scale: float = 0.1
    bias_gain: bool = False
    init: Literal["orthogonal", "gaussian"] = "orthogonal"
    mlp_bias: bool = True
    causal: bool = True
    head: Head = "lm"
    classes: int = 0
    mlp_init: Literal["mirrored"] | None = None
    value_output: ValueOutput = "trained"
    tied_head: bool = True
    images: Images | None = None
    readers: int = 0

    def __post_init__(self):
        _check_kinds(self)
        for name in _LEAST:  # as Python's integers: numpy's are no JSON, and 36.0 blocks cannot be counted
            if (value := getattr(self, name)) is not None or name not in ("kv_heads", "hidden"):
                object.__setattr__(self, name, _whole(name, value))
        for name, (_, value) in self._derived().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_own(self)
        _check_sizes(self)
        _check_choices(self)
        _check_images(self)
        _check_readers(self)
        _check_by_head(self)
        _check_identity_values(self)
        given = self.activation
        if given is not None and not isinstance(given, ShapedActivation | str):
            given = base_name(given)  # a function of the user's own
        if not isinstance(given, ShapedActivation):
            object.__setattr__(self, "activation", _solved_activation(self, given))
        _check_mirrored(self, given)

    @property
    def preserves_signal(self) -> bool:
        """Whether attention is SPA, which needs a zero query-key product at the start."""
        return self.scheme.preserves_signal

    @property
    def skipless(self) -> bool:
        """No shortcut around attention or MLP."""
        return self.attention_skip.shortcut == 0.0 and (not self.hidden or self.mlp_skip.shortcut == 0.0)

    @property
    def vanilla(self) -> bool:
        """Skipless and without norms. Sec. 2."""
        return self.skipless and self.norm == "none"

    @property
    def scales_embedding(self) -> bool:
        """Whether looked-up rows are multiplied by √d, so that Σ_0 has a unit diagonal (App. H).

        All but the standard networks that normalise a growing stream, such as Pre-LN.
        Departs: App. H says it of the proposed vanilla methods alone. Here also of norm-free baselines, whose norms
        would otherwise start at 1/d, and of SPA with skips, which assumes a unit diagonal.
        """
        standard = isinstance(self.scheme, StandardAttention) and self.norm != "none" and not self.skipless
        return not standard

    @property
    def max_length(self) -> int | None:
        """How many locations attention was calibrated for, where that is a limit; None where any length is served."""
        return self.length if self.scheme.bounded else None

    @property
    def shaped_activation(self) -> ShapedActivation:
        assert isinstance(self.activation, ShapedActivation)  # names are resolved in __post_init__
        return self.activation

    @property
    def reader_width(self) -> int:
        """Features of all readers together: rows of their W_Q, W_K and W_V."""
        return self.readers * (self.width // self.heads)

    @property
    def matrix_parameters(self) -> int:
        """Entries of all weight matrices, the shared embedding included: what is quoted as a model's size."""
        kv = self.width // self.heads * (self.kv_heads or self.heads)
        values = self.width**2 + self.width * kv if self.value_output == "trained" else 0
        readers = 4 * self.width * self.reader_width
        block = self.width**2 + self.width * kv + values + readers + 2 * self.width * (self.hidden or 0)
        rows = self.vocab_size * (1 if self.tied_head else 2)
        if self.images is not None:
            rows = self.images.patch_numbers + self.images.length
        return rows * self.width + self.depth * block

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed. Unknown names are errors; what is derived from a changed field follows it.

        So does an activation shaped by its name: dks-gelu for 36 blocks becomes dks-gelu for 108, and the default of
        mlp_init="mirrored" with it.
        """
        check_names(ModelConfig, changes)
        if isinstance(images := changes.get("images"), Images):
            changes.setdefault("length", images.length)
        if "activation" not in changes and (name := _shaped_name(self, changes)):
            changes["activation"] = None if name == "dks-gelu" else name  # which None stands for
        for name, (source, default) in self._derived().items():
            if source in changes and name not in changes and getattr(self, name) == default:
                changes[name] = None
        return dataclasses.replace(self, **changes)

    def _derived(self) -> dict[str, tuple[str, Any]]:
        """Of each field that is None unless given: the field that it follows from, and its value then."""
        return {
            "hidden": ("width", 4 * self.width),
            "kv_heads": ("heads", self.heads),
            "query_key": ("scheme", "zero-query" if self.preserves_signal else "normal"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the scheme carries its kind."""
        data = dataclasses.asdict(self)
        data["scheme"] = self.scheme.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        check_names(ModelConfig, data)
        data = dict(data)
        if isinstance(data.get("scheme"), dict):
            data["scheme"] = Scheme.from_dict(data["scheme"])
        kinds = {"attention_skip": Skip, "mlp_skip": Skip, "activation": ShapedActivation, "images": Images}
        for name, kind in kinds.items():
            if isinstance(data.get(name), dict):
                data[name] = build(kind, data[name], kind.__name__, f"{name}.")
        return cls(**data)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        return cls.from_dict(parse_json(text))


def attention_shapes(config: ModelConfig) -> list[AttentionShape]:
    """One AttentionShape per block: the one place where depth meets the scheme."""
    scheme, mlp = config.scheme, mlp_layer(config)
    through = mlp.forward if mlp is not None else None
    context = {"length": config.length, "mlp": through, "normalised": config.norm == "pre"}
    shapes = scheme.shapes(config.depth, config.attention_skip.shortcut, config.causal, **context)
    name = type(scheme).__name__
    if not isinstance(shapes, list | tuple) or len(shapes) != config.depth:
        seen = f"{len(shapes)} shapes" if isinstance(shapes, list | tuple) else f"a {type(shapes).__name__}"
        raise ValueError(f"{name}.shapes gave {seen} for {config.depth} blocks; it must give one for each, in a list")
    for block, shape in enumerate(shapes, start=1):
        if not isinstance(shape, AttentionShape):
            raise ValueError(
                f"{name}.shapes gave a {type(shape).__name__} for block {block}; it must be an AttentionShape: "
                f"DenseShape(matrix, causal={config.causal}) makes one of a T×T matrix"
            )
        _check_table(shape, config.length, f"{name}.shapes, block {block}")
        if shape.causal != config.causal:
            raise ValueError(
                f"{name}.shapes gave block {block} a shape with causal={shape.causal}, and the network has "
                f"causal={config.causal}; give the shape what `shapes` was given"
            )
        if scheme.by_head and not isinstance(shape, ShapeByHead):
            raise ValueError(
                f"{name} is by head and its shapes gave block {block} a {type(shape).__name__}; it must be a "
                f"ShapeByHead of {config.heads} shapes"
            )
        if isinstance(shape, ShapeByHead) and shape.heads != config.heads:
            raise ValueError(
                f"{name}.shapes gave block {block} {shape.heads} shapes by head, and heads={config.heads}; give one "
                "for each head"
            )
    return list(shapes)


def _check_table(shape: AttentionShape, length: int, name: str) -> None:
    """Refuse a TableShape of one's own whose matrices are none of attention, as DenseShape refuses them."""
    for one in shape.shapes if isinstance(shape, ShapeByHead) else (shape,):
        if not isinstance(one, TableShape) or isinstance(one, DenseShape | SymmetricExponentialShape):
            continue
        matrix = one.dense(length)
        if not isinstance(matrix, np.ndarray) or matrix.shape != (length, length):
            seen = f"a {type(matrix).__name__} shaped {np.shape(matrix)}"
            raise ValueError(f"{name}: dense({length}) gave {seen}; it must be a NumPy array ({length}, {length})")
        try:
            DenseShape(matrix, one.causal)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def mlp_layer(config: ModelConfig) -> KernelLayer | None:
    """The MLP sub-block's kernel map, or None in attention-only models."""
    if not config.hidden:
        return None
    mirrored = config.mlp_init == "mirrored"
    mlp = MirroredMlp() if mirrored else Mlp(config.shaped_activation, mlp_gain(config))
    return sub_block(mlp, config.mlp_skip, config.norm)


def mlp_gain(config: ModelConfig) -> float:
    """σ of the matrix behind the activation: 1 for DKS and TAT by construction, else what keeps q: 1 → 1. App. H.

    Not for mirrored MLPs, whose two matrices are made together.
    """
    return variance_gain(config.shaped_activation)


def _solved_activation(config: ModelConfig, given: str | None) -> ShapedActivation:
    """The activation of a name, or the default: of too few blocks for ξ = 5, with the largest ξ that they allow."""
    if not config.hidden:
        return ShapedActivation("identity")
    if given is not None:
        return named_activation(given, config.depth, config.mlp_skip)
    if config.mlp_init == "mirrored":
        return ShapedActivation("gelu")
    shaped, xi = default_activation(config.depth, config.mlp_skip)
    if xi != 5.0:
        logger.warning(
            "depth=%d is too shallow for dks-gelu with ξ = 5; ξ is %g, the largest it allows", config.depth, xi
        )
    return shaped


def _shaped_name(config: ModelConfig, changes: dict[str, Any]) -> str | None:
    """The name to solve again by when what an activation was shaped for changes; None for one of other constants."""
    if not config.hidden and changes.get("hidden"):
        raise ValueError(
            f"hidden becomes {changes['hidden']}, but a network without MLPs has no activation: name one too, such as "
            "activation='dks-gelu'"
        )
    own = config.shaped_activation
    if not config.hidden or own == ShapedActivation(own.base) or not changes.keys() & {"depth", "mlp_skip", "mlp_init"}:
        return None
    return name_of(own, config.depth, config.mlp_skip)


_LEAST = dict.fromkeys(("vocab_size", "width", "depth", "heads", "kv_heads", "length"), 1)
_LEAST |= dict.fromkeys(("hidden", "classes", "readers"), 0)
_MOST = (1 << 31) - 1


def _check_kinds(config: ModelConfig) -> None:
    if not isinstance(config.scheme, Scheme):
        kinds = ", ".join(f"{kind.__name__}()" for kind in SCHEMES.values())
        raise ValueError(f"scheme is {config.scheme!r}; it must be one of {kinds}, or one derived from Scheme")
    if type(config.scheme) is not SCHEMES.get(config.scheme.kind):
        name = type(config.scheme).__name__
        raise ValueError(f"scheme is a {name}, which no file could name: put @register_scheme('…') above its class")
    if not (isinstance(config.activation, ShapedActivation | str | None) or callable(config.activation)):
        raise ValueError(
            f"activation is {config.activation!r}; it must be a name such as 'gelu', a ShapedActivation, or a function "
            "that skipless.register_activation has named"
        )
    for name in ("attention_skip", "mlp_skip"):
        if not isinstance(value := getattr(config, name), Skip):
            raise ValueError(f"{name} is {value!r}; it must be a Skip, such as Skip.normalised(0.98)")
    if not isinstance(config.images, Images | None):
        raise ValueError(f"images is {config.images!r}; it must be Images(…), or None for tokens")


def _whole(name: str, value: Any) -> int:
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or number < _LEAST[name]:
        meaning = ", which means no MLPs" if name == "hidden" else ""
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {_LEAST[name]}{meaning}")
    if number > _MOST:
        raise ValueError(f"{name} is {value!r}; it must be at most {_MOST:,}")
    return number


def _check_sizes(config: ModelConfig) -> None:
    """Refuse sizes that do not go together."""
    if config.width % config.heads:
        near = max(round(config.width / config.heads), 1) * config.heads
        raise ValueError(f"width={config.width} is not a multiple of heads={config.heads}; the nearest is {near}")
    if config.heads % (config.kv_heads or config.heads):
        near = nearest_divisor(config.heads, config.kv_heads or 1)
        raise ValueError(f"kv_heads={config.kv_heads} does not divide heads={config.heads}; the nearest is {near}")
    if config.position == "rope" and (wide := config.width // config.heads) % 2:
        raise ValueError(
            f"head width {wide} is odd; rotary positions need an even one: width={(wide + 1) * config.heads} or other "
            "heads, or position='none'"
        )
    scheme = config.scheme
    sizes = {"heads": "heads", "blocks": "depth", "locations": "length"}
    for name, size in sizes.items():
        needs, has = getattr(scheme, name), getattr(config, size)
        if needs not in (None, has):
            raise ValueError(
                f"{shortened(scheme)} is for {needs} {name}, and {size}={has}; use {size}={needs}, or a scheme for "
                f"{has} {name}"
            )


def _check_images(config: ModelConfig) -> None:
    """Refuse a network of images that is not one of their patches."""
    images = config.images
    if images is None:
        return
    if config.length != images.length:
        raise ValueError(
            f"length={config.length}, and images of {images.side} × {images.side} in patches of {images.patch} have "
            f"{images.length} of them; use length={images.length}"
        )
    if config.head == "lm":
        raise ValueError("head='lm' predicts tokens, and images have none; use head='pooled', and classes")
    if config.position == "rope" and (wide := config.width // config.heads) % 4:
        raise ValueError(
            f"head width {wide} is not a multiple of 4, and rotary positions of images turn one half by the row and "
            f"one by the column; the nearest is {max(round(wide / 4), 1) * 4}"
        )


def _check_readers(config: ModelConfig) -> None:
    """Refuse readers where there is nothing for them to be added to, or no gain that could start at 0."""
    if not config.readers:
        return
    rule = (
        "a reader is a head beyond those that carry the stream by the shape of SPA without W_V and W_O; it starts with "
        "a gain of 0 on the bias and shares no keys"
    )
    if not config.preserves_signal:
        raise ValueError(f"readers={config.readers} with {shortened(config.scheme)}: {rule}; use E-SPA")
    needs = {"value_output": "identity", "bias_gain": True, "kv_heads": config.heads}
    if config.position == "relative":
        needs["position"] = "rope"
    for name, value in needs.items():
        if (seen := getattr(config, name)) != value:
            raise ValueError(f"readers={config.readers} with {name}={seen!r}: {rule}; use {name}={value!r}")


def _check_by_head(config: ModelConfig) -> None:
    """Refuse what would mix the streams of heads that have a kernel each."""
    if not config.scheme.by_head:
        return
    rule = "every head has a kernel of its own, so its channels must not meet another's before training"
    needs: dict[str, Any] = {"value_output": "identity", "mlp_init": "mirrored", "norm": "none", "readers": 0}
    needs |= {"attention_skip": Skip(), "mlp_skip": Skip()}
    if not config.hidden:
        del needs["mlp_init"]
    for name, value in needs.items():
        if (seen := getattr(config, name)) != value:
            raise ValueError(
                f"{shortened(config.scheme)} with {name}={seen!r}: {rule}; use {name}={value!r}, or one decay for all "
                "heads"
            )


def _check_identity_values(config: ModelConfig) -> None:
    """Refuse a skip beside SPA that mixes the input itself."""
    skip = config.attention_skip
    if config.preserves_signal and config.value_output == "identity" and skip.shortcut * skip.residual:
        raise ValueError(
            f"{type(config.scheme).__name__} with attention_skip=({skip.shortcut}, {skip.residual}) and "
            "value_output='identity': beside a skip SPA counts on W_V and W_O, which make what attention adds "
            "uncorrelated with what the skip carries; use value_output='trained', or attention_skip=Skip()"
        )


def _check_choices(config: ModelConfig) -> None:
    """Refuse numbers that cannot be, and fields that contradict each other."""
    if not 0 < config.rope_base < math.inf:
        raise ValueError(f"rope_base is {config.rope_base!r}; it must be finite and above 0 (10000 is usual)")
    if not math.isfinite(config.query_key_scale):
        raise ValueError(f"query_key_scale is {config.query_key_scale!r}; it must be a finite number (0.1 is usual)")
    skip = config.attention_skip
    if config.preserves_signal and abs(skip.shortcut**2 + skip.residual**2 - 1.0) > 1e-9:
        raise ValueError(
            f"{type(config.scheme).__name__} with attention_skip=({skip.shortcut}, {skip.residual}): SPA needs a "
            "normalised skip, α²+β²=1; use Skip.normalised(α), or Skip() for none"
        )
    if config.head != "lm" and config.classes < 1:
        raise ValueError(f"head={config.head!r} needs classes ≥ 1, the number of outputs; it is {config.classes}")
    if config.head == "lm" and config.classes:
        raise ValueError(
            f"classes={config.classes} with head='lm', which predicts tokens; use head='token' or 'pooled'"
        )
    if config.head != "lm" and not config.tied_head:
        raise ValueError(
            f"tied_head=False with head={config.head!r}, which has a matrix of its own in any case; use tied_head=True"
        )
    if config.head == "lm" and not config.causal:
        raise ValueError(
            "a non-causal model sees the token it would predict; use head='token' or 'pooled' for encoders"
        )


def _check_mirrored(config: ModelConfig, given: Any) -> None:
    """Refuse sizes and activations of which no mirrored MLP can be made; `given` is the activation as it was asked for.

    Each direction of the input takes a pair of hidden units, whose difference φ(u) − φ(−u) must be u times a number.
    """
    if config.mlp_init != "mirrored" or not config.hidden:
        return
    hidden, least = config.hidden, 2 * config.width
    if hidden % 2:
        raise ValueError(
            f"hidden={hidden} is odd, and mirrored units come in pairs; use hidden={max(hidden + 1, least)}"
        )
    if hidden < least:
        raise ValueError(
            f"hidden={hidden} makes {hidden // 2} mirrored pairs, fewer than the {config.width} directions of the "
            f"stream, some of which would be lost; use hidden={least} or more"
        )
    if not odd_factor(config.shaped_activation):
        name = given if isinstance(given, str) else config.shaped_activation
        raise ValueError(
            f"activation={name!r} with mlp_init='mirrored': φ(x) − φ(−x) must be a multiple of x, so that pairs of "
            "opposite sign start linear, and here it is not; use 'gelu', 'silu', 'relu', 'leaky_relu' or "
            "'tat-leaky_relu'"
        )

"""ModelConfig: everything that defines a network, frozen, checked, and plain JSON."""

import dataclasses
import difflib
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from skipless.nn.attention import QueryKeyInit
from skipless.theory import shaping
from skipless.theory.activations import ShapedActivation
from skipless.theory.propagation import NormPlacement, Skip
from skipless.theory.schemes import ExponentialSPA, Scheme, StandardAttention, UniformSPA, ValueSkipInit

Position = Literal["rope", "relative", "none"]
Head = Literal["lm", "token", "pooled"]

SCHEMES: dict[str, type] = {
    "standard": StandardAttention,
    "value-skipinit": ValueSkipInit,
    "u-spa": UniformSPA,
    "e-spa": ExponentialSPA,
}


@dataclass(frozen=True)
class ModelConfig:
    """A transformer of the paper or a relative of it. Defaults: vanilla E-SPA, 36 blocks of width 1024.

    activation may be given by name ("dks-gelu", "tat-leaky_relu", "gelu", …); the solved constants are what is kept,
    so that loading needs no solver. hidden=0 means attention-only, with no activation to solve. length is the training
    length: calibrations and presets use it, and only calibrations "exact" and "mlp-aware" forbid longer sequences.
    query_key None means zero-query for SPA, normal otherwise.
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
    activation: ShapedActivation | str = "dks-gelu"
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

    def __post_init__(self):
        _check_kinds(self)
        defaults = {
            "kv_heads": self.heads if self.kv_heads is None else self.kv_heads,
            "hidden": 4 * self.width if self.hidden is None else self.hidden,
            "query_key": self.query_key or ("zero-query" if self.preserves_signal else "normal"),
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        _check_sizes(self)
        _check_choices(self)
        if isinstance(self.activation, str):
            name = self.activation if self.hidden else "identity"
            object.__setattr__(self, "activation", named_activation(name, self.depth, self.mlp_skip))

    @property
    def preserves_signal(self) -> bool:
        """Whether attention is SPA, which needs a zero query-key product at the start."""
        return isinstance(self.scheme, ExponentialSPA | UniformSPA)

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
    def most_locations(self) -> int | None:
        """How many locations attention was calibrated for, where that is a limit; None where any length is served."""
        calibration = getattr(self.scheme, "calibration", "paper")
        tables = calibration == "mlp-aware" and isinstance(self.scheme, ExponentialSPA)
        return self.length if calibration == "exact" or tables else None

    @property
    def shaped_activation(self) -> ShapedActivation:
        """The activation's solved constants."""
        assert isinstance(self.activation, ShapedActivation)  # names are resolved in __post_init__
        return self.activation

    @property
    def matrix_parameters(self) -> int:
        """Entries of all weight matrices, the shared embedding included: what is quoted as a model's size."""
        kv = self.width // self.heads * (self.kv_heads or self.heads)
        block = 2 * self.width**2 + 2 * self.width * kv + 2 * self.width * (self.hidden or 0)
        return self.vocab_size * self.width + self.depth * block

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed. Unknown names are errors; what is derived from a changed field follows it.

        So does an activation shaped by its name: dks-gelu for 36 blocks becomes dks-gelu for 108.
        """
        _check_names(changes)
        if "activation" not in changes and (name := _shaped_name(self, changes)):
            changes["activation"] = name
        derived = {
            "hidden": ("width", 4 * self.width),
            "kv_heads": ("heads", self.heads),
            "query_key": ("scheme", "zero-query" if self.preserves_signal else "normal"),
        }
        for name, (source, default) in derived.items():
            if source in changes and name not in changes and getattr(self, name) == default:
                changes[name] = None
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the scheme carries its kind."""
        data = dataclasses.asdict(self)
        kind = next(name for name, cls in SCHEMES.items() if isinstance(self.scheme, cls))
        data["scheme"] = {"kind": kind, **data["scheme"]}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """The inverse of to_dict."""
        data = dict(data)
        _check_names(data)
        if isinstance(data.get("scheme"), dict):
            data["scheme"] = _scheme_from(data["scheme"])
        for name in ("attention_skip", "mlp_skip"):
            if isinstance(data.get(name), dict):
                data[name] = Skip(**data[name])
        if isinstance(data.get("activation"), dict):
            data["activation"] = ShapedActivation(**data["activation"])
        return cls(**data)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        return cls.from_dict(json.loads(text))


def _shaped_name(config: ModelConfig, changes: dict[str, Any]) -> str | None:
    """The name to solve again by when what an activation was shaped for changes; None for one of other constants."""
    if not config.hidden and changes.get("hidden"):
        raise ValueError(
            f"hidden becomes {changes['hidden']}, but a network without MLPs has no activation: name one too, such as "
            "activation='dks-gelu'"
        )
    own = config.shaped_activation
    if not config.hidden or own == ShapedActivation(own.base) or not changes.keys() & {"depth", "mlp_skip"}:
        return None
    for name in (f"dks-{own.base}", f"tat-{own.base}"):
        with suppress(ValueError):
            solved = dataclasses.astuple(named_activation(name, config.depth, config.mlp_skip))
            if all(
                a == b or math.isclose(a, b, rel_tol=1e-6)
                for a, b in zip(solved, dataclasses.astuple(own), strict=True)
            ):
                return name
    return None


def named_activation(name: str, depth: int, skip: Skip) -> ShapedActivation:
    """ "dks-gelu", "tat-leaky_relu" and so on: shaped for `depth` nonlinearities; a bare name is left as it is."""
    method, _, base = name.rpartition("-")
    if method == "":
        return ShapedActivation(base)
    if method not in ("dks", "tat"):
        raise ValueError(f"activation is {name!r}; the transformation before the dash must be 'dks' or 'tat'")
    weight = skip.shortcut if 0.0 < skip.shortcut < 1.0 else 0.0
    solve = shaping.dks if method == "dks" else shaping.tat
    try:
        return solve(base, depth, skip_weight=weight)
    except ValueError as error:
        raise ValueError(
            f"activation={name!r} over {depth} blocks: {error}. Other targets: activation=shaping.{method}({base!r}, …)"
        ) from error


def _scheme_from(data: dict[str, Any]) -> Scheme:
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in SCHEMES:
        raise ValueError(f"scheme kind is {kind!r}; it must be one of {', '.join(SCHEMES)}")
    return SCHEMES[kind](**fields)


def _check_names(data: dict[str, Any]) -> None:
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(sorted(known))}"
            raise ValueError(f"ModelConfig has no field {name!r}; {hint}")


def _check_kinds(config: ModelConfig) -> None:
    if not isinstance(config.scheme, tuple(SCHEMES.values())):
        kinds = ", ".join(f"{kind.__name__}()" for kind in SCHEMES.values())
        raise ValueError(f"scheme is {config.scheme!r}; it must be one of {kinds}")
    for name in ("attention_skip", "mlp_skip"):
        if not isinstance(value := getattr(config, name), Skip):
            raise ValueError(f"{name} is {value!r}; it must be a Skip, such as Skip.normalised(0.98)")
    if config.hidden is not None and (int(config.hidden) != config.hidden or config.hidden < 0):
        raise ValueError(f"hidden is {config.hidden!r}; it must be an integer of at least 0, which means no MLPs")


def _check_sizes(config: ModelConfig) -> None:
    for name in ("vocab_size", "width", "depth", "heads", "kv_heads", "length"):
        value = getattr(config, name)
        if int(value) != value or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    if config.width % config.heads:
        near = round(config.width / config.heads) * config.heads
        raise ValueError(f"width={config.width} is not a multiple of heads={config.heads}; the nearest is {near}")
    if config.heads % (config.kv_heads or config.heads):
        raise ValueError(f"kv_heads={config.kv_heads} does not divide heads={config.heads}")
    if config.position == "rope" and (config.width // config.heads) % 2:
        raise ValueError(f"head width {config.width // config.heads} is odd; rotary positions need an even one")
    alibi = getattr(config.scheme, "alibi_heads", 0)
    if alibi and alibi != config.heads:
        raise ValueError(f"alibi_heads={alibi} differs from heads={config.heads}; use alibi_heads={config.heads}")


def _check_choices(config: ModelConfig) -> None:
    choices = {
        "norm": ("none", "pre", "post"),
        "position": ("rope", "relative", "none"),
        "query_key": ("zero-query", "zero-key", "small", "normal"),
        "init": ("orthogonal", "gaussian"),
        "head": ("lm", "token", "pooled"),
    }
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    skip = config.attention_skip
    if config.preserves_signal and abs(skip.shortcut**2 + skip.residual**2 - 1.0) > 1e-9:
        raise ValueError(
            f"{type(config.scheme).__name__} with attention_skip=({skip.shortcut}, {skip.residual}): SPA needs a "
            "normalised skip, α²+β²=1; use Skip.normalised(α), or Skip() for none"
        )
    if config.head != "lm" and config.classes < 1:
        raise ValueError(f"head={config.head!r} needs classes ≥ 1, the number of outputs; it is {config.classes}")
    if config.head == "lm" and not config.causal:
        raise ValueError(
            "a non-causal model sees the token it would predict; use head='token' or 'pooled' for encoders"
        )

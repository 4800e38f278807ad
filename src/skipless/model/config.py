"""ModelConfig: everything that defines a network, frozen, checked, and plain JSON."""

import dataclasses
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from skipless.model import config_checks as checks
from skipless.nn.attention import QueryKeyInit, ValueOutput
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
    so that loading needs no solver. None means dks-gelu, or plain gelu for mirrored MLPs. hidden=0 means
    attention-only, with no activation to solve. length is the training length: calibrations and presets use it, and
    only calibrations "exact" and "mlp-aware" forbid longer sequences. query_key None means zero-query for SPA, normal
    otherwise. mlp_init None means as `init`; "mirrored" pairs hidden units of opposite sign, so that every MLP starts
    as an exact rotation of its input (docs/derivations.md). value_output="identity" leaves W_V and W_O out: attention
    mixes the input itself, split by head.
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

    def __post_init__(self):
        _check_kinds(self)
        for name, value in checks.whole_numbers(self).items():
            object.__setattr__(self, name, value)
        defaults = {
            "kv_heads": self.heads if self.kv_heads is None else self.kv_heads,
            "hidden": 4 * self.width if self.hidden is None else self.hidden,
            "query_key": self.query_key or ("zero-query" if self.preserves_signal else "normal"),
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        checks.check_sizes(self)
        checks.check_choices(self)
        given = self.activation
        if not isinstance(given, ShapedActivation):
            default = "gelu" if self.mlp_init == "mirrored" else "dks-gelu"
            name = "identity" if not self.hidden else default if given is None else given
            object.__setattr__(self, "activation", named_activation(name, self.depth, self.mlp_skip))
        checks.check_mirrored(self, given)

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
        values = self.width**2 + self.width * kv if self.value_output == "trained" else 0
        block = self.width**2 + self.width * kv + values + 2 * self.width * (self.hidden or 0)
        return self.vocab_size * self.width + self.depth * block

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed. Unknown names are errors; what is derived from a changed field follows it.

        So does an activation shaped by its name: dks-gelu for 36 blocks becomes dks-gelu for 108, and the default of
        mlp_init="mirrored" with it.
        """
        checks.check_names(ModelConfig, changes)
        if "activation" not in changes and (name := _shaped_name(self, changes)):
            mirrored = changes.get("mlp_init") == "mirrored" and name == "dks-gelu"
            changes["activation"] = None if mirrored else name
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
        checks.check_names(ModelConfig, data)
        data = dict(data)
        if isinstance(data.get("scheme"), dict):
            data["scheme"] = _scheme_from(data["scheme"])
        for name, kind in {"attention_skip": Skip, "mlp_skip": Skip, "activation": ShapedActivation}.items():
            if isinstance(data.get(name), dict):
                checks.check_names(kind, data[name])
                data[name] = kind(**data[name])
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
    if not config.hidden or own == ShapedActivation(own.base) or not changes.keys() & {"depth", "mlp_skip", "mlp_init"}:
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
    checks.check_names(SCHEMES[kind], fields)
    return SCHEMES[kind](**fields)


def _check_kinds(config: ModelConfig) -> None:
    if not isinstance(config.scheme, tuple(SCHEMES.values())):
        kinds = ", ".join(f"{kind.__name__}()" for kind in SCHEMES.values())
        raise ValueError(f"scheme is {config.scheme!r}; it must be one of {kinds}")
    if not isinstance(config.activation, ShapedActivation | str | None):
        raise ValueError(
            f"activation is {config.activation!r}; it must be a name such as 'gelu', or a ShapedActivation"
        )
    for name in ("attention_skip", "mlp_skip"):
        if not isinstance(value := getattr(config, name), Skip):
            raise ValueError(f"{name} is {value!r}; it must be a Skip, such as Skip.normalised(0.98)")

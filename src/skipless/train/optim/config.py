"""OptimizerConfig: the optimiser, its rates and clipping; frozen, checked, and plain JSON."""

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Name = Literal["adam", "adamw", "muon", "soap"]
Role = Literal["query", "key", "value", "output", "up", "down", "position"]

NAMES: tuple[str, ...] = get_args(Name)
ROLES: tuple[str, ...] = get_args(Role)
ORTHOGONAL_ROLES = ("value", "output", "up", "down")  # queries start at 0, and with keys make no signal of their own

# The paper tunes the rate for every network and prints none. These were the best of a coarse grid at 36 blocks of width
# 512: vanilla E-SPA with Adam and with Muon, Pre-LN with Adam. SOAP's is three times Adam's: at width 256 its best was
# five times Adam's for vanilla E-SPA, and ten times diverged.
USUAL_RATES = {"adam": 3e-5, "adamw": 5e-4, "muon": 1e-3, "soap": 1e-4}
MUON_VECTOR_RATE = 3e-5


@dataclass(frozen=True)
class OptimizerConfig:
    """App. H by default: Adam without weight decay, a rate of its own for the embedding, gradients clipped at 0.1.

    rate: the highest rate of all but the embedding, which the schedule multiplies. None: USUAL_RATES of the optimiser.
    embedding_rate: 2e-4 for WikiText-103, 5e-4 for C4 (App. H), whatever the network.
    vector_rate: biases, norm and skip gains. None: `rate`; with Muon, whose rate is of another scale, 3e-5.
    head_rate: an untied head's matrix. None: `rate`; with Muon, which leaves it to Adam, the embedding's.
    gain_rate: trained skip weights (SkipInit's β), Value-SkipInit's two gains and the bias gain. None: vectors' rate.
    role_rates: factors on `rate` by the role of a block's matrix, such as {"value": 0.5, "output": 0.5}. 0 freezes it:
        no gradient is computed, and the optimiser keeps no state of it.
    weight_decay: on matrices and the embedding, never on vectors; in the gradient for "adam" (L2), apart from it
        (Loshchilov and Hutter 2019) for the others.
    betas, eps: Adam's, also for what Muon and SOAP leave to it. soap_betas: those of SOAP's matrices.
    momentum, nesterov, newton_schulz_steps: Muon's. precondition_every (steps between new bases) and
        max_precondition_width (a longer side keeps its own basis): SOAP's.
    keep_orthogonal: roles whose matrices stay nearly orthogonal, such as ("value", "output"); two products of a matrix
        with itself a step, in full precision. None by default, as in the paper.
    clip: the largest global gradient norm; None leaves gradients alone.
    """

    name: Name = "adam"
    rate: float | None = None
    embedding_rate: float = 2e-4
    vector_rate: float | None = None
    head_rate: float | None = None
    role_rates: dict[str, float] = field(default_factory=dict, hash=False)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    soap_betas: tuple[float, float] = (0.95, 0.95)
    precondition_every: int = 10
    max_precondition_width: int = 10_000
    clip: float | None = 0.1
    keep_orthogonal: tuple[str, ...] = ()
    gain_rate: float | None = None

    def __post_init__(self):
        for name in ("betas", "soap_betas"):
            object.__setattr__(self, name, _pair(name, getattr(self, name)))
        object.__setattr__(self, "role_rates", dict(self.role_rates))
        object.__setattr__(self, "keep_orthogonal", _names(self.keep_orthogonal))
        _check_choices(self)
        _check_numbers(self)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Roles whose matrices stay as they start."""
        return tuple(role for role in ROLES if self.role_rates.get(role) == 0.0)

    @property
    def peak_rate(self) -> float:
        """`rate`, or the usual one: what roles' factors and the schedule multiply."""
        return USUAL_RATES[self.name] if self.rate is None else self.rate

    @property
    def rates(self) -> dict[str, float]:
        """The highest rate of every group: "embedding", "head", "vectors", each role, and "gains" if they have one."""
        rate = self.peak_rate
        vectors, head = (MUON_VECTOR_RATE, self.embedding_rate) if self.name == "muon" else (rate, rate)
        return {
            "embedding": self.embedding_rate,
            "head": head if self.head_rate is None else self.head_rate,
            "vectors": vectors if self.vector_rate is None else self.vector_rate,
            **{role: rate * self.role_rates.get(role, 1.0) for role in ROLES},
            **({} if self.gain_rate is None else {"gains": self.gain_rate}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "OptimizerConfig":
        """The inverse of to_dict; lists stand for tuples, as JSON writes them."""
        for name in data:
            _known("OptimizerConfig has no field", name, tuple(f.name for f in dataclasses.fields(cls)))
        return cls(**data)


def _pair(name: str, value: Any) -> tuple[float, float]:
    if len(value) != 2:
        raise ValueError(f"{name} is {value!r}; it must be two decays, such as (0.9, 0.999)")
    return float(value[0]), float(value[1])


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _known(complaint: str, name: str, allowed: tuple[str, ...]) -> None:
    if name not in allowed:
        near = difflib.get_close_matches(name, allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(allowed)}"
        raise ValueError(f"{complaint} {name!r}; {hint}")


def _check_choices(config: OptimizerConfig) -> None:
    _known("there is no optimiser", config.name, NAMES)
    for role in config.role_rates:
        _known("role_rates names a matrix role that does not exist,", role, ROLES)
    for role in config.keep_orthogonal:
        _known("keep_orthogonal names a role whose matrices do not start orthogonal,", role, ORTHOGONAL_ROLES)


def _check_numbers(config: OptimizerConfig) -> None:
    rates = {
        name: getattr(config, name) for name in ("rate", "embedding_rate", "vector_rate", "head_rate", "gain_rate")
    }
    factors = {f"role_rates[{role!r}]": value for role, value in config.role_rates.items()}
    for name, value in {**rates, **factors, "eps": config.eps, "weight_decay": config.weight_decay}.items():
        if value is not None and not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be finite and not negative")
    decays = {"momentum": config.momentum}
    for name in ("betas", "soap_betas"):
        decays |= {f"{name}[{index}]": value for index, value in enumerate(getattr(config, name))}
    for name, value in decays.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} is {value!r}; a decay lies in [0, 1), such as 0.95")
    for name in ("newton_schulz_steps", "precondition_every", "max_precondition_width"):
        value, least = getattr(config, name), 0 if name == "max_precondition_width" else 1
        if int(value) != value or value < least:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if config.clip is not None and not config.clip > 0.0:
        raise ValueError(f"clip is {config.clip!r}; it must be positive (0.1 in the paper), or None for no clipping")

"""Configuration of a run: model, data, optimiser and schedule; frozen, checked, and plain JSON."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from skipless.console import check_seed, nearest
from skipless.files import leads_inside, parse_json
from skipless.model.config import ModelConfig
from skipless.schema import KINDS, build, check_choice, check_own, shortened
from skipless.theory.feasibility import nearest_divisor
from skipless.theory.schemes import Scheme

Precision = Literal["bf16", "fp16", "fp32"]

OptimizerName = Literal["adam", "adamw", "muon", "soap"]
Role = Literal["query", "key", "value", "output", "up", "down", "position"]

OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
ROLES: tuple[str, ...] = get_args(Role)
ORTHOGONAL_ROLES = ("value", "output", "up", "down")  # queries start at 0, and with keys make no signal of their own

# The paper tunes the rate for every network and prints none. These were the best of a coarse grid at 36 blocks of width
# 512: vanilla E-SPA with Adam and with Muon, Pre-LN with Adam. SOAP's is three times Adam's: at width 256 its best was
# five times Adam's for vanilla E-SPA, and ten times diverged.
USUAL_RATES = {"adam": 3e-5, "adamw": 5e-4, "muon": 1e-3, "soap": 1e-4}
MUON_VECTOR_RATE = 3e-5
# The rate falls as depth^−power. Each of L blocks moves the output of a network without skips by about as much as its
# own matrices move, relative to their size; Muon moves all of them by the same share. With one direction in common the
# L shares add up, so that the whole moves by the same amount if each moves by 1/L of it. For ReLU MLPs trained by SGD
# the power is 3/2 (Jelassi et al. 2023, arXiv:2305.07810).
DEPTH_POWER = 1.0
NO_IMAGES = "a network of images needs some: `skipless prepare SOURCE --images --out FOLDER`, then --data FOLDER"
_LEAST_EPS, _MOST_DECAY, _MOST_STEPS = 1e-30, 1e3, 1 << 53
_ZERO = {
    "eval_every": " (0: validate at the end alone)",
    "eval_tokens": " (0: never validate)",
    "checkpoint_every": " (0: save at the end alone)",
}


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
    momentum, nesterov, newton_schulz_steps: Muon's. newton_schulz: where its steps are taken, "gram" in Gram matrices
        if that is quicker; the same but for rounding. precondition_every (steps between new bases) and
        max_precondition_width (a longer side keeps its own basis): SOAP's.
    keep_orthogonal: roles whose matrices stay nearly orthogonal, such as ("value", "output"); two products of a matrix
        with itself a step, in full precision. None by default, as in the paper.
    clip: the largest global gradient norm; None leaves gradients alone.
    """

    name: OptimizerName = "adam"
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
    newton_schulz: Literal["direct", "gram"] = "direct"

    def __post_init__(self):
        for name in ("betas", "soap_betas"):
            if not isinstance(pair := getattr(self, name), list | tuple) or len(pair) != 2:
                raise ValueError(f"{name} is {pair!r}; it must be two decays, such as (0.9, 0.999)")
        if isinstance(self.keep_orthogonal, str):
            object.__setattr__(self, "keep_orthogonal", (self.keep_orthogonal,))
        _check_known("there is no optimiser", [self.name], OPTIMIZERS)
        check_own(self)
        _check_known("role_rates names a matrix role that does not exist,", self.role_rates, ROLES)
        words = "keep_orthogonal names a role whose matrices do not start orthogonal,"
        _check_known(words, self.keep_orthogonal, ORTHOGONAL_ROLES)
        object.__setattr__(self, "role_rates", dict(self.role_rates))
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


def by_depth(rate: float, depth: int, at: int = 36, power: float = DEPTH_POWER) -> float:
    """The rate of a network of `depth` blocks from the best one of `at` blocks, to three digits: ∝ depth^−power."""
    return float(f"{rate * (at / depth) ** power:.3g}")


def _check_known(complaint: str, names: Iterable[str], allowed: tuple[str, ...]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{complaint} {name!r}; {nearest(name, allowed)}")


def _check_numbers(config: OptimizerConfig) -> None:
    rates = {
        name: getattr(config, name) for name in ("rate", "embedding_rate", "vector_rate", "head_rate", "gain_rate")
    }
    factors = {f"role_rates[{role!r}]": value for role, value in config.role_rates.items()}
    for name, value in {**rates, **factors, "eps": config.eps, "weight_decay": config.weight_decay}.items():
        if value is not None and not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be finite and not negative")
    if config.eps < _LEAST_EPS:
        raise ValueError(
            f"eps is {config.eps!r}, and a gradient of 0 would be 0/0; use {_LEAST_EPS:g} or more, as 1e-8"
        )
    if config.weight_decay > _MOST_DECAY:
        raise ValueError(f"weight_decay is {config.weight_decay!r}; it must be at most {_MOST_DECAY:g} (0.1 is usual)")
    decays = {"momentum": config.momentum}
    for name in ("betas", "soap_betas"):
        decays |= {f"{name}[{index}]": value for index, value in enumerate(getattr(config, name))}
    for name, value in decays.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} is {value!r}; a decay lies in [0, 1), such as 0.95")
    for name in ("newton_schulz_steps", "precondition_every", "max_precondition_width"):
        value, least = getattr(config, name), 0 if name == "max_precondition_width" else 1
        if not least <= value <= _MOST_STEPS:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}, and below 2⁵³")
    if config.clip is not None and not config.clip > 0.0:
        raise ValueError(f"clip is {config.clip!r}; it must be positive (0.1 in the paper), or None for no clipping")


@dataclass(frozen=True)
class DataConfig:
    """What to train on: a prepared folder, or a corpus that is prepared first (see `skipless prepare`).

    valid is an optional second prepared folder, by the same tokenizer, whose held-out split serves for validation
    instead of the first one's. packed keeps attention within documents.

    crop and flip are for images: in training each is shifted by up to `crop` pixels along both axes, and mirrored one
    time in two.
    """

    corpus: str = "stdlib"
    folder: str | None = None
    valid: str | None = None
    vocab: int | None = None
    packed: bool = False
    crop: int = 4
    flip: bool = True

    def __post_init__(self):
        check_own(self, "data.")
        if not 0 <= self.crop <= 1 << 10:
            raise ValueError(
                f"data.crop is {self.crop}; it must lie in 0 … {1 << 10} pixels (an eighth of a side is usual)"
            )
        if self.vocab is not None and not 1 <= self.vocab < 1 << 31:
            raise ValueError(f"data.vocab is {self.vocab}; it must be at least 1, and at most 257 means bytes")


@dataclass(frozen=True)
class TrainConfig:
    """The schedule of a run. Defaults are App. H's for WikiText-103.

    length: tokens in a row. None: the model's, which an Experiment fills in.
    warmup: steps until the rate is at its highest. None: a tenth of all steps, at most App. H's 4,000.
    label_smoothing: of images, the share of the target that is spread over all classes; validation has none.
    eval_every: steps from one validation to the next; there is one at the end too. 0: at the end alone.
    eval_tokens: locations to validate on at most, tokens or patches. 0: no validation at all.
    cuda_graph: the whole step as one CUDA graph; "auto" where it can be, with a word where not, "on" or an error.
    """

    steps: int = 100_000
    batch_size: int = 16
    length: int = None  # ty: ignore[invalid-assignment]
    warmup: int = None  # ty: ignore[invalid-assignment]
    accumulate: int = 1
    seed: int = 0
    precision: Precision = "bf16"
    compile: bool = True
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    impl: str = "auto"
    recompute: bool = False
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    ema: float = 0.01
    log_every: int = 10
    eval_every: int = 1_000
    eval_tokens: int = 262_144
    checkpoint_every: int = 1_000
    keep: int = 2
    probe_at: tuple[int, ...] = ()
    on_divergence: Literal["stop", "halve-lr"] = "stop"
    label_smoothing: float = 0.0

    def __post_init__(self):
        check_own(self, "train.")
        if self.warmup is None:
            object.__setattr__(self, "warmup", usual_warmup(self.steps))
        for name in ("steps", "batch_size", "length", "accumulate", "log_every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"train.{name} is {value}; it must be at least 1")
        for name in ("warmup", "eval_every", "checkpoint_every", "eval_tokens", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be at least 0{_ZERO.get(name, '')}")
        check_seed(self.seed, "train.seed")
        for name, hint in TrainConfig.__annotations__.items():
            if hint is int and name != "seed" and (getattr(self, name) or 0) > _MOST_STEPS:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be at most {_MOST_STEPS:,}")
        if self.warmup >= self.steps:
            raise ValueError(
                f"train.warmup={self.warmup} leaves no step of {self.steps} for the cosine; {self.steps // 10} is usual"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"train.accumulate={self.accumulate} does not divide batch_size={self.batch_size}; the nearest is "
                f"{nearest_divisor(self.batch_size, self.accumulate)}"
            )
        if not 0.0 < self.ema <= 1.0:
            raise ValueError(f"train.ema is {self.ema}; the smoothing factor must lie in (0, 1] (App. H: 0.01)")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"train.label_smoothing is {self.label_smoothing}; a share lies in [0, 1), such as 0.1")

    def replace(self, **changes: Any) -> "TrainConfig":
        """A copy with some fields changed. A warm-up that is the usual one for its steps follows them."""
        if "steps" in changes and self.warmup == usual_warmup(self.steps):
            changes.setdefault("warmup", None)
        return dataclasses.replace(self, **changes)


def usual_warmup(steps: int) -> int:
    """A tenth of the steps, at most App. H's 4,000."""
    return min(steps // 10, 4_000)


@dataclass(frozen=True)
class Experiment:
    """One run: a network, its data, its optimiser and its schedule. Recipes are functions that return one."""

    name: str
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self):
        check_own(self)
        if self.train.length is None:
            object.__setattr__(self, "train", self.train.replace(length=self.model.length))
        if self.train.label_smoothing and self.model.head != "pooled":
            raise ValueError(
                f"train.label_smoothing={self.train.label_smoothing} with model.head={self.model.head!r}: only a "
                "pooled head's loss has it; use 0"
            )
        if self.model.images is not None and self.train.length != self.model.length:
            raise ValueError(
                f"train.length={self.train.length}, and an image of this network has {self.model.length} patches; use "
                f"--set train.length={self.model.length}"
            )

    @property
    def folder(self) -> Path:
        """Where the run goes unless another place is named: runs/NAME; ValueError for a name that leads elsewhere."""
        if not leads_inside(self.name):
            raise ValueError(
                f"the experiment's name is {self.name!r}, and runs/NAME leads out of runs/: give --out a folder"
            )
        return Path("runs") / self.name

    def to_json(self) -> str:
        """The whole configuration as JSON; from_json gives back an equal object."""
        parts = {"data": self.data, "optimizer": self.optimizer, "train": self.train}
        plain = {name: dataclasses.asdict(part) for name, part in parts.items()}
        return json.dumps({"name": self.name, "model": self.model.to_dict(), **plain}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """The inverse of to_json; unknown fields, and values of another type than the field's, are errors."""
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_dict(cls, data: Any) -> "Experiment":
        """The experiment of what JSON holds."""
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            seen = shortened(data)
            raise ValueError(f'an experiment is a mapping with a name, such as {{"name": "mine"}}, not {seen}')
        return build(cls, data, "an experiment")

    def override(self, *assignments: str) -> "Experiment":
        """A copy with fields set from text: override("train.steps=500", "model.scheme.gamma_final=0.2")."""
        return self.with_fields(split_assignments(assignments))

    def with_fields(self, values: Mapping[str, Any]) -> "Experiment":
        """A copy with fields set by their dotted names, to values or to their text: {"train.steps": 500}.

        What follows from a changed field follows it. So do model.length and train.length each other; where both are
        set they must be equal.
        """
        changes = {tuple(name.split(".")): value for name, value in values.items()}
        lengths = (changes.get((part, "length")) for part in ("model", "train"))
        model, train = (_parsed(length, int, "length") for length in lengths)
        if model is not None and train is not None and model != train:
            raise ValueError(
                f"model.length={model} and train.length={train} differ: a network is calibrated for the length it is "
                "trained at; set one of them, and the other follows"
            )
        if model is not None or train is not None:
            changes |= dict.fromkeys([("model", "length"), ("train", "length")], train if model is None else model)
        elif any(path[:2] == ("model", "images") for path in changes):
            changes[("train", "length")] = None  # as many as the patches of an image
        return _changed(self, changes, "")


def split_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """The text of each field by its dotted name: ["train.steps=500"] is {"train.steps": "500"}."""
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment!r} has no '='; write it as train.steps=500")
        values[name.strip()] = text.strip()
    return values


def _changed(target: Any, changes: dict[tuple[str, ...], Any], prefix: str) -> Any:
    """A copy of `target` with all changes made at once, so that values which depend on each other may change."""
    known = [f.name for f in dataclasses.fields(target)]
    values: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        if name not in known:
            raise ValueError(f"--set {prefix}{name}: {type(target).__name__} has no such field; {nearest(name, known)}")
        below = {path[1:]: text for path, text in changes.items() if path[0] == name}
        values[name] = _value(getattr(target, name), typing.get_type_hints(type(target))[name], below, prefix + name)
    follows = isinstance(target, ModelConfig | TrainConfig)
    return target.replace(**values) if follows else dataclasses.replace(target, **values)


def _value(old: Any, hint: Any, changes: dict[tuple[str, ...], Any], name: str) -> Any:
    """A field's new value: as a whole, by its own fields, or by the keys of a mapping."""
    parts = {path: text for path, text in changes.items() if path}
    if parts and () in changes and typing.get_origin(hint) is not dict and hint is not Scheme:
        part = ".".join((name, *next(iter(parts))))
        raise ValueError(f"--set names {name} as a whole and {part} within it; one of the two would be lost")
    whole = {(): _parsed(changes[()], hint, name)} if () in changes else {}
    if typing.get_origin(hint) is dict:
        deeper = next((path for path in parts if len(path) > 1), None)
        if deeper is not None:
            raise ValueError(f"--set {name}.{'.'.join(deeper)}: {name}.{deeper[0]} is a plain value")
        kind = typing.get_args(hint)[1]
        return {**whole.get((), old), **{key: _parsed(one, kind, f"{name}.{key}") for (key,), one in parts.items()}}
    if parts and not dataclasses.is_dataclass(old):
        raise ValueError(f"--set {name}: it is a plain value, so nothing lies below it")
    new = whole.get((), old)
    return _changed(new, parts, f"{name}.") if parts else new


def _parsed(value: Any, hint: Any, name: str) -> Any:
    return parse(value, hint, name) if isinstance(value, str) else value


def parse(text: str, hint: Any, name: str) -> Any:
    """The value of `text` for a field's type: int, float, bool, str, a choice, an optional, a tuple or a mapping."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _parse_union(text, args, name)
    if origin is Literal:
        return check_choice(text, args, name)
    if origin is tuple:
        parts = (part.strip().strip("\"'") for part in text.strip("()[]").split(","))
        return tuple(parse(part, args[0], name) for part in parts if part)
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{name} is {text!r}; it must be {KINDS[bool]}")
        return text.lower() in ("true", "1")
    if hint in (int, float):
        try:
            return int(text.replace("_", "")) if hint is int else float(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}; it must be {KINDS[hint]}") from None
    if hint is str:
        return text
    if hint is Scheme:
        return Scheme.from_dict(parse_json(text) if text.startswith("{") else {"kind": text})
    if dataclasses.is_dataclass(hint):
        first = dataclasses.fields(hint)[0].name
        raise ValueError(f"{name} cannot be set from text; set a field below it, such as {name}.{first}=…")
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f'{name} is {text!r}, which is not JSON ({error}); write it as {{"value": 0.5}}') from None
    if origin is dict and not isinstance(value, dict):
        raise ValueError(f'{name} is {text!r}, not a mapping; write it as {{"value": 0.5}}, or set {name}.value=0.5')
    return value


def _parse_union(text: str, kinds: tuple, name: str) -> Any:
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    errors = []
    for kind in sorted((k for k in kinds if k is not type(None)), key=lambda k: k is str):
        if dataclasses.is_dataclass(kind):
            continue
        try:
            return parse(text, kind, name)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(errors[0] if errors else f"{name} cannot be set from text; set a field below it")

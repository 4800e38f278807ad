"""An arm: one network with one optimiser, and its run at any size, rate and seed."""

import dataclasses
import functools
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from skipless.model.config import ModelConfig
from skipless.model.presets import preset
from skipless.ops.precision import Precision
from skipless.recipes.paper import Printed
from skipless.recipes.reproduce import rates
from skipless.recipes.reproduce.scale import Scale
from skipless.recipes.reproduce.text import Text
from skipless.theory.schemes import ExponentialSPA, UniformSPA
from skipless.train.config import DataConfig, Experiment
from skipless.train.optim import OptimizerConfig

Measure = Literal["", "probes", "tasks", "pace"]
Optimizer = Literal["adam", "muon", "soap"]

_TIMED_STEPS = 100
# What a result depends on; the rest of a schedule is about speed, logs and files.
_SCHEDULE = ("steps", "batch_size", "length", "warmup", "accumulate", "seed", "precision", "ema", "probe_at")


@dataclass(frozen=True)
class Arm:
    """A preset with some fields changed, trained by one optimiser.

    printed: what the paper says of it. multiples: lengths of training, as multiples of the usual one; its rate is tuned
    at the usual one. precision: None is the size's own. core arms belong to the item at every size, others to the
    paper's own and to --arms. gain_rate: of the gains of SkipInit and Value-SkipInit; None is the optimiser's own.
    seeds: how many at the best rate; None is the size's own number. follows: another arm of its item, whose best rates
    it takes instead of tuning its own, the rate by the law over depth with this power (rates.by_depth).
    """

    name: str
    label: str
    preset: str
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    optimizer: Optimizer = "adam"
    role_rates: dict[str, float] = field(default_factory=dict, hash=False)
    keep_orthogonal: tuple[str, ...] = ()
    gain_rate: float | None = None
    printed: tuple[Printed, ...] = ()
    multiples: tuple[float, ...] = (1.0,)
    precision: Precision | None = None
    core: bool = True
    seeds: int | None = None
    follows: str = ""
    depth_power: float = rates.DEPTH_POWER

    @property
    def corpus(self) -> str:
        """Which of the paper's two corpora it is trained on: "wikitext103" or "c4"."""
        return "c4" if self.preset.startswith("c4/") else "wikitext103"

    def model(self, scale: Scale, text: Text) -> ModelConfig:
        """The network at this size, for this text."""
        return _model(self, scale, text)

    def lengths(self, scale: Scale) -> tuple[float, ...]:
        """Its multiples, as far as they are run at this size."""
        return tuple(multiple for multiple in self.multiples if multiple <= scale.longest)

    def rates(self, scale: Scale, text: Text, count: int) -> tuple[float, ...]:
        """The grid of rates that every arm gets."""
        return rates.grid(rates.expected(self.model(scale, text), self.optimizer), count)

    def experiment(
        self,
        scale: Scale,
        text: Text,
        rate: float,
        seed: int = 0,
        multiple: float = 1.0,
        measure: Measure = "",
        embedding_rate: float | None = None,
    ) -> Experiment:
        """The run. measure adds what is to be seen besides losses. embedding_rate: None is the size's own."""
        train = scale.schedule(self.corpus, seed, multiple)
        train = dataclasses.replace(train, precision=self.precision or train.precision)
        if measure == "probes":
            train = dataclasses.replace(train, probe_at=(0, train.steps // 2, train.steps))
        if measure == "pace":
            steps = min(_TIMED_STEPS, train.steps)
            every = max(steps // 5, 1)
            train = dataclasses.replace(train, steps=steps, warmup=steps // 2, log_every=every, eval_every=0)
        return Experiment(
            name=f"{self.name.replace('/', '-')}-{rate:g}-{seed}",
            model=self.model(scale, text),
            data=DataConfig(corpus=text.name, folder=text.folder),
            optimizer=OptimizerConfig(
                self.optimizer,
                rate,
                scale.embedding(self.corpus) if embedding_rate is None else embedding_rate,
                role_rates=dict(self.role_rates),
                keep_orthogonal=self.keep_orthogonal,
                gain_rate=self.gain_rate,
            ),
            train=train,
        )


@functools.lru_cache(maxsize=1024)
def _model(arm: Arm, scale: Scale, text: Text) -> ModelConfig:
    # sizes and scheme alone are read from it; nothing is solved, and a mirrored MLP would want its own activation
    plain = preset(arm.preset, activation="identity", **_without(arm.changes, "activation", "mlp_init"))
    changes = {**arm.changes, **scale.sizes(plain), "vocab_size": text.vocab_size}
    if isinstance(plain.scheme, ExponentialSPA | UniformSPA):
        changes["scheme"] = dataclasses.replace(plain.scheme, repeat_rate=text.repeat_rate)
    return preset(arm.preset, **changes)


def run_key(experiment: Experiment, text: Text, measure: Measure = "") -> str:
    """What two runs share if and only if they give the same results: a hash of all they depend on.

    Names, paths, precision of solved constants beyond six digits and settings at their defaults do not enter: the key
    is the same on every machine, and stays when a configuration gains a field.
    """
    train = {name: getattr(experiment.train, name) for name in _SCHEDULE}
    essentials = {
        "model": _changed(experiment.model, experiment.model.to_dict()),
        "optimizer": _changed(experiment.optimizer, experiment.optimizer.to_dict()),
        "train": train,
        "text": text.fingerprint,
        "measure": measure,
    }
    return hashlib.sha256(json.dumps(_rounded(essentials), sort_keys=True).encode()).hexdigest()[:16]


def _changed(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    defaults = {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}
    return {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return value


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}

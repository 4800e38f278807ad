"""A run that an item asks for, before it is run: the experiment, and who wants it."""

import functools
from dataclasses import dataclass, replace

from skipless.recipes.reproduce.arm import Arm, Measure, run_key
from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.scale import Scale
from skipless.recipes.reproduce.text import Text
from skipless.train.config import Experiment


@dataclass(frozen=True)
class Setting:
    """What holds for all runs of a call: size, text, and how many rates and seeds each arm gets."""

    scale: Scale
    text: Text
    rates: int
    seeds: int

    @classmethod
    def of(cls, scale: Scale, text: Text, rates: int | None = None, seeds: int | None = None) -> "Setting":
        """The scale's own numbers where none are given."""
        counts = {"rates": scale.rates if rates is None else rates, "seeds": scale.seeds if seeds is None else seeds}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"--{name} is {count}; it must be at least 1")
        return cls(scale, text, **counts)


@dataclass(frozen=True)
class Job:
    """One run. Jobs with equal keys are the same run, whoever asks. weights: whether to keep its folder with them."""

    item: str
    arm: str
    experiment: Experiment
    key: str
    rate: float
    seed: int
    multiple: float
    measure: Measure = ""
    weights: bool = False

    @property
    def exclusive(self) -> bool:
        """Whether nothing else may run beside it: its pace is what is wanted."""
        return self.measure == "pace"

    @property
    def stage(self) -> int:
        """0 in a sweep, 1 at its best rate, 2 for a pace."""
        return 2 if self.exclusive else int(self.seed > 0 or self.multiple != 1.0 or bool(self.measure))

    @property
    def network(self) -> str:
        """Equal for runs that can share what torch.compile has compiled."""
        train = self.experiment.train
        return f"{self.experiment.model.to_json()} {train.batch_size} {train.length}"

    def describe(self) -> str:
        """In words, for a line of progress."""
        longer = "" if self.multiple == 1.0 else f" ×{self.multiple:g}"
        what = f" ({self.measure})" if self.measure else ""
        return f"{self.item}: {self.arm}{longer}, rate {self.rate:g}, seed {self.seed}{what}"


def make_job(
    item: Item, arm: Arm, setting: Setting, rate: float, seed: int = 0, multiple: float = 1.0, measure: Measure = ""
) -> Job:
    """The run of an arm."""
    base = _job(arm, setting.scale, setting.text, rate, seed, multiple, measure)
    return replace(base, item=item.name, weights=item.keeps_weights and (multiple > 1.0 or bool(measure)))


@functools.lru_cache(maxsize=8192)
def _job(arm: Arm, scale: Scale, text: Text, rate: float, seed: int, multiple: float, measure: Measure) -> Job:
    experiment = arm.experiment(scale, text, rate, seed, multiple, measure)
    return Job("", arm.name, experiment, run_key(experiment, text, measure), rate, seed, multiple, measure)

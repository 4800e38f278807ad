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
    """What holds for all runs of a call: size, text, and how many rates and seeds each arm gets.

    own_seeds: whether arms that ask for a number of seeds of their own get it.
    """

    scale: Scale
    text: Text
    rates: int
    seeds: int
    own_seeds: bool = False

    @classmethod
    def of(cls, scale: Scale, text: Text, rates: int | None = None, seeds: int | None = None) -> "Setting":
        """The scale's own numbers where none are given; arms' own seeds too, where runs are long enough to judge."""
        counts = {"rates": scale.rates if rates is None else rates, "seeds": scale.seeds if seeds is None else seeds}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"--{name} is {count}; it must be at least 1")
        return cls(scale, text, **counts, own_seeds=seeds is None and scale.judged)

    def seeds_of(self, arm: Arm) -> int:
        """How many seeds the arm gets at its best rate."""
        return arm.seeds if self.own_seeds and arm.seeds is not None else self.seeds


@dataclass(frozen=True)
class Job:
    """One run. Jobs with equal keys are the same run, whoever asks. weights: whether to keep its folder with them.

    embedding_rate: None is the size's own.
    """

    item: str
    arm: str
    experiment: Experiment
    key: str
    rate: float
    seed: int
    multiple: float
    measure: Measure = ""
    weights: bool = False
    embedding_rate: float | None = None

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
        embedding = "" if self.embedding_rate is None else f", embedding {self.embedding_rate:g}"
        return f"{self.item}: {self.arm}{longer}, rate {self.rate:g}{embedding}, seed {self.seed}{what}"


def make_job(  # noqa: PLR0913  (an arm, and the five numbers that name one of its runs)
    item: Item,
    arm: Arm,
    setting: Setting,
    rate: float,
    seed: int = 0,
    multiple: float = 1.0,
    measure: Measure = "",
    embedding_rate: float | None = None,
) -> Job:
    """The run of an arm."""
    base = _job(arm, setting.scale, setting.text, rate, seed, multiple, measure, embedding_rate)
    return replace(base, item=item.name, weights=item.keeps_weights and (multiple > 1.0 or bool(measure)))


@functools.lru_cache(maxsize=8192)
def _job(  # noqa: PLR0913  (all that names a run)
    arm: Arm,
    scale: Scale,
    text: Text,
    rate: float,
    seed: int,
    multiple: float,
    measure: Measure,
    embedding_rate: float | None,
) -> Job:
    experiment = arm.experiment(scale, text, rate, seed, multiple, measure, embedding_rate)
    key = run_key(experiment, text, measure)
    return Job("", arm.name, experiment, key, rate, seed, multiple, measure, embedding_rate=embedding_rate)

"""What is known of an arm: its sweep over rates, the best of them, and the runs at it, by length and seed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from skipless.recipes.reproduce import rates
from skipless.recipes.reproduce.arm import Arm
from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.job import Job, Setting, make_job
from skipless.recipes.reproduce.record import Record

_MOST_SEEDS = 5  # runs of earlier calls with more seeds are seen up to here


@dataclass(frozen=True)
class Sample:
    """A quantity over seeds. half_range is half of highest − lowest, 0 for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Infinite if any diverged."""
        return sum(self.values) / len(self.values)

    @property
    def half_range(self) -> float:
        """What seeds differ by, halved."""
        spread = max(self.values) - min(self.values)
        return spread / 2.0 if math.isfinite(spread) else 0.0


@dataclass(frozen=True)
class Outcome:
    """An arm as far as it has been run. sweep: by rate, seed 0; runs: at the best rate, by multiple and then seed.

    missing are the runs that the sweep still needs; best is None until it is complete, or if all of it diverged. edge
    says that the best rate is the highest or lowest tried.
    """

    arm: Arm
    sweep: dict[float, Record]
    missing: tuple[Job, ...]
    best: float | None
    edge: bool
    runs: dict[float, dict[int, Record]] = field(default_factory=dict)
    pace: Record | None = None

    def sample(self, quantity: str, multiple: float = 1.0) -> Sample | None:
        """The quantity at the best rate over all seeds that have been run; None where there is none yet."""
        found = [record.value(quantity) for _, record in sorted(self.runs.get(multiple, {}).items())]
        values = [value for value in found if value is not None]
        if not values and self.failed and quantity in ("train_loss", "valid_loss", "valid_perplexity"):
            values = [math.inf]
        return Sample(tuple(values)) if values else None

    @property
    def failed(self) -> bool:
        """Whether every rate of a complete sweep diverged."""
        return not self.missing and self.best is None


def rival_of(outcome: Outcome, known: Mapping[str, Outcome]) -> Sample | None:
    """The final loss of Pre-LN with the arm's own optimiser; None for Pre-LN itself, and while it is unknown."""
    _, _, optimiser = outcome.arm.name.partition("/")
    rival = known.get(f"pre-ln/{optimiser}")
    return rival.sample("train_loss") if rival is not None and rival.arm.name != outcome.arm.name else None


def outcome_of(item: Item, arm: Arm, setting: Setting, records: Mapping[str, Record]) -> Outcome:
    """Look up the arm's runs. The best rate is that of the lowest training loss, as in App. H."""
    grid = list(arm.rates(setting.scale, setting.text, setting.rates))
    sweep, missing = _swept(item, arm, setting, records, grid)
    for _ in range(rates.MOST_BEYOND):
        losses = {rate: record.train_loss for rate, record in sweep.items()}
        if missing or (more := rates.beyond(losses)) is None:
            break
        grid.append(more)
        sweep, missing = _swept(item, arm, setting, records, grid)
    finite = {rate: record.train_loss for rate, record in sweep.items() if math.isfinite(record.train_loss)}
    best = min(finite, key=lambda rate: (finite[rate], rate)) if finite and not missing else None
    edge = best is not None and rates.beyond({rate: record.train_loss for rate, record in sweep.items()}) is not None
    if best is None:
        return Outcome(arm, dict(sorted(sweep.items())), tuple(missing), None, edge)
    runs = _finals(item, arm, setting, records, best)
    pace = records.get(make_job(item, arm, setting, best, measure="pace").key)
    return Outcome(arm, dict(sorted(sweep.items())), (), best, edge, runs, pace)


def multiples(item: Item, arm: Arm, setting: Setting) -> tuple[float, ...]:
    """Every length at which the arm may have been trained, the usual one among them."""
    return tuple(sorted({1.0, *arm.lengths(setting.scale), *item.ladder}))


def _swept(
    item: Item, arm: Arm, setting: Setting, records: Mapping[str, Record], tried: list[float]
) -> tuple[dict[float, Record], list[Job]]:
    jobs = [make_job(item, arm, setting, rate) for rate in tried]
    sweep = {job.rate: records[job.key] for job in jobs if job.key in records}
    return sweep, [job for job in jobs if job.key not in records]


def _finals(
    item: Item, arm: Arm, setting: Setting, records: Mapping[str, Record], best: float
) -> dict[float, dict[int, Record]]:
    runs: dict[float, dict[int, Record]] = {}
    for multiple in multiples(item, arm, setting):
        for seed in range(max(setting.seeds, _MOST_SEEDS)):
            key = make_job(item, arm, setting, best, seed, multiple, item.measure).key
            if key in records:
                runs.setdefault(multiple, {})[seed] = records[key]
    return runs

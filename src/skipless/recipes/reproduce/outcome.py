"""What is known of an arm: its sweep over rates, the best of them, and the runs at it, by length and seed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from skipless.recipes.reproduce import rates
from skipless.recipes.reproduce.arm import Arm, Measure
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
    says that the best rate is the highest or lowest tried. Where the embedding's rate is tuned too, embedding_sweep has
    its rates at the best one of the others, and best_embedding is the best of them.
    """

    arm: Arm
    sweep: dict[float, Record]
    missing: tuple[Job, ...]
    best: float | None
    edge: bool
    runs: dict[float, dict[int, Record]] = field(default_factory=dict)
    pace: Record | None = None
    embedding_sweep: dict[float, Record] = field(default_factory=dict)
    best_embedding: float | None = None
    embedding_edge: bool = False

    @property
    def swept(self) -> tuple[Record, ...]:
        """Every run that tuned it, once."""
        return tuple({record.key: record for record in (*self.sweep.values(), *self.embedding_sweep.values())}.values())

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
    """Look up the arm's runs. The best rate is that of the lowest training loss, as in App. H.

    Where the item has embedding rates, they are tuned by coordinates: the rate at the middle one, then the embedding's
    at the best rate. With one rate nothing is tuned. An arm that follows another has that one's best rates.
    """
    if not arm.follows:
        grid, start = arm.rates(setting.scale, setting.text, setting.rates), item.embedding_start
        others = item.embedding_rates if setting.rates > 1 else ()
        return _tuned(item, arm, setting, records, grid, start, others)
    leader = outcome_of(item, item.arm(arm.follows), setting, records)
    if leader.best is None:
        return Outcome(arm, {}, leader.missing, None, False)
    depths = [each.model(setting.scale, setting.text).depth for each in (arm, leader.arm)]
    rate = rates.by_depth(leader.best, *depths, arm.depth_power)
    return _tuned(item, arm, setting, records, (rate,), leader.best_embedding, ())


def best_job(
    item: Item, outcome: Outcome, setting: Setting, seed: int = 0, multiple: float = 1.0, measure: Measure = ""
) -> Job:
    """A run of the arm at its best rates."""
    if outcome.best is None:
        raise ValueError(f"{outcome.arm.name} of {item.name} has no best rate yet: its sweep is incomplete or diverged")
    rate, embedding = outcome.best, outcome.best_embedding
    return make_job(item, outcome.arm, setting, rate, seed, multiple, measure, embedding)


def multiples(item: Item, arm: Arm, setting: Setting) -> tuple[float, ...]:
    """Every length at which the arm may have been trained, the usual one among them."""
    return tuple(sorted({1.0, *arm.lengths(setting.scale), *item.ladder}))


def _tuned(
    item: Item,
    arm: Arm,
    setting: Setting,
    records: Mapping[str, Record],
    grid: tuple[float, ...],
    start: float | None,
    others: tuple[float, ...],
) -> Outcome:
    """The arm at these rates. start: the embedding's rate meanwhile, None for the size's own; others: its others."""
    first = _sweep(list(grid), records, lambda rate: make_job(item, arm, setting, rate, embedding_rate=start))
    embedding = _Sweep({}, (), None, False)
    if (best := first.best) is not None and start is not None:
        tried = list(dict.fromkeys((start, *others)))
        embedding = _sweep(tried, records, lambda rate: make_job(item, arm, setting, best, embedding_rate=rate))
    known = Outcome(
        arm,
        first.tried,
        (*first.missing, *embedding.missing),
        None if embedding.missing else best,
        first.edge,
        embedding_sweep=embedding.tried,
        best_embedding=embedding.best,
        embedding_edge=embedding.edge,
    )
    if known.best is None:
        return known
    pace = records.get(best_job(item, known, setting, measure="pace").key)
    return replace(known, runs=_finals(item, setting, records, known), pace=pace)


@dataclass(frozen=True)
class _Sweep:
    """Rates tried, the runs that are still missing, the best rate once there are none, and whether it is at an edge."""

    tried: dict[float, Record]
    missing: tuple[Job, ...]
    best: float | None
    edge: bool


def _sweep(grid: list[float], records: Mapping[str, Record], job_at: Callable[[float], Job]) -> _Sweep:
    """The runs of a grid, and of rates beyond it while the best one lies at its edge."""
    most = len(grid) + rates.MOST_BEYOND
    while True:
        jobs = {rate: job_at(rate) for rate in sorted(grid)}
        tried = {rate: records[job.key] for rate, job in jobs.items() if job.key in records}
        missing = tuple(jobs[rate] for rate in grid if rate not in tried)
        losses = {rate: record.train_loss for rate, record in tried.items()}
        more = None if missing else rates.beyond(losses)
        if more is None or len(grid) == most:
            break
        grid = [*grid, more]
    finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    best = min(finite, key=lambda rate: (finite[rate], rate)) if finite and not missing else None
    return _Sweep(tried, missing, best, best is not None and more is not None)


def _finals(
    item: Item, setting: Setting, records: Mapping[str, Record], known: Outcome
) -> dict[float, dict[int, Record]]:
    runs: dict[float, dict[int, Record]] = {}
    for multiple in multiples(item, known.arm, setting):
        for seed in range(max(setting.seeds_of(known.arm), _MOST_SEEDS)):
            key = best_job(item, known, setting, seed, multiple, item.measure).key
            if key in records:
                runs.setdefault(multiple, {})[seed] = records[key]
    return runs

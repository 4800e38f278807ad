"""Runs of a table: which are missing, what is known of each arm, and the steps to a loss."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from skipless.paper import experiments
from skipless.paper.experiments import Arm, Item, Job, Measure, Setting, make_job
from skipless.paper.records import Record


@dataclass(frozen=True)
class Ratio:
    """Steps needed over the usual number; only a bound where no run reaches the loss ("> 3") or all do ("< 0.5")."""

    value: float
    bound: str = ""

    def text(self) -> str:
        """As a cell of a table."""
        return f"{self.bound} {self.value:.2g}".strip()


def steps_ratio(target: float, losses: Mapping[float, float]) -> Ratio | None:
    """The multiple at which the loss reaches `target`, from losses at some multiples.

    The smallest multiple that reaches it, interpolated from the one before it: logarithm of the loss against logarithm
    of the length. None without any run.
    """
    known = sorted((multiple, loss) for multiple, loss in losses.items() if math.isfinite(loss))
    if not known or not math.isfinite(target):
        return None
    reached = next((index for index, (_, loss) in enumerate(known) if loss <= target), None)
    if reached is None:
        return Ratio(known[-1][0], ">")
    if reached == 0:
        exact = known[0][1] == target
        return Ratio(known[0][0], "" if exact else "<")
    (low, above), (high, below) = known[reached - 1], known[reached]
    share = (math.log(above) - math.log(target)) / (math.log(above) - math.log(below))
    return Ratio(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))


def next_multiple(ladder: tuple[float, ...], target: float, losses: Mapping[float, float]) -> float | None:
    """The next length to try: up from 1 until the target is reached, down from 1 until it is not; None when done."""
    reached = {multiple: loss <= target for multiple, loss in losses.items()}
    if 1.0 not in reached:
        return 1.0
    upwards = [multiple for multiple in sorted(ladder) if multiple > 1.0]
    downwards = [multiple for multiple in sorted(ladder, reverse=True) if multiple < 1.0]
    path, until = (downwards, False) if reached[1.0] else (upwards, True)
    for multiple in path:
        if multiple not in reached:
            return multiple
        if reached[multiple] is until:
            return None
    return None


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
    rate = experiments.by_depth(leader.best, *depths, arm.depth_power)
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
    most = len(grid) + experiments.MOST_BEYOND
    while True:
        jobs = {rate: job_at(rate) for rate in sorted(grid)}
        tried = {rate: records[job.key] for rate, job in jobs.items() if job.key in records}
        missing = tuple(jobs[rate] for rate in grid if rate not in tried)
        losses = {rate: record.train_loss for rate, record in tried.items()}
        more = None if missing else experiments.beyond(losses)
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


Arms = tuple[str, ...]


def missing(items: Sequence[Item], setting: Setting, records: Mapping[str, Record], arms: Arms = ()) -> list[Job]:
    """All runs that can be named now: item by item; in each first sweeps, then the best rate's runs, then paces.

    Arms of the same network stay together. A sweep's best rate names further runs when it is known, the embedding's
    rates first.
    """
    found: dict[str, Job] = {}
    for item in items:
        for job in _of_item(item, setting, records, arms):
            found.setdefault(job.key, job)
    return list(found.values())


def outcomes(item: Item, setting: Setting, records: Mapping[str, Record], arms: Arms = ()) -> dict[str, Outcome]:
    """What is known of each chosen arm, by name."""
    return {arm.name: outcome_of(item, arm, setting, records) for arm in item.chosen(setting.scale, arms)}


def total(item: Item, setting: Setting) -> int:
    """How many runs the item takes if no best rate lies at an edge, and each ladder takes one more length."""
    chosen = item.chosen(setting.scale)
    sweeps = sum(1 if arm.follows else _sweep_count(item, setting) for arm in chosen)
    finals = sum(_final_count(item, arm, setting) for arm in chosen)
    climbs = (len(chosen) - 1) * bool(item.ladder)
    return sweeps + finals + climbs + len(chosen) * bool(item.ladder)


def _sweep_count(item: Item, setting: Setting) -> int:
    """Runs that tune an arm: its rates, and the embedding's besides the first."""
    return setting.rates + (max(len(item.embedding_rates) - 1, 0) if setting.rates > 1 else 0)


def _final_count(item: Item, arm: Arm, setting: Setting) -> int:
    """Runs at the best rate; the sweep already holds its first seed, unless something is to be measured."""
    return setting.seeds_of(arm) + len(arm.lengths(setting.scale)) - 1 - (0 if item.measure else 1)


def _of_item(item: Item, setting: Setting, records: Mapping[str, Record], arms: Arms) -> Iterable[Job]:
    known = outcomes(item, setting, records, arms)
    for outcome in known.values():
        yield from outcome.missing
    for outcome in known.values():
        if outcome.best is not None:
            yield from _final_runs(item, setting, outcome, _targets(item, outcome, known))
    if item.ladder:
        for outcome in known.values():
            if outcome.best is not None and outcome.pace is None:
                yield best_job(item, outcome, setting, measure="pace")


def _targets(item: Item, outcome: Outcome, known: Mapping[str, Outcome]) -> list[Sample]:
    """The losses that an arm's ladder is to reach, as far as they are known: the baseline's, and its rival's."""
    baseline = known.get(item.baseline)
    if not item.ladder or baseline is None or outcome.arm.name == item.baseline:
        return []
    found = (baseline.sample("train_loss"), rival_of(outcome, known))
    return [sample for sample in found if sample is not None]


def _final_runs(item: Item, setting: Setting, outcome: Outcome, targets: Sequence[Sample]) -> Iterable[Job]:
    """Seeds at the usual length, then other lengths with the first seed, until they reach the targets."""
    wanted = [(1.0, seed) for seed in range(setting.seeds_of(outcome.arm))]
    wanted += [(multiple, 0) for multiple in outcome.arm.lengths(setting.scale) if multiple != 1.0]
    losses = {multiple: runs[0].train_loss for multiple, runs in outcome.runs.items() if 0 in runs}
    climbs = [next_multiple(item.ladder, target.mean, losses) for target in targets]
    wanted += [(climb, 0) for climb in climbs if climb is not None]
    for multiple, seed in wanted:
        if seed not in outcome.runs.get(multiple, {}):
            yield best_job(item, outcome, setting, seed, multiple, item.measure)

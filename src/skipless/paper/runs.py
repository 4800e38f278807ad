"""Runs of a table: what names one, which are missing, and what those that are done say of each arm."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skipless.files import digest
from skipless.model.config import ModelConfig
from skipless.paper import experiments
from skipless.paper.experiments import Arm, Measure, PaperTable, Scale, Setting
from skipless.paper.records import Facts, Record
from skipless.training.config import Experiment, TrainConfig, by_depth


@dataclass(frozen=True)
class Run:
    """One training run of an arm. Runs with equal keys are the same run, whichever table asks for it.

    weights: whether its folder is kept, with the weights. embedding_rate: None is the scale's own.
    """

    table: str
    arm: str
    scale: str
    text: Facts
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
        """Whether nothing else may run beside it, because its steps are timed."""
        return self.measure == "pace"

    @property
    def stage(self) -> int:
        """0 in a sweep, 1 at its best rate, 2 for a timing."""
        return 2 if self.exclusive else int(self.seed > 0 or self.multiple != 1.0 or bool(self.measure))

    @property
    def network(self) -> str:
        """Equal for runs that can share what torch.compile has compiled."""
        train = self.experiment.train
        return f"{self.experiment.model.to_json()} {train.batch_size} {train.length}"

    def describe(self) -> str:
        longer = "" if self.multiple == 1.0 else f" ×{self.multiple:g}"
        what = f" ({self.measure})" if self.measure else ""
        embedding = "" if self.embedding_rate is None else f", embedding {self.embedding_rate:g}"
        return f"{self.table}: {self.arm}{longer}, rate {self.rate:g}{embedding}, seed {self.seed}{what}"


def make_run(  # noqa: PLR0913  (an arm, and the five numbers that name one of its runs)
    table: PaperTable,
    arm: Arm,
    setting: Setting,
    rate: float,
    seed: int = 0,
    multiple: float = 1.0,
    measure: Measure = "",
    embedding_rate: float | None = None,
) -> Run:
    """The run of an arm."""
    scale, text, numbers = setting.scale, setting.text, (rate, seed, multiple, measure)
    experiment, key = _keyed(arm, scale, text, *numbers, embedding_rate)
    weights = table.keeps_weights and (multiple > 1.0 or bool(measure))
    return Run(table.name, arm.name, scale.name, text, experiment, key, *numbers, weights, embedding_rate)


@functools.lru_cache(maxsize=8192)
def _keyed(arm: Arm, scale: Scale, text: Facts, *numbers: Any) -> tuple[Experiment, str]:
    experiment = arm.experiment(scale, text, *numbers)
    return experiment, run_key(experiment, text, numbers[3])


@dataclass(frozen=True)
class Machine:
    """A machine in three numbers: FLOP/s that training sustains, seconds per block and step at least, start-up."""

    name: str
    flops: float
    block_seconds: float
    start_seconds: float


H200 = Machine("H200", 300e12, 0.4e-3, 12.0)
CPU = Machine("CPU, 2 cores", 60e9, 1.2e-3, 0.2)


def run_seconds(model: ModelConfig, train: TrainConfig, machine: Machine) -> float:
    """Seconds of a run, good to a factor of two or so: 6 FLOP per weight and token, and attention's."""
    per_token = 6.0 * model.matrix_parameters + 6.0 * model.depth * model.width * train.length
    arithmetic = per_token * train.batch_size * train.length / machine.flops
    return machine.start_seconds + train.steps * max(arithmetic, machine.block_seconds * model.depth)


# What a result depends on; the rest of a schedule is about speed, logs and files.
_SCHEDULE = ("steps", "batch_size", "length", "warmup", "accumulate", "seed", "precision", "ema", "probe_at")


def run_key(experiment: Experiment, text: Facts, measure: Measure = "") -> str:
    """What two runs share if and only if they give the same results: a hash of all they depend on.

    Names, paths, precision of solved constants beyond six digits and settings at their defaults do not enter: the key
    is the same on every machine, and stays when a configuration gains a field.
    """
    train = {name: getattr(experiment.train, name) for name in _SCHEDULE}
    if experiment.model.images is not None:
        data = experiment.data
        train |= {"label_smoothing": experiment.train.label_smoothing, "crop": data.crop, "flip": data.flip}
    essentials = {
        "model": _essentials(experiment.model),
        "optimizer": _rounded(_changed(experiment.optimizer, dataclasses.asdict(experiment.optimizer))),
        "train": _rounded(train),
        "text": text.fingerprint,
        "measure": measure,
    }
    return digest(essentials)[:16]


@functools.lru_cache(maxsize=256)
def _essentials(model: ModelConfig) -> dict[str, Any]:
    """The part of a key that the many runs of a network share."""
    return _rounded(_changed(model, model.to_dict()))


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


_OF_FAILED = {"train_loss": math.inf, "valid_loss": math.inf, "valid_perplexity": math.inf, "accuracy": 0.0}
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
class Sweep:
    """Rates that were tried, with seed 0, and the runs that are still missing.

    best is None until none is missing, or if all diverged. edge says that it is the highest or lowest tried.
    """

    tried: dict[float, Record] = field(default_factory=dict)
    missing: tuple[Run, ...] = ()
    best: float | None = None
    edge: bool = False


@dataclass(frozen=True)
class Outcome:
    """An arm as far as it has been run, tuned by coordinates; runs: at the best rates, by multiple and then seed.

    embeddings: the embedding's rates at the best one of the others, where they are tuned too.
    """

    arm: Arm
    rates: Sweep
    embeddings: Sweep = field(default_factory=Sweep)
    runs: dict[float, dict[int, Record]] = field(default_factory=dict)
    timing: Record | None = None

    @property
    def missing(self) -> tuple[Run, ...]:
        """The runs that tuning still needs."""
        return (*self.rates.missing, *self.embeddings.missing)

    @property
    def best(self) -> float | None:
        """The best rate, once all is tuned."""
        return None if self.embeddings.missing else self.rates.best

    @property
    def swept(self) -> tuple[Record, ...]:
        """Every run that tuned it, once."""
        tried = (*self.rates.tried.values(), *self.embeddings.tried.values())
        return tuple({record.key: record for record in tried}.values())

    def sample(self, quantity: str, multiple: float = 1.0) -> Sample | None:
        """The quantity at the best rate over all seeds that have been run; None where there is none yet."""
        found = [record.value(quantity) for _, record in sorted(self.runs.get(multiple, {}).items())]
        values = [value for value in found if value is not None]
        if not values and self.failed and quantity in _OF_FAILED:
            values = [_OF_FAILED[quantity]]
        return Sample(tuple(values)) if values else None

    @property
    def losses(self) -> dict[float, float]:
        """The first seed's final loss at the best rate, by multiple of the usual steps."""
        return {multiple: runs[0].train_loss for multiple, runs in self.runs.items() if 0 in runs}

    @property
    def failed(self) -> bool:
        """Whether every rate of a complete sweep diverged."""
        return not self.missing and self.best is None


def rival_of(outcome: Outcome, known: Mapping[str, Outcome]) -> Sample | None:
    """The final loss of Pre-LN with the arm's own optimiser; None for Pre-LN itself, and while it is unknown."""
    _, _, optimiser = outcome.arm.name.partition("/")
    rival = known.get(f"pre-ln/{optimiser}")
    return rival.sample("train_loss") if rival is not None and rival.arm.name != outcome.arm.name else None


def outcome_of(table: PaperTable, arm: Arm, setting: Setting, records: Mapping[str, Record]) -> Outcome:
    """Look up the arm's runs. The best rate is that of the lowest training loss, as in App. H.

    Where the table has embedding rates, they are tuned by coordinates: the rate at the middle one, then the embedding's
    at the best rate. With one rate nothing is tuned. An arm that follows another has that one's best rates.
    """
    scale, text, start = setting.scale, setting.text, table.embedding_start
    if arm.follows:
        leader = outcome_of(table, table.arm(arm.follows), setting, records)
        if leader.best is None:
            return Outcome(arm, Sweep(missing=leader.missing))
        depths = [each.model(scale, text).depth for each in (arm, leader.arm)]
        rates, start, others = (by_depth(leader.best, *depths, arm.depth_power),), leader.embeddings.best, ()
    else:
        rates, others = arm.rates(scale, text, setting.rates), table.embedding_rates if setting.rates > 1 else ()

    found = _sweep(list(rates), records, lambda rate: make_run(table, arm, setting, rate, embedding_rate=start))
    embeddings = Sweep()
    if (best := found.best) is not None and start is not None:
        tried = list(dict.fromkeys((start, *others)))
        embeddings = _sweep(tried, records, lambda rate: make_run(table, arm, setting, best, embedding_rate=rate))
    known = Outcome(arm, found, embeddings)
    if known.best is None:
        return known
    timing = records.get(best_run(table, known, setting, measure="pace").key)
    return replace(known, runs=_finals(table, setting, records, known), timing=timing)


def best_run(
    table: PaperTable, outcome: Outcome, setting: Setting, seed: int = 0, multiple: float = 1.0, measure: Measure = ""
) -> Run:
    """A run of the arm at its best rates, which a longer one lowers by the law over steps."""
    rate, embedding = rates_at(outcome, multiple)
    return make_run(table, outcome.arm, setting, rate, seed, multiple, measure, embedding)


def rates_at(outcome: Outcome, multiple: float) -> tuple[float, float | None]:
    """The best rate and the embedding's, for a run of `multiple` times the usual steps."""
    best, power = outcome.best, outcome.arm.steps_power
    if best is None:
        raise ValueError(f"{outcome.arm.name} has no best rate yet: its sweep is incomplete or diverged")
    embedding = outcome.embeddings.best
    lowered = None if embedding is None else experiments.by_steps(embedding, multiple, power)
    return experiments.by_steps(best, multiple, power), lowered


def step_multiples(table: PaperTable, arm: Arm, setting: Setting) -> tuple[float, ...]:
    """Every multiple of the usual steps that the arm may have been trained for, 1 among them."""
    return tuple(sorted({1.0, *arm.multiples_at(setting.scale), *table.step_ladder}))


def _sweep(grid: list[float], records: Mapping[str, Record], run_at: Callable[[float], Run]) -> Sweep:
    """The runs of a grid, and of rates beyond it while the best one lies at its edge."""
    most = len(grid) + experiments.MOST_BEYOND
    while True:
        runs = {rate: run_at(rate) for rate in sorted(grid)}
        tried = {rate: records[run.key] for rate, run in runs.items() if run.key in records}
        missing = tuple(runs[rate] for rate in grid if rate not in tried)
        losses = {rate: record.train_loss for rate, record in tried.items()}
        more = None if missing else experiments.beyond(losses)
        if more is None or len(grid) == most:
            break
        grid = [*grid, more]
    finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    best = min(finite, key=lambda rate: (finite[rate], rate)) if finite and not missing else None
    return Sweep(tried, missing, best, best is not None and more is not None)


def _finals(
    table: PaperTable, setting: Setting, records: Mapping[str, Record], known: Outcome
) -> dict[float, dict[int, Record]]:
    runs: dict[float, dict[int, Record]] = {}
    for multiple in step_multiples(table, known.arm, setting):
        for seed in range(max(setting.seeds_of(known.arm), _MOST_SEEDS)):
            key = best_run(table, known, setting, seed, multiple, table.measure).key
            if key in records:
                runs.setdefault(multiple, {})[seed] = records[key]
    return runs


Arms = tuple[str, ...]


def missing(
    tables: Sequence[PaperTable], setting: Setting, records: Mapping[str, Record], arms: Arms = ()
) -> list[Run]:
    """All runs that can be named now: table by table, in each first sweeps, then the best rate's runs, then timings.

    Arms of the same network stay together. A sweep's best rate names further runs when it is known, the embedding's
    rates first.
    """
    found: dict[str, Run] = {}
    for table in tables:
        for run in _of_table(table, setting, records, arms):
            found.setdefault(run.key, run)
    return list(found.values())


def outcomes(table: PaperTable, setting: Setting, records: Mapping[str, Record], arms: Arms = ()) -> dict[str, Outcome]:
    """What is known of each chosen arm, by name."""
    return {arm.name: outcome_of(table, arm, setting, records) for arm in table.chosen(setting.scale, arms)}


def total(table: PaperTable, setting: Setting) -> int:
    """How many runs the table takes if no best rate lies at an edge, and each ladder of steps takes one more run."""
    chosen = table.chosen(setting.scale)
    sweeps = sum(_sweep_count(table, arm, setting) for arm in chosen)
    finals = sum(_final_count(table, arm, setting) for arm in chosen)
    climbs = (len(chosen) - 1) * bool(table.step_ladder)
    return sweeps + finals + climbs + len(chosen) * bool(table.step_ladder)


def _sweep_count(table: PaperTable, arm: Arm, setting: Setting) -> int:
    """Runs that tune an arm: its rates, and the embedding's besides the first; one where it is not tuned."""
    if arm.follows or arm.rate is not None:
        return 1
    return setting.rates + (max(len(table.embedding_rates) - 1, 0) if setting.rates > 1 else 0)


def _final_count(table: PaperTable, arm: Arm, setting: Setting) -> int:
    """Runs at the best rate; the sweep already holds its first seed, unless something is to be measured."""
    return setting.seeds_of(arm) + len(arm.multiples_at(setting.scale)) - 1 - (0 if table.measure else 1)


def _of_table(table: PaperTable, setting: Setting, records: Mapping[str, Record], arms: Arms) -> Iterable[Run]:
    known = outcomes(table, setting, records, arms)
    for outcome in known.values():
        yield from outcome.missing
    # also those that were not named
    rivals = outcomes(table, setting, records, ("all",)) if table.step_ladder and arms else known
    for outcome in known.values():
        if outcome.best is not None:
            yield from _final_runs(table, setting, outcome, _targets(table, outcome, rivals))
    if table.step_ladder:
        for outcome in known.values():
            if outcome.best is not None and outcome.timing is None:
                yield best_run(table, outcome, setting, measure="pace")


def _targets(table: PaperTable, outcome: Outcome, known: Mapping[str, Outcome]) -> list[Sample]:
    """The losses that an arm's ladder of steps is to reach, where known: the baseline's, and its rival's."""
    baseline = known.get(table.baseline)
    if not table.step_ladder or baseline is None or outcome.arm.name == table.baseline:
        return []
    found = (baseline.sample("train_loss"), rival_of(outcome, known))
    return [sample for sample in found if sample is not None]


def _final_runs(table: PaperTable, setting: Setting, outcome: Outcome, targets: Sequence[Sample]) -> Iterable[Run]:
    """Seeds at the usual steps, then other multiples with the first seed, until they reach the targets."""
    wanted = [(1.0, seed) for seed in range(setting.seeds_of(outcome.arm))]
    wanted += [(multiple, 0) for multiple in outcome.arm.multiples_at(setting.scale) if multiple != 1.0]
    climbs = [next_multiple(table.step_ladder, target.mean, outcome.losses) for target in targets]
    wanted += [(climb, 0) for climb in climbs if climb is not None]
    for multiple, seed in wanted:
        if seed not in outcome.runs.get(multiple, {}):
            yield best_run(table, outcome, setting, seed, multiple, table.measure)


_MOST_JOBS = 256  # processes


@dataclass(frozen=True)
class Limits:
    """How to work: runs side by side, seconds in all, device, the folder of tasks, and a text to evaluate on too."""

    jobs: int = 1
    budget: float = float("inf")
    device: str | None = None
    tasks: Path | None = None
    other_text: str | None = None

    def __post_init__(self):
        if not 1 <= self.jobs <= _MOST_JOBS:
            raise ValueError(f"--jobs is {self.jobs}; it must lie in 1 … {_MOST_JOBS}")
        if not self.budget > 0.0:
            raise ValueError(f"--budget is {self.budget:g} seconds; it must be positive")


class Listener:
    """Is told what happens; this one says nothing."""

    def started(self, run: Run) -> None:
        """A run begins."""

    def finished(self, record: Record, known: int) -> None:
        """A run is done; so many more are known to be missing."""

    def failed(self, run: Run, error: str, traceback: Path) -> None:
        """A run ended with an error other than divergence; its traceback is in a file."""


@dataclass(frozen=True)
class Ratio:
    """Steps needed over the usual number; only a bound where no run reaches the loss ("> 3") or all do ("< 0.5")."""

    value: float
    bound: str = ""

    def text(self) -> str:
        return f"{self.bound} {self.value:.2g}".strip()


def steps_ratio(target: float, losses: Mapping[float, float]) -> Ratio | None:
    """The multiple at which the loss reaches `target`, from losses at some multiples.

    The smallest multiple that reaches it, interpolated from the one before it: logarithm of the loss against logarithm
    of the multiple. None without any run.
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
    """The next multiple to try: up from 1 until the target is reached, down from 1 until it is not; None when done."""
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

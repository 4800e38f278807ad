"""Which runs are missing, in the order in which they are to be run: a function of the records alone."""

from collections.abc import Iterable, Mapping, Sequence

from skipless.recipes.reproduce.arm import Arm
from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.job import Job, Setting
from skipless.recipes.reproduce.outcome import Outcome, Sample, best_job, outcome_of, rival_of
from skipless.recipes.reproduce.ratio import next_multiple
from skipless.recipes.reproduce.record import Record

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
            yield from _finals(item, setting, outcome, _targets(item, outcome, known))
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


def _finals(item: Item, setting: Setting, outcome: Outcome, targets: Sequence[Sample]) -> Iterable[Job]:
    """Seeds at the usual length, then other lengths with the first seed, until they reach the targets."""
    wanted = [(1.0, seed) for seed in range(setting.seeds_of(outcome.arm))]
    wanted += [(multiple, 0) for multiple in outcome.arm.lengths(setting.scale) if multiple != 1.0]
    losses = {multiple: runs[0].train_loss for multiple, runs in outcome.runs.items() if 0 in runs}
    climbs = [next_multiple(item.ladder, target.mean, losses) for target in targets]
    wanted += [(climb, 0) for climb in climbs if climb is not None]
    for multiple, seed in wanted:
        if seed not in outcome.runs.get(multiple, {}):
            yield best_job(item, outcome, setting, seed, multiple, item.measure)

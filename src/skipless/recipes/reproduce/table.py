"""Rows of an item's tables: what the paper prints beside what we measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.outcome import Outcome, Sample, rival_of
from skipless.recipes.reproduce.ratio import Ratio, steps_ratio
from skipless.recipes.reproduce.record import Record

HEAD = ("arm", "paper", "ours", "steps", "time", "seeds", "rate", "log")
RATIO_HEAD = ("arm", "paper", "steps to the baseline", "the same in wall-clock", "against Pre-LN, same optimiser")
DIGITS = {"train_loss": 3, "valid_loss": 3, "valid_perplexity": 1}


@dataclass(frozen=True)
class Row:
    """One arm at one length of training, for one quantity; value is None until it has been run."""

    arm: str
    label: str
    quantity: str
    multiple: float
    paper: str
    value: float | None
    cells: tuple[str, ...]  # steps, time, seeds, rate, log
    ours: str

    def line(self) -> tuple[str, ...]:
        """The row as cells under HEAD."""
        return (self.label, self.paper, self.ours, *self.cells)


def rows(outcomes: Mapping[str, Outcome], quantity: str) -> list[Row]:
    """All rows of one table, in the item's order of arms."""
    return [
        _row(outcome, quantity, multiple)
        for outcome in outcomes.values()
        for multiple in sorted({1.0, *outcome.runs, *(p.steps for p in outcome.arm.printed if p.quantity == quantity)})
    ]


def ratio_rows(item: Item, outcomes: Mapping[str, Outcome]) -> list[tuple[str, ...]]:
    """How many times the baseline's steps an arm needs for its loss; lines under RATIO_HEAD. None without one."""
    baseline, target = outcomes.get(item.baseline), _target(item, outcomes)
    if baseline is None or target is None:
        return []
    lines = []
    for outcome in outcomes.values():
        if outcome is baseline:
            continue
        ratio = ratio_to(outcome, target)
        rival = rival_of(outcome, outcomes)
        printed = [p.text() for p in outcome.arm.printed if p.quantity == "steps_ratio"]
        against = ratio_to(outcome, rival) if rival is not None else None
        cells = (_ratio_text(ratio), _ratio_text(_wall_clock(ratio, outcome, baseline)), _ratio_text(against))
        lines.append((outcome.arm.label, "".join(printed), *cells))
    return lines


def grid(item: Item, outcomes: Mapping[str, Outcome]) -> tuple[Sequence[str], list[Sequence[str]]] | None:
    """Head and lines of the usual length at a glance, where all arms are named "kind/way": losses, and steps ratios."""
    names = [arm.name.split("/") for arm in item.arms]
    if any(len(parts) != 2 for parts in names):
        return None
    kinds, ways = (tuple(dict.fromkeys(side)) for side in zip(*names, strict=True))
    lines: list[Sequence[str]] = [
        (kind, *(_glance(item, outcomes, outcomes.get(f"{kind}/{way}")) for way in ways)) for kind in kinds
    ]
    return ("", *ways), lines


def _glance(item: Item, outcomes: Mapping[str, Outcome], outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    target = _target(item, outcomes) if outcome.arm.name != item.baseline else None
    ratio = ratio_to(outcome, target) if target is not None else None
    loss = _row(outcome, "train_loss", 1.0).ours
    return loss if ratio is None or math.isnan(ratio.value) else f"{loss} ({ratio.text()}×)"


def _target(item: Item, outcomes: Mapping[str, Outcome]) -> Sample | None:
    """The loss that arms are to reach: the baseline's."""
    baseline = outcomes.get(item.baseline)
    return baseline.sample("train_loss") if baseline is not None else None


def ratio_to(outcome: Outcome, target: Sample) -> Ratio | None:
    """Steps the arm needs for the target's loss, over the usual number."""
    losses = {multiple: runs[0].train_loss for multiple, runs in outcome.runs.items() if 0 in runs}
    return steps_ratio(target.mean, losses)


def best_record(outcome: Outcome, multiple: float = 1.0) -> Record | None:
    """The run that stands for the arm in a figure: the best rate's first seed, or the best of an unfinished sweep."""
    if runs := outcome.runs.get(multiple):
        return runs[min(runs)]
    finite = [record for record in outcome.swept if math.isfinite(record.train_loss)]
    return min(finite, key=lambda record: record.train_loss) if finite and multiple == 1.0 else None


def sample_text(sample: Sample | None, digits: int) -> str:
    """As a cell: mean ± half of what seeds differ by."""
    if sample is None:
        return "–"
    if math.isinf(sample.mean):
        return "diverged"
    spread = f" ± {sample.half_range:.{digits}f}" if len(sample.values) > 1 else ""
    return f"{sample.mean:.{digits}f}{spread}"


def _row(outcome: Outcome, quantity: str, multiple: float) -> Row:
    arm, digits = outcome.arm, DIGITS.get(quantity, 2)
    printed = [p.text() for p in arm.printed if p.quantity == quantity and p.steps == multiple]
    sample = outcome.sample(quantity, multiple)
    ours, record = sample_text(sample, digits), best_record(outcome, multiple)
    if sample is None and record is not None and (value := record.value(quantity)) is not None:
        tried = len(outcome.swept)
        ours = f"{value:.{digits}f} (sweep: {tried} of {tried + len(outcome.missing)})"
    label = arm.label if multiple == 1.0 else f"{arm.label}, {multiple:g}× the steps"
    value = None if sample is None else sample.mean
    return Row(arm.name, label, quantity, multiple, "".join(printed) or "–", value, _cells(outcome, multiple), ours)


def _cells(outcome: Outcome, multiple: float) -> tuple[str, ...]:
    runs = list(outcome.runs.get(multiple, {}).values()) or ([] if multiple != 1.0 else list(outcome.swept))
    if not runs:
        return ("–",) * 5
    seconds = sum(record.seconds for record in runs) / len(runs)
    chosen = best_record(outcome, multiple) or runs[0]
    seeds = len(outcome.runs.get(multiple, {})) or 1
    log = f"{chosen.item}-{chosen.scale} {chosen.key[:8]}"
    return (f"{chosen.steps}", f"{seconds:.0f} s", f"{seeds}", _best_text(outcome), log)


def _best_text(outcome: Outcome) -> str:
    """The best rate, and the embedding's where it is not the size's own."""
    if outcome.best is None:
        return "–"
    rate = f"{outcome.best:g}" + " (at the edge)" * outcome.edge
    if outcome.best_embedding is None:
        return rate
    return f"{rate}, embedding {outcome.best_embedding:g}" + " (at the edge)" * outcome.embedding_edge


def _wall_clock(ratio: Ratio | None, outcome: Outcome, baseline: Outcome) -> Ratio | None:
    """The ratio times that of the paces, both measured with nothing else beside them; None where one is not."""
    if ratio is None or outcome.pace is None or baseline.pace is None:
        return None
    return Ratio(ratio.value * outcome.pace.step_seconds / baseline.pace.step_seconds, ratio.bound)


def _ratio_text(ratio: Ratio | None) -> str:
    return "–" if ratio is None or math.isnan(ratio.value) else ratio.text()

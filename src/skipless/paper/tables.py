"""All tables by name, and what is known of one as a page: Markdown and JSON."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from skipless import __version__
from skipless.console import count
from skipless.paper.claims import Claim, Results, Verdict, made_at
from skipless.paper.experiments import MOST_BEYOND, PaperTable, Setting
from skipless.paper.records import Record
from skipless.paper.runs import Outcome, Ratio, Sample, Sweep, missing, outcome_of, rates_at, rival_of, steps_ratio

# Every table, in the paper's order and then those beyond it, and the file that states it.
_FILES = {
    "kernels": "extensions",
    "baselines": "skipless",
    "activations": "skipless",
    "skips": "skips",
    "c4": "skips",
    "c4-skips": "skips",
    "c4-longer": "extensions",
    "longer": "extensions",
    "depth": "skipless",
    "u-spa-schedules": "skipless",
    "query-key": "skipless",
    "orthogonal": "skipless",
    "positions": "skipless",
    "positions-longer": "skipless",
    "stable": "skips",
    "separate": "skips",
    "downstream": "extensions",
    "training-kernels": "extensions",
    "optimisers": "extensions",
    "closing": "extensions",
    "kept-orthogonal": "extensions",
    "rounding": "extensions",
    "depth-steady": "extensions",
    "mirrored-factors": "mirrored",
    "mirrored": "mirrored",
    "mirrored-longer": "mirrored",
    "mirrored-long": "mirrored",
    "mirrored-depth": "mirrored",
    "mirrored-readers": "mirrored",
    "mirrored-others": "mirrored",
    "low-bits": "mirrored",
    "blocks": "mirrored",
    "backwards": "mirrored",
    "vision": "vision",
}


class Tables(Mapping[str, PaperTable]):
    """All tables by name. A table's file is imported when the table is asked for."""

    def __getitem__(self, name: str) -> PaperTable:
        stated = vars(import_module(f"skipless.paper.{_FILES[name]}")).values()
        return next(each for each in stated if isinstance(each, PaperTable) and each.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


TABLES = Tables()

HEAD = ("arm", "paper", "ours", "steps", "time", "seeds", "rate", "log")
RATIO_HEAD = ("arm", "paper", "steps to the baseline", "the same in wall-clock", "against Pre-LN, same optimiser")
DIGITS = {"train_loss": 3, "valid_loss": 3, "valid_perplexity": 1, "other_loss": 3}
_DRAWN = "Training curves, and the rates tried"
_NAMES = {
    "train_loss": "Training loss",
    "valid_perplexity": "Validation perplexity",
    "valid_loss": "Validation loss",
    "other_loss": "Loss on another text",
    "accuracy": "Accuracy in validation, per cent",
}


@dataclass(frozen=True)
class Summary:
    """What is known of a table at one scale.

    to_do: runs of the usual arms that are missing; further: of each other arm that has begun, by name.
    """

    table: PaperTable
    setting: Setting
    outcomes: Mapping[str, Outcome]
    verdicts: Sequence[tuple[Claim, Verdict]]
    to_do: int
    further: Mapping[str, int]


def gather(table: PaperTable, setting: Setting, records: Mapping[str, Record]) -> Summary:
    """Look everything up, and judge the claims where the scale is one they were written for."""
    known = {arm.name: outcome_of(table, arm, setting, records) for arm in table.arms}
    core = {arm.name for arm in table.chosen(setting.scale)}
    shown = {name: outcome for name, outcome in known.items() if name in core or outcome.rates.tried}
    results = Results(shown, setting.text.unigram)
    verdicts = [(claim, claim.judge(results)) for claim in made_at(table.claims, setting.scale)]
    beyond = [run.arm for run in missing([table], setting, records, ("all",)) if run.arm in shown.keys() - core]
    return Summary(table, setting, shown, verdicts, len(missing([table], setting, records)), Counter(beyond))


def markdown(summary: Summary, figure: str = "") -> str:
    """The page; figure is the picture's file name beside it."""
    table, setting = summary.table, summary.setting
    parts = [f"# {table.title}\n", f"Reference: {table.reference}. Scale: `{setting.scale.name}`.\n"]
    parts += [f"{table.note}\n"] if table.note else []
    parts.append(_how(summary))
    if figure:
        drawn = "Training curves, the rates tried, and measures by block" if measured_blocks(summary) else _DRAWN
        shown = "Kernels by block and step" if table.measure == "probes" else drawn
        parts.append(f"![{shown}]({figure})\n")
    if found := grid(table, summary.outcomes):
        words = f"; in brackets the steps to the loss of {table.baseline}, over its own" if table.baseline else ""
        parts.append(
            f"## At a glance: {_glanced(table).replace('train_', 'training ')}{words}\n\n{markdown_table(*found)}"
        )
    if table.side_by_side:
        parts.append(f"## Side by side\n\n{markdown_table(*_side_by_side(summary))}{_by_block(summary)}")
    for quantity in () if table.side_by_side else table.quantities:
        title = _NAMES.get(quantity, quantity.replace("_", " ").capitalize())
        parts.append(f"## {title}\n\n{markdown_table(HEAD, [row.line() for row in rows(summary.outcomes, quantity)])}")
    if lines := ratio_rows(table, summary.outcomes):
        parts.append(f"## Steps to the loss of {table.baseline}\n\n{markdown_table(RATIO_HEAD, lines)}")
    parts += [_claims(summary), _sweeps(summary), _missing(summary)]
    return "\n".join(part for part in parts if part)


def as_json(summary: Summary) -> dict[str, Any]:
    """Every number of the page."""
    table, setting = summary.table, summary.setting
    found, tuned = summary.outcomes, bool(table.embedding_rates)
    glance = grid(table, found)

    def losses(sweep: Sweep) -> dict[str, float | None]:
        return {f"{rate:g}": _finite(record.train_loss) for rate, record in sweep.tried.items()}

    tables = {
        quantity: [
            {
                "arm": row.arm,
                "label": row.label,
                "multiple": row.multiple,
                "paper": row.paper,
                "ours": _finite(row.value),
                "text": row.ours,
                **dict(zip(HEAD[3:], row.cells, strict=True)),
            }
            for row in rows(found, quantity)
        ]
        for quantity in table.quantities
    }
    return {
        "skipless": __version__,
        "item": table.name,
        "reference": table.reference,
        "scale": setting.scale.name,
        "text": setting.text.to_json(),
        "rates": setting.rates,
        "seeds": setting.seeds,
        **({"glance": [list(line) for line in (glance[0], *glance[1])]} if glance else {}),
        "tables": tables,
        "ratios": [dict(zip(RATIO_HEAD, line, strict=True)) for line in ratio_rows(table, found)],
        "bands": [{"claim": claim.text(), "mark": v.mark, "detail": v.detail} for claim, v in summary.verdicts],
        "sweeps": {arm: losses(outcome.rates) for arm, outcome in found.items()},
        **({"embedding_sweeps": {arm: losses(outcome.embeddings) for arm, outcome in found.items()}} if tuned else {}),
        "missing": summary.to_do,
    }


@dataclass(frozen=True)
class Row:
    """One arm at one step multiple, for one quantity; value is None until it has been run."""

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
    """The rows of one quantity, in the table's order of arms."""
    return [
        _row(outcome, quantity, multiple)
        for outcome in outcomes.values()
        for multiple in sorted({1.0, *outcome.runs, *(p.steps for p in outcome.arm.printed if p.quantity == quantity)})
    ]


def ratio_rows(table: PaperTable, outcomes: Mapping[str, Outcome]) -> list[tuple[str, ...]]:
    """How many times the baseline's steps an arm needs for its loss; lines under RATIO_HEAD. None without one."""
    baseline, target = outcomes.get(table.baseline), _target(table, outcomes)
    if baseline is None or target is None:
        return []
    lines = []
    for outcome in outcomes.values():
        if outcome is baseline:
            continue
        ratio, against = _ratio_to(outcome, target), _ratio_to(outcome, rival_of(outcome, outcomes))
        printed = [p.text() for p in outcome.arm.printed if p.quantity == "steps_ratio"]
        cells = (_ratio_text(ratio), _ratio_text(_wall_clock(ratio, outcome, baseline)), _ratio_text(against))
        lines.append((outcome.arm.label, "".join(printed), *cells))
    return lines


def grid(table: PaperTable, outcomes: Mapping[str, Outcome]) -> tuple[Sequence[str], list[Sequence[str]]] | None:
    """Head and lines of the usual steps at a glance, where all arms are named "kind/way": losses, and steps ratios."""
    names = [arm.name.split("/") for arm in table.arms]
    if any(len(parts) != 2 for parts in names):
        return None
    kinds, ways = (tuple(dict.fromkeys(side)) for side in zip(*names, strict=True))
    lines: list[Sequence[str]] = [
        (kind, *(_glance(table, outcomes, outcomes.get(f"{kind}/{way}")) for way in ways)) for kind in kinds
    ]
    return ("", *ways), lines


def _glanced(table: PaperTable) -> str:
    """The quantity that is shown at a glance."""
    return "accuracy" if "accuracy" in table.quantities else "train_loss"


def _glance(table: PaperTable, outcomes: Mapping[str, Outcome], outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    target = _target(table, outcomes) if outcome.arm.name != table.baseline else None
    ratio = _ratio_to(outcome, target)
    loss = _row(outcome, _glanced(table), 1.0).ours
    return loss if ratio is None or math.isnan(ratio.value) else f"{loss} ({ratio.text()}×)"


def _target(table: PaperTable, outcomes: Mapping[str, Outcome]) -> Sample | None:
    """The loss that arms are to reach: the baseline's."""
    baseline = outcomes.get(table.baseline)
    return baseline.sample("train_loss") if baseline is not None else None


def _ratio_to(outcome: Outcome, target: Sample | None) -> Ratio | None:
    """Steps the arm needs for the target's loss, over the usual number; None where there is no target."""
    return None if target is None else steps_ratio(target.mean, outcome.losses)


def _side_by_side(summary: Summary) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and lines of one table: quantities by arms, at the best rate."""
    found = summary.outcomes
    lines: list[Sequence[str]] = [
        (quantity.replace("_", " "), *(_significant(outcome.sample(quantity)) for outcome in found.values()))
        for quantity in summary.table.quantities
    ]
    lines.append(("seeds", *(str(len(outcome.runs.get(1.0, {}))) for outcome in found.values())))
    return ("", *found), lines


def _significant(sample: Sample | None) -> str:
    """Three digits, and what seeds differ by."""
    if sample is None:
        return "–"
    spread = f" ± {sample.half_range:.1g}" if len(sample.values) > 1 else ""
    return f"{sample.mean:.3g}{spread}"


def measured_blocks(summary: Summary) -> dict[str, dict[str, tuple[range, list[float]]]]:
    """Measure, then arm: the blocks' numbers and the first seed's values. Block 0 is the embedding."""
    first_seeds = {name: outcome.runs.get(1.0, {}).get(0) for name, outcome in summary.outcomes.items()}
    found = {}
    for quantity in (*summary.table.quantities, *summary.table.profiles):
        first = 0 if quantity == "readout_rise" else 1
        values = {name: run.by_block[quantity] for name, run in first_seeds.items() if run and quantity in run.by_block}
        if values:
            found[quantity] = {name: (range(first, first + len(own)), own) for name, own in values.items()}
    return found


def _by_block(summary: Summary) -> str:
    """Numbers of nine blocks, for the quantities that have them."""
    parts = []
    for quantity, arms in measured_blocks(summary).items():
        longest = max((blocks for blocks, _ in arms.values()), key=len)
        shown = sorted({round(index * (len(longest) - 1) / 8) for index in range(9)})
        lines = [
            (summary.outcomes[name].arm.label, *(f"{own[at]:.3g}" if at < len(own) else "–" for at in shown))
            for name, (_, own) in arms.items()
        ]
        head = ("arm", *(str(longest[at]) for at in shown))
        parts.append(f"\n## By block: {quantity.replace('_', ' ')}\n\n{markdown_table(head, lines)}")
    return "".join(parts)


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
    return (f"{chosen.steps}", f"{seconds:.0f} s", f"{seeds}", _best_text(outcome, multiple), log)


def _best_text(outcome: Outcome, multiple: float) -> str:
    """The best rate, and the embedding's where it is not the scale's own, as runs of this length have them."""
    if outcome.best is None:
        return "–"
    best, embedding = rates_at(outcome, multiple)
    rate = f"{best:g}" + " (at the edge)" * outcome.rates.edge
    if embedding is None:
        return rate
    return f"{rate}, embedding {embedding:g}" + " (at the edge)" * outcome.embeddings.edge


def _wall_clock(ratio: Ratio | None, outcome: Outcome, baseline: Outcome) -> Ratio | None:
    """The ratio times that of the step times, both taken with nothing beside them; None where one is not known."""
    if ratio is None or outcome.timing is None or baseline.timing is None:
        return None
    return Ratio(ratio.value * outcome.timing.step_seconds / baseline.timing.step_seconds, ratio.bound)


def _ratio_text(ratio: Ratio | None) -> str:
    return "–" if ratio is None or math.isnan(ratio.value) else ratio.text()


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = "|".join("---" for _ in head)
    body = "".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |\n" for line in lines)
    return f"| {' | '.join(head)} |\n|{rule}|\n{body}"


def _how(summary: Summary) -> str:
    setting = summary.setting
    runs = [record for outcome in summary.outcomes.values() for record in all_runs(outcome)]
    devices = sorted({f"{record.device}, torch {record.torch}" for record in runs})
    beside = max((record.jobs for record in runs), default=1)
    times = f" Times are of up to {beside} runs side by side on one device." if beside > 1 else ""
    commits = ", ".join(sorted({record.commit for record in runs if record.commit}))
    law = " Deeper arms are not tuned: they take the rates of the shallowest by a law over depth."
    tuned = (
        f"Every arm: {count(setting.rates, 'rate')} of {{1, 2, 3, 5}}·10ⁿ around the expected one, another beyond "
        f"the best while that lies at the edge ({MOST_BEYOND} at most), seed 0, chosen by training loss; then "
        f"{count(setting.seeds, 'seed')} at the best rate{_headline_seeds(summary)}.{_embedding_words(summary)}"
        f"{law * any(arm.follows for arm in summary.table.arms)}"
    )
    words = "Final losses are means over the last 200 steps, or a tenth; ± is half the range over seeds."
    where = f"Runs on: {'; '.join(devices) or 'none yet'}{f'; commit {commits}' if commits else ''}."
    return f"{setting.text.kind}: {setting.text.describe()}. {tuned} {words}{times} {where}\n"


def _headline_seeds(summary: Summary) -> str:
    setting = summary.setting
    own = {setting.seeds_of(arm) for arm in summary.table.arms} - {setting.seeds}
    return f" ({', '.join(map(str, sorted(own)))} of some arms)" if own else ""


def _embedding_words(summary: Summary) -> str:
    table = summary.table
    if len(table.embedding_rates) < 2 or summary.setting.rates == 1:
        scale, start = summary.setting.scale, table.embedding_start
        own = scale.embedding(table.arms[0].corpus) if start is None else start
        known = scale.judged and scale.width and own <= 1e-3  # measured at this rate, not at the higher one of `cpu`
        lower = " Tuned, networks end 0.3 to 0.5 nats lower (`mirrored`)." if known else ""
        return f" The embedding's rate is {own:g} for all and was not tuned.{lower}"
    tried = ", ".join(f"{rate:g}" for rate in table.embedding_rates)
    return (
        f" That is at an embedding rate of {table.embedding_start:g}; at the best rate the embedding's is then tuned "
        f"by the same rule over {tried}, and seeds run at the best pair."
    )


def _claims(summary: Summary) -> str:
    if not summary.setting.scale.judged:
        return "## Claims\n\nNot judged at this scale: its runs are too short to mean anything.\n"
    marks = {"pass": "pass", "fail": "**fail**", "not run": "not run"}
    lines = [(claim.text(), marks[verdict.mark], verdict.detail or "–") for claim, verdict in summary.verdicts]
    if not lines:
        return ""
    return f"## Claims, stated before the runs\n\n{markdown_table(('claim', 'verdict', 'numbers'), lines)}"


def _sweeps(summary: Summary) -> str:
    lines = []
    for outcome in summary.outcomes.values():
        own = summary.setting.scale.embedding(outcome.arm.corpus) if summary.table.embedding_rates else None
        lines.append((outcome.arm.label, "; ".join(_tried(record, own) for record in outcome.swept) or "not run"))
    head = "rate, embedding's rate: loss" if summary.table.embedding_rates else "rate: loss"
    return f"## Rates tried: training loss\n\n{markdown_table(('arm', head), lines)}"


def _tried(record: Record, own: float | None) -> str:
    """A run of a sweep; own: the scale's own embedding rate, where the embedding's rate is to be shown."""
    rates = f"{record.rate:g}" + ("" if own is None else f", {record.embedding_rate or own:g}")
    loss = f"{record.train_loss:.3f}" if math.isfinite(record.train_loss) else f"diverged at step {record.diverged_at}"
    return f"{rates}: {loss}"


def _missing(summary: Summary) -> str:
    command = f"skipless reproduce {summary.table.name} --scale {summary.setting.scale.name} --data …"
    begun = [f"{summary.outcomes[name].arm.label} ({count(left, 'run')})" for name, left in summary.further.items()]
    further = [arm.label for arm in summary.table.arms if arm.name not in summary.outcomes]
    optional = {"not complete": begun, "not run": further}
    left = [f"{words}: {'; '.join(labels)}" for words, labels in optional.items() if labels]
    more = f" Only with `--arms all`, and {'; '.join(left)}." if left else ""
    if not summary.to_do:
        return f"All runs of the usual arms are done.{more}\n" if more else "All runs are done.\n"
    are = "is" if summary.to_do == 1 else "are"
    return f"At least {count(summary.to_do, 'run')} {are} still missing: `{command}` goes on.{more}\n"


def all_runs(outcome: Outcome) -> list[Record]:
    """Every run of an arm: those of its sweeps, and those at the best rate."""
    return [*outcome.swept, *(record for runs in outcome.runs.values() for record in runs.values())]


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)

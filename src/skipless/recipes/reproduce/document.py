"""An item's results as a page of Markdown and as JSON, from its records alone."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipless import __version__
from skipless.recipes.reproduce.bands import Findings, Verdict
from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.job import Setting
from skipless.recipes.reproduce.kernel_checks import Check
from skipless.recipes.reproduce.outcome import Outcome, outcome_of
from skipless.recipes.reproduce.plan import missing
from skipless.recipes.reproduce.rates import MOST_BEYOND
from skipless.recipes.reproduce.record import Record
from skipless.recipes.reproduce.table import HEAD, RATIO_HEAD, grid, ratio_rows, rows

_NAMES = {"train_loss": "Training loss", "valid_perplexity": "Validation perplexity", "valid_loss": "Validation loss"}


@dataclass(frozen=True)
class Summary:
    """What is known of an item at one size.

    to_do: runs of the usual arms that are missing; further: of each other arm that has begun, by name.
    """

    item: Item
    setting: Setting
    outcomes: Mapping[str, Outcome]
    verdicts: Sequence[tuple[str, Verdict]]
    to_do: int
    further: Mapping[str, int]


def gather(item: Item, setting: Setting, records: Mapping[str, Record]) -> Summary:
    """Look everything up, and judge the bands where the size is one they were written for."""
    known = {arm.name: outcome_of(item, arm, setting, records) for arm in item.arms}
    core = {arm.name for arm in item.chosen(setting.scale)}
    shown = {name: outcome for name, outcome in known.items() if name in core or outcome.sweep}
    findings = Findings(shown, setting.text.unigram)
    judged = item.bands if setting.scale.judged else ()
    verdicts = [(band.claim(), band.judge(findings)) for band in judged]
    beyond = [job.arm for job in missing([item], setting, records, ("all",)) if job.arm in shown.keys() - core]
    return Summary(item, setting, shown, verdicts, len(missing([item], setting, records)), Counter(beyond))


def markdown(summary: Summary, figure: str = "") -> str:
    """The page; figure is the picture's file name beside it."""
    item, setting = summary.item, summary.setting
    parts = [f"# {item.title}\n", f"Reference: {item.reference}. Scale: `{setting.scale.name}`.\n"]
    parts += [f"{item.note}\n"] if item.note else []
    parts.append(_how(summary))
    if figure:
        shown = "Kernels by block and step" if item.measure == "probes" else "Training curves, and the rates tried"
        parts.append(f"![{shown}]({figure})\n")
    if found := grid(item, summary.outcomes):
        words = f"; in brackets the steps to the loss of {item.baseline}, over its own" if item.baseline else ""
        parts.append(f"## At a glance: training loss{words}\n\n{table(*found)}")
    for quantity in item.quantities:
        title = _NAMES.get(quantity, quantity.replace("_", " ").capitalize())
        parts.append(f"## {title}\n\n{table(HEAD, [row.line() for row in rows(summary.outcomes, quantity)])}")
    if lines := ratio_rows(item, summary.outcomes):
        parts.append(f"## Steps to the loss of {item.baseline}\n\n{table(RATIO_HEAD, lines)}")
    parts += [_bands(summary), _sweeps(summary), _missing(summary)]
    return "\n".join(part for part in parts if part)


def as_json(summary: Summary) -> dict[str, Any]:
    """Every number of the page."""
    item, setting = summary.item, summary.setting
    glance = grid(item, summary.outcomes)
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
            for row in rows(summary.outcomes, quantity)
        ]
        for quantity in item.quantities
    }
    return {
        "skipless": __version__,
        "item": item.name,
        "reference": item.reference,
        "scale": setting.scale.name,
        "text": setting.text.to_json(),
        "rates": setting.rates,
        "seeds": setting.seeds,
        **({"glance": [list(line) for line in (glance[0], *glance[1])]} if glance else {}),
        "tables": tables,
        "ratios": [dict(zip(RATIO_HEAD, line, strict=True)) for line in ratio_rows(item, summary.outcomes)],
        "bands": [{"claim": claim, "mark": v.mark, "detail": v.detail} for claim, v in summary.verdicts],
        "sweeps": {
            name: {f"{rate:g}": _finite(record.train_loss) for rate, record in outcome.sweep.items()}
            for name, outcome in summary.outcomes.items()
        },
        **({"embedding_sweeps": _embedding_sweeps(summary)} if item.embedding_rates else {}),
        "missing": summary.to_do,
    }


def kernels_markdown(item: Item, checks: Sequence[Check], figure: str = "") -> str:
    """The page of the item that trains nothing."""
    lines = [(c.where, c.claim, c.ours, "pass" if c.holds else "**fail**") for c in checks]
    picture = f"![Kernels by depth]({figure})\n" if figure else ""
    body = table(("figure", "claim", "ours", "verdict"), lines)
    return "\n".join(part for part in (f"# {item.title}\n", f"{item.reference}. {item.note}\n", picture, body) if part)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = "|".join("---" for _ in head)
    body = "".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |\n" for line in lines)
    return f"| {' | '.join(head)} |\n|{rule}|\n{body}"


def _how(summary: Summary) -> str:
    setting = summary.setting
    runs = [record for outcome in summary.outcomes.values() for record in _all_runs(outcome)]
    devices = sorted({f"{record.device}, torch {record.torch}" for record in runs})
    beside = max((record.jobs for record in runs), default=1)
    times = f" Times are of up to {beside} runs side by side on one device." if beside > 1 else ""
    commits = ", ".join(sorted({record.commit for record in runs if record.commit}))
    tuned = (
        f"Every arm: {count(setting.rates, 'rate')} of {{1, 2, 3, 5}}·10ⁿ around the expected one, another beyond "
        f"the best while that lies at the edge ({MOST_BEYOND} at most), seed 0, chosen by training loss; then "
        f"{count(setting.seeds, 'seed')} at the best rate{_headline_seeds(summary)}.{_embedding_words(summary)}"
        f"{_law_words(summary.item)}"
    )
    words = "Final losses are means over the last 200 steps, or a tenth; ± is half the range over seeds."
    where = f"Runs on: {'; '.join(devices) or 'none yet'}{f'; commit {commits}' if commits else ''}."
    return f"Text: {setting.text.describe()}. {tuned} {words}{times} {where}\n"


def _headline_seeds(summary: Summary) -> str:
    setting = summary.setting
    own = {setting.seeds_of(arm) for arm in summary.item.arms} - {setting.seeds}
    return f" ({', '.join(map(str, sorted(own)))} of some arms)" if own else ""


def _embedding_words(summary: Summary) -> str:
    item = summary.item
    if len(item.embedding_rates) < 2 or summary.setting.rates == 1:
        return f" The embedding's rate is {item.embedding_start:g} for all." if item.embedding_rates else ""
    tried = ", ".join(f"{rate:g}" for rate in item.embedding_rates)
    return (
        f" That is at an embedding rate of {item.embedding_start:g}; at the best rate the embedding's is then tuned by "
        f"the same rule over {tried}, and seeds run at the best pair."
    )


def _law_words(item: Item) -> str:
    followers = any(arm.follows for arm in item.arms)
    return " Deeper arms are not tuned: they take the rates of the shallowest by a law over depth." if followers else ""


def count(number: int, name: str) -> str:
    """ "1 run", "2 runs", "0 runs"."""
    return f"{number} {name}{'s' * (number != 1)}"


def _bands(summary: Summary) -> str:
    if not summary.setting.scale.judged:
        return "## Bands\n\nNot judged at this scale: its runs are too short to mean anything.\n"
    marks = {"pass": "pass", "fail": "**fail**", "not run": "not run"}
    lines = [(claim, marks[verdict.mark], verdict.detail or "–") for claim, verdict in summary.verdicts]
    if not lines:
        return ""
    return f"## Bands, stated before the runs\n\n{table(('claim', 'verdict', 'numbers'), lines)}"


def _sweeps(summary: Summary) -> str:
    lines = []
    for outcome in summary.outcomes.values():
        own = summary.setting.scale.embedding(outcome.arm.corpus) if summary.item.embedding_rates else None
        lines.append((outcome.arm.label, "; ".join(_tried(record, own) for record in outcome.swept) or "not run"))
    head = "rate, embedding's rate: loss" if summary.item.embedding_rates else "rate: loss"
    return f"## Rates tried: training loss\n\n{table(('arm', head), lines)}"


def _tried(record: Record, own: float | None) -> str:
    """A run of a sweep; own: the size's own embedding rate, where the embedding's rate is to be shown."""
    rates = f"{record.rate:g}" + ("" if own is None else f", {record.embedding_rate or own:g}")
    loss = f"{record.train_loss:.3f}" if math.isfinite(record.train_loss) else f"diverged at step {record.diverged_at}"
    return f"{rates}: {loss}"


def _embedding_sweeps(summary: Summary) -> dict[str, dict[str, float | None]]:
    """Losses by the embedding's rate, at each arm's best rate."""
    return {
        name: {f"{rate:g}": _finite(record.train_loss) for rate, record in outcome.embedding_sweep.items()}
        for name, outcome in summary.outcomes.items()
    }


def _missing(summary: Summary) -> str:
    command = f"skipless reproduce {summary.item.name} --scale {summary.setting.scale.name} --data …"
    begun = [f"{summary.outcomes[name].arm.label} ({count(left, 'run')})" for name, left in summary.further.items()]
    further = [arm.label for arm in summary.item.arms if arm.name not in summary.outcomes]
    optional = {"not complete": begun, "not run": further}
    left = [f"{words}: {'; '.join(labels)}" for words, labels in optional.items() if labels]
    more = f" Only with `--arms all`, and {'; '.join(left)}." if left else ""
    if not summary.to_do:
        return f"All runs of the usual arms are done.{more}\n" if more else "All runs are done.\n"
    are = "is" if summary.to_do == 1 else "are"
    return f"At least {count(summary.to_do, 'run')} {are} still missing: `{command}` goes on.{more}\n"


def _all_runs(outcome: Outcome) -> list[Record]:
    return [*outcome.swept, *(record for runs in outcome.runs.values() for record in runs.values())]


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)

"""README.md of a folder of results: every figure and table of the paper by its number, and whether it came out."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skipless.files import read_json
from skipless.paper.claims import Mark, quantity_of
from skipless.paper.experiments import PaperTable, Setting
from skipless.paper.records import ResultsFolder
from skipless.paper.tables import TABLES, Summary, all_runs, gather, markdown_table

HEAD = ("paper", "what it shows", "does it come out so?", "what was run", "command")
_FAILED_HEAD = ("paper", "claim", "numbers")
_C4 = "on C4: cannot be had; in C4's shape on other text: "


@dataclass(frozen=True)
class Item:
    """A figure or table of the paper, or a part of one: which of our tables holds it.

    quantities: only claims about these count, where a table holds two items. words: what stands for a verdict where
    there is nothing to run. before: words in front of the verdict.
    """

    number: str
    shows: str
    table: str = ""
    quantities: tuple[str, ...] = ()
    words: str = ""
    before: str = ""


_TRAINING, _VALIDATION = ("train_loss",), ("valid_loss", "valid_perplexity")
FIGURES = (
    Item("Fig. 1", "kernels by depth: standard attention, U-SPA, E-SPA", "kernels"),
    Item("Fig. 2", "networks without skips beside Pre-LN", "baselines"),
    Item("Fig. 3", "normalised skips, with and without norms", "skips"),
    Item("Fig. 4a", "C4: networks without skips, validation", "c4", _VALIDATION, before=_C4),
    Item("Fig. 4b", "C4: E-SPA trained longer, until it matches Pre-LN", "c4-longer", before=_C4),
    Item("Fig. 5", "kernels of inputs with repeated tokens", "kernels"),
    Item("Fig. 6", "the diagonal with and without the correction for repeated tokens", "kernels"),
    Item("Fig. 7", "Fig. 1 with norms and skips", "kernels"),
    Item("Fig. 8", "the scale of W_Q and W_K at the start", "query-key"),
    Item("Fig. 9", "orthogonal against Gaussian initialisation", "orthogonal"),
    Item("Fig. 10", "positions, and none: training", "positions", _TRAINING),
    Item("Fig. 10", "the same after four times the steps", "positions-longer", _TRAINING),
    Item("Fig. 11", "stable skips, by their weight", "stable"),
    Item("Fig. 12", "a skip around attention or the MLP alone, by its weight", "separate"),
    Item("Fig. 13", "C4: networks without skips, training", "c4", _TRAINING, before=_C4),
    Item("Fig. 14", "E-SPA trained longer, until it matches Pre-LN", "longer"),
    Item("Fig. 15", "kernels of E-SPA during training", "training-kernels"),
)
PRINTED = (
    Item("Table 1", "activations, with and without norms: training", "activations", _TRAINING),
    Item("Table 2", "C4: kinds of skips, with and without norms", "c4-skips", before=_C4),
    Item("Table 3", "E-SPA of 36, 72 and 108 blocks, by length of training", "depth"),
    Item("Table 4", "Table 1 in validation", "activations", _VALIDATION),
    Item("Table 5", "Fig. 10 in validation", "positions", _VALIDATION),
    Item("Table 5", "the same after four times the steps", "positions-longer", _VALIDATION),
    Item("Table 6", "zero-shot accuracy on five tasks", "downstream", before=_C4),
    Item("Table 7", "the weights of Table 2's skips", words="not a result: the arms of Table 2 have these weights"),
)
IN_WORDS = (Item("App. C", "schedules of U-SPA: no noticeable difference", "u-spa-schedules"),)


def results_index(out: Path, folders: Sequence[ResultsFolder]) -> str:
    """The page: figures, tables, what the paper says in words, tables of our own, and the claims that do not hold."""
    pages = _Pages(out, folders)
    held = {item.table for item in (*FIGURES, *PRINTED, *IN_WORDS)}
    own = tuple(Item("ours", table.title, name) for name, table in TABLES.items() if name not in held)
    sections = {"Figures": FIGURES, "Tables": PRINTED, "In the paper's words": IN_WORDS, "Beyond the paper": own}
    parts = [
        "# Results\n",
        "Every table and figure of the paper by its number, and tables of our own beyond it. Claims were stated\n"
        "before the runs, from what the paper says: *agrees* is all of them, *partly* some, *no* none. Nothing was\n"
        "trained at the paper's size, which takes days for each; its training texts, WikiText-103 and C4, are not\n"
        "among our data. So it is signs and orders that can agree, not losses. Networks are blocks × width. How to\n"
        "read a page, and what each command needs: [docs/reproducing.md](../docs/reproducing.md).\n",
    ]
    for title, items in sections.items():
        lines = [line for item in items for line in pages.lines(item)]
        parts.append(f"## {title}\n\n{markdown_table(HEAD, lines)}")
    lines = [line for name in TABLES for line in pages.failed(name, (*FIGURES, *PRINTED, *IN_WORDS))]
    if lines:
        parts.append(f"## Claims that do not hold\n\n{markdown_table(_FAILED_HEAD, lines)}")
    parts.append("Made from the logs by `skipless reproduce --index`.\n")
    return "\n".join(parts)


@dataclass(frozen=True)
class _Judged:
    """A claim as judged: what it is about, in words, its mark and the numbers."""

    quantity: str
    text: str
    mark: Mark
    detail: str


class _Pages:
    """The pages of a folder, each looked up once."""

    def __init__(self, out: Path, folders: Sequence[ResultsFolder]):
        self.out = out
        self._summaries: dict[str, list[Summary]] = {}
        for name, table in TABLES.items():
            if not table.kernels:
                self._summaries[name] = list(_summaries(table, out, folders))

    def lines(self, item: Item) -> Iterator[tuple[str, ...]]:
        """A line for each scale that the item's table has a page of; one that says so where it has none."""
        if not item.table:
            yield item.number, item.shows, item.words, "–", "–"
        elif TABLES[item.table].kernels:
            found = [check for check in self._checks(item.table) if _names(check.quantity, item.number)]
            title = _link(self.out, item.table, item.shows)
            yield item.number, title, _verdict(found) if found else "not run", "theory, float64", _command(item.table)
        elif summaries := self._summaries[item.table]:
            for summary in summaries:
                title = _link(self.out, f"{item.table}-{summary.setting.scale.name}", item.shows)
                yield item.number, title, _agreement(summary, item), _size(summary), _trained(summary.table, summary)
        else:
            words = f"{item.before}not run"
            yield item.number, item.shows, words, "–", _trained(TABLES[item.table])

    def failed(self, name: str, items: Sequence[Item]) -> Iterator[tuple[str, ...]]:
        """The claims of a table that do not hold."""
        where = ", ".join(dict.fromkeys(item.number for item in items if item.table == name)) or "ours"
        if TABLES[name].kernels:
            found, page = self._checks(name), name
            yield from ((where, _link(self.out, page, each.text), each.detail) for each in found if each.mark == "fail")
            return
        for summary in self._summaries[name]:
            page = f"{name}-{summary.setting.scale.name}"
            for each in _judged(summary):
                if each.mark == "fail":
                    yield where, f"{_link(self.out, page, name)}: {each.text}", each.detail

    def _checks(self, name: str) -> list[_Judged]:
        if not _has_page(self.out, name):
            return []
        checks = read_json(self.out / f"{name}.json", lambda page: list(page["checks"]))
        return [
            _Judged(
                str(check["where"]),
                str(check["claim"]),
                "pass" if check["holds"] is True else "fail",
                str(check["ours"]),
            )
            for check in checks
        ]


def _summaries(table: PaperTable, out: Path, folders: Sequence[ResultsFolder]) -> Iterator[Summary]:
    for folder in folders:
        texts, scale = folder.texts(table.on_images), table.scales.get(folder.scale)
        if _has_page(out, f"{table.name}-{folder.scale}") and texts and scale is not None:
            yield gather(table, Setting.of(scale, texts[0]), folder.records)


def _names(where: str, number: str) -> bool:
    """Whether "Fig. 1 and 7" names "Fig. 7"."""
    return number.split()[1] in re.findall(r"\d+", where)


def _judged(summary: Summary, quantities: tuple[str, ...] = ()) -> list[_Judged]:
    """The claims of a table that was judged, or those about some quantities."""
    found = [
        _Judged(quantity_of(claim), claim.text(), verdict.mark, verdict.detail) for claim, verdict in summary.verdicts
    ]
    return [each for each in found if not quantities or each.quantity in quantities]


def _agreement(summary: Summary, item: Item) -> str:
    if not summary.setting.scale.judged:
        return "not judged at this scale"
    words = item.before + _verdict(_judged(summary, item.quantities))
    return f"{words}; {summary.to_do} or more runs missing" if summary.to_do else words


def _verdict(claims: Sequence[_Judged]) -> str:
    """ "agrees (4 of 4 claims)", with those that have not been run."""
    marks = Counter(each.mark for each in claims)
    passed, judged = marks["pass"], marks["pass"] + marks["fail"]
    if not judged:
        return "not run" if claims else "no claim of its own"
    word = "agrees" if passed == judged else "partly" if passed else "no"
    left = f", {marks['not run']} not run" if marks["not run"] else ""
    return f"**{word}** ({passed} of {judged} claim{'s' * (judged != 1)}{left})"


def _has_page(out: Path, stem: str) -> bool:
    return (out / f"{stem}.md").is_file()


def _link(out: Path, stem: str, words: str) -> str:
    return f"[{words}]({stem}.md)" if _has_page(out, stem) else words


def _command(name: str, options: str = "") -> str:
    return f"`skipless reproduce {name}{options}`"


def _trained(table: PaperTable, summary: Summary | None = None) -> str:
    scale = summary.setting.scale.name if summary is not None else "small"
    arms = "" if all(arm.core for arm in table.arms) else " --arms all"
    tasks = " --tasks-folder …" if table.measure == "tasks" else ""
    return _command(table.name, f" --scale {scale} --data …{arms}{tasks}")


def _size(summary: Summary) -> str:
    """Depth × width, steps, seeds and the text."""
    setting = summary.setting
    models = [outcome.arm.outline(setting.scale, setting.text) for outcome in summary.outcomes.values()]
    sizes = dict.fromkeys(f"{model.depth} × {model.width}" for model in models)
    steps = sorted({record.steps for outcome in summary.outcomes.values() for record in all_runs(outcome)})
    counts = sorted({len(outcome.runs[1.0]) for outcome in summary.outcomes.values() if outcome.runs.get(1.0)})
    seeds = f"{_span(counts)} seed{'s' * (counts != [1])}" if counts else "no seed complete"
    return f"{', '.join(sizes)}, {_span(steps)} steps, {seeds}; {setting.text.title}"


def _span(values: Sequence[int]) -> str:
    return "–" if not values else f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"

"""The files of an item: results/ITEM-SCALE.md, .png and .json, all made from logs."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skipless.cli.output import write_whole
from skipless.recipes.reproduce.document import Summary, as_json, gather, kernels_markdown, markdown
from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.job import Setting
from skipless.recipes.reproduce.kernel_checks import Check, kernel_checks
from skipless.recipes.reproduce.log import ResultsFolder
from skipless.recipes.reproduce.outcome import Outcome
from skipless.recipes.reproduce.scale import Scale
from skipless.recipes.reproduce.stages import unpack
from skipless.recipes.reproduce.table import best_record, sample_text


def write_item(item: Item, setting: Setting, folder: ResultsFolder) -> tuple[Summary, list[Path]]:
    """Write the item's page, picture and data; what they show, and where they are."""
    stem = folder.path / f"{item.name}-{folder.scale}"
    summary = gather(item, setting, folder.records)
    drawn = _draw(stem.with_suffix(".png"), lambda: _picture(summary))
    page = markdown(summary, f"{stem.name}.png" if drawn else "")
    return summary, [*_written(stem, page, as_json(summary)), *drawn]


def write_kernels(item: Item, stem: Path) -> tuple[list[Check], list[Path]]:
    """The same for the item that trains nothing."""
    checks = kernel_checks()
    drawn = _draw(stem.with_suffix(".png"), _kernel_picture)
    page = kernels_markdown(item, checks, f"{stem.name}.png" if drawn else "")
    data = {"item": item.name, "reference": item.reference, "checks": [vars(check) for check in checks]}
    return checks, [*_written(stem, page, data), *drawn]


def _written(stem: Path, page: str, data: dict[str, Any]) -> list[Path]:
    paths = [stem.parent / f"{stem.name}.md", stem.parent / f"{stem.name}.json"]
    write_whole(paths[0], page.encode())
    write_whole(paths[1], json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n")
    return paths


def _draw(path: Path, picture: Callable[[], Any]) -> list[Path]:
    """The path in a list, or an empty one where there is nothing to draw or nothing to draw with."""
    try:
        from skipless.analysis.figure_style import render

        figure = picture()
        if figure is None:
            return []
        write_whole(path, render(figure, path.suffix))
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("matplotlib", "PIL"):
            raise
        print(f"no figure: {missing.name} is not installed; pip install 'skipless[plot]'", file=sys.stderr)
        return []
    return [path]


def _picture(summary: Summary) -> Any:
    from skipless.analysis.figures import Heading
    from skipless.analysis.reproduce_figure import ArmCurve, reproduction

    item, setting = summary.item, summary.setting
    heading = Heading(item.title, f"{item.reference}; scale {setting.scale.name}, {setting.text.name}")
    if item.measure == "probes":
        return _stages(summary, heading)
    curves = [ArmCurve(**drawn) for outcome in summary.outcomes.values() for drawn in _curves(outcome, setting.scale)]
    return reproduction(curves, setting.text.unigram, heading) if curves else None


def _curves(outcome: Outcome, scale: Scale) -> Iterator[dict[str, Any]]:
    """The arm at the usual length with its sweep, and at the longest of its own lengths that has been run."""
    arm, longest = outcome.arm, max((m for m in outcome.arm.lengths(scale) if outcome.runs.get(m)), default=1.0)
    for multiple in dict.fromkeys((1.0, longest)):
        record = best_record(outcome, multiple)
        if record is None or not record.curve:
            continue
        steps, losses = zip(*record.curve, strict=True)
        usual, sample = multiple == 1.0, outcome.sample("train_loss", multiple)
        seeds = [run for run in outcome.runs.get(multiple, {}).values() if run.key != record.key and run.curve]
        yield {
            "label": arm.label if usual else f"{arm.label}, {multiple:g}× the steps",
            "steps": steps,
            "losses": losses,
            "final": sample_text(sample, 2) if sample is not None else f"{record.train_loss:.2f} (unfinished)",
            "sweep": {rate: tried.train_loss for rate, tried in outcome.sweep.items()} if usual else {},
            "others": [tuple(zip(*run.curve, strict=True)) for run in seeds],
            "name": arm.name if usual else f"{arm.name}/×{multiple:g}",
        }


def _stages(summary: Summary, heading: Any) -> Any:
    from skipless.analysis.reproduce_figure import kernels_by_stage

    found = [run for o in summary.outcomes.values() for run in o.runs.get(1.0, {}).values() if run.kernels]
    if not found:
        return None
    return kernels_by_stage({f"step {step}": blocks for step, blocks in unpack(found[0].kernels).items()}, heading)


def _kernel_picture() -> Any:
    """Fig. 7, whose first three rows are Fig. 1."""
    from skipless.analysis.study import study
    from skipless.cli.kernel_figure import draw
    from skipless.cli.kernel_request import Flags, resolve

    request = resolve("fig7", Flags())
    return draw(request, [study(network, request.signals[0]) for network in request.networks])

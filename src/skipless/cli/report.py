"""`skipless report`: runs, inspections and certificates as one HTML file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from skipless.analysis.inspection import Inspection

MOST_CURVES = 24
_KINDS = (
    "a run's folder (with metrics.jsonl), a folder of `skipless reproduce` or an item's .json there, a JSON file of "
    "`skipless inspect --json`, or one of `skipless kernels --json`"
)


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Folders of runs and results, JSON files of `inspect` or `kernels`."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its heading. Default: the network's name, or how many there are.")] = "",
) -> None:
    """Put runs and networks on one page: verdicts, kernels by depth, training curves, tables.

    \b
    skipless report runs/e-spa runs/pre-ln --out report.html
    skipless kernels fig7 --json fig7.json && skipless report fig7.json
    skipless report results/baselines-small.json --out baselines.html
    """
    from skipless.analysis.report import render
    from skipless.cli.output import check_apart, check_target, write_whole
    from skipless.cli.report_results import free_name, is_results, read_results
    from skipless.recipes.reproduce.document import count

    check_apart({"--out": out}, paths)
    check_target(out)
    results = [path for path in paths if path.exists() and is_results(path)]
    inspections, curves = gather(path for path in paths if path not in results)
    found, tables, words = read_results(results, MOST_CURVES)
    curves |= {free_name(name, curves): records for name, records in found.items()}
    if words:
        print(words)
    page = render(inspections, curves, title, tables).encode()
    write_whole(out, page)
    networks = count(len(inspections), "network")
    print(f"report: {out} ({len(page) / 1000:.0f} kB, {networks}, {count(len(curves), 'run')})")


def gather(paths: Iterable[Path]) -> "tuple[list[Inspection], dict[str, list[dict[str, Any]]]]":
    """All inspections, and the records of all runs by name; equal names are numbered."""
    from dataclasses import replace

    from skipless.cli.report_results import free_name

    inspections: list[Inspection] = []
    curves: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give {_KINDS}")
        if path.is_dir():
            name = free_name(_run_name(path), curves)
            records, found = _read_run(path, name)
            if records:
                curves[name] = records
        else:
            found = _read_file(path)
        for inspection in found:
            taken = {other.model for other in inspections}
            inspections.append(replace(inspection, model=free_name(inspection.model, taken)))
    return inspections, curves


def _read_run(path: Path, name: str) -> "tuple[list[dict[str, Any]], list[Inspection]]":
    from skipless.train.metrics import read_metrics

    probes = sorted((path / "probes").glob("step-*.npz"))
    if not (path / "metrics.jsonl").is_file() and not probes:
        raise ValueError(f"{path} is a folder without metrics.jsonl; give {_KINDS}")
    records = read_metrics(path) if (path / "metrics.jsonl").is_file() else []
    normalised = _experiment(path).get("model", {}).get("norm", "none") != "none"
    return records, [_read_probe(file, name, normalised) for file in probes]


def _read_probe(file: Path, name: str, normalised: bool) -> "Inspection":
    import zipfile

    import numpy as np

    from skipless.analysis.report_sources import inspection_of_states

    try:
        with np.load(file, allow_pickle=False) as saved:
            step, states = int(saved["step"]), saved["states"]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is not a probe of a run, or damaged ({error}); delete it to leave it out") from error
    return inspection_of_states(f"{name}, step {step}", states, normalised=normalised)


def _read_file(path: Path) -> "list[Inspection]":
    from skipless.analysis.report_sources import inspection_from_dict, inspections_of_certificates

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give {_KINDS}") from error
    try:
        if isinstance(data, dict) and "networks" in data:
            return inspections_of_certificates(data)
        several = data if isinstance(data, list) else [data]
        if several and all(isinstance(one, dict) and {"blocks", "verdict"} <= one.keys() for one in several):
            return [inspection_from_dict(one) for one in several]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    raise ValueError(f"{path} holds neither an inspection nor certificates of networks; give {_KINDS}")


def _run_name(path: Path) -> str:
    return str(_experiment(path).get("name") or path.resolve().name)


def _experiment(path: Path) -> dict[str, Any]:
    """experiment.json as plain data, so that a run of another version still shows; empty where there is none."""
    file = path / "experiment.json"
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); delete it to show the run without its settings") from error
    return data if isinstance(data, dict) else {}

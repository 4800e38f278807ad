"""`skipless report`: one page from runs, certificates and results."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from skipless.console import check_apart, check_target, count, write_output
from skipless.files import PAGE_MARK, mapping, read_json, reading
from skipless.inspection.inspection import Inspection
from skipless.paper.records import read_records
from skipless.paper.tables import HEAD
from skipless.report.page import ResultTable, render
from skipless.schema import build, check
from skipless.training.run import EXPERIMENT, METRICS, read_metrics, read_probe

MOST_CURVES = 24
_KINDS = (
    "a run's folder (with metrics.jsonl), a folder of `skipless reproduce` or an item's .json there, or a JSON file of "
    "`skipless inspect --json`, `skipless kernels --json` or, of images, `skipless eval --json`"
)


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Folders of runs and results, JSON files of `inspect`, `kernels` or `eval`."
        ),
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
    check_apart({"--out": out}, paths)
    check_target(out, PAGE_MARK)
    results = [path for path in paths if path.exists() and is_results(path)]
    judged = [path for path in paths if path not in results and is_evaluation(path)]
    classes = [table for path in judged for table in read_classes(path)]
    inspections, curves = gather(path for path in paths if path not in (*results, *judged))
    found, tables, words = read_results(results, MOST_CURVES)
    curves |= {free_name(name, curves): records for name, records in found.items()}
    if words:
        print(words)
    if not (inspections or curves or tables or classes):
        raise ValueError(f"there is nothing to show in {', '.join(map(str, paths))}; give {_KINDS}")
    page = render(inspections, curves, title, tables, classes).encode()
    write_output(out, page)
    shown = {"network": inspections, "run": curves, "table": tables, "evaluation": classes}
    words = [count(len(each), name) for name, each in shown.items() if each]
    print(f"report: {out} ({', '.join([f'{len(page) / 1000:.0f} kB', *words])})")


def gather(paths: Iterable[Path]) -> tuple[list[Inspection], dict[str, list[dict[str, Any]]]]:
    """All inspections, and the records of all runs by name. Runs of one recipe have their folders' names beside it."""
    inspections: list[Inspection] = []
    curves: dict[str, list[dict[str, Any]]] = {}
    paths = list(paths)
    runs = {path: str(_experiment(path).get("name") or path.resolve().name) for path in paths if path.is_dir()}
    several = {name for name, number in Counter(runs.values()).items() if number > 1}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give {_KINDS}")
        if path.is_dir():
            name = f"{runs[path]} ({path.resolve().name})" if runs[path] in several else runs[path]
            name = free_name(name, curves)
            records, found = _read_run(path, name)
            if records:
                curves[name] = records
        else:
            found = read_json(path, _shown, f"give {_KINDS}", what="cannot be shown")
        for inspection in found:
            taken = {other.model for other in inspections}
            inspections.append(replace(inspection, model=free_name(inspection.model, taken)))
    return inspections, curves


def _read_run(path: Path, name: str) -> tuple[list[dict[str, Any]], list[Inspection]]:
    probes = sorted((path / "probes").glob("step-*.npz"))
    if not (path / METRICS).exists() and not probes:
        raise ValueError(f"{path} is a folder without metrics.jsonl; give {_KINDS}")
    records = read_metrics(path) if (path / METRICS).exists() else []
    with reading(path / EXPERIMENT, "delete it to show the run without its settings"):
        normalised = dict(_experiment(path).get("model", {})).get("norm", "none") != "none"
    return records, [_read_probe(file, name, normalised) for file in probes]


def _read_probe(file: Path, name: str, normalised: bool) -> Inspection:
    step, states = read_probe(file)
    with reading(file, "delete it to leave it out"):
        return Inspection.of_states(f"{name}, step {step}", states, normalised=normalised)


def _shown(data: Any) -> list[Inspection]:
    if isinstance(data, dict) and {"networks", "blocks"} <= data.keys():
        return Inspection.of_certificates(data)
    several = data if isinstance(data, list) else [data]
    if several and all(isinstance(one, dict) and {"blocks", "verdict"} <= one.keys() for one in several):
        inspections = [Inspection.from_dict(one) for one in several]
        return [each for one in inspections for each in (one, *one.others)]
    raise ValueError("it holds neither an inspection nor certificates of networks")


def _experiment(path: Path) -> dict[str, Any]:
    """experiment.json as plain data, so that a run of another version still shows; empty where there is none."""
    file = path / EXPERIMENT
    if not file.is_file():
        return {}
    return read_json(file, mapping, "delete it to show the run without its settings")


def is_evaluation(path: Path) -> bool:
    """Whether a file is one of `skipless eval --json`, of images."""
    if not path.is_file():
        return False

    def judged(data: Any) -> bool:
        return isinstance(data, dict) and {"weights", "images"} <= data.keys()

    return read_json(path, judged, f"give {_KINDS}", what="cannot be shown")


def read_classes(path: Path) -> list[ResultTable]:
    """The accuracy on each class, as a table for each folder of images that was evaluated on."""
    from skipless.training.accuracy import ClassResult, class_table

    def tables(data: Any) -> list[ResultTable]:
        found = []
        for folder, values in mapping(data["images"]).items():
            results = [build(ClassResult, each, "a class") for each in values["classes"]]
            accuracy, images = check(values["accuracy"], float, "accuracy"), check(values["images"], int, "images")
            of = f"{data['weights']} on {Path(folder).name}: {accuracy:.2%} of {images:,} images"
            found.append(ResultTable(of, *class_table(results)))
        return found

    return read_json(path, tables, "`skipless eval --json` writes it again")


_AGAIN = "`skipless reproduce --tables-only` writes it again"


def is_results(path: Path) -> bool:
    """Whether a folder holds logs of reproductions, or a file is an item's in such a folder."""
    folder = path if path.is_dir() else path.parent
    if not any((folder / "logs").glob("*.jsonl")):
        return False
    return path.is_dir() or (path.suffix == ".json" and _read(path) is not None)


def read_results(paths: Iterable[Path], most: int) -> tuple[dict[str, list[dict[str, Any]]], list[ResultTable], str]:
    """Curves by item, size and arm, of the runs that stand in the tables, each once; the tables; what was left out.

    Of more than `most` curves those of the usual length are kept, and none if they are too many as well.
    """
    curves, longer, tables = _read_all(paths)
    if len(curves) <= most:
        return curves, tables, ""
    usual = {name: records for name, records in curves.items() if name not in longer}
    if len(usual) <= most:
        words = f"of {len(curves)} curves the {len(usual)} of the usual length: more would hide each other"
        return usual, tables, words
    return {}, tables, f"tables without their {len(curves)} curves, too many for a chart: name fewer items' .json"


def _read_all(paths: Iterable[Path]) -> tuple[dict[str, list[dict[str, Any]]], set[str], list[ResultTable]]:
    """All curves by name, the names of those of another than the usual length, and the tables."""
    curves: dict[str, list[dict[str, Any]]] = {}
    longer: set[str] = set()
    tables: list[ResultTable] = []
    given = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    files = list(dict.fromkeys(file.resolve() for file in given))  # an item and its folder: its claims count once
    logs = {file.parent: _records(file.parent / "logs") for file in files}
    for file in files:
        data, records = _read(file), logs[file.parent]
        if data is None:
            continue
        with reading(file, _AGAIN):
            tables += _tables(data)
            for row in next(iter(data["tables"].values()), []):
                seed, found = records.pop(row["log"].rpartition(" ")[2], (0, None))
                if found is not None and found not in curves.values():  # nor in a copy of the folder
                    times = "" if row["multiple"] == 1.0 else f" ×{row['multiple']:g}"
                    one = f", seed {seed}" if row["seeds"] not in ("1", "–") else ""  # the table's number is a mean
                    name = free_name(f"{data['item']}, {data['scale']}: {row['arm']}{times}{one}", curves)
                    curves[name] = found
                    longer |= {name} if times else set()
    return curves, longer, tables


def free_name(name: str, taken: Iterable[str]) -> str:
    """The name, numbered where it is taken."""
    names = set(taken)
    number = next(n for n in range(1, len(names) + 2) if (name if n == 1 else f"{name} ({n})") not in names)
    return name if number == 1 else f"{name} ({number})"


def _read(file: Path) -> dict[str, Any] | None:
    """An item's data, or None for a file of another kind."""

    def item(data: Any) -> dict[str, Any] | None:
        return data if isinstance(data, dict) and {"item", "scale", "tables"} <= data.keys() else None

    return read_json(file, item, _AGAIN)


def _records(logs: Path) -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """The seed and curve of every run, by the part of its key that tables show."""
    found = {}
    for file in sorted(logs.glob("*.jsonl")):
        for run in read_records(file):
            points = [{"step": int(step), "ema": loss} for step, loss in run.curve]
            last = {"step": run.steps, "valid_loss": run.valid_loss}
            found[run.key[:8]] = run.seed, [*points, *([last] if math.isfinite(run.valid_loss) else [])]
    return found


def _tables(data: dict[str, Any]) -> list[ResultTable]:
    of = f"{data['item']} ({data['reference']}), scale {data['scale']}"
    tables = [
        ResultTable(f"{of}: {quantity.replace('_', ' ')}", HEAD, [_cells(row) for row in rows])
        for quantity, rows in data["tables"].items()
    ]
    if glance := data.get("glance"):
        tables.insert(0, ResultTable(f"{of}: at a glance", tuple(glance[0]), glance[1:]))
    if ratios := data.get("ratios"):
        head = [name for name in ratios[0] if name == "arm" or any(row[name] for row in ratios)]  # paper: often none
        rows = [[row[name] for name in head] for row in ratios]
        tables.append(ResultTable(f"{of}: steps to a loss", head, rows))
    claims = [(each["claim"], each["mark"], each["detail"]) for each in data["bands"]]
    return [*tables, *([ResultTable(f"{of}: claims", ("claim", "verdict", "numbers"), claims, True)] if claims else [])]


def _cells(row: dict[str, Any]) -> list[str]:
    """A row as its page shows it; files of older versions know its name and number alone."""
    longer = "" if row["multiple"] == 1.0 else f", {row['multiple']:g}× the steps"
    ours = "–" if row["ours"] is None else f"{row['ours']:.4g}"
    known = row.get("label", row["arm"] + longer), row["paper"], row.get("text", ours)
    return [*known, *(row[name] for name in HEAD[3:])]

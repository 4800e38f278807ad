"""Results of `skipless reproduce` for the report: tables as they were written, and the curves of the runs they name.

Given are such folders, or the .json files of items in them.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipless.analysis.report import ResultTable

_COLUMNS = ("arm", "paper", "ours", "steps", "time", "seeds", "rate", "log")


def is_results(path: Path) -> bool:
    """Whether a folder holds logs of reproductions, or a file is an item's in such a folder."""
    folder = path if path.is_dir() else path.parent
    if not any((folder / "logs").glob("*.jsonl")):
        return False
    return path.is_dir() or (path.suffix == ".json" and _read(path) is not None)


def read_results(paths: Iterable[Path], most: int) -> "tuple[dict[str, list[dict[str, Any]]], list[ResultTable], str]":
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


def _read_all(paths: Iterable[Path]) -> "tuple[dict[str, list[dict[str, Any]]], set[str], list[ResultTable]]":
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
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); `skipless reproduce --tables-only` writes it again") from error
    return data if isinstance(data, dict) and {"item", "scale", "tables"} <= data.keys() else None


def _records(logs: Path) -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """The seed and curve of every run, by the part of its key that tables show."""
    found = {}
    for file in sorted(logs.glob("*.jsonl")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                run = json.loads(line)
                points = [{"step": step, "ema": loss} for step, loss in run["curve"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}, is not the log of a run ({error}); delete it") from error
            last = {"step": run["steps"], "valid_loss": run["valid_loss"]}
            found[run["key"][:8]] = run["seed"], [*points, *([last] if run["valid_loss"] is not None else [])]
    return found


def _tables(data: dict[str, Any]) -> "list[ResultTable]":
    from skipless.analysis.report import ResultTable

    of = f"{data['item']} ({data['reference']}), scale {data['scale']}"
    tables = [
        ResultTable(f"{of}: {quantity.replace('_', ' ')}", _COLUMNS, [_cells(row) for row in rows])
        for quantity, rows in data["tables"].items()
    ]
    if glance := data.get("glance"):
        tables.insert(0, ResultTable(f"{of}: at a glance", tuple(glance[0]), glance[1:]))
    if ratios := data.get("ratios"):
        head = [name for name in ratios[0] if name == "arm" or any(row[name] for row in ratios)]  # paper: often none
        rows = [[row[name] for name in head] for row in ratios]
        tables.append(ResultTable(f"{of}: steps to a loss", head, rows))
    bands = [(band["claim"], band["mark"], band["detail"]) for band in data["bands"]]
    return [*tables, *([ResultTable(f"{of}: bands", ("claim", "verdict", "numbers"), bands, True)] if bands else [])]


def _cells(row: dict[str, Any]) -> list[str]:
    """A row as its page shows it; files of older versions know its name and number alone."""
    longer = "" if row["multiple"] == 1.0 else f", {row['multiple']:g}× the steps"
    ours = "–" if row["ours"] is None else f"{row['ours']:.4g}"
    known = row.get("label", row["arm"] + longer), row["paper"], row.get("text", ours)
    return [*known, *(row[name] for name in _COLUMNS[3:])]

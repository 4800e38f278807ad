"""metrics.jsonl: a line per record, readable while it grows and after any kill."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from skipless.data.shards import write_whole


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines; a last one that is being written, or that a kill cut short, is left out.

    path: the file, or the run's folder. Numbers that are not finite are NaN and Infinity, as Python's json has them.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a run writes it as it trains")
    lines = path.read_bytes().split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("it has no step")
            records.append(record)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is damaged ({error}); delete the line to read the rest"
            ) from error
    return records


class MetricsLog:
    """Appends records to the file; opened at the first one."""

    def __init__(self, path: Path):
        self.path = path
        self._file = None

    def add(self, record: dict[str, Any]) -> None:
        """Write a line and hand it to the system: it outlives this process."""
        if "step" not in record:
            raise ValueError(f"record {record} has no 'step'; resuming could not tell whether to keep it")
        line = json.dumps(record) + "\n"
        if self._file is None:
            if self.path.is_file():
                self._keep(read_metrics(self.path))  # no line is added to half of one
            self._file = self.path.open("a", encoding="utf-8")
        try:
            self._file.write(line)
            self._file.flush()
        except OSError:
            with suppress(OSError):  # it would be written again, and its second error hide the first
                self.close()
            raise

    def sync(self) -> None:
        """Flush to the disk: lines outlive the machine."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def rewind(self, step: int | None, due: Callable[[int], bool] | None = None) -> None:
        """Keep the lines up to `step`, none for None; of losses only those of steps that are `due`."""
        self.close()

        def kept(record: dict[str, Any]) -> bool:
            extra = due is not None and "loss" in record and not due(record["step"])
            return step is not None and record["step"] <= step and not extra

        if self.path.is_file():
            self._keep([record for record in read_metrics(self.path) if kept(record)])

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _keep(self, records: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(record) + "\n" for record in records).encode()
        if text != self.path.read_bytes():
            write_whole(self.path, text)

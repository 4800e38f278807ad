"""results/logs/ITEM-SCALE.jsonl: one line per run, read back by key whichever item it was run for."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from skipless.data.locking import sole_worker
from skipless.data.shards import append_line, read_lines
from skipless.recipes.reproduce.record import Record
from skipless.recipes.reproduce.text import Text

LOGS, RUNS = "logs", "runs"


class ResultsFolder:
    """The folder of a reproduction: logs of runs by key, run folders while they last, tables and figures."""

    def __init__(self, path: str | Path, scale: str):
        self.path, self.scale = Path(path), scale
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out is {self.path}, a file; name a folder")
        self.records = self._read()

    def log(self, item: str) -> Path:
        """The log of an item's runs."""
        return self.path / LOGS / f"{item}-{self.scale}.jsonl"

    def run_folder(self, key: str) -> Path:
        """Where a run trains; gone when its record is written, unless its weights are wanted."""
        return self.path / RUNS / f"{self.scale}-{key}"

    def add(self, record: Record) -> None:
        """Write a record, flushed to the disk; what is kept in memory is what a later call will read."""
        file = self.log(record.item)
        file.parent.mkdir(parents=True, exist_ok=True)
        read_lines(file)  # cuts off what a crash left of the last line
        line = record.to_json()
        append_line(file, line)
        self.records[record.key] = Record.from_json(line)

    def texts(self) -> list[Text]:
        """The texts that runs were trained on, the most frequent first."""
        counts: dict[str, list] = {}
        for record in self.records.values():
            counts.setdefault(record.text["fingerprint"], []).append(record.text)
        return [Text(**found[0]) for found in sorted(counts.values(), key=len, reverse=True)]

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep a second `skipless reproduce` out of the folder; the lock ends with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        refusal = f"another skipless reproduce is working in {self.path}: wait for it, or use another --out"
        with sole_worker(self.path, refusal):
            self.records = self._read()  # of what another one has added before it let go
            yield

    def _read(self) -> dict[str, Record]:
        files = sorted((self.path / LOGS).glob(f"*-{self.scale}.jsonl"))
        return {record.key: record for file in files for record in _records(file)}


def _records(file: Path) -> Iterable[Record]:
    try:
        return [Record.from_json(line) for line in read_lines(file, mend=False)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged or of another version ({error}); move it away to go on without") from error

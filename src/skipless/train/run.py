"""The folder of a run: what was asked for, where it ran, what it measured; and who may write there.

experiment.json   the whole configuration; once something is trained another one refuses the folder
data.json         fingerprints of the prepared folders; other tokens refuse to resume
env.json          versions, device and commit of the start and of every resumption
metrics.jsonl     one JSON object per line
checkpoints/      see skipless.train.checkpoint
export/           weights to use elsewhere
finished.json     written last
.lock             process and host of who is training
"""

import json
import logging
import os
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from skipless.data.shards import ASIDE, write_whole
from skipless.data.store import fingerprint
from skipless.train.collective import is_main, on_main
from skipless.train.config import Experiment
from skipless.train.disk import storing
from skipless.train.environment import environment
from skipless.train.metrics import MetricsLog

EXPERIMENT, DATA, ENVIRONMENT, METRICS, FINISHED, LOCK = (
    "experiment.json",
    "data.json",
    "env.json",
    "metrics.jsonl",
    "finished.json",
    ".lock",
)
CHECKPOINTS, EXPORT = "checkpoints", "export"
FREE = ("train.keep",)  # settings that may change when a run goes on
logger = logging.getLogger("skipless")


class RunFinishedError(ValueError):
    """The run in the folder has reached its last step: there is nothing to train."""


class RunFolder:
    """The folder of one run, held by one training at a time; a context manager that lets go of it at the end.

    In a distributed run every process opens it; the main one writes, for the others `log` and the rest do nothing.
    """

    def __init__(self, path: Path, experiment: Experiment, lock: IO[str] | None):
        self.path, self.experiment = path, experiment
        self.metrics = path / METRICS
        self.checkpoints, self.export = path / CHECKPOINTS, path / EXPORT
        self._lock = lock
        self._log = MetricsLog(self.metrics) if lock is not None else None

    @classmethod
    def open(cls, path: str | Path, experiment: Experiment, *, resume: bool) -> "RunFolder":
        """Make the folder that of `experiment`, or take up what is there with resume=True.

        ValueError if it holds a run with other settings (naming each) or tokens, one that needs --resume, files of
        something else, or if another process is training there; RunFinishedError if there is nothing left to do.
        resume=True where no run has begun starts one, so that a command can always be run again with --resume.
        """
        path = Path(path)
        locks: list[IO[str]] = []

        def claim() -> None:
            with storing(path):
                _check_place(path)
                path.mkdir(parents=True, exist_ok=True)
                locks.append(_lock(path))
                try:
                    _claim(path, experiment, resume)
                except BaseException:
                    locks.pop().close()
                    raise

        on_main(claim)
        return cls(path, experiment, locks[0] if is_main() else None)

    def log(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl; a kill loses no line that was logged. The record has a "step"."""
        if self._log is not None:
            with storing(self.metrics):
                self._log.add(record)

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk; call it before a checkpoint, which must not survive the lines before it."""
        if self._log is not None:
            with storing(self.metrics):
                self._log.sync()

    def rewind(self, step: int | None, due: Callable[[int], bool] | None = None) -> None:
        """Drop lines after the checkpoint's step, so that the log becomes that of a run without interruption.

        None, for no checkpoint, drops all, and `due` the losses of other steps, which a run logs only as it stops. So
        lines of step s are to be logged before the checkpoint of step s. Where records count from 0 and checkpoints
        count updates, the last line that belongs to one is rewind(step - 1)'s.
        """
        if self._log is not None:
            with storing(self.metrics):
                self._log.rewind(step, due)

    def finish(self, **summary: Any) -> None:
        """Mark the run as finished, with what is worth knowing at a glance."""
        if self._log is not None:
            self.sync()
            with storing(self.path / FINISHED):
                write_whole(self.path / FINISHED, json.dumps(summary, indent=2).encode() + b"\n")

    def close(self) -> None:
        """Close the log and let go of the folder."""
        try:
            if self._log is not None:
                with storing(self.metrics):
                    self._log.close()
        finally:
            if self._lock is not None:
                self._lock.truncate(0)
                self._lock.close()
                self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_experiment(path: str | Path) -> Experiment:
    """The configuration of the run in a folder."""
    file = Path(path) / EXPERIMENT
    if not file.is_file():
        raise ValueError(f"{path} is not a run (no {EXPERIMENT}); `skipless train` makes one")
    try:
        return Experiment.from_json(file.read_text())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged or of another version ({error}); use another folder") from error


def _check_place(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; a run needs a folder")
    own = (EXPERIMENT, DATA, ENVIRONMENT, METRICS, FINISHED, LOCK, CHECKPOINTS, EXPORT)
    foreign = (
        [file.name for file in path.iterdir() if file.name not in own and file.suffix != ASIDE] if path.exists() else []
    )
    if foreign and not (path / EXPERIMENT).is_file():
        raise ValueError(
            f"{path} holds other files ({', '.join(sorted(foreign)[:3])}); give the run a folder of its own"
        )


def _lock(path: Path) -> IO[str]:
    """The lock file, held until it is closed or the process ends, however that ends: a kill leaves no stale lock."""
    file = (path / LOCK).open("a+")
    file.seek(0)
    holder, here = file.read().strip(), f"on {socket.gethostname()}"
    if not _free(file, holder, here):
        file.close()
        raise ValueError(
            f"{holder or 'another process'} is training in {path}; wait for it, stop it, or use another folder. If it "
            f"no longer exists, delete {path / LOCK}"
        )
    if holder and not holder.endswith(here):
        logger.warning("%s was last trained by %s; if that still runs, stop it: two would spoil the run", path, holder)
    file.truncate(0)
    file.write(f"process {os.getpid()} {here}\n")
    file.flush()
    return file


def _free(file: IO[str], holder: str, here: str) -> bool:
    """Whether no one else has the lock; by the holder's number where the file system knows no locks."""
    try:
        fcntl = import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True  # Windows
    except BlockingIOError:
        return False
    except OSError:
        if not holder.endswith(here):
            return not holder
        try:
            os.kill(int(holder.split()[1]), 0)
        except ProcessLookupError:
            return True
        return False
    return True


def _claim(path: Path, experiment: Experiment, resume: bool) -> None:
    file = path / EXPERIMENT
    begun = file.is_file() and _trained(path)
    if begun:
        _check_same(path, read_experiment(path), experiment)
        if (path / FINISHED).is_file():
            raise RunFinishedError(f"the run in {path} is finished; to train again, use another folder")
        if not resume:
            raise ValueError(f"{path} holds this run, unfinished: add --resume to go on, or use another folder")
        _check_tokens(path / DATA, experiment)
    elif resume:
        logger.info("%s holds no run yet: it starts from the beginning", path)
    for name in (CHECKPOINTS, EXPORT):
        (path / name).mkdir(exist_ok=True)
    for leftover in path.glob(f"*{ASIDE}"):
        leftover.unlink()
    _note_environment(path / ENVIRONMENT, begun)
    if not begun:
        write_whole(path / DATA, json.dumps(_fingerprints(experiment), indent=2).encode() + b"\n")
        write_whole(file, experiment.to_json().encode() + b"\n")


def _trained(path: Path) -> bool:
    """Whether a run has come to anything; a start that was refused has not, and its folder is free."""
    metrics = path / METRICS
    logged = metrics.is_file() and metrics.stat().st_size > 0
    return logged or (path / FINISHED).is_file() or any((path / CHECKPOINTS).glob("step-*"))


def _note_environment(file: Path, begun: bool) -> None:
    noted = environment()
    if begun and file.is_file():
        try:
            first = dict(json.loads(file.read_bytes()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); delete it to go on without") from error
        noted = {**first, "resumed": [*first.get("resumed", []), noted]}
    write_whole(file, json.dumps(noted, indent=2).encode() + b"\n")


def _check_same(path: Path, there: Experiment, here: Experiment) -> None:
    old, new = (_flat(json.loads(one.to_json())) for one in (there, here))
    differing = [
        f"{name} is {old.get(name)!r} there, {new.get(name)!r} here"
        for name in sorted((old.keys() | new.keys()).difference(FREE))
        if old.get(name) != new.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} holds a run with other settings: {'; '.join(differing)}. To go on with that run, repeat its "
            "settings and add --resume; for these settings, use another folder"
        )


def _fingerprints(experiment: Experiment) -> dict[str, str | None]:
    folders = {"data.folder": experiment.data.folder, "data.valid": experiment.data.valid}
    return {name: fingerprint(folder) for name, folder in folders.items() if folder is not None}


def _check_tokens(file: Path, experiment: Experiment) -> None:
    """Refuse tokens that were prepared anew since the run began; a folder of before such notes has none to compare."""
    if not file.is_file():
        return
    try:
        there = dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it to go on without") from error
    for name, here in _fingerprints(experiment).items():
        if here and there.get(name) not in (None, here):
            raise ValueError(
                f"{name} holds other tokens ({here}) than when the run in {file.parent} began ({there[name]}); prepare "
                f"them again as they were, or use another folder for a new run. To go on regardless, delete {file}"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found

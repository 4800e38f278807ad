"""Training the runs that are missing: one after another here, or by worker processes side by side.

A worker process lives as long as the command, so that what torch has compiled for a network serves its next runs.
"""

import functools
import gc
import logging
import math
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch

import skipless
from skipless.files import reading, write_whole
from skipless.paper.experiments import PaperTable, Setting
from skipless.paper.measures import measured, other_loss
from skipless.paper.records import Record, ResultsFolder, record_of
from skipless.paper.runs import CPU, H200, Limits, Listener, Run, missing, run_seconds
from skipless.training import trainer
from skipless.training.config import Experiment
from skipless.training.divergence import Diverged
from skipless.training.run import EXPERIMENT, FINISHED, METRICS, git_state, read_experiment, read_metrics
from skipless.training.trainer import OutOfTime, RunLimits, train

_STOPS = {signal.SIGINT, signal.SIGTERM}
_SPENT = "spent.txt"  # in a run's folder: its seconds so far
_PIECE_SECONDS = 60.0  # a run with checkpoints is begun if it can go on for so long
_MOST_FAILURES = 3
_SAVING = 0.05, 30.0  # share of the budget, and seconds at most, in which runs are saved and pages written


@dataclass(frozen=True)
class RunRequest:
    """A run, the folder it trains in, how to work, and for how many seconds at most."""

    run: Run
    folder: Path
    limits: Limits = field(default_factory=Limits)
    seconds: float = float("inf")
    quiet: bool = True


@dataclass
class Scheduler:
    """Hands the missing runs of some tables to workers, one run to each at a time."""

    tables: Sequence[PaperTable]
    setting: Setting
    results: ResultsFolder
    limits: Limits = field(default_factory=Limits)
    listener: Listener = field(default_factory=Listener)
    arms: tuple[str, ...] = ()
    clock: Callable[[], float] = time.monotonic

    def work(self) -> list[Run]:
        """Train what is missing. Returns what still is: for want of time, or because it failed."""
        self._began, self._ratios = self.clock(), []
        self._dropped: set[str] = set()  # runs that failed or ran out of time
        self._failed: set[str] = set()  # networks whose runs failed since the last success
        # chosen once: where a GPU is lost on the way its runs fail, and do not go on by themselves on a CPU
        self._device = self.limits.device or ("cuda" if torch.cuda.is_available() else "cpu")
        limits, count = replace(self.limits, device=self._device), self.limits.jobs
        workers = (
            [Worker()] if count == 1 else [WorkerProcess(max((os.cpu_count() or 1) // count, 1)) for _ in range(count)]
        )
        try:
            while True:
                for worker in workers:
                    if worker.run is None and (run := self._next(worker, workers)) is not None:
                        self.listener.started(run)
                        worker.start(RunRequest(run, self.results.run_folder(run.key), limits, self._left()))
                busy = [worker for worker in workers if worker.run is not None]
                if not busy:
                    return self._missing()
                for worker in first_done(busy):
                    self._take_in(worker)
        finally:  # Ctrl-C may have reached this process alone
            for worker in workers:
                worker.interrupt()
            for worker in workers:
                worker.close()

    def _missing(self) -> list[Run]:
        return missing(self.tables, self.setting, self.results.records, self.arms)

    def _next(self, worker: "Worker", workers: "Sequence[Worker]") -> Run | None:
        """The first run that fits into the time; of those like it, one of the worker's own network or of nobody's."""
        running = [other.run for other in workers if other.run is not None]
        if any(run.exclusive for run in running):
            return None
        taken = self._dropped | {run.key for run in running}
        ready = [run for run in self._missing() if run.key not in taken and self._fits(run)]
        ready = [run for run in ready if not run.exclusive] or ([] if running else ready)
        alike = [run for run in ready if (run.table, run.stage) == (ready[0].table, ready[0].stage)]
        others = {other.network for other in workers if other is not worker}
        own = [run for run in alike if run.network == worker.network]
        free = [run for run in alike if run.network not in others]
        return next(iter(own or free or alike), None)

    def _left(self) -> float:
        """Seconds until runs are to end, so that all of them are saved when the budget is spent."""
        share, most = _SAVING
        return self.limits.budget - min(share * self.limits.budget, most) - (self.clock() - self._began)

    def _fits(self, run: Run) -> bool:
        resumable = run.experiment.train.checkpoint_every > 0
        expected = self._estimate(run) * (median(self._ratios) if self._ratios else 1.0)
        return self._left() > (_PIECE_SECONDS if resumable else expected)

    def _estimate(self, run: Run) -> float:
        machine = CPU if self._device.startswith("cpu") else H200
        return run_seconds(run.experiment.model, run.experiment.train, machine)

    def _take_in(self, worker: "Worker") -> None:
        """Write the record of the worker's run before its folder goes, or say that it failed."""
        run, (record, error) = worker.run, worker.result()
        assert run is not None
        folder = self.results.run_folder(run.key)
        if error:
            self._dropped.add(run.key)
            self._failed.add(run.network)
            self.listener.failed(run, error, error_file(folder))
            if len(self._failed) == _MOST_FAILURES:
                words = f"runs of {_MOST_FAILURES} networks in a row failed, the last one"
                raise ValueError(f"{words} ({run.describe()}): {error}")
            return
        self._failed.clear()
        if record is None:  # its time was up
            self._dropped.add(run.key)
            return
        self._ratios.append(record.seconds / self._estimate(run))
        self.results.add(record)
        error_file(folder).unlink(missing_ok=True)
        if not run.weights:
            shutil.rmtree(folder, ignore_errors=True)
        self.listener.finished(record, len(self._missing()))


Answer = tuple[Record | None, str]  # of a run: its record, and what went wrong; (None, "") where its time was up


class Worker:
    """The only worker of one job: this very process."""

    def __init__(self):
        self.run: Run | None = None
        self.network = ""

    def start(self, request: RunRequest) -> None:
        self.run, self.network = request.run, request.run.network
        self._answer = attempt(request)

    def result(self) -> Answer:
        """What came of it; the worker is free again."""
        self.run = None
        return self._answer

    def interrupt(self) -> None:
        """Nothing: Ctrl-C has reached it."""

    def close(self) -> None:
        """Nothing."""


class WorkerProcess(Worker):
    """A process of its own. One that dies fails its run, and a new one takes its place."""

    def __init__(self, threads: int):
        super().__init__()
        # read when a process first imports torch: each worker would otherwise compile with all cores
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        self._threads = threads
        self._process: BaseProcess | None = None

    def start(self, request: RunRequest) -> None:
        """Send it to the process, which is started by the first one."""
        self.run, self.network = request.run, request.run.network
        if self._process is None:
            self._open()
        with suppress(BrokenPipeError):  # its end is seen by result()
            self.connection.send(request)

    def result(self) -> Answer:
        """What the process answers."""
        self.run = None
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            process, self._process = self._process, None
            assert process is not None
            process.join()
            return None, f"its process died (exit code {process.exitcode})"

    def interrupt(self) -> None:
        """Do what Ctrl-C does in a terminal: a run that trains saves itself, and no other begins."""
        process = self._process
        if process is not None and process.is_alive() and process.pid is not None and os.name == "posix":
            os.kill(process.pid, signal.SIGINT)

    def close(self) -> None:
        """End the process, after its run has been saved."""
        if self._process is not None:
            self.connection.close()
            self._process.join()

    def _open(self) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._threads))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS) if os.name == "posix" else None
        try:
            process.start()  # Ctrl-C waits, here until the process is known and there until it asks for it
            self._process = process
        finally:
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the end of the process ends the connection


def first_done(workers: Sequence[Worker]) -> list[Worker]:
    """Wait until at least one of these workers has an answer, or its process has died."""
    processes = [worker for worker in workers if isinstance(worker, WorkerProcess)]
    if not processes:
        return list(workers)
    ready = wait([worker.connection for worker in processes])
    return [worker for worker in processes if worker.connection in ready]


def _serve(connection: Connection, threads: int) -> None:
    """A worker process: answers one request after another, until its parent stops asking or is gone."""
    torch.set_num_threads(threads)
    for number in _STOPS:
        signal.signal(number, lambda *_: trainer.early.set())  # while a run trains it listens itself, and saves
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)

    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            request = connection.recv()
            if trainer.early.is_set():
                return
            connection.send(attempt(request))


def attempt(request: RunRequest) -> Answer:
    """run_one, with an error in words; its traceback is written beside the run's folder."""
    try:
        return run_one(request), ""
    except Exception as error:
        with suppress(OSError):  # a full disk may be the error
            request.folder.parent.mkdir(parents=True, exist_ok=True)
            write_whole(error_file(request.folder), "".join(traceback.format_exception(error)).encode())
        return None, f"{type(error).__name__}: {error}"


def error_file(folder: Path) -> Path:
    """Where the traceback of a run that trains in this folder is kept, until it succeeds."""
    return folder.with_name(f"{folder.name}.error.txt")


def run_one(request: RunRequest) -> Record | None:
    """Train a run to its end. None if its seconds were over first: it is saved, and a later call goes on.

    A run that diverges is recorded with an infinite loss.
    """
    run, folder, limits = request.run, request.folder, request.limits
    if not (folder / FINISHED).is_file():
        _clear_other(run.experiment, folder)
    before, done = _spent(folder), _steps_done(folder)
    began, outcome = time.monotonic(), _where(limits.device)
    try:
        outcome |= _trained(request)
        if not math.isnan(outcome["step_seconds"]):  # a killed call wrote no time: its steps took what these take
            before = max(before, done * outcome["step_seconds"])
        if outcome.get("diverged_at") is None:
            outcome |= measured(run, folder, limits.tasks, outcome["kind"])
            if limits.other_text is not None and not run.exclusive:
                loss = other_loss(run, folder, limits.other_text, outcome["kind"])
                outcome["measures"] = {**outcome.get("measures", {}), "other_loss": loss}
    except OutOfTime:
        return None
    finally:
        seconds = round(before + time.monotonic() - began, 2)
        if (folder / EXPERIMENT).is_file():  # or a run that never began would leave files of no run
            write_whole(folder / _SPENT, f"{seconds}\n".encode())
        if torch.cuda.is_available():  # give the run's memory back
            gc.collect()
            torch.cuda.empty_cache()
    metrics = read_metrics(folder) if (folder / METRICS).is_file() else []
    beside = 1 if run.exclusive else limits.jobs
    return record_of(run, metrics, {**outcome, "seconds": seconds, "jobs": beside})


def _trained(request: RunRequest) -> dict[str, Any]:
    """Train. A sweep meets growing gradients on purpose: a quiet run does not warn of them."""
    if (request.folder / FINISHED).is_file():  # an earlier call was killed between its end and its record
        return {"step_seconds": float("nan")}
    logger, run = logging.getLogger("skipless"), request.run
    needed = run.weights or run.measure in ("tasks", "uses") or request.limits.other_text is not None
    limits = RunLimits(seconds=request.seconds, weights=needed, validation=not run.exclusive)
    before = logger.level
    if request.quiet:
        logger.setLevel(logging.ERROR)
    try:
        device, quiet = request.limits.device, request.quiet
        done = train(run.experiment, request.folder, resume=True, device=device, quiet=quiet, limits=limits)
        return {"step_seconds": done.step_seconds}
    except Diverged as error:
        return {"step_seconds": float("nan"), "diverged_at": error.step}
    finally:
        logger.setLevel(before)


def _clear_other(experiment: Experiment, folder: Path) -> None:
    """Remove what a call with other settings of speed or logs, or another version, has left of the run."""
    if not (folder / EXPERIMENT).is_file():
        (folder / _SPENT).unlink(missing_ok=True)  # of a run that never began
        return
    try:
        same = read_experiment(folder) == experiment
    except ValueError:
        same = False
    if not same:
        shutil.rmtree(folder)


def _spent(folder: Path) -> float:
    """Seconds of earlier calls on the same run, but for those of a call that was killed."""
    file = folder / _SPENT
    with reading(file, "delete it: the time of earlier calls is then taken from their steps"):
        return float(file.read_text()) if file.is_file() else 0.0


def _steps_done(folder: Path) -> int:
    """Steps that earlier calls logged."""
    metrics = read_metrics(folder) if (folder / METRICS).is_file() else []
    return max((line["step"] for line in metrics), default=0)


def _where(device: str | None) -> dict[str, Any]:
    """Device, versions and time, for a record."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if kind.startswith("cuda") and torch.cuda.is_available() else "CPU"
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"kind": kind, "device": name, "torch": torch.__version__, "commit": _commit(), "time": stamp}


@functools.cache
def _commit() -> str:
    """Twelve digits of it, and a plus where files differ from it."""
    state = git_state(Path(skipless.__file__).parent)
    if state is None:
        return ""
    return f"{state['commit'][:12]}{'+' if state['dirty'] else ''}"

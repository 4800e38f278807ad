"""Runs jobs, one after another or several side by side, until none is missing or the time is up."""

import functools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from skipless.recipes.reproduce import estimate, failure
from skipless.recipes.reproduce.item import Item
from skipless.recipes.reproduce.job import Job, Setting
from skipless.recipes.reproduce.log import ResultsFolder
from skipless.recipes.reproduce.plan import missing
from skipless.recipes.reproduce.record import Record
from skipless.recipes.reproduce.run import Order
from skipless.recipes.reproduce.worker import Worker

_PIECE_SECONDS = 60.0  # a resumable run is begun if it can go on for so long
_MOST_FAILURES = 3
_SAVING = 0.05, 30.0  # of the budget, and seconds at most: kept for saving runs and drawing pictures


@dataclass(frozen=True)
class Limits:
    """How to work: processes side by side, seconds in all, device, and what tasks are scored on."""

    jobs: int = 1
    budget: float = float("inf")
    device: str | None = None
    tasks: Path | None = None

    def __post_init__(self):
        if self.jobs < 1:
            raise ValueError(f"--jobs is {self.jobs}; it must be at least 1")
        if not self.budget > 0.0:
            raise ValueError(f"--budget is {self.budget:g} seconds; it must be positive")


class Watch:
    """Is told what happens; this one keeps quiet."""

    def started(self, job: Job) -> None:
        """A run begins."""

    def finished(self, record: Record, known: int) -> None:
        """A run is done; so many more are known to be missing."""

    def failed(self, job: Job, error: Exception, traceback: Path) -> None:
        """A run ended with an error that is not divergence; its traceback is in a file."""


@dataclass
class Crew:
    """The workers and what they are doing."""

    items: Sequence[Item]
    setting: Setting
    results: ResultsFolder
    limits: Limits = field(default_factory=Limits)
    watch: Watch = field(default_factory=Watch)
    arms: tuple[str, ...] = ()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self):
        count = self.limits.jobs
        threads = max((os.cpu_count() or 1) // count, 1)
        self._workers = [Worker(count == 1, threads) for _ in range(count)]
        self._running: dict[Future, tuple[Worker, Job]] = {}
        self._dropped: set[str] = set()
        self._paces: list[float] = []
        self._failed: set[str] = set()
        self._began = self.clock()

    def work(self) -> list[Job]:
        """Run what is missing. Returns what still is: for want of time, or because it failed."""
        try:
            while self._start_some() or self._running:
                if self._running:
                    self._take_in()
        except BaseException:  # a signal may have reached this process alone
            for worker in self._workers:
                worker.interrupt()
            raise
        finally:
            for worker in self._workers:
                worker.stop()
        return missing(self.items, self.setting, self.results.records, self.arms)

    def _start_some(self) -> bool:
        """Give every idle worker a job; whether any was given."""
        begun = False
        for worker in self._workers:
            if any(busy is worker for busy, _ in self._running.values()):
                continue
            job = self._next(worker)
            if job is None:
                break
            self.watch.started(job)
            self._running[worker.start(self._order(job))] = (worker, job)
            begun = True
        return begun

    def _next(self, worker: Worker) -> Job | None:
        """The first job that fits into the time; of its like, one of the worker's own network, or of nobody's."""
        busy = {job.key for _, job in self._running.values()}
        if any(job.exclusive for _, job in self._running.values()):
            return None
        known = missing(self.items, self.setting, self.results.records, self.arms)
        ready = [job for job in known if job.key not in busy | self._dropped and self._fits(job)]
        open_jobs = [job for job in ready if not job.exclusive] or ([] if busy else ready)
        if not open_jobs:
            return None
        first = open_jobs[0]
        similar = [job for job in open_jobs if (job.item, job.stage) == (first.item, first.stage)]
        others = {each.network for each in self._workers if each is not worker}
        own = [job for job in similar if job.network == worker.network]
        free = [job for job in similar if job.network not in others]
        return (own or free or similar)[0]

    def _left(self) -> float:
        """Seconds until runs are to end, so that all of them are saved when the budget is spent."""
        share, most = _SAVING
        return self.limits.budget - min(share * self.limits.budget, most) - (self.clock() - self._began)

    def _fits(self, job: Job) -> bool:
        left = self._left()
        resumable = job.experiment.train.checkpoint_every > 0
        return left > (_PIECE_SECONDS if resumable else self._expected(job))

    def _expected(self, job: Job) -> float:
        """The estimate, corrected by how the runs of this call compared with theirs."""
        return estimate.run_seconds(job.experiment, self._machine()) * (median(self._paces) if self._paces else 1.0)

    @functools.cached_property
    def _device(self) -> str:
        """Chosen once: a worker whose GPU is lost on the way fails, and does not go on by itself on a CPU."""
        import torch

        return self.limits.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def _machine(self) -> estimate.Machine:
        return estimate.CPU if self._device.startswith("cpu") else estimate.H200

    def _order(self, job: Job) -> Order:
        limits, left = self.limits, self._left()
        folder = self.results.run_folder(job.key)
        beside = 1 if job.exclusive else limits.jobs
        scale = self.setting.scale.name
        return Order(job, self.setting.text, scale, folder, self._device, left, beside, limits.tasks)

    def _take_in(self) -> None:
        """Wait for a run to end, and write its record before its folder goes."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            _, job = self._running.pop(future)
            try:
                record = future.result()
            except Exception as error:
                self._fail(job, error)
                continue
            self._failed.clear()
            if record is None:
                self._dropped.add(job.key)
                continue
            self._paces.append(record.seconds / estimate.run_seconds(job.experiment, self._machine()))
            self.results.add(record)
            failure.error_file(self.results.run_folder(job.key)).unlink(missing_ok=True)
            if not job.weights:
                shutil.rmtree(self.results.run_folder(job.key), ignore_errors=True)
            known = missing(self.items, self.setting, self.results.records, self.arms)
            self.watch.finished(record, len(known))

    def _fail(self, job: Job, error: Exception) -> None:
        self._dropped.add(job.key)
        self._failed.add(job.network)
        self.watch.failed(job, error, failure.error_file(self.results.run_folder(job.key)))
        if len(self._failed) == _MOST_FAILURES:
            raise ValueError(
                f"runs of {_MOST_FAILURES} networks in a row failed, the last one ({job.describe()}): {error}"
            ) from error

"""Carrying runs out: one process or several workers, within a budget of time."""

import base64
import functools
import gc
import logging
import os
import pickle
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import skipless
from skipless.files import write_whole
from skipless.model.config import ModelConfig
from skipless.model.transformer import kernel_blocks
from skipless.paper.experiments import Item, Job, Setting, Text
from skipless.paper.records import Record, ResultsFolder, record_of
from skipless.paper.runs import missing
from skipless.theory import kernels, propagation
from skipless.training import trainer
from skipless.training.config import Experiment
from skipless.training.divergence import Diverged
from skipless.training.load import load_model
from skipless.training.run import EXPERIMENT, METRICS, RunFinishedError, git_state, read_experiment, read_metrics
from skipless.training.tasks import TASKS, local_records, questions, score_tasks, task_file
from skipless.training.trainer import OutOfTime, RunLimits, train


@dataclass(frozen=True)
class Machine:
    """A machine in three numbers: FLOP/s that training sustains, seconds per block and step at least, start-up."""

    name: str
    flops: float
    block_seconds: float
    start_seconds: float


H200 = Machine("H200", 300e12, 0.4e-3, 12.0)
CPU = Machine("CPU, 2 cores", 60e9, 1.2e-3, 0.2)


def run_seconds(experiment: Experiment, machine: Machine) -> float:
    """Seconds of a run, good to a factor of two or so: 6 FLOP per weight and token, and attention's."""
    model, train = experiment.model, experiment.train
    per_token = 6.0 * model.matrix_parameters + 6.0 * model.depth * model.width * train.length
    arithmetic = per_token * train.batch_size * train.length / machine.flops
    return machine.start_seconds + train.steps * max(arithmetic, machine.block_seconds * model.depth)


def error_file(folder: Path) -> Path:
    """Where the traceback of a run that trains in this folder is kept, until it succeeds."""
    return folder.with_name(f"{folder.name}.error.txt")


def keep(error: Exception, folder: Path) -> Exception:
    """Write the traceback down. Returns the error, or where it cannot be pickled (torch.compile's) its words."""
    with suppress(OSError):  # a full disk may be the error
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_whole(error_file(folder), "".join(traceback.format_exception(error)).encode())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


SIDE = 32  # locations kept, evenly


def read_stage(probes: Path, step: int) -> np.ndarray:
    """(L+1, T, T) kernels of the probe at `step`."""
    file = probes / f"step-{step:08d}.npz"
    if not file.is_file():
        raise ValueError(f"{file} is missing: the run was to be probed at step {step}")
    with np.load(file, allow_pickle=False) as stored:
        return stored["states"].astype(np.float64)


def pack(stages: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Cosines of about SIDE locations after the input, the first, a third, two thirds and the last block, as bytes."""
    depth, length = next(iter(stages.values())).shape[0] - 1, next(iter(stages.values())).shape[1]
    blocks = sorted({0, 1, max(depth // 3, 1), max(2 * depth // 3, 1), depth})
    stride = -(-length // SIDE)
    shown = np.array(
        [[kernels.cosine(states[block])[::stride, ::stride] for block in blocks] for states in stages.values()]
    )
    levels = np.round(255.0 * np.clip(shown, 0.0, 1.0)).astype(np.uint8)
    data = base64.b64encode(levels.tobytes()).decode()
    return {"steps": list(stages), "blocks": blocks, "side": levels.shape[-1], "cosines": data}


def unpack(packed: Mapping[str, Any]) -> dict[int, dict[int, np.ndarray]]:
    """Cosines by step and block."""
    steps, blocks, side = packed["steps"], packed["blocks"], packed["side"]
    levels = np.frombuffer(base64.b64decode(packed["cosines"]), np.uint8)
    shown = levels.reshape(len(steps), len(blocks), side, side) / 255.0
    return {step: dict(zip(blocks, stage, strict=True)) for step, stage in zip(steps, shown, strict=True)}


NEAR = 4  # locations at most so far apart are neighbours


def measured(job: Job, folder: Path, tasks: Path | None, device: str) -> dict[str, Any]:
    """The job's measures, and its kernels where it has probes, from the folder of its finished run."""
    if job.measure == "probes":
        stages = {step: read_stage(folder / "probes", step) for step in job.experiment.train.probe_at}
        return {"measures": kernel_measures(job.experiment.model, list(stages.values())), "kernels": pack(stages)}
    if job.measure == "tasks":
        return {"measures": task_measures(folder, tasks, device)}
    return {}


def kernel_measures(model: ModelConfig, stages: Sequence[np.ndarray]) -> dict[str, float]:
    """Fig. 15 in numbers: how well theory predicts the kernels at step 0, and how much neighbours stand out.

    stages: (L+1, T, T) kernels before, in the middle of and after training.
    """
    cosines = [np.stack([kernels.cosine(state) for state in states[1:]]) for states in stages]
    predicted = propagation.forward(kernel_blocks(model), stages[0][0])
    above = np.triu_indices(stages[0].shape[1], 1)
    theory = np.concatenate([kernels.cosine(kernel)[above] for kernel in predicted[1:]])
    seen = np.concatenate([cosine[above] for cosine in cosines[0]])
    values = {"agreement_with_theory": float(np.corrcoef(theory, seen)[0, 1])}
    for name, stage in zip(("start", "middle", "end"), cosines, strict=True):
        values[f"recency_{name}"] = _recency(stage)
        values[f"cosine_{name}"] = float(np.mean([kernels.mean_cosine(cosine) for cosine in stage]))
    return values


def task_measures(folder: Path, tasks: Path | None, device: str) -> dict[str, float]:
    """Accuracy on each task in per cent, and their mean."""
    if tasks is None:
        raise ValueError("zero-shot accuracy needs --tasks-folder, the folder of the tasks' .jsonl files")
    subject = load_model(folder, device=device)
    asked = {name: questions(name, local_records(name, tasks), file=task_file(name, tasks)) for name in TASKS}
    length = subject.model.config.length
    scores = score_tasks(subject.model, subject.tokenizer, asked, length=length)
    values = {name: 100.0 * score.accuracy for name, score in scores.items()}
    return {**values, "mean_accuracy": sum(values.values()) / len(values)}


def _recency(cosines: np.ndarray) -> float:
    places = np.arange(cosines.shape[1])
    apart = np.abs(places[:, None] - places[None])
    near, far = (apart > 0) & (apart <= NEAR), apart > NEAR
    return float(cosines[:, near].mean() - cosines[:, far].mean())


_SPENT = "spent.txt"


@dataclass(frozen=True)
class Order:
    """A job and how to do it: where, on what, for how long at most, beside how many others."""

    job: Job
    text: Text
    scale: str
    folder: Path
    device: str | None = None
    seconds: float = float("inf")
    jobs: int = 1
    tasks: Path | None = None


def run_one(order: Order) -> Record | None:
    """The record of the finished run; None if its seconds were over first: it is saved, and a later call goes on.

    A run that leaves the numbers is finished too, with an infinite loss.
    """
    _clear_other(order)
    began, before, outcome = time.monotonic(), _spent(order.folder), _place(order.device)
    try:
        outcome |= _trained(order)
        if outcome.get("diverged_at") is None:
            outcome |= measured(order.job, order.folder, order.tasks, outcome["kind"])
    except OutOfTime:
        return None
    finally:
        seconds = round(before + time.monotonic() - began, 2)
        if (order.folder / EXPERIMENT).is_file():  # or a run that never began would leave files of no run
            write_whole(order.folder / _SPENT, f"{seconds}\n".encode())
        _release()
    outcome |= {"seconds": seconds, "jobs": order.jobs}
    metrics = read_metrics(order.folder) if (order.folder / METRICS).is_file() else []
    return record_of(order.job, order.text, order.scale, metrics, outcome)


def _trained(order: Order) -> dict[str, Any]:
    """Train to the end. A sweep meets growing gradients on purpose: they are not warned of, divergence is recorded."""
    logger, experiment = logging.getLogger("skipless"), order.job.experiment
    before, keep = logger.level, order.job.weights or order.job.measure == "tasks"
    logger.setLevel(logging.ERROR)
    ending = RunLimits(seconds=order.seconds, weights=keep)
    try:
        done = train(experiment, order.folder, resume=True, device=order.device, quiet=True, ending=ending)
        return {"step_seconds": done.step_seconds}
    except RunFinishedError:  # an earlier call was killed between its end and its record
        return {"step_seconds": float("nan")}
    except Diverged as error:
        return {"step_seconds": float("nan"), "diverged_at": error.step}
    finally:
        logger.setLevel(before)


def _clear_other(order: Order) -> None:
    """Remove what an interrupted call with other settings of speed or logs, or another path to its text, has left.

    So too what another version has left, whose settings this one cannot read.
    """
    if not (order.folder / EXPERIMENT).is_file():
        (order.folder / _SPENT).unlink(missing_ok=True)  # of a run that never began
    elif _found(order.folder) != order.job.experiment:
        shutil.rmtree(order.folder)


def _found(folder: Path) -> Experiment | None:
    try:
        return read_experiment(folder)
    except ValueError:
        return None


def _spent(folder: Path) -> float:
    """Seconds of earlier calls on the same run."""
    file = folder / _SPENT
    return float(file.read_text()) if file.is_file() else 0.0


def _release() -> None:
    """Give the finished run's memory on the GPU back."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _place(device: str | None) -> dict[str, Any]:
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if kind.startswith("cuda") and torch.cuda.is_available() else "CPU"
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"kind": kind, "device": name, "torch": torch.__version__, "commit": _commit(), "time": stamp}


@functools.cache
def _commit() -> str:
    state = git_state(Path(skipless.__file__).parent)
    return "" if state is None else state["commit"][:12] + "+" * state["dirty"]


class Worker:
    """A process of its own, which keeps what it has compiled; with jobs=1 this very process."""

    def __init__(self, alone: bool, threads: int):
        self.alone, self.threads, self.network = alone, threads, ""
        self._pool = None if alone else self._open()
        self._processes: set[BaseProcess] = set()

    def start(self, order: Order) -> Future:
        """Carry out an order."""
        self.network = order.job.network
        if self._pool is not None:
            try:
                return self._submit(self._pool, order)
            except BrokenProcessPool:  # the process was killed; a new one takes its place
                self._pool = self._open()
                return self._submit(self._pool, order)
        future: Future = Future()
        try:
            future.set_result(_attempt(order))
        except Exception as error:
            future.set_exception(error)
        return future

    def interrupt(self) -> None:
        """What Ctrl-C does in a terminal, which tells all processes: a run that trains saves itself, none is begun."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None and os.name == "posix":
                os.kill(process.pid, signal.SIGINT)

    def stop(self) -> None:
        """End the process, after its run; one that is interrupted saves itself first."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _open(self) -> ProcessPoolExecutor:
        # read when a process first imports torch: each worker would otherwise compile with all cores
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(self.threads))
        setup = (os.getpid(), self.threads)
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin, initargs=setup)

    def _submit(self, pool: ProcessPoolExecutor, order: Order) -> Future:
        before = set(active_children())
        with _held_back():  # the first order starts the process
            future = pool.submit(_attempt, order)
            self._processes = {one for one in self._processes if one.is_alive()} | (set(active_children()) - before)
        return future


@contextmanager
def _held_back() -> Generator[None]:
    """Ctrl-C waits, here and in a process that is started here until it asks for it."""
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _attempt(order: Order) -> Record | None:
    """run_one, in whichever process; what goes wrong is written down there."""
    if trainer.early.is_set():
        raise KeyboardInterrupt
    try:
        return run_one(order)
    except Exception as error:
        raise keep(error, order.folder) from error


def _begin(parent: int, threads: int) -> None:
    """Set a worker process up: its share of the cores, and its end when the one that started it is gone."""
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, lambda *_: trainer.early.set())  # while a run trains it listens itself, and saves
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
class Scheduler:
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
        return run_seconds(job.experiment, self._machine()) * (median(self._paces) if self._paces else 1.0)

    @functools.cached_property
    def _device(self) -> str:
        """Chosen once: a worker whose GPU is lost on the way fails, and does not go on by itself on a CPU."""
        import torch

        return self.limits.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def _machine(self) -> Machine:
        return CPU if self._device.startswith("cpu") else H200

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
            self._paces.append(record.seconds / run_seconds(job.experiment, self._machine()))
            self.results.add(record)
            error_file(self.results.run_folder(job.key)).unlink(missing_ok=True)
            if not job.weights:
                shutil.rmtree(self.results.run_folder(job.key), ignore_errors=True)
            known = missing(self.items, self.setting, self.results.records, self.arms)
            self.watch.finished(record, len(known))

    def _fail(self, job: Job, error: Exception) -> None:
        self._dropped.add(job.key)
        self._failed.add(job.network)
        self.watch.failed(job, error, error_file(self.results.run_folder(job.key)))
        if len(self._failed) == _MOST_FAILURES:
            raise ValueError(
                f"runs of {_MOST_FAILURES} networks in a row failed, the last one ({job.describe()}): {error}"
            ) from error

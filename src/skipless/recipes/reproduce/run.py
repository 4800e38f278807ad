"""One job from start to record, in whichever process: train, read the log, measure, let go of the memory."""

import functools
import gc
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import skipless
from skipless.data.shards import write_whole
from skipless.recipes.reproduce.job import Job
from skipless.recipes.reproduce.measures import measured
from skipless.recipes.reproduce.record import Record, record_of
from skipless.recipes.reproduce.text import Text
from skipless.train.config import Experiment
from skipless.train.divergence import Diverged
from skipless.train.ending import Ending, TimeUp
from skipless.train.environment import git_state
from skipless.train.loop import train
from skipless.train.metrics import read_metrics
from skipless.train.run import EXPERIMENT, METRICS, RunFinishedError, read_experiment

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


def carry_out(order: Order) -> Record | None:
    """The record of the finished run; None if its seconds were over first: it is saved, and a later call goes on.

    A run that leaves the numbers is finished too, with an infinite loss.
    """
    _clear_other(order)
    began, before, outcome = time.monotonic(), _spent(order.folder), _place(order.device)
    try:
        outcome |= _trained(order)
        if outcome.get("diverged_at") is None:
            outcome |= measured(order.job, order.folder, order.tasks, outcome["kind"])
    except TimeUp:
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
    ending = Ending(seconds=order.seconds, weights=keep)
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

"""A crew of processes that is told to stop, by a signal that only the one who leads it hears."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest

from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.paper import execute
from skipless.paper.catalogue import ITEMS
from skipless.paper.execute import Limits, Scheduler
from skipless.paper.experiments import SCALES, Job, Setting, Text, make_job
from skipless.paper.records import ResultsFolder

DAYS = 1_000_000  # steps


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Two processes with one run, of days."""
    (tmp_path / "a.txt").write_text("The signal goes through. " * 400)
    prepare(Preparation(str(tmp_path / "a.txt"), Bytes()), tmp_path / "data")
    item, setting = ITEMS["baselines"], Setting.of(SCALES["tiny"], Text.read(tmp_path / "data"))
    job = make_job(item, item.arms[0], setting, 1e-4)
    config = replace(job.experiment.train, steps=DAYS, log_every=1, compile=False)
    long: Job = replace(job, experiment=replace(job.experiment, train=config))
    monkeypatch.setattr(execute, "missing", lambda *_: [long])
    return Scheduler([item], setting, ResultsFolder(tmp_path / "results", "tiny"), Limits(jobs=2, device="cpu"))


def interrupted(crew: Scheduler, when: Callable[[], object]) -> float:
    """Seconds from a SIGINT to this process until all of the crew have ended."""
    sent: list[float] = []

    def send() -> None:
        while not when():
            time.sleep(0.05)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def give_up() -> None:  # for a worker that does not hear of it
        for child in active_children():
            child.kill()

    rescue = threading.Timer(90.0, give_up)
    rescue.start()
    threading.Thread(target=send, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            crew.work()
    finally:
        rescue.cancel()
    return time.monotonic() - sent[0]


def runs(crew: Scheduler) -> list[Path]:
    return sorted((crew.results.path / "runs").glob("*/"))


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_signal_to_the_leader_alone_stops_and_saves_a_run(endless: Scheduler) -> None:
    took = interrupted(endless, lambda: any((run / "metrics.jsonl").is_file() for run in runs(endless)))
    assert took < 60.0
    (run,) = runs(endless)
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_signal_while_a_process_starts_is_not_lost(endless: Scheduler, capfd: pytest.CaptureFixture[str]) -> None:
    assert interrupted(endless, active_children) < 60.0
    assert not runs(endless)
    assert "Traceback" not in capfd.readouterr().err

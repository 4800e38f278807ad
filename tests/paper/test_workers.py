"""Worker processes that are told to stop, by a signal that their parent alone hears; and runs that were left behind."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest

from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.paper import workers
from skipless.paper.experiments import SCALES, Setting
from skipless.paper.records import ResultsFolder, Text
from skipless.paper.runs import Limits, Listener, Run, make_run
from skipless.paper.tables import TABLES
from skipless.paper.workers import RunRequest, Scheduler, run_one
from skipless.training.trainer import Result

DAYS = 1_000_000  # steps


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """As in a terminal: what a script starts in the background is told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Two processes with one run, of days."""
    (tmp_path / "a.txt").write_text("The signal goes through. " * 400)
    prepare(Preparation(str(tmp_path / "a.txt"), Bytes()), tmp_path / "data")
    table, setting = TABLES["baselines"], Setting.of(SCALES["tiny"], Text.read(tmp_path / "data"))
    run = make_run(table, table.arms[0], setting, 1e-4)
    config = replace(run.experiment.train, steps=DAYS, log_every=1, compile=False)
    long: Run = replace(run, experiment=replace(run.experiment, train=config))
    monkeypatch.setattr(workers, "missing", lambda *_: [long])
    return Scheduler([table], setting, ResultsFolder(tmp_path / "results", "tiny"), Limits(jobs=2, device="cpu"))


def interrupted(scheduler: Scheduler, when: Callable[[], object]) -> float:
    """Seconds from a SIGINT to this process until all workers have ended."""
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
            scheduler.work()
    finally:
        rescue.cancel()
    return time.monotonic() - sent[0]


def runs(scheduler: Scheduler) -> list[Path]:
    return sorted((scheduler.results.path / "runs").glob("*/"))


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_signal_to_the_parent_alone_stops_and_saves_a_run(endless: Scheduler) -> None:
    took = interrupted(endless, lambda: any((run / "metrics.jsonl").is_file() for run in runs(endless)))
    assert took < 60.0
    (run,) = runs(endless)
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_signal_while_a_process_starts_is_not_lost(endless: Scheduler, capfd: pytest.CaptureFixture[str]) -> None:
    assert interrupted(endless, active_children) < 60.0
    assert not runs(endless)
    assert "Traceback" not in capfd.readouterr().err


class Failures(Listener):
    """Notes the errors of runs."""

    def __init__(self):
        self.errors: list[str] = []

    def failed(self, run: Run, error: str, traceback: Path) -> None:
        self.errors.append(error)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_worker_that_is_killed_fails_its_run_and_no_other(endless: Scheduler) -> None:
    def kill() -> None:
        while not (children := active_children()):
            time.sleep(0.05)
        children[0].kill()

    endless.listener = failures = Failures()
    threading.Thread(target=kill, daemon=True).start()
    assert len(endless.work()) == 1  # it is still missing
    assert failures.errors == ["its process died (exit code -9)"]
    assert not active_children()


def test_a_run_stopped_before_it_began_leaves_no_files_of_no_run(tmp_path: Path, monkeypatch) -> None:
    text, table = Text("none", 256, 0.05, 3.2, 0, ""), TABLES["baselines"]
    run = make_run(table, table.arms[0], Setting.of(SCALES["tiny"], text), 1e-4)

    def stopped(experiment, folder: Path, **_) -> None:
        folder.mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_one(RunRequest(run, tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())
    (tmp_path / "run" / "spent.txt").write_text("1.0\n")  # as earlier versions left it
    with pytest.raises(KeyboardInterrupt):
        run_one(RunRequest(run, tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


def test_the_steps_of_a_killed_call_count_in_its_time(tmp_path: Path, monkeypatch) -> None:
    text, table, folder = Text("none", 256, 0.05, 3.2, 0, ""), TABLES["baselines"], tmp_path / "run"
    run = make_run(table, table.arms[0], Setting.of(SCALES["tiny"], text), 1e-4)
    folder.mkdir()
    (folder / "experiment.json").write_text("{}")
    monkeypatch.setattr(workers, "read_experiment", lambda _: run.experiment)
    lines = [{"step": step, "loss": 3.0, "ema": 3.0} for step in (1, 2)]  # and no spent.txt
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(workers, "train", lambda *_, **__: Result(3, 3.0, None, None, 10.0))
    record = run_one(RunRequest(run, folder))
    assert record is not None
    assert record.seconds == pytest.approx(20.0, abs=1.0)
    (folder / "spent.txt").write_text("50.0\n")  # a call that ended as it should, before the one that was killed
    record = run_one(RunRequest(run, folder))
    assert record is not None
    assert record.seconds == pytest.approx(50.0, abs=1.0)


@pytest.mark.parametrize("left", ['{"name": "old", "train": {"gone": 1}}', "{"])
def test_what_another_version_left_of_a_run_is_begun_again(tmp_path: Path, monkeypatch, left: str) -> None:
    text, table, folder = Text("none", 256, 0.05, 3.2, 0, ""), TABLES["baselines"], tmp_path / "run"
    run = make_run(table, table.arms[0], Setting.of(SCALES["tiny"], text), 1e-4)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "experiment.json").write_text(left)
    seen: list[bool] = []

    def stopped(*_, **__) -> None:
        seen.append(folder.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_one(RunRequest(run, folder))
    assert seen == [False]


def test_a_run_whose_steps_are_timed_ends_without_a_validation(tmp_path: Path) -> None:
    """Its record has none, as those of before `eval_every=0` meant one at the end."""
    text = tmp_path / "a.txt"
    text.write_text("The signal goes through. " * 4000)
    prepare(Preparation(str(text), Bytes(), valid=str(text)), tmp_path / "data")
    table, setting = TABLES["optimisers"], Setting.of(SCALES["tiny"], Text.read(tmp_path / "data"))
    run = make_run(table, table.arms[0], setting, 1e-4, measure="pace")
    config = replace(run.experiment.train, steps=4, warmup=2, log_every=2, compile=False)
    timed = replace(run, experiment=replace(run.experiment, train=config))
    record = run_one(RunRequest(timed, tmp_path / "run", Limits(device="cpu")))
    assert record is not None
    assert (len(record.curve), record.valid_loss) == (2, float("inf"))

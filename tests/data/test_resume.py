"""kill -9 at random moments: every restart goes on, and the result is that of a run left alone."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from skipless.data.prepare import Chunk, Encoded, Folder, SectionWriter
from skipless.data.store import check_hash, check_sizes
from skipless.files import is_part

COMMAND = [sys.executable, "-c", "from skipless.cli import main; main()", "prepare"]
OPTIONS = ["--vocab", "500", "--sample-mb", ".2", "--shard-mb", ".02", "--valid-fraction", ".1"]
SKIPPED = ("verified.json", ".lock")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in SKIPPED}


def start(sources: Path, out: Path) -> subprocess.Popen:
    return subprocess.Popen([*COMMAND, str(sources), "--out", str(out), *OPTIONS], stdout=subprocess.DEVNULL)


def noted(folder: Path) -> int:
    journal = folder / "sections.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def kill_sometime(run: subprocess.Popen, folder: Path, choice: random.Random, seconds: float) -> bool:
    """kill -9 after some sections more, or after some time; whether there was anything left to kill."""
    sections = noted(folder) + choice.randint(2, 12)
    deadline = time.monotonic() + choice.uniform(0.1, 1.0) * seconds
    while run.poll() is None and noted(folder) < sections and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(choice.uniform(0.0, 0.01))
    run.send_signal(signal.SIGKILL)
    return run.wait() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_killed_at_random_moments_the_result_is_the_same(sources, tmp_path):
    begun = time.monotonic()
    assert start(sources, tmp_path / "alone").wait() == 0
    seconds = time.monotonic() - begun
    choice = random.Random(time.time_ns())
    folder, stages = tmp_path / "killed", []
    while len(stages) < 5:
        if kill_sometime(start(sources, folder), folder, choice, seconds):
            stages.append(check_stage(folder))
        else:  # it was quicker: the result must be right, and there is nothing left to kill
            assert contents(folder) == contents(tmp_path / "alone"), stages
            shutil.rmtree(folder)
    assert start(sources, folder).wait() == 0, stages
    assert contents(folder) == contents(tmp_path / "alone"), stages


def test_killed_after_the_manifest_the_journal_goes_with_the_next_run(sources, tmp_path):
    assert start(sources, tmp_path / "out").wait() == 0
    whole = contents(tmp_path / "out")
    (tmp_path / "out" / "sections.jsonl").write_text('{"tokenizer": {}}\n')
    assert start(sources, tmp_path / "out").wait() == 0
    assert contents(tmp_path / "out") == whole


def check_stage(folder: Path) -> str:
    """How far a killed run came; all that it calls finished must be whole."""
    sections = Folder(folder).sections()
    shards = [shard for section in sections.values() for shard in section.shards]
    check_sizes(folder, shards, 2)
    for shard in shards:
        check_hash(folder, shard)
    if (folder / "manifest.json").exists():
        return "finished"
    if shards:
        return "sections"
    return "tokenizer" if (folder / "tokenizer.model").exists() else "start"


def test_ctrl_c_at_the_moment_a_shard_is_opened_leaves_nothing(tmp_path, monkeypatch):
    opened = Path.open

    def interrupted(self, *args, **options):
        opened(self, *args, **options).close()
        raise KeyboardInterrupt

    writer = SectionWriter(tmp_path)
    monkeypatch.setattr(Path, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.add(Chunk(0), [Encoded("train", np.zeros(3, np.uint16), 1, 3)])
    assert [is_part(path) for path in tmp_path.iterdir()] == [True]
    writer.abandon()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["rename", "journal", "manifest", "tokenizer"])
def test_killed_between_two_steps(sources, tmp_path, moment):
    """The moments that chance would seldom meet: just before a file takes its name or a line is noted."""
    code = f"""
import os, signal
from pathlib import Path
from skipless.data.prepare import Folder
count = 0
def die_at(number):
    global count
    count += 1
    if count == number:
        os.kill(os.getpid(), signal.SIGKILL)
replace, note, finish = Path.replace, Folder.note, Folder.finish
def later(self, target):
    if self.name.startswith({".tokenizer" if moment == "tokenizer" else ".train"!r}):
        die_at({1 if moment == "tokenizer" else 5})
    return replace(self, target)
def noting(self, line):
    if "index" in line: die_at(4)
    note(self, line)
def finishing(self, manifest):
    die_at(1)
    finish(self, manifest)
if {moment!r} in ("rename", "tokenizer"): Path.replace = later
if {moment!r} == "journal": Folder.note = noting
if {moment!r} == "manifest": Folder.finish = finishing
from skipless.cli import main
main()
"""
    arguments = ["prepare", str(sources), "--out", str(tmp_path / "out"), *OPTIONS]
    killed = subprocess.run([sys.executable, "-c", code, *arguments], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    stage = check_stage(tmp_path / "out")
    assert stage == ("start" if moment == "tokenizer" else "sections")
    again = subprocess.run([*COMMAND, *arguments[1:]], check=True, capture_output=True, text=True)
    assert ("resuming" in again.stderr) == (moment != "tokenizer")
    if "reference" not in _REFERENCE:
        subprocess.run([*COMMAND, str(sources), "--out", str(tmp_path / "alone"), *OPTIONS], check=True)
        _REFERENCE["reference"] = contents(tmp_path / "alone")
    assert contents(tmp_path / "out") == _REFERENCE["reference"]


_REFERENCE: dict[str, dict[str, bytes]] = {}

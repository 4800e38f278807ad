"""Ctrl-C at any moment of any command: one line, exit code 130, no traceback, and only whole files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skipless import console

NOTHING = "skipless: stopped; nothing was written"


def stopped(arguments: list[str], when: Callable[[int], bool], number: int = signal.SIGINT) -> tuple[int, list[str]]:
    """Exit code and lines of standard error of a command that gets a signal as soon as when(its pid) is true."""
    process = subprocess.Popen(
        [sys.executable, "-m", "skipless", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a runner in the background ignores it
    )
    deadline = time.monotonic() + 100
    while not when(process.pid):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    _, complaint = process.communicate(timeout=100)
    return process.returncode, complaint.splitlines()


def mapped(pid: int, name: str) -> bool:
    """Whether the process has loaded a library of that name."""
    return name in Path(f"/proc/{pid}/maps").read_text()


pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process loads is read in /proc")


@pytest.mark.parametrize("command", ["inspect", "kernels", "eval", "report"])
def test_during_imports(command, tmp_path, tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")  # a folder without one is refused before torch is imported
    arguments = {
        "inspect": ["inspect", "wikitext103/e-spa"],
        "kernels": ["kernels", "wikitext103/e-spa", "--figure", str(tmp_path / "kernels.png")],
        "eval": ["eval", str(model), "--json", str(tmp_path / "eval.json")],
        "report": ["report", str(tmp_path / "none.json"), "--out", str(tmp_path / "report.html")],
    }[command]
    library = {"kernels": "scipy", "report": "_multiarray_umath"}.get(command, "libtorch_cpu")
    code, lines = stopped(arguments, lambda pid: mapped(pid, library))
    assert (code, lines) == (130, [NOTHING])
    assert not list(tmp_path.iterdir())


def test_sigterm_is_ctrl_c(tmp_path):
    arguments = ["kernels", "wikitext103/e-spa", "--figure", str(tmp_path / "kernels.png")]
    code, lines = stopped(arguments, lambda pid: mapped(pid, "scipy"), signal.SIGTERM)
    assert (code, lines) == (130, [NOTHING])


def test_a_process_of_torchrun_leaves_sigterm_alone(monkeypatch):
    """It may wait for others where Python hears nothing, and torchrun would have to kill it."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    with console.handle_stops():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_while_inspecting(tmp_path):
    """Past the imports: a network that takes long, while it is being built or run, which a gigabyte tells."""

    def when(pid: int) -> bool:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") > 1e9

    sizes = ["--width", "1024", "--batch", "8", "--length", "512", "--json", str(tmp_path / "seen.json")]
    code, lines = stopped(["inspect", "wikitext103/pre-ln", *sizes], when)
    assert (code, lines[-1]) == (130, NOTHING)
    assert "Traceback" not in "\n".join(lines)
    assert not list(tmp_path.iterdir())


def test_files_that_are_there_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, "written_files", [])

    def command() -> None:
        console.write_output(tmp_path / "data.json", b"{}")
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        console.report_interrupt(command)()
    assert end.value.code == 130
    assert capsys.readouterr().err == f"skipless: stopped; written: {tmp_path / 'data.json'}\n"
    with pytest.raises(SystemExit):
        console.report_interrupt(command, "stopped; the same command goes on from there")()
    assert capsys.readouterr().err == "skipless: stopped; the same command goes on from there\n"


def test_a_file_in_the_making_is_taken_away(tmp_path, monkeypatch):
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("skipless.data.store.os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        console.write_output(tmp_path / "data.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_a_process_that_ignores_it_goes_on(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with console.handle_stops():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

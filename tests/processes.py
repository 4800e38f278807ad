"""Python programs in processes of their own that start in a moment: forked from one that has imported torch already.

They take signals, print and exit as those of `python -c` do. Only imports are saved, seconds of every test otherwise.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
# nothing here imports triton, which reads TRITON_INTERPRET as it is imported
_CONTEXT.set_forkserver_preload(["torch.distributed.checkpoint.state_dict", "skipless.training.trainer"])


def _run(code: str, arguments: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    """In the new process, which leads a group of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["-c", *arguments]
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


class Program:
    """A running program, with what tests need of subprocess.Popen."""

    def __init__(self, code: str, *arguments: object, environment: dict[str, str] | None = None):
        folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._outputs = [folder / "stdout", folder / "stderr"]
        taken = {**os.environ} if environment is None else environment
        self._process = _CONTEXT.Process(target=_run, args=(code, [*map(str, arguments)], taken, self._outputs))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, minus the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a program of the tests", timeout)
        return self.poll()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def outputs(self) -> list[str]:
        """What it has written so far to standard output and to standard error."""
        return [path.read_text() if path.exists() else "" for path in self._outputs]

    def finished(self, timeout: float = 300) -> str:
        """Its standard output, once it has ended well."""
        try:
            code = self.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)  # with the processes that it has started
            raise
        output, complaint = self.outputs()
        assert code == 0, f"exit code {code}\n{output[-2000:]}{complaint[-4000:]}"
        return output


def ranks(size: int, code: str, *arguments: object) -> list[Program]:
    """The program in `size` processes that find each other as those of torchrun do."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    return [
        Program(code, *arguments, environment={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]

"""Ctrl-C, the same for every command: one line that says what was written, exit code 130 and no traceback."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
written: list[Path] = []  # files that this process has finished writing


@contextmanager
def stoppable() -> Generator[None]:
    """In here Ctrl-C ends an import at once: unwinding it could be swallowed by a library, or end in a traceback.

    Elsewhere it is a KeyboardInterrupt as usual. A process that was told to ignore it goes on ignoring it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before != signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say()
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, before)


def told(command: Callable[..., None], words: str | None = None) -> Callable[..., None]:
    """The command, ending with a line on Ctrl-C: `words`, for one that writes more than files of its own."""

    @functools.wraps(command)
    def run(*args, **kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:  # typer would end it without a word
            say(words)
            sys.exit(INTERRUPTED)

    return run


def say(words: str | None = None) -> None:
    """On standard error; by default which files are there."""
    files = f"written: {', '.join(map(str, written))}" if written else "nothing was written"
    print(f"skipless: {words or f'stopped; {files}'}", file=sys.stderr)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _importing(frame):
        say()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

"""Ctrl-C between steps: the first one asks the run to stop and save, the second one stops it at once."""

import signal
import threading
import time

ECHO = 1.0  # seconds: torchrun hands a terminal's Ctrl-C on to processes that had it already
early = threading.Event()  # set by a process's own handler: a signal outside training, which the next run stops for


class StopRequest:
    """While it is entered, SIGINT and SIGTERM set `asked` instead of ending the process in the middle of an update.

    A second signal, more than ECHO seconds after the first, ends it as usual. Outside the main thread, where Python
    delivers no signals, it does nothing. Where `early` is set it has been asked from the start.
    """

    def __init__(self):
        self.asked = False
        self._first = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        if early.is_set():
            self.asked, self._first = True, time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # ty: ignore[invalid-argument-type]

    def _note(self, number: int, frame: object) -> None:
        if self.asked and time.monotonic() - self._first > ECHO:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._first = True, time.monotonic()

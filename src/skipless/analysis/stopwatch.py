"""How long measuring takes, without waiting for a GPU while it runs."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch


class Stopwatch:
    """Adds up the time of what runs inside `around`: a GPU's own, or the processor's where that is longer."""

    def __init__(self):
        self._host = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def around(self, device: torch.device) -> Generator[None]:
        """Around one measurement on `device`."""
        started = time.perf_counter()
        began = _mark(device)
        try:
            yield
        finally:
            if began is not None:
                self._events.append((began, cast(torch.cuda.Event, _mark(device))))
            self._host += time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """So far. Waits for the measurements on a GPU to be over."""
        if not self._events:
            return self._host
        for _, last in self._events:
            last.synchronize()
        return max(self._host, sum(first.elapsed_time(last) for first, last in self._events) / 1e3)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """A moment in the GPU's work, or None elsewhere."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))

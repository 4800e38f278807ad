"""Who carries out orders: this very process, or one of its own that Ctrl-C stops at any moment of its life."""

import os
import signal
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess

from skipless.recipes.reproduce import failure
from skipless.recipes.reproduce.record import Record
from skipless.recipes.reproduce.run import Order, carry_out
from skipless.train import interrupt


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
    """carry_out, in whichever process; what goes wrong is written down there."""
    if interrupt.early.is_set():
        raise KeyboardInterrupt
    try:
        return carry_out(order)
    except Exception as error:
        raise failure.keep(error, order.folder) from error


def _begin(parent: int, threads: int) -> None:
    """Set a worker process up: its share of the cores, and its end when the one that started it is gone."""
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, lambda *_: interrupt.early.set())  # while a run trains it listens itself, and saves
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

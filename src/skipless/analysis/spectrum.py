"""How many directions a kernel has left, from its eigenvalues.

A GPU takes them one matrix at a time, and longer than a processor does: kernels of a model on a GPU are sent to
threads that work beside it, so that nothing waits. Each uses one core: matrices of this size gain nothing from more,
and where other work holds some of the cores, threads that wait for each other lose all.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

Ranks = tuple[float, float]
_MOST_WORKERS = 8


def later(kernels: list[Tensor]) -> Callable[[], Ranks]:
    """A function that gives the mean over the kernels, each (T, T) of any size, of their two `ranks`."""
    if not kernels or not kernels[0].is_cuda:
        found = _mean([ranks(kernel) for kernel in kernels])
        return lambda: found
    copies = [kernel.to("cpu", non_blocking=True) for kernel in kernels]
    copied = torch.cuda.current_stream(kernels[0].device).record_event()

    def work() -> Ranks:
        copied.synchronize()
        return _mean([ranks(kernel) for kernel in copies])

    return _workers().submit(work).result


@torch.no_grad()
def ranks(kernel: Tensor) -> Ranks:
    """(exp of the entropy of the spectrum, tr Σ / λ_max); NaN where the kernel is not finite or is 0."""
    if not bool(torch.isfinite(kernel).all()):
        return math.nan, math.nan
    values = torch.linalg.eigvalsh(kernel).clamp(min=0.0)
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp()), float(1.0 / share[-1])


@cache
def _workers() -> ThreadPoolExecutor:
    count = min(_MOST_WORKERS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, "skipless-spectrum", initializer=torch.set_num_threads, initargs=(1,))


def _mean(found: list[Ranks]) -> Ranks:
    count = len(found)
    return (sum(r[0] for r in found) / count, sum(r[1] for r in found) / count) if count else (math.nan, math.nan)

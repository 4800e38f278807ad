"""Timing a training step, looking into it, and writing down what was found as it comes."""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from step_arms import OURS, Run, Shape, batch_of, compiled, flops_per_step, network, train_step
from torch import nn

from skipless.data.loader import Batch
from skipless.training.cuda_graph import GraphedStep, unchanged

PEAK = 989e12  # dense bfloat16 of an H100 or H200
MODES = ("eager", "graph")
_COMPARED, _ROUNDS = 3, 3


class MismatchError(RuntimeError):
    """Two ways to compute the same thing differ: no speed is printed."""


class Budget:
    """Whether there is time for more."""

    def __init__(self, seconds: float):
        self._until = time.monotonic() + seconds

    def over(self) -> bool:
        """Whether the seconds are spent."""
        return time.monotonic() > self._until


class Results:
    """Rows, printed as they come and appended to a JSONL file where one is named."""

    def __init__(self, out: Path | None):
        self.rows: list[dict] = []
        self._out = out
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict) -> None:
        """One row, on the terminal and on the disk before the next is measured."""
        self.rows.append(row)
        self.note(row)

    def note(self, row: dict) -> None:
        """A line that is no measurement, such as where it all ran."""
        text = json.dumps(row)
        print(text, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(text + "\n")


def surroundings(options: argparse.Namespace) -> dict:
    """Where and how a benchmark ran."""
    on_gpu = options.device.startswith("cuda")
    name = torch.cuda.get_device_name(options.device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return {"device_name": name, "torch": torch.__version__, "command": sys.argv}


def measure(model: nn.Module, shape: Shape, run: Run, modes: tuple[str, ...], steps: int) -> Iterator[tuple[str, dict]]:
    """What each mode takes, after the losses of the first steps have been found to agree."""
    step, batch = train_step(model, shape, run), batch_of(shape, run)
    began = time.perf_counter()
    with unchanged(step.model, step.optimizer):
        expected = _losses(step, batch)
    started = time.perf_counter() - began
    for mode in sorted(modes, reverse=True):  # the graph first: its losses must start where the eager ones did
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        advance = GraphedStep(step) if mode == "graph" else step
        if mode == "graph":
            _compare(expected, _losses(advance, batch))
        milliseconds = _milliseconds(lambda go=advance: go(0, batch), run, steps)
        yield mode, {"ms": milliseconds, "start_s": started, **_derived(model, shape, run, milliseconds)}
        advance = None


def warmed_up(model: nn.Module, shape: Shape, run: Run, mode: str) -> Callable[[], object]:
    """A step that has been made before, launched by the host or replayed."""
    step, batch = train_step(model, shape, run), batch_of(shape, run)
    advance = GraphedStep(step) if mode == "graph" else step
    for _ in range(5):
        advance(0, batch)
    return lambda: advance(0, batch)


def _losses(advance: Callable, batch: Batch) -> list[float]:
    return [advance(step, batch)[0].item() for step in range(_COMPARED)]


def _compare(expected: list[float], found: list[float]) -> None:
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
    if not worst < 1e-3:
        raise MismatchError(f"losses by graph {found} differ from eager ones {expected} by {worst:.1e}")


def _milliseconds(call: Callable[[], object], run: Run, steps: int) -> float:
    """The median round's time per call, the device idle before and after each round."""
    for _ in range(3):
        call()
    rounds = []
    for _ in range(_ROUNDS):
        _wait(run)
        began = time.perf_counter()
        for _ in range(steps):
            call()
        _wait(run)
        rounds.append(1e3 * (time.perf_counter() - began) / steps)
    return statistics.median(rounds)


def _derived(model: nn.Module, shape: Shape, run: Run, milliseconds: float) -> dict:
    flops = flops_per_step(model, shape) / milliseconds * 1e3
    memory = torch.cuda.max_memory_allocated() / 1e9 if run.device.type == "cuda" else None
    return {"tflops": flops / 1e12, "mfu": 100 * flops / PEAK, "memory_gb": memory}


def _wait(run: Run) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def release() -> None:
    """Forget compiled code and give memory back, so that arms do not weigh on each other."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def check(arm: str, shape: Shape, run: Run) -> float:
    """The error of compiled code in bfloat16 over that of eager code, both against eager float32, in norm.

    MismatchError above 2. On a shallow copy, since a deep one amplifies rounding, and with its weights moved by a
    twentieth, since queries start at zero. Hugging Face's networks are compared by their losses.
    """
    if not run.compile:
        return 0.0
    ours = arm in OURS
    model = network(arm, replace(shape, depth=min(6 if ours else 2, shape.depth)), run)
    for parameter in model.parameters():
        parameter.add_(0.05 * shape.width**-0.5 * torch.randn_like(parameter))
    batch = batch_of(shape, run).map(lambda tensor: tensor[:2])

    def output(half: bool = run.device.type == "cuda") -> torch.Tensor:
        with torch.autocast(run.device.type, torch.bfloat16, enabled=half):
            return (model(batch.inputs) if ours else model(batch.inputs, targets=batch.targets)).float()

    truth, eager = output(half=False), output()
    compiled(model, run)
    ours_off, eager_off = ((x - truth).norm() / truth.norm() for x in (output(), eager))
    error = float(ours_off / eager_off.clamp(min=1e-3))
    if not error < 2.0:
        raise MismatchError(f"{arm}: compiled code is {error:.3g} times as far from float32 as eager code; no speed")
    release()
    return error

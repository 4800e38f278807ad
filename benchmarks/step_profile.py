"""Where a training step's time goes: its kernels by time, how long the device waited between them, and its clock."""

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from step_arms import Run, Shape, batch_of, train_step
from torch import nn
from torch.profiler import ProfilerActivity

from skipless.train.graph import GraphedStep

_PROFILED, _LONG = 3, 40  # steps under the profiler, and between two readings of the clock
Span = tuple[str, float, float]  # a kernel's name, its start and its end in microseconds


def profile(model: nn.Module, shape: Shape, run: Run, mode: str, rows: int = 30) -> str:
    """The kernels of a step launched by the host, or replayed from a graph; operators instead of kernels on a CPU."""
    step, batch = train_step(model, shape, run), batch_of(shape, run)
    advance = GraphedStep(step) if mode == "graph" else step
    on_gpu = run.device.type == "cuda"
    for _ in range(5):
        advance(0, batch)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    _wait(on_gpu)
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(_PROFILED):
            advance(0, batch)
        _wait(on_gpu)
    if not on_gpu:  # operators call one another: each counts for what it does itself
        return table_of_spans([(e.name, 0.0, e.self_cpu_time_total) for e in seen.events()], _PROFILED, rows)
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in kernels]
    waited = f"       {idle(spans) / 1e3 / _PROFILED:9.3f} ms         with none of them running"
    return "\n".join([table_of_spans(spans, _PROFILED, rows), waited, clock(lambda: advance(0, batch))])


def table_of_spans(spans: Iterable[Span], steps: int, rows: int) -> str:
    """One line per name: share, milliseconds and calls a step, the longest first; then the sum."""
    spans = list(spans)
    spent, calls = defaultdict(float), defaultdict(int)
    for name, start, end in spans:
        spent[name] += end - start
        calls[name] += 1
    total = sum(spent.values()) or 1.0
    names = sorted(spent, key=spent.__getitem__, reverse=True)
    line = "{:6.1%} {:9.3f} ms {:6d}  {}".format
    lines = [line(spent[n] / total, spent[n] / 1e3 / steps, calls[n] // steps, n[:110]) for n in names[:rows]]
    return "\n".join([*lines, line(1.0, total / 1e3 / steps, len(spans) // steps, "in all")])


def idle(spans: Iterable[Span]) -> float:
    """The microseconds between the first start and the last end in which nothing runs."""
    waited, until = 0.0, None
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        waited += max(0.0, start - until) if until is not None else 0.0
        until = max(end, until) if until is not None else end
    return waited


def clock(call: Callable[[], object]) -> str:
    """The processors' clock and the board's power while the steps run, read three times; needs nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi: clock and power are unknown"
    query = "clocks.sm,clocks.max.sm,power.draw.instant,power.limit,clocks_event_reasons.active"
    readings = []
    for _ in range(3):
        for _ in range(_LONG):
            call()
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        readings.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
        _wait(True)
    return "\n".join([f"{query}, while it ran:", *readings])


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()

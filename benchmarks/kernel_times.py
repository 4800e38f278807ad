"""Where a call's time goes on a GPU: its kernels by time, how long the device waited between them, and its clock."""

import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity

_PROFILED, _LONG = 3, 2.0  # calls under the profiler; seconds of calls before a reading of the clock
Span = tuple[str, float, float]  # a kernel's name, its start and its end in microseconds


def kernel_times(call: Callable[[], object], on_gpu: bool, rows: int = 30) -> str:
    """The kernels of a call that has been made before; on a CPU its operators, of which each counts for itself."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    _wait(on_gpu)
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(_PROFILED):
            call()
        _wait(on_gpu)
    if not on_gpu:
        return table_of_spans([(e.name, 0.0, e.self_cpu_time_total) for e in seen.events()], _PROFILED, rows)
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in kernels]
    waited = f"       {idle(spans) / 1e3 / _PROFILED:9.3f} ms         with none of them running"
    return "\n".join([table_of_spans(spans, _PROFILED, rows), waited, clock(call)])


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
    """The processors' clock and the board's power during call after call, read three times; needs nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi: clock and power are unknown"
    query = "clocks.sm,clocks.max.sm,power.draw.instant,power.limit,clocks_event_reasons.active"
    readings = []
    for _ in range(3):
        until = time.monotonic() + _LONG
        while time.monotonic() < until:
            call()
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        readings.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
        _wait(True)
    return "\n".join([f"{query}, while it ran:", *readings])


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()

"""What a run shows while it goes: a live line on a terminal, plain lines elsewhere, TensorBoard if asked."""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Dense bfloat16 peaks in FLOP/s, by a part of the device's name; MFU is shown where the device is known.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}


@dataclass(frozen=True)
class Line:
    """One logged interval, after `step` updates."""

    step: int
    loss: float
    ema: float
    rate: float
    gradient: float
    tokens_per_second: float

    def as_record(self) -> dict[str, float | int]:
        """For metrics.jsonl. Time is left out, so that equal runs have equal logs."""
        return {"step": self.step, "loss": self.loss, "ema": self.ema, "rate": self.rate, "gradient": self.gradient}


class Display:
    """Shows lines of a run of `steps` steps. flops_per_token is 6 per parameter plus attention's, for MFU."""

    def __init__(self, name: str, steps: int, *, flops_per_token: float = 0.0, device: str = "", quiet: bool = False):
        self.name, self.steps, self.quiet = name, steps, quiet
        self.flops_per_token = flops_per_token
        self.peak = next((peak for part, peak in _PEAKS.items() if part in device), None)
        self._began, self._first, self._last_said = time.monotonic(), None, 0.0
        self._live: Any = _rich_progress(name, steps) if not quiet and sys.stderr.isatty() else None

    def show(self, line: Line) -> None:
        """The newest line: always on the bar, every few seconds as text."""
        if self._first is None:
            self._first = (line.step, time.monotonic())
        text = self._text(line)
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=line.step, description=text)
            return
        now = time.monotonic()
        if not self.quiet and (now - self._last_said > 5.0 or line.step >= self.steps):
            self._last_said = now
            print(f"{self.name} {line.step}/{self.steps}  {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own: an evaluation, a warning, a checkpoint."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            print(f"{self.name} {text}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _text(self, line: Line) -> str:
        text = (
            f"loss {line.loss:.3f}  ema {line.ema:.3f}  grad {line.gradient:.2g}  {line.tokens_per_second:,.0f} tok/s"
        )
        if self.peak:
            text += f"  MFU {100 * line.tokens_per_second * self.flops_per_token / self.peak:.0f}%"
        eta = self._eta(line.step)
        return text + (f"  {eta} left" if eta else "")

    def _eta(self, step: int) -> str:
        if self._first is None or step <= self._first[0]:
            return ""
        pace = (time.monotonic() - self._first[1]) / (step - self._first[0])
        seconds = math.ceil(pace * (self.steps - step))
        hours, rest = divmod(seconds, 3600)
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


class Board:
    """TensorBoard's event files, where the package is installed."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "TensorBoard is not installed: pip install 'skipless[log]', or leave out --tensorboard"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def add(self, record: dict[str, Any]) -> None:
        """Every number of a log record, by its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def _rich_progress(name: str, steps: int):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(name), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task("", total=steps)
    progress.start()
    return progress

"""`skipless demo` at work: prepare, train what is not trained yet, then draw, print and write."""

import dataclasses
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from skipless.cli.demo_report import as_json, closing, draw, table
from skipless.cli.output import print_table, write_whole
from skipless.data.progress import Progress
from skipless.recipes.demo import DEMO, E_SPA, Arm, Size, arms, check_steps, counting, prepare_text
from skipless.recipes.demo_outcome import read_outcome, sample
from skipless.train.config import Experiment
from skipless.train.device import find_device
from skipless.train.divergence import Diverged
from skipless.train.loop import read_result, train
from skipless.train.run import EXPERIMENT, FINISHED, read_experiment

DATA, RUNS, FIGURE, RESULTS, SAMPLE = "data", "runs", "demo.png", "results.json", "sample.txt"
SAMPLE_TOKENS = 160


@dataclass(frozen=True)
class Request:
    """What the command was asked for."""

    out: Path
    steps: int
    seed: int = 0
    device: str | None = None
    fresh: bool = False


def run(request: Request, size: Size = DEMO) -> None:
    """The whole demonstration. Interrupted, it goes on at the next call; finished, it trains nothing."""
    out = request.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out is {out}, a file; name a folder")
    check_steps(request.steps)
    if request.device is not None:
        find_device(request.device)
    data = (out / DATA).resolve()
    _say(f"text: the standard library of Python {sys.version_info.major}.{sys.version_info.minor}, byte by byte")
    prepare_text(data, Progress(), request.fresh)
    planned = arms(data, request.steps, request.seed, size)
    for arm in planned:
        _check_run(out / RUNS / arm.name, arm.experiment, request.fresh)
    _warn_if_busy()
    for number, arm in enumerate(planned, 1):
        _train(arm, out / RUNS / arm.name, request.device, f"{number}/{len(planned)}")
    _show(planned, request)


def _warn_if_busy() -> None:
    """Torch's threads wait for each other by spinning, which on a busy machine costs ten times the work itself."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load > cores and "OMP_WAIT_POLICY" not in os.environ:
        _say(
            f"other programs keep this machine busy (load {load:.1f} on {cores} cores), so this takes longer; "
            "OMP_WAIT_POLICY=passive skipless demo suffers least"
        )


def _check_run(folder: Path, experiment: Experiment, fresh: bool) -> None:
    """See that the folder holds this very run, or none; with `fresh`, none."""
    if not (folder / EXPERIMENT).is_file():
        return
    if fresh:
        shutil.rmtree(folder)
        return
    there = read_experiment(folder)
    # a finished demo may have been moved, and its text with it
    moved = dataclasses.replace(there, data=experiment.data) if (folder / FINISHED).is_file() else there
    if moved != experiment:
        raise ValueError(
            f"{folder} holds another demo ({_difference(there, experiment)}): repeat its options, give another --out, "
            "or start over with --fresh"
        )


def _difference(there: Experiment, here: Experiment) -> str:
    then, now = (
        {"--steps": e.train.steps, "--seed": e.train.seed, "its text in": e.data.folder} for e in (there, here)
    )
    found = [f"{name} {then[name]} there, {now[name]} here" for name in then if then[name] != now[name]]
    return "; ".join(found) or "of another version of skipless"


def _train(arm: Arm, folder: Path, device: str | None, count: str) -> None:
    what = f"{count} {arm.label} (skips: {arm.skips}, norms: {arm.norms})"
    if (folder / FINISHED).is_file():
        _say(f"{what}: trained already")
        return
    _say(f"{what}: {arm.experiment.train.steps} steps")
    began = time.monotonic()
    try:
        train(arm.experiment, folder, resume=True, device=device)
    except Diverged as error:
        raise ValueError(f"{arm.label}: {error}") from error
    except KeyboardInterrupt:
        _say(f"skipless: stopped while training {arm.label}; the same command goes on from there")
        raise typer.Exit(130) from None
    _say(f"{what}: done in {time.monotonic() - began:.0f} s")


def _show(planned: tuple[Arm, ...], request: Request) -> None:
    out, console = request.out, Console()
    outcomes = [read_outcome(arm, out / RUNS / arm.name) for arm in planned]
    reference = counting(planned[0])
    weights = out / RUNS / E_SPA / read_result(out / RUNS / E_SPA)["weights"]
    text = sample(weights, SAMPLE_TOKENS, request.seed)
    head, rows, styles = table(outcomes, reference)
    console.print()
    print_table(console, head, rows, styles)
    _note(console, f"\nE-SPA writes, after {request.steps} steps:\n")
    _note(console, text.rstrip())
    write_whole(out / SAMPLE, text.encode())
    write_whole(out / RESULTS, json.dumps(as_json(outcomes, reference), indent=2).encode() + b"\n")
    drawn = _write_figure(out / FIGURE, lambda: draw(outcomes, reference))
    written = [out / FIGURE] if drawn else []
    _note(console, "")
    for path in [*written, out / RESULTS, out / SAMPLE, weights]:
        _note(console, f"wrote {path}")
    console.print()
    console.print(closing(outcomes, reference), markup=False, highlight=False, style="bold", soft_wrap=True)


def _write_figure(path: Path, picture) -> bool:
    try:
        from skipless.analysis.figure_style import render

        write_whole(path, render(picture(), path.suffix))
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("matplotlib", "PIL"):
            raise
        _say(f"no figure: {missing.name} is not installed; pip install 'skipless[plot]', then the same command again")
        return False
    return True


def _note(console: Console, words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)

"""`skipless demo`: three deep networks on a CPU in four minutes."""

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from skipless import __version__
from skipless.console import Progress, print_table, write_output
from skipless.paper.demo import (
    DEMO,
    E_SPA,
    STANDARD,
    Arm,
    Counting,
    Outcome,
    Size,
    arms,
    check_steps,
    counting,
    prepare_text,
    read_outcome,
    sample,
)
from skipless.training.config import Experiment
from skipless.training.distributed import find_device
from skipless.training.divergence import Diverged
from skipless.training.run import EXPERIMENT, FINISHED, read_experiment, read_result
from skipless.training.trainer import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# A network within this many nats of symbol frequencies has learned nothing of its context.
NOTHING = 0.1


def table(outcomes: Sequence[Outcome], reference: Counting) -> tuple[list[str], list[list[str]], list[str]]:
    """Head, rows and the colour of each row's last cell; the last row is the reference."""
    tail = outcomes[0].tail
    training = f"training loss (mean of last {tail})" if tail > 1 else "training loss (last step)"
    head = ["network", "skips", "norms", training, "valid bits/byte", "signal at initialisation"]
    rows = [
        [o.arm.label, o.arm.skips, o.arm.norms, f"{o.final:.2f}", f"{o.valid_bits:.2f}", o.verdict.words]
        for o in outcomes
    ]
    rows.append(["counting symbols", "", "", f"{reference.train:.2f}", f"{reference.valid_bits:.2f}", ""])
    colours = {"preserved": "green", "drift": "yellow"}
    return head, rows, [*(colours.get(o.verdict.kind, "red") for o in outcomes), ""]


def closing(outcomes: Sequence[Outcome], reference: Counting) -> str:
    """Who has learned something: said from the numbers alone."""
    sentences = [f"{outcome.arm.label} {_learned(reference.train - outcome.final)}." for outcome in outcomes]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _learned(gain: float) -> str:
    if gain > NOTHING:
        return f"is {gain:.2f} nats per byte better than counting symbols"
    if gain > -NOTHING:
        return "is no better than counting symbols"
    return f"is {-gain:.2f} nats per byte worse than counting symbols"


def title(outcomes: Sequence[Outcome], reference: Counting) -> str:
    """The picture's headline, which claims no more than the numbers show."""
    depth = outcomes[0].arm.experiment.model.depth
    learned = {outcome.arm.name: reference.train - outcome.final > NOTHING for outcome in outcomes}
    if learned[E_SPA] and not learned[STANDARD]:
        return f"{depth} blocks without skips: E-SPA learns, standard attention does not"
    return f"{depth} blocks, with and without skips"


def as_json(outcomes: Sequence[Outcome], reference: Counting) -> dict[str, Any]:
    """Every number of the table and the curves."""
    return {
        "skipless": __version__,
        "counting": {"training_loss": reference.train, "valid_bits_per_byte": reference.valid_bits},
        "networks": [
            {
                "name": outcome.arm.name,
                "label": outcome.arm.label,
                "skips": outcome.arm.skips,
                "norms": outcome.arm.norms,
                "training_loss": outcome.final,
                "training_loss_steps": outcome.tail,
                "valid_bits_per_byte": outcome.valid_bits,
                "verdict": outcome.verdict.words,
                "losses": [round(float(loss), 4) for loss in outcome.losses],
            }
            for outcome in outcomes
        ],
    }


def _details(outcome: Outcome) -> str:
    return f"skips: {outcome.arm.skips}\nnorms: {outcome.arm.norms}"


def draw(outcomes: Sequence[Outcome], reference: Counting) -> "Figure":
    """The picture of all three."""
    from skipless.figures.kernels import Heading
    from skipless.figures.training import ArmPicture, demo_picture

    model, schedule = outcomes[0].arm.experiment.model, outcomes[0].arm.experiment.train
    tokens = schedule.steps * schedule.batch_size * schedule.length
    subtitle = (
        f"{model.depth} blocks × {model.width}, bytes of Python's standard library: {schedule.steps} steps of "
        f"{schedule.batch_size} × {schedule.length}, {tokens / 1e3:,.0f} thousand bytes, the same for all"
    )
    pictures = [
        ArmPicture(o.arm.label, _details(o), o.losses, o.final, o.initial, o.trained, o.verdict) for o in outcomes
    ]
    return demo_picture(pictures, reference.train, Heading(title(outcomes, reference), subtitle))


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
    write_output(out / SAMPLE, text.encode())
    write_output(out / RESULTS, json.dumps(as_json(outcomes, reference), indent=2).encode() + b"\n")
    drawn = _write_figure(out / FIGURE, lambda: draw(outcomes, reference))
    written = [out / FIGURE] if drawn else []
    _note(console, "")
    for path in [*written, out / RESULTS, out / SAMPLE, weights]:
        _note(console, f"wrote {path}")
    console.print()
    console.print(closing(outcomes, reference), markup=False, highlight=False, style="bold", soft_wrap=True)


def _write_figure(path: Path, picture) -> bool:
    try:
        from skipless.figures.style import render

        write_output(path, render(picture(), path.suffix))
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


Out = Annotated[Path, typer.Option(help="Where everything goes.")]
Steps = Annotated[int | None, typer.Option(help="Steps of each network; the default takes minutes on two cores.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the weights, the batches and the generated text.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete what an earlier demo left in --out, and start over.")]


def command(
    out: Out = Path("skipless-demo"),
    steps: Steps = None,
    seed: Seed = 0,
    device: Device = None,
    fresh: Fresh = False,
) -> None:
    """Train 36 blocks without skips or norms on Python's standard library, beside Pre-LN and standard attention.

    Stop it at any time: the same command goes on from there, and when all is trained only draws and prints again.
    """

    from skipless.paper.demo import STEPS

    run(Request(out, STEPS if steps is None else steps, seed, device, fresh))

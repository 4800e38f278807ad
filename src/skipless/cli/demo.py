"""`skipless demo`: four deep networks on a CPU in four minutes, as a table, a figure and a text.

A table at a scale of its own, on the Python standard library.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console

from skipless import __version__
from skipless.cli.app import write_figure
from skipless.console import Progress, print_table, print_text, say, write_output
from skipless.data.prepare import OPTIONS, Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.tokenizer import Bytes
from skipless.files import check_folder
from skipless.model.config import ModelConfig
from skipless.model.kernel_maps import certificate, input_norm
from skipless.paper.experiments import Arm, PaperTable, Scale, Setting
from skipless.paper.measures import probe_at
from skipless.paper.mirrored import MIRRORED
from skipless.paper.records import Record, Text
from skipless.paper.runs import Limits, Run, make_run, run_key
from skipless.theory import kernels
from skipless.theory.certificate import Verdict
from skipless.training.config import Experiment
from skipless.training.run import EXPERIMENT, FINISHED, read_experiment, read_metrics, read_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA, RUNS, FIGURE, RESULTS, SAMPLE = "data", "runs", "demo.png", "results.json", "sample.txt"
TEXT = Preparation("stdlib", tokenizer=Bytes())
SAMPLE_TOKENS = 160
FEWEST = 3  # networks of a finished demo, an earlier version's included
NOTHING = 0.1  # nats: a network so close to symbol frequencies has learned nothing of its context

# Standard attention keeps the norms of the usual block; E-SPA has none. One optimiser for all, and each network at the
# best rates of results/demo-sweep-cpu.jsonl: 120 steps, seed 0, factors of 2, by training loss. At an embedding's rate
# of 5e-3: Pre-LN 2e-2: 2.094, 4e-2: 2.018, 8e-2: 2.018; E-SPA 1e-3: 2.728, 2e-3: 2.666, 4e-3: 2.701; E-SPA mirrored
# 2e-3: 2.054, 4e-3: 1.921, 8e-3: 1.931, 1.6e-2: 2.067. At 1e-2 the best were 2.024, 2.691 and 1.927. Standard attention
# is not in that sweep: in the same setting it had 3.21 at 5e-4, and over 150 steps with an embedding's rate of 2e-3 it
# had 3.18 at 5e-4 and 3.20 at 2e-3. Counting symbols is 3.24.
DEMO = PaperTable(
    "demo",
    "Deep networks with and without skips, on bytes",
    "Fig. 2, made small",
    (
        Arm("pre-ln", "Pre-LN", "wikitext103/pre-ln", optimizer="muon", rate=4e-2),
        Arm("standard", "standard attention", "wikitext103/skipless-ln", optimizer="muon", rate=5e-4),
        Arm("e-spa", "E-SPA", "wikitext103/e-spa", optimizer="muon", rate=2e-3),
        replace(MIRRORED.arm("mirrored-identity/muon"), name="mirrored", label="E-SPA mirrored", rate=4e-3),
    ),
)
SCALE = Scale(
    "demo",
    steps=100,
    width=96,
    head_width=24,
    length=64,
    batch_size=16,
    embedding_rate=5e-3,
    rates=1,
    seeds=1,
    judged=False,
    training={
        "precision": "fp32",
        "compile": False,
        "impl": "sdpa",  # at 64 locations a dense bias is small, and nothing is compiled
        "ema": 0.1,  # .01 would still show the first steps at the last
        "log_every": 1,
        "eval_tokens": 16_384,
        "checkpoint_every": 50,
        "on_divergence": "halve-lr",
    },
)
PROMPT = "    def "


def demo_scale(steps: int | None = None) -> Scale:
    """The demo's scale, with another number of steps; refuses a schedule too short to be one."""
    if steps is not None and steps < 2:
        raise ValueError(f"--steps is {steps}; the shortest schedule is one step of warm-up and one of training: 2")
    return SCALE if steps is None else replace(SCALE, steps=steps)


def demo_runs(setting: Setting, seed: int = 0) -> list[Run]:
    """A run of each arm at its rate, probed before the first update and before the last, whose weights are kept.

    Arms are equal in steps, batches, warm-up and optimiser; mirrored has the factors of its recipe on rates. E-SPA's
    repeat rate is the text's: bytes repeat ten times as often as the paper's 32k pieces.
    """
    runs = []
    for arm in DEMO.arms:
        assert arm.rate is not None
        run = make_run(DEMO, arm, setting, arm.rate, seed)
        train = replace(run.experiment.train, probe_at=(0, run.experiment.train.steps - 1))
        data = replace(run.experiment.data, corpus="stdlib")  # of any Python, so that an earlier demo goes on
        experiment = replace(run.experiment, name=arm.name, data=data, train=train)
        runs.append(replace(run, experiment=experiment, key=run_key(experiment, setting.text), weights=True))
    return runs


@dataclass(frozen=True, eq=False)
class DemoRow:
    """A trained network: its losses by step in nats, and measured cosines by block before and after training.

    skips and norms: words for them. valid_bits: per byte of held-out text. The verdict is theory's, for the network at
    initialisation and tokens that repeat as often as the text's.
    """

    run: Run
    label: str
    skips: str
    norms: str
    record: Record
    losses: np.ndarray
    valid_bits: float
    initial: dict[int, np.ndarray]
    trained: np.ndarray
    verdict: Verdict

    @property
    def tail(self) -> int:
        """How many of the last steps the record's training loss is the mean of: a tenth."""
        return max(len(self.losses) // 10, 1)


def demo_row(run: Run, record: Record, folder: Path) -> DemoRow:
    """What the finished run in `folder` has to show."""
    model, train = run.experiment.model, run.experiment.train
    losses = {line["step"]: line["loss"] for line in read_metrics(folder) if "loss" in line}
    repeat_rate = TokenStore(run.experiment.data.folder or "").repeat_rate or 0.0
    start = input_norm(model) * kernels.uniform(repeat_rate, train.length)
    first, last = (_cosines(probe_at(folder, step)) for step in train.probe_at)
    return DemoRow(
        run,
        DEMO.arm(run.arm).label,
        *_skips_and_norms(model),
        record,
        np.array([losses[step] for step in sorted(losses)]),
        read_result(folder)["valid"]["bits_per_byte"],
        {block: first[block] for block in shown_blocks(model.depth)},
        last[-1],
        certificate(model, start).verdict,
    )


def _skips_and_norms(model: ModelConfig) -> tuple[str, str]:
    return "none" if model.skipless else "yes", "none" if model.norm == "none" else "RMSNorm"


def shown_blocks(depth: int) -> list[int]:
    """The input, the first block, a third of the depth and all of it."""
    return sorted({0, 1, max(depth // 6, 1), max(depth // 3, 1), depth})


def _cosines(states: np.ndarray) -> np.ndarray:
    """The cosines of (depth + 1, T, T) kernels; NaN where a norm is zero or not finite."""
    norms = np.sqrt(np.diagonal(states, axis1=1, axis2=2))
    with np.errstate(divide="ignore", invalid="ignore"):
        return states / (norms[:, :, None] * norms[:, None, :])


@dataclass(frozen=True)
class Counting:
    """What counting symbols alone reaches: the bound of a network that does not look at its context.

    train is the entropy of the training text's symbols, in nats; valid_bits what their frequencies cost on the
    validation tokens that the networks are scored on, in bits per byte.
    """

    train: float
    valid_bits: float


def counting(run: Run) -> Counting:
    """The reference for the run's losses."""
    folder, schedule = run.experiment.data.folder or "", run.experiment.train
    train, valid = TokenStore(folder), TokenStore(folder, "valid")
    counts = np.ones(train.vocab_size)  # one more of each: a symbol of the validation text may be new
    for piece in train.pieces():
        counts += np.bincount(piece, minlength=train.vocab_size)
    shares = counts / counts.sum()
    windows = min(math.ceil(schedule.eval_tokens / schedule.length), (len(valid) - 1) // schedule.length)
    scored = valid.read(1, windows * schedule.length)
    nats = -np.log(shares)
    size = int((scored != valid.end).sum())
    return Counting(float(shares @ nats), float(nats[scored].sum()) / math.log(2.0) / size)


def sample(weights: Path, tokens: int, seed: int) -> str:
    """Text that the saved network writes after PROMPT; control characters and broken UTF-8 are shown as U+FFFD."""
    import torch

    from skipless.model.generate import Sampling, generate
    from skipless.training.checkpoint import model_from_weights

    model = model_from_weights(weights, impl="sdpa")
    prompt = torch.tensor([list(PROMPT.encode())])
    with torch.inference_mode():
        written = generate(model, prompt, tokens, sampling=Sampling(temperature=0.7), seed=seed)[0].tolist()
    text = bytes(written).decode("utf-8", "replace")
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def command(
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("skipless-demo"),
    steps: Annotated[
        int | None, typer.Option(help="Steps of each network; the default takes minutes on two cores.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the batches and the generated text.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete what an earlier demo left in --out, and start over.")
    ] = False,
) -> None:
    """Train 36 blocks without skips or norms on Python's standard library, beside Pre-LN and standard attention.

    Stop it at any time: the same command goes on from there, and when all is trained only draws and prints again.
    """
    shown = _shown(out)
    scale = demo_scale(steps)
    if device is not None:
        from skipless.training.distributed import find_device

        find_device(device)
    data = (out / DATA).resolve()
    say(f"text: the standard library of Python {sys.version_info.major}.{sys.version_info.minor}, byte by byte")
    prepare(TEXT, data, force=fresh, progress=Progress())  # what an earlier call prepared is checked and kept
    runs = demo_runs(Setting.of(scale, Text.read(data)), seed)
    for file in shown if fresh else ():
        file.unlink()
    runs = [_taken_up(run, out / RUNS / run.arm, fresh) for run in runs]
    _warn_if_busy()
    trained = [_train(run, out / RUNS / run.arm, device, f"{n}/{len(runs)}") for n, run in enumerate(runs, 1)]
    rows = [demo_row(run, record, out / RUNS / run.arm) for run, record in zip(runs, trained, strict=True)]
    _show(rows, counting(runs[0]), out, seed)


def _shown(out: Path) -> list[Path]:
    """What an earlier demo has shown at its end. A folder of other files is refused, and files that only look so."""
    check_folder(out, f"{DATA}/{OPTIONS}")
    shown = [out / name for name in (FIGURE, RESULTS, SAMPLE) if (out / name).exists()]
    if shown and len(list(out.glob(f"{RUNS}/*/{FINISHED}"))) < FEWEST:
        raise ValueError(f"{shown[0]} is there, and no demo has written it: move it away, or give another --out")
    return shown


def _taken_up(run: Run, folder: Path, fresh: bool) -> Run:
    """The run, after seeing that the folder holds this very one or none; with `fresh`, none.

    A finished demo may have been moved, and its text with it: the run is then the one found there.
    """
    if not (folder / EXPERIMENT).is_file():
        return run
    if fresh:
        shutil.rmtree(folder)
        return run
    there, here = read_experiment(folder), run.experiment
    moved = replace(there, data=here.data) if (folder / FINISHED).is_file() else there
    if moved != here:
        raise ValueError(
            f"{folder} holds another demo ({_difference(there, here)}): repeat its options, give another --out, "
            "or start over with --fresh"
        )
    return run


def _difference(there: Experiment, here: Experiment) -> str:
    then, now = (
        {"--steps": e.train.steps, "--seed": e.train.seed, "its text in": e.data.folder} for e in (there, here)
    )
    found = [f"{name} {then[name]} there, {now[name]} here" for name in then if then[name] != now[name]]
    return "; ".join(found) or "of another version of skipless"


def _warn_if_busy() -> None:
    """Torch's threads wait for each other by spinning, which on a busy machine costs ten times the work itself."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load > cores and "OMP_WAIT_POLICY" not in os.environ:
        say(
            f"other programs keep this machine busy (load {load:.1f} on {cores} cores), so this takes longer; "
            "OMP_WAIT_POLICY=passive skipless demo suffers least"
        )


def _train(run: Run, folder: Path, device: str | None, count: str) -> Record:
    label, (skips, norms) = DEMO.arm(run.arm).label, _skips_and_norms(run.experiment.model)
    what = f"{count} {label} (skips: {skips}, norms: {norms})"
    finished = (folder / FINISHED).is_file()
    say(f"{what}: trained already" if finished else f"{what}: {run.experiment.train.steps} steps")
    import torch  # once there is something to train

    from skipless.paper.workers import RunRequest, run_one

    # A tenth of the collapsed network's gradients underflow, and some CPUs are very slow with numbers below 1e-38.
    torch.set_flush_denormal(True)
    try:
        record = run_one(RunRequest(run, folder, Limits(device=device), quiet=False))
    except KeyboardInterrupt:
        words = f"stopped while training {label}; the same command goes on from there"
        raise KeyboardInterrupt(words) from None
    finally:
        torch.set_flush_denormal(False)
    assert record is not None  # its time is not limited
    if record.diverged:
        raise ValueError(f"{label} diverged at step {record.diverged_at}, at every rate it was lowered to")
    if not finished:
        say(f"{what}: done in {record.seconds:.0f} s")
    return record


def _show(rows: Sequence[DemoRow], reference: Counting, out: Path, seed: int) -> None:
    """The table, a sample of text, the figure and the closing sentences; all but the sentences also as files."""
    console, last = Console(), rows[-1]
    folder = out / RUNS / last.run.arm
    weights = folder / read_result(folder)["weights"]
    text = sample(weights, SAMPLE_TOKENS, seed)
    head, lines, styles = table(rows, reference)
    console.print()
    print_table(console, head, lines, styles)
    print_text(console, f"\n{last.label} writes, after {last.run.experiment.train.steps} steps:\n")
    print_text(console, text.rstrip())
    write_output(out / SAMPLE, text.encode())
    write_output(out / RESULTS, json.dumps(as_json(rows, reference), indent=2).encode() + b"\n")
    written = [*write_figure(out / FIGURE, lambda: draw(rows, reference)), out / RESULTS, out / SAMPLE, weights]
    print_text(console, "")
    for path in written:
        print_text(console, f"wrote {path}")
    console.print()
    print_text(console, closing(rows, reference), "bold")


def table(rows: Sequence[DemoRow], reference: Counting) -> tuple[list[str], list[list[str]], list[str]]:
    """Head, lines and the colour of each line's last cell; the last line is the reference."""
    tail = rows[0].tail
    training = f"training loss (mean of last {tail})" if tail > 1 else "training loss (last step)"
    head = ["network", "skips", "norms", training, "valid bits/byte", "signal at initialisation"]
    lines = [
        [r.label, r.skips, r.norms, f"{r.record.train_loss:.2f}", f"{r.valid_bits:.2f}", r.verdict.words] for r in rows
    ]
    lines.append(["counting symbols", "", "", f"{reference.train:.2f}", f"{reference.valid_bits:.2f}", ""])
    colours = {"preserved": "green", "drift": "yellow"}
    return head, lines, [*(colours.get(row.verdict.kind, "red") for row in rows), ""]


def closing(rows: Sequence[DemoRow], reference: Counting) -> str:
    """Who has learned something: said from the numbers alone."""
    sentences = [f"{row.label} {_learned(reference.train - row.record.train_loss)}." for row in rows]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _learned(gain: float) -> str:
    if gain > NOTHING:
        return f"is {gain:.2f} nats per byte better than counting symbols"
    if gain > -NOTHING:
        return "is no better than counting symbols"
    return f"is {-gain:.2f} nats per byte worse than counting symbols"


def as_json(rows: Sequence[DemoRow], reference: Counting) -> dict[str, Any]:
    """Every number of the table and the curves."""
    return {
        "skipless": __version__,
        "counting": {"training_loss": reference.train, "valid_bits_per_byte": reference.valid_bits},
        "networks": [
            {
                "name": row.run.arm,
                "label": row.label,
                "skips": row.skips,
                "norms": row.norms,
                "training_loss": row.record.train_loss,
                "training_loss_steps": row.tail,
                "valid_bits_per_byte": row.valid_bits,
                "verdict": row.verdict.words,
                "losses": [round(float(loss), 4) for loss in row.losses],
            }
            for row in rows
        ],
    }


def draw(rows: Sequence[DemoRow], reference: Counting) -> "Figure":
    """The picture of all of them."""
    from skipless.figures.kernels import Heading
    from skipless.figures.training import ArmPicture, demo_picture

    model, train = rows[0].run.experiment.model, rows[0].run.experiment.train
    tokens = train.steps * train.batch_size * train.length
    subtitle = (
        f"{model.depth} blocks × {model.width}, bytes of Python's standard library: {train.steps} steps of "
        f"{train.batch_size} × {train.length}, {tokens / 1e3:,.0f} thousand bytes, the same for all"
    )
    pictures = [
        ArmPicture(
            row.label,
            f"skips: {row.skips}\nnorms: {row.norms}",
            row.losses,
            row.record.train_loss,
            row.initial,
            row.trained,
            row.verdict,
        )
        for row in rows
    ]
    return demo_picture(pictures, reference.train, Heading(title(rows, reference), subtitle))


def title(rows: Sequence[DemoRow], reference: Counting) -> str:
    """The picture's headline, which claims no more than the numbers show."""
    depth = rows[0].run.experiment.model.depth
    losses = {row.run.arm: row.record.train_loss for row in rows}
    learned = {arm: reference.train - loss > NOTHING for arm, loss in losses.items()}
    if not learned["e-spa"] or not learned["mirrored"] or learned["standard"]:
        return f"{depth} blocks, with and without skips"
    more = ", mirrored E-SPA more than Pre-LN" if losses["mirrored"] < losses["pre-ln"] else ""
    return f"{depth} blocks without skips: standard attention learns nothing, E-SPA learns{more}"

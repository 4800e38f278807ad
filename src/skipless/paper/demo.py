"""The demo, a table at a scale of its own: four deep networks on the Python standard library, on a CPU in minutes."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from skipless.data.store import TokenStore
from skipless.model.kernel_maps import certificate, input_norm
from skipless.paper.experiments import Arm, PaperTable, Scale, Setting
from skipless.paper.measures import probe_at
from skipless.paper.mirrored import MIRRORED
from skipless.paper.records import Record
from skipless.paper.runs import Run, make_run, run_key
from skipless.theory import kernels
from skipless.theory.certificate import Verdict
from skipless.training.run import read_metrics, read_result

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


def demo_scale(steps: int | None = None, scale: Scale = SCALE) -> Scale:
    """The demo's scale, with another number of steps; refuses a schedule too short to be one."""
    if steps is not None and steps < 2:
        raise ValueError(f"--steps is {steps}; the shortest schedule is one step of warm-up and one of training: 2")
    return scale if steps is None else replace(scale, steps=steps)


def demo_runs(setting: Setting, seed: int = 0, table: PaperTable = DEMO) -> list[Run]:
    """A run of each arm at its rate, probed before the first update and before the last, whose weights are kept.

    Arms are equal in steps, batches, warm-up and optimiser; mirrored has the factors of its recipe on rates. E-SPA's
    repeat rate is the text's: bytes repeat ten times as often as the paper's 32k pieces.
    """
    runs = []
    for arm in table.arms:
        assert arm.rate is not None
        run = make_run(table, arm, setting, arm.rate, seed)
        train = replace(run.experiment.train, probe_at=(0, run.experiment.train.steps - 1))
        data = replace(run.experiment.data, corpus="stdlib")  # whichever Python's: an earlier demo's runs stay its own
        experiment = replace(run.experiment, name=arm.name, data=data, train=train)
        runs.append(replace(run, experiment=experiment, key=run_key(experiment, setting.text), weights=True))
    return runs


@dataclass(frozen=True, eq=False)
class DemoRow:
    """A trained network: its losses by step in nats, and measured cosines by block before and after training.

    valid_bits: per byte of held-out text. The verdict is theory's, for the network at initialisation and tokens that
    repeat as often as the text's.
    """

    run: Run
    label: str
    record: Record
    losses: np.ndarray
    valid_bits: float
    initial: dict[int, np.ndarray]
    trained: np.ndarray
    verdict: Verdict

    @property
    def skips(self) -> str:
        """In words."""
        return "none" if self.run.experiment.model.skipless else "yes"

    @property
    def norms(self) -> str:
        """In words."""
        return "none" if self.run.experiment.model.norm == "none" else "RMSNorm"

    @property
    def tail(self) -> int:
        """How many of the last steps the record's training loss is the mean of: a tenth."""
        return max(len(self.losses) // 10, 1)


def demo_row(run: Run, record: Record, folder: Path, table: PaperTable = DEMO) -> DemoRow:
    """What the finished run in `folder` has to show."""
    model, train = run.experiment.model, run.experiment.train
    losses = {line["step"]: line["loss"] for line in read_metrics(folder) if "loss" in line}
    repeat_rate = TokenStore(run.experiment.data.folder or "").repeat_rate or 0.0
    start = input_norm(model) * kernels.uniform(repeat_rate, train.length)
    first, last = (_cosines(probe_at(folder, step)) for step in train.probe_at)
    return DemoRow(
        run,
        table.arm(run.arm).label,
        record,
        np.array([losses[step] for step in sorted(losses)]),
        read_result(folder)["valid"]["bits_per_byte"],
        {block: first[block] for block in shown_blocks(model.depth)},
        last[-1],
        certificate(model, start).verdict,
    )


def shown_blocks(depth: int) -> list[int]:
    """The input, the first block, a third of the depth and all of it."""
    return sorted({0, 1, max(depth // 6, 1), max(depth // 3, 1), depth})


def _cosines(states: np.ndarray) -> np.ndarray:
    """Of (depth + 1, T, T) kernels; NaN where a norm is zero or not finite."""
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

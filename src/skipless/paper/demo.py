"""The demo: three deep networks on the Python standard library."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from skipless.console import Progress
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import Manifest, TokenStore, read_manifest
from skipless.data.tokenizer import Bytes
from skipless.model.generate import Sampling, generate
from skipless.model.presets import preset
from skipless.model.transformer import certificate, input_norm
from skipless.theory import kernels
from skipless.theory.certificate import Verdict
from skipless.theory.schemes import ExponentialSPA
from skipless.training.checkpoint import model_from_weights
from skipless.training.config import DataConfig, Experiment, OptimizerConfig, TrainConfig
from skipless.training.run import read_metrics, read_result

PRE_LN, STANDARD, E_SPA = "pre-ln", "standard", "e-spa"


@dataclass(frozen=True)
class Size:
    """What all three networks share: the network's size and the text they see."""

    depth: int = 36
    width: int = 96
    heads: int = 4
    length: int = 64
    batch_size: int = 16
    eval_tokens: int = 16_384


@dataclass(frozen=True)
class Arm:
    """One network: its label in a table and everything its run depends on."""

    label: str
    experiment: Experiment

    @property
    def name(self) -> str:
        """The folder of its run."""
        return self.experiment.name

    @property
    def skips(self) -> str:
        """In words."""
        return "none" if self.experiment.model.skipless else "yes"

    @property
    def norms(self) -> str:
        """In words."""
        return "none" if self.experiment.model.norm == "none" else "RMSNorm"


STEPS = 120
DEMO = Size()
TEXT = Preparation("stdlib", tokenizer=Bytes())

_LABELS = {PRE_LN: "Pre-LN", STANDARD: "standard attention", E_SPA: "E-SPA"}
# Standard attention keeps the norms of the usual block; E-SPA has none.
_PRESETS = {PRE_LN: "wikitext103/pre-ln", STANDARD: "wikitext103/skipless-ln", E_SPA: "wikitext103/e-spa"}
# One optimiser for all; each network's rate is the best of these, by the training loss after 150 steps (seed 0):
# E-SPA 1e-3: 2.69, 2e-3: 2.55, 4e-3 (embedding 4e-3): 2.69; standard attention 5e-4: 3.18, 2e-3: 3.20, Adam 1e-4: 3.19;
# Pre-LN 1e-2: 2.13, Adam 1e-3: 2.50. Counting symbols: 3.24.
_RATES = {PRE_LN: 1e-2, STANDARD: 5e-4, E_SPA: 2e-3}


def check_steps(steps: int) -> None:
    """Refuse a schedule too short to be one."""
    if steps < 2:
        raise ValueError(f"--steps is {steps}; the shortest schedule is one step of warm-up and one of training: 2")


def arms(data: Path, steps: int = STEPS, seed: int = 0, size: Size = DEMO) -> tuple[Arm, ...]:
    """Pre-LN, standard attention without skips, and vanilla E-SPA, on the text prepared in `data`.

    Equal in steps, batches, warm-up (a tenth of the steps) and optimiser; each at its own best rate. E-SPA's repeat
    rate is the text's: bytes repeat ten times as often as the paper's 32k pieces.
    """
    check_steps(steps)
    store = TokenStore(data)
    schedule = TrainConfig(
        steps=steps,
        batch_size=size.batch_size,
        length=size.length,
        warmup=max(steps // 10, 1),
        seed=seed,
        precision="fp32",
        compile=False,
        impl="sdpa",  # at 64 locations a dense bias is small, and nothing is compiled
        ema=0.1,  # .01 would still show the first steps after 120
        log_every=1,
        eval_every=steps,
        eval_tokens=size.eval_tokens,
        checkpoint_every=50,
        keep=1,
        probe_at=(0, steps - 1),
        on_divergence="halve-lr",
    )
    return tuple(_arm(name, store, schedule, size) for name in (PRE_LN, STANDARD, E_SPA))


def _arm(name: str, store: TokenStore, schedule: TrainConfig, size: Size) -> Arm:
    sizes = {"depth": size.depth, "width": size.width, "heads": size.heads, "length": size.length}
    model = preset(_PRESETS[name], vocab_size=store.vocab_size, **sizes)
    if isinstance(model.scheme, ExponentialSPA):
        model = model.replace(scheme=ExponentialSPA(repeat_rate=round(store.repeat_rate or 0.0, 3)))
    data = DataConfig(corpus="stdlib", folder=str(store.folder))
    optimizer = OptimizerConfig("muon", rate=_RATES[name], embedding_rate=2e-3)
    return Arm(_LABELS[name], Experiment(name, model, data, optimizer, schedule))


def prepare_text(folder: Path, progress: Progress, fresh: bool = False, plan: Preparation = TEXT) -> Manifest:
    """The standard library of this Python as bytes; what an earlier call prepared is checked and kept."""
    return prepare(plan, folder, force=fresh, progress=progress)


@dataclass(frozen=True)
class Counting:
    """What counting symbols alone reaches: the bound of a network that does not look at its context.

    train is the entropy of the training text's symbols, in nats; valid_bits what their frequencies cost on the
    validation tokens that the networks are scored on, in bits per byte.
    """

    train: float
    valid_bits: float


def counting(arm: Arm) -> Counting:
    """The reference for the arm's losses."""
    folder, schedule = Path(arm.experiment.data.folder or ""), arm.experiment.train
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


SAMPLING = Sampling(temperature=0.7)
PROMPT = "    def "


@dataclass(frozen=True, eq=False)
class Outcome:
    """losses by step in nats; valid_bits per byte of held-out text; cosines by block, measured on one sequence.

    The verdict is theory's, for the network at initialisation and tokens that repeat as often as the text's.
    """

    arm: Arm
    losses: np.ndarray
    valid_bits: float
    initial: dict[int, np.ndarray]
    trained: np.ndarray
    verdict: Verdict

    @property
    def tail(self) -> int:
        """How many of the last steps `final` is the mean of: a tenth."""
        return max(len(self.losses) // 10, 1)

    @property
    def final(self) -> float:
        """The training loss at the end."""
        return float(self.losses[-self.tail :].mean())


def read_outcome(arm: Arm, folder: Path) -> Outcome:
    """The outcome of the finished run in `folder`."""
    model, schedule = arm.experiment.model, arm.experiment.train
    losses = {record["step"]: record["loss"] for record in read_metrics(folder) if "loss" in record}
    rate = read_manifest(Path(arm.experiment.data.folder or "")).splits["train"].repeat_rate or 0.0
    judged = certificate(model, input_norm(model) * kernels.uniform(rate, schedule.length))
    first, last = (_cosines(folder, step) for step in (0, schedule.steps - 1))
    return Outcome(
        arm,
        np.array([losses[step] for step in sorted(losses)]),
        read_result(folder)["valid"]["bits_per_byte"],
        {block: first[block] for block in shown_blocks(model.depth)},
        last[-1],
        judged.verdict,
    )


def shown_blocks(depth: int) -> list[int]:
    """The input, the first block, a third of the depth and all of it."""
    return sorted({0, 1, max(depth // 6, 1), max(depth // 3, 1), depth})


def sample(weights: Path, tokens: int, seed: int) -> str:
    """Text that the saved network writes after PROMPT; control characters and broken UTF-8 are shown as U+FFFD."""
    import torch

    model = model_from_weights(weights, impl="sdpa")
    prompt = torch.tensor([list(PROMPT.encode())])
    with torch.inference_mode():
        written = generate(model, prompt, tokens, sampling=SAMPLING, seed=seed)[0].tolist()
    text = bytes(written).decode("utf-8", "replace")
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def _cosines(folder: Path, step: int) -> np.ndarray:
    """(depth + 1, T, T) of the probe before update `step`; NaN where a norm is zero or not finite."""
    path = folder / "probes" / f"step-{step:08d}.npz"
    if not path.is_file():
        raise ValueError(f"{path} is missing, and with it the kernels to draw; --fresh trains again")
    with np.load(path) as stored:
        states = stored["states"].astype(np.float64)
    scale = np.sqrt(np.diagonal(states, axis1=1, axis2=2))
    with np.errstate(divide="ignore", invalid="ignore"):
        return states / (scale[:, :, None] * scale[:, None, :])

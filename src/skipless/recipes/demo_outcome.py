"""What a finished arm of the demonstration shows: its losses, its measured kernels, the certificate's verdict."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from skipless.data.store import read_manifest
from skipless.model.generate import Sampling, generate
from skipless.model.signal import certificate, input_norm
from skipless.recipes.demo import Arm
from skipless.theory import kernels
from skipless.theory.certificate import Verdict
from skipless.train.loop import read_result
from skipless.train.metrics import read_metrics
from skipless.train.weights import load_model

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

    model = load_model(weights, impl="sdpa")
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

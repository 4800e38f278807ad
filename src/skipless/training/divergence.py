"""Divergence: how a run notices it, explains it, and watches the kernels on the way."""

import io
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from skipless.files import write_whole
from skipless.model.transformer import Transformer
from skipless.theory import kernels
from skipless.theory.certificate import Thresholds
from skipless.training.distributed import local, plain
from skipless.training.optim.half_weights import HalfWeights


class Diverged(RuntimeError):
    """A loss, a gradient or the result of an update is not finite. `step`, counted from 1, is the first such step.

    good: the last step after which all was well. A bad loss comes of weights that were bad one step earlier, so it is
    two steps before unless given.
    """

    def __init__(self, step: int, text: str, good: int | None = None):
        self.step, self.good = step, step - 2 if good is None else good
        super().__init__(text)


class GradientWatch:
    """Warns when the gradient norm leaves its own recent band: `factor` times the median of the last `window` steps."""

    def __init__(self, window: int = 100, factor: float = 20.0):
        self._recent: deque[float] = deque(maxlen=window)
        self._factor, self._quiet_until = factor, 0

    def see(self, step: int, norm: float) -> str | None:
        """A warning, or None. After one it stays quiet for a window."""
        usual = median(self._recent) if len(self._recent) >= 10 else math.inf
        self._recent.append(norm)
        if norm <= self._factor * usual or step < self._quiet_until:
            return None
        self._quiet_until = step + (self._recent.maxlen or 0)
        return (
            f"step {step}: the gradient norm {norm:.3g} is {norm / usual:.0f} times its recent median {usual:.3g}; "
            "divergence often follows. A lower optimizer.rate or a longer warm-up helps."
        )


def check_finite(
    model: nn.Module,
    first_step: int,
    losses: list[float],
    gradients: list[float],
    scale: float = 1.0,
    half: HalfWeights | None = None,
) -> None:
    """Raise Diverged at the first step whose loss or gradient norm is not finite, with the norms per block.

    scale, half: of the gradients that the last step has left behind, see norms_by_block.
    """
    for step, (loss, gradient) in enumerate(zip(losses, gradients, strict=True), first_step):
        if not (math.isfinite(loss) and math.isfinite(gradient)):
            report = f"{norms_by_block(model, scale, half)} {advice(model)}".strip()
            raise Diverged(step, f"diverged at step {step}: loss {loss:g}, gradient norm {gradient:g}. {report}")


@torch.no_grad()
def check_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, anywhere: Callable[[bool], bool] = bool
) -> None:
    """Raise Diverged where a parameter or a number of the optimiser's state is not finite: nothing to be kept.

    A loss and a gradient are those before the update, and may both be finite where it is not. anywhere: whether it is
    so in any process, given whether it is so here.
    """
    named = {name: parameter for name, parameter in plain(model).named_parameters() if parameter.requires_grad}
    states = {
        f"{name}, {key} of its optimiser": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    parts = {name: local(value) for name, value in {**named, **states}.items()}
    tensors = {name: part for name, part in parts.items() if part.numel()}
    largest = torch.stack([norm.float().cpu() for norm in torch._foreach_norm(list(tensors.values()), math.inf)])
    bad = [name for name, finite in zip(tensors, largest.isfinite().tolist(), strict=True) if not finite]
    if anywhere(bool(bad)):
        where = f"{bad[0]} is not finite" if bad else "a process has a number that is not finite"
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        words = f"diverged at step {step}: after its update {where}{more}. {advice(plain(model))}"
        raise Diverged(step, words, good=step - 1)


def advice(model: nn.Module) -> str:
    """What to change; without skips also what holds great depth together (results/depth-steady-small.md)."""
    words = "Lower optimizer.rate, or set train.on_divergence=halve-lr."
    if not isinstance(model, Transformer) or not model.config.skipless:
        return words
    return (
        "Networks without skips want rates about ten times below Pre-LN's, and their MLPs the lowest, the more so the "
        "deeper they are: --set optimizer.role_rates.up=0.2 --set optimizer.role_rates.down=0.2. "
        f"Or: {words[0].lower()}{words[1:]}"
    )


@torch.no_grad()
def norms_by_block(model: nn.Module, scale: float = 1.0, half: HalfWeights | None = None) -> str:
    """Parameter and gradient norms of each block, the first bad one named.

    scale: what the gradients are multiplied by. half: whose copies have received them, if any.
    """
    if not isinstance(model, Transformer):
        return ""
    norms = []
    for block in model.each_block():
        gradients = [p.grad if half is None else half.gradient_of(p) for p in block.parameters()]
        norms.append((_norm(list(block.parameters())), _norm([g for g in gradients if g is not None]) / scale))
    bad = [number for number, pair in enumerate(norms, 1) if not all(map(math.isfinite, pair))]
    first = f"Block {bad[0]} is the first that is not finite." if bad else "All blocks are finite again."
    table = ", ".join(f"{number}: {weight:.3g}/{gradient:.3g}" for number, (weight, gradient) in enumerate(norms, 1))
    return f"{first} Norms per block (weights/gradients): {table}."


def _norm(tensors: list[torch.Tensor]) -> float:
    if not tensors:
        return 0.0
    norms = torch._foreach_norm([t.detach().float() for t in tensors])
    return float(torch.linalg.vector_norm(torch.stack([n.cpu() for n in norms])))


@dataclass(frozen=True, eq=False)
class Probe:
    """Σ_0 … Σ_L of one sequence, (L+1, T, T), at one step: the paper's kernels-during-training figure."""

    step: int
    states: np.ndarray

    def summary(self) -> dict[str, float]:
        """The last block's diagonal and cosine, and the extremes of the diagonal over depth: what a log line holds."""
        diagonals = np.diagonal(self.states, axis1=1, axis2=2)
        return {
            "diagonal_min": float(diagonals.min()),
            "diagonal_max": float(diagonals.max()),
            "diagonal_last": float(diagonals[-1].mean()),
            "cosine_last": kernels.mean_cosine(self.states[-1]),
        }

    def save(self, folder: Path) -> Path:
        """Write it to step-….npz, in float32."""
        folder.mkdir(parents=True, exist_ok=True)
        path, file = folder / f"step-{self.step:08d}.npz", io.BytesIO()
        np.savez_compressed(file, step=self.step, states=self.states.astype(np.float32))
        write_whole(path, file.getvalue())
        return path


@torch.no_grad()
def measure(model: Transformer, tokens: Tensor, step: int, most: int = 128) -> Probe:
    """The kernels of the first row's first `most` tokens, or of the first image; memory of one activation at a time.

    Compiled blocks are run as written: a length and a precision met once are not worth compiling for.
    """
    x = model.embed(tokens[:1] if model.config.images is not None else tokens[:1, :most])
    positions = model.positions(x)
    states = [_kernel(x)]
    for block in model.each_block():
        x = block.forward(x, positions)
        states.append(_kernel(x))
    return Probe(step, np.stack(states))


def _kernel(x: Tensor) -> np.ndarray:
    return kernels.of_activations(x[0].float().cpu().numpy())


def diagonal_warning(step: int, summary: dict[str, float]) -> str | None:
    """A warning when a probe's squared norms have left the certificate's band."""
    low, high, band = summary["diagonal_min"], summary["diagonal_max"], Thresholds().lost_norm
    if 1.0 / band <= low and high <= band:
        return None
    return f"step {step}: squared activation norms span [{low:.3g}, {high:.3g}], outside the certificate's band."

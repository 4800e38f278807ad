"""Kernels of a live network: what each block does to one sequence, measured at chosen steps of training."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from skipless.model.transformer import Transformer
from skipless.theory import kernels


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
        """probes/step-….npz in float32, written aside and renamed."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{self.step:08d}.npz"
        aside = path.with_suffix(".partial")
        with aside.open("wb") as file:
            np.savez_compressed(file, step=self.step, states=self.states.astype(np.float32))
        aside.replace(path)
        return path


@torch.no_grad()
def measure(model: Transformer, tokens: Tensor, step: int, most: int = 128) -> Probe:
    """The kernels of the first row's first `most` tokens, block by block; memory of one activation at a time.

    Compiled blocks are run as written: a length and a precision met once are not worth compiling for.
    """
    tokens = tokens[:1, :most]
    placement, x = model.placement(tokens), model.embed(tokens)
    states = [_kernel(x)]
    for block in model.each_block():
        x = block.forward(x, placement)
        states.append(_kernel(x))
    return Probe(step, np.stack(states))


def _kernel(x: Tensor) -> np.ndarray:
    return kernels.of_activations(x[0].float().cpu().numpy())

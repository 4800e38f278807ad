"""What an inspection of a network finds: per block, in plain data that tables, figures and pages read."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from skipless.theory.certificate import Verdict


@dataclass(frozen=True)
class BlockSignal:
    """The signal after one block (block 0 is what enters the first).

    norm_*: squared activation norm over width, the diagonal of Σ. cosine_*: between different locations of a sequence,
    with quantiles at 5, 25, 50, 75 and 95 %. collapse is the rank-one residual ‖X − 1x̄ᵀ‖/‖X‖: 0 is total collapse.
    kurtosis is of the activations' entries, 3 for a Gaussian; outlier is the largest entry over the root mean square.
    gradient_*: squared gradient norm per location, relative to the output's mean. attention_*: None where the model
    gives no attention weights. parameter_gradients: norm by kind of parameter. predicted: theory's diagonal and cosine,
    for models of this library.
    """

    block: int
    name: str
    norm_min: float
    norm_mean: float
    norm_max: float
    cosine_mean: float
    cosine_quantiles: tuple[float, ...]
    effective_rank: float
    stable_rank: float
    collapse: float
    kurtosis: float
    outlier: float
    gradient_mean: float | None = None
    gradient_max: float | None = None
    attention_entropy: float | None = None
    attention_first: float | None = None
    parameter_gradients: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] | None = None


@dataclass(frozen=True, eq=False)
class Inspection:
    """All blocks of one network on one batch, the verdict, and kernels of one sequence for the eye.

    kernels: (blocks+1, t, t) cosines of the first row, at most 128 locations; None if not kept.
    advice: what to change, in plain words, empty when healthy.
    """

    model: str
    blocks: tuple[BlockSignal, ...]
    verdict: Verdict
    advice: str = ""
    kernels: np.ndarray | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; kernels as nested lists of three digits."""
        kernels = None if self.kernels is None else np.round(self.kernels.astype(np.float64), 3).tolist()
        blocks = [asdict(block) for block in self.blocks]
        return {
            "model": self.model,
            "verdict": asdict(self.verdict),
            "advice": self.advice,
            "blocks": blocks,
            "kernels": kernels,
        }

    def to_json(self) -> str:
        """as_dict as text."""
        return json.dumps(self.as_dict())

"""What attention weights say, from scores that exist for a few queries at a time and are thrown away.

Those of two rows and at most 512 queries are computed once more, in float64, 32 MB at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skipless.analysis.activation_stats import wide

MOST_ROWS, MOST_QUERIES = 2, 512
_CHUNK = 2**25  # bytes of one chunk's float64 scores

Weights = Callable[[int, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class AttentionStats:
    """Means over the queries that see more than one key, all heads and the first rows: entropy in nats; spread, the
    entropy over that of a uniform distribution on the keys seen; first, the weight on the first key."""

    entropy: float
    spread: float
    first: float

    @classmethod
    def of(cls, sums: Tensor) -> "AttentionStats":
        """From what `summed` left on its device."""
        *totals, count = sums.tolist()
        return cls(*(total / count if count else float("nan") for total in totals))


def summed(shape: tuple[int, int, int, int], weights: Weights, device: torch.device) -> Tensor:
    """[Σ entropy, Σ spread, Σ first, count] for attention of `shape` (rows, heads, queries, keys), on its device.

    weights(row, queries) gives, for a row of the batch and the indices of some queries, the weights (heads, queries,
    keys), where nothing is seen any numbers at all, and which keys are visible, broadcastable to them.
    """
    rows, heads, queries, keys = shape
    chosen = evenly(queries, device)
    step = max(_CHUNK // (8 * heads * keys), 1)
    total = torch.zeros(4, device=device)
    for row in range(min(rows, MOST_ROWS)):
        for some in chosen.split(step):
            total = total + _sums(*weights(row, some))
    return total


def evenly(count: int, device: torch.device) -> Tensor:
    """Indices of at most MOST_QUERIES of `count` queries, evenly spread."""
    if count <= MOST_QUERIES:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, MOST_QUERIES, device=device).round().long()


def _sums(weights: Tensor, visible: Tensor) -> Tensor:
    weights = weights.to(wide(weights))
    keys = visible.sum(-1).expand(weights.shape[:-1])
    choosing = keys > 1
    entropy = torch.special.entr(weights).sum(-1)
    values = (entropy, entropy / keys.clamp(min=2).to(entropy.dtype).log(), weights[..., 0], torch.ones_like(entropy))
    return torch.stack([torch.where(choosing, value, 0.0).sum() for value in values])

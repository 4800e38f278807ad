"""What `fold` did, block by block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class BlockFold:
    """One block's weights before and after, and what became of its stream.

    conditions holds the condition number of each matrix that was tried; why_not says why none was taken.
    """

    weights_before: int
    weights_after: int
    stream: str | None
    conditions: Mapping[Any, float]
    why_not: str | None = None

    @property
    def saved(self) -> float:
        """The fraction of the block's weights that is gone."""
        return 1.0 - self.weights_after / self.weights_before


@dataclass(frozen=True)
class FoldReport:
    """Weights are the entries of the blocks' matrices: no embedding, biases or gains. str() is a table."""

    blocks: tuple[BlockFold, ...]
    max_condition: float
    dtype: torch.dtype

    @property
    def weights_before(self) -> int:
        """Of all blocks, unfolded."""
        return sum(block.weights_before for block in self.blocks)

    @property
    def weights_after(self) -> int:
        """Of all blocks, folded."""
        return sum(block.weights_after for block in self.blocks)

    @property
    def saved(self) -> float:
        """The fraction of all block weights that is gone."""
        return 1.0 - self.weights_after / self.weights_before

    @property
    def rounding(self) -> float:
        """u·κ, u the dtype's unit roundoff and κ the largest condition number folded (1 if none).

        The largest relative error that rounding the stream can put into one block's queries, keys or values.
        """
        folded = [block.conditions[block.stream] for block in self.blocks if block.stream is not None]
        return torch.finfo(self.dtype).eps / 2 * max(folded, default=1.0)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{len(self.blocks)} blocks: {self.weights_before:,} weights -> {self.weights_after:,} (-{self.saved:.1%})",
            f"{dtype}: relative rounding up to {self.rounding:.1e} per block; condition numbers up to "
            f"{self.max_condition:.1e} allowed",
            "block  saved  stream  condition",
        ]
        for index, block in enumerate(self.blocks):
            stream = block.stream or "-"
            condition = f"{block.conditions[block.stream]:.1e}" if block.stream else f"({block.why_not})"
            lines.append(f"{index:5d}  {block.saved:5.1%}  {stream:6s}  {condition}")
        return "\n".join(lines)

"""Sizes of tiles, by head width and precision: measured on an H200, and small enough for any GPU that Triton serves."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: tiles of `queries` × `keys`, warps per program, and stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Sizes:
    """The forward kernel's tiles, and the backward's: those of its key side and those of its query side.

    kept: the query side's where the key side keeps the gradients of the scores; its queries are the key side's keys.
    """

    forward: Launch
    key_side: Launch
    query_side: Launch
    kept: Launch


def sizes(head_width: int, dtype: torch.dtype) -> Sizes:
    """The tiles for a head width, by benchmarks/tune_attention.py."""
    if dtype == torch.float32:
        return Sizes(Launch(32, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1))
    if head_width <= 64:
        return Sizes(Launch(64, 128, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3), Launch(64, 64, 4, 3))
    if head_width <= 128:
        return Sizes(Launch(64, 64, 4, 3), Launch(32, 64, 4, 3), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3))
    return Sizes(Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), Launch(32, 32, 4, 2))

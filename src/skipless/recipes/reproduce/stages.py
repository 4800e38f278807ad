"""Kernels at a few steps of a training and after a few blocks, small enough to stand in a log line."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skipless.theory import kernels

SIDE = 32  # locations kept, evenly


def read_stage(probes: Path, step: int) -> np.ndarray:
    """(L+1, T, T) kernels of the probe at `step`."""
    file = probes / f"step-{step:08d}.npz"
    if not file.is_file():
        raise ValueError(f"{file} is missing: the run was to be probed at step {step}")
    with np.load(file, allow_pickle=False) as stored:
        return stored["states"].astype(np.float64)


def pack(stages: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Cosines of about SIDE locations after the input, the first, a third, two thirds and the last block, as bytes."""
    depth, length = next(iter(stages.values())).shape[0] - 1, next(iter(stages.values())).shape[1]
    blocks = sorted({0, 1, max(depth // 3, 1), max(2 * depth // 3, 1), depth})
    stride = -(-length // SIDE)
    shown = np.array(
        [[kernels.cosine(states[block])[::stride, ::stride] for block in blocks] for states in stages.values()]
    )
    levels = np.round(255.0 * np.clip(shown, 0.0, 1.0)).astype(np.uint8)
    data = base64.b64encode(levels.tobytes()).decode()
    return {"steps": list(stages), "blocks": blocks, "side": levels.shape[-1], "cosines": data}


def unpack(packed: Mapping[str, Any]) -> dict[int, dict[int, np.ndarray]]:
    """Cosines by step and block."""
    steps, blocks, side = packed["steps"], packed["blocks"], packed["side"]
    levels = np.frombuffer(base64.b64decode(packed["cosines"]), np.uint8)
    shown = levels.reshape(len(steps), len(blocks), side, side) / 255.0
    return {step: dict(zip(blocks, stage, strict=True)) for step, stage in zip(steps, shown, strict=True)}

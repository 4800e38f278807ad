"""Gradient checkpointing as transformers knows it.

A file of its own, imported when a model is built: modeling_layers imports the Auto classes, which import modeling.py.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer


class RecomputedCall(GradientCheckpointingLayer):
    """Calls native blocks, and once more in the backward pass where gradient checkpointing is on."""

    def forward(self, call: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return call(*arguments)

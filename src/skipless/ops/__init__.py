"""Attention that starts from a given matrix, and the loss: pure functions of tensors."""

from skipless.ops.attention import shaped_attention
from skipless.ops.cross_entropy import linear_cross_entropy
from skipless.ops.layout import Layout
from skipless.ops.parts import ShapeParts

__all__ = ["Layout", "ShapeParts", "linear_cross_entropy", "shaped_attention"]

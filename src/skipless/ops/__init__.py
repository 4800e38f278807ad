"""Attention that starts from a given matrix, and the loss: pure functions of tensors."""

from skipless.ops.attention import shaped_attention
from skipless.ops.bias import BiasVectors
from skipless.ops.cross_entropy import linear_cross_entropy
from skipless.ops.layout import Layout

__all__ = ["BiasVectors", "Layout", "linear_cross_entropy", "shaped_attention"]

"""Attention that starts from a given matrix: pure functions on (q, k, v)."""

from skipless.ops.attention import shaped_attention
from skipless.ops.layout import Layout
from skipless.ops.parts import ShapeParts

__all__ = ["Layout", "ShapeParts", "shaped_attention"]

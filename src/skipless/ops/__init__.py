"""Attention that starts from a given matrix, and the loss: pure functions of tensors."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "activation": ["register_activation"],
        "attention": ["Rotation", "shaped_attention"],
        "bias": ["AttentionInputs", "BiasVectors"],
        "cross_entropy": ["linear_cross_entropy"],
        "layout": ["Layout"],
    },
)

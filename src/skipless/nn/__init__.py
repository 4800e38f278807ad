"""Modules: attention that starts from a given shape, the MLP, and the block around both."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "attention": ["AttentionOptions", "LayerCache", "ShapedAttention"],
        "block": ["MLP", "Activation", "Block", "SubBlock"],
        "position": ["Positions", "RelativePosition"],
    },
)

"""The transformer: its configuration, the paper's presets, generation, and folding for inference."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "config": ["Images", "ModelConfig", "attention_shapes"],
        "fold": ["FoldReport", "FoldedTransformer"],
        "generate": ["KVCache", "Sampling", "decode"],
        "presets": ["preset"],
        "kernel_maps": ["certificate"],
        "transformer": ["Transformer"],
    },
)

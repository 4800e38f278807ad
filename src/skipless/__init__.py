"""Deep transformers without shortcuts: signal-preserving attention as a PyTorch library.

Names below load on first use, so that importing the package, or asking the command line for help, stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipless.hf.convert import convert
    from skipless.inspection.inspect import assert_signal_preserved, inspect
    from skipless.model.config import ModelConfig
    from skipless.model.fold import fold
    from skipless.model.generate import generate
    from skipless.model.presets import preset
    from skipless.model.transformer import Transformer
    from skipless.ops.attention import shaped_attention
    from skipless.theory.activations import ShapedActivation
    from skipless.theory.certificate import Certificate, certify
    from skipless.theory.kernels import repeat_rate
    from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit
    from skipless.theory.shapes import AttentionShape
    from skipless.training.load import load

__version__ = "0.1.0"

_HOMES = {
    "AttentionShape": "skipless.theory.shapes",
    "Certificate": "skipless.theory.certificate",
    "ExponentialSPA": "skipless.theory.schemes",
    "ModelConfig": "skipless.model.config",
    "ShapedActivation": "skipless.theory.activations",
    "StandardAttention": "skipless.theory.schemes",
    "Transformer": "skipless.model.transformer",
    "UniformSPA": "skipless.theory.schemes",
    "ValueSkipInit": "skipless.theory.schemes",
    "assert_signal_preserved": "skipless.inspection.inspect",
    "certify": "skipless.theory.certificate",
    "convert": "skipless.hf.convert",
    "fold": "skipless.model.fold",
    "generate": "skipless.model.generate",
    "inspect": "skipless.inspection.inspect",
    "load": "skipless.training.load",
    "preset": "skipless.model.presets",
    "repeat_rate": "skipless.theory.kernels",
    "shaped_attention": "skipless.ops.attention",
}

__all__ = [
    "AttentionShape",
    "Certificate",
    "ExponentialSPA",
    "ModelConfig",
    "ShapedActivation",
    "StandardAttention",
    "Transformer",
    "UniformSPA",
    "ValueSkipInit",
    "__version__",
    "assert_signal_preserved",
    "certify",
    "convert",
    "fold",
    "generate",
    "inspect",
    "load",
    "preset",
    "repeat_rate",
    "shaped_attention",
]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'skipless' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__

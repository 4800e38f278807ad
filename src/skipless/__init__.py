"""Deep transformers without shortcuts: signal-preserving attention as a PyTorch library.

Names below load on first use, so that importing the package, or asking the command line for help, stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipless.theory.activations import ShapedActivation
    from skipless.theory.certificate import Certificate, certify
    from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit
    from skipless.theory.shapes import AttentionShape
    from skipless.theory.tokens import repeat_rate

__version__ = "0.1.0"

_HOMES = {
    "AttentionShape": "skipless.theory.shapes",
    "Certificate": "skipless.theory.certificate",
    "ExponentialSPA": "skipless.theory.schemes",
    "ShapedActivation": "skipless.theory.activations",
    "StandardAttention": "skipless.theory.schemes",
    "UniformSPA": "skipless.theory.schemes",
    "ValueSkipInit": "skipless.theory.schemes",
    "certify": "skipless.theory.certificate",
    "repeat_rate": "skipless.theory.tokens",
}

__all__ = [
    "AttentionShape",
    "Certificate",
    "ExponentialSPA",
    "ShapedActivation",
    "StandardAttention",
    "UniformSPA",
    "ValueSkipInit",
    "__version__",
    "certify",
    "repeat_rate",
]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'skipless' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__

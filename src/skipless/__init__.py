"""Deep transformers without shortcuts: signal-preserving attention as a PyTorch library.

Names below load on first use, so that importing the package, or asking the command line for help, stays quick.
"""

from typing import TYPE_CHECKING

from skipless import lazy

# ruff: noqa: F401
if TYPE_CHECKING:  # what type checkers and editors read; the table below is what runs
    from skipless import data, figures, hf, inspection, model, nn, ops, paper, report, theory, training
    from skipless.hf.convert import convert
    from skipless.inspection.inspect import assert_signal_preserved, inspect
    from skipless.inspection.inspection import Inspection
    from skipless.model.config import ModelConfig
    from skipless.model.fold import fold
    from skipless.model.generate import generate
    from skipless.model.kernel_maps import certificate
    from skipless.model.presets import preset
    from skipless.model.transformer import Transformer
    from skipless.nn.attention import ShapedAttention
    from skipless.ops.activation import register_activation
    from skipless.ops.attention import shaped_attention
    from skipless.ops.layout import Layout
    from skipless.paper.recipes import recipe, train
    from skipless.theory.activations import ShapedActivation
    from skipless.theory.certificate import Certificate, certify
    from skipless.theory.kernels import repeat_rate
    from skipless.theory.propagation import Skip
    from skipless.theory.schemes import (
        ExponentialSPA,
        Scheme,
        StandardAttention,
        UniformSPA,
        ValueSkipInit,
        register_scheme,
    )
    from skipless.theory.shapes import AttentionShape
    from skipless.theory.shaping import dks, tat
    from skipless.training.load import load

__version__ = "0.1.0"

# which register our classes there
lazy.import_after("transformers.models.auto.configuration_auto", "skipless.hf.configuration")
lazy.import_after("transformers.models.auto.modeling_auto", "skipless.hf.modeling")

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "theory": [],
        "theory.activations": ["ShapedActivation"],
        "theory.certificate": ["Certificate", "certify"],
        "theory.kernels": ["repeat_rate"],
        "theory.propagation": ["Skip"],
        "theory.schemes": [
            "ExponentialSPA",
            "Scheme",
            "StandardAttention",
            "UniformSPA",
            "ValueSkipInit",
            "register_scheme",
        ],
        "theory.shapes": ["AttentionShape"],
        "theory.shaping": ["dks", "tat"],
        "ops": [],
        "ops.activation": ["register_activation"],
        "ops.attention": ["shaped_attention"],
        "ops.layout": ["Layout"],
        "nn": [],
        "nn.attention": ["ShapedAttention"],
        "model": [],
        "model.config": ["ModelConfig"],
        "model.fold": ["fold"],
        "model.generate": ["generate"],
        "model.kernel_maps": ["certificate"],
        "model.presets": ["preset"],
        "model.transformer": ["Transformer"],
        "hf": [],
        "hf.convert": ["convert"],
        "data": [],
        "inspection": [],
        "inspection.inspect": ["assert_signal_preserved", "inspect"],
        "inspection.inspection": ["Inspection"],
        "training": [],
        "training.load": ["load"],
        "figures": [],
        "report": [],
        "paper": [],
        "paper.recipes": ["recipe", "train"],
    },
)

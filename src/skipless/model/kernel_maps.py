"""A configuration as theory sees it: the kernel map of each block, and their certificate. Nothing here needs torch."""

from typing import TYPE_CHECKING

import numpy as np

from skipless.model.config import ModelConfig, attention_shapes, mlp_layer
from skipless.model.presets import configuration
from skipless.theory import kernels
from skipless.theory.certificate import Certificate, certify
from skipless.theory.propagation import (
    Attend,
    AttendByHead,
    AttendInput,
    Chain,
    KernelLayer,
    Normalise,
    Skip,
    sub_block,
)
from skipless.theory.shapes import AttentionShape

if TYPE_CHECKING:
    from skipless.model.transformer import Transformer


def certificate(
    config: "ModelConfig | Transformer | str", kernel: np.ndarray | None = None, length: int | None = None
) -> Certificate:
    """What the configuration does to a signal at initialisation: by default to the average kernel of its tokens.

    That kernel has `length` locations: 100, or config.length where that is less, or where nothing else is calibrated.
    """
    config = configuration(config)
    if kernel is None:
        fixed = None if config.causal else config.max_length
        length = length if length is not None else fixed or min(100, config.length)
        kernel = kernels.uniform(getattr(config.scheme, "repeat_rate", 0.0), length) * input_norm(config)
    return certify(kernel_blocks(config), kernel, normalised=config.norm != "none")


def kernel_blocks(config: ModelConfig) -> list[KernelLayer]:
    """The network as kernel maps, one per block."""
    mlp, attention = mlp_layer(config), [_attention(config, shape) for shape in attention_shapes(config)]
    return [block if mlp is None else Chain((block, mlp)) for block in attention]


def _attention(config: ModelConfig, shape: AttentionShape) -> KernelLayer:
    """The sub-block of attention by this shape, its skip and norm included."""
    skip = Skip(config.attention_skip.shortcut, config.attention_skip.residual)
    if config.value_output == "identity" and skip.shortcut:
        beside = AttendInput(shape, skip, normalised=config.norm == "pre")
        return Chain((beside, Normalise())) if config.norm == "post" else beside
    attend = AttendByHead if config.scheme.by_head else Attend
    return sub_block(attend(shape), skip, config.norm)


def input_norm(config: ModelConfig) -> float:
    """The diagonal of Σ_0: 1, or 1/d where looked-up rows are not multiplied by √d. App. H."""
    return 1.0 if config.scales_embedding else 1.0 / config.width

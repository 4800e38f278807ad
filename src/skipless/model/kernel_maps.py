"""A configuration as theory sees it: the shape of each block's attention, kernel maps, and their certificate.

Nothing here needs torch: the network itself is built of the same shapes in `model.transformer`.
"""

from typing import TYPE_CHECKING

import numpy as np

from skipless.model.config import ModelConfig
from skipless.model.presets import configuration
from skipless.theory import kernels
from skipless.theory.certificate import Certificate, certify
from skipless.theory.local_maps import variance_gain
from skipless.theory.propagation import (
    Attend,
    AttendByHead,
    AttendInput,
    Chain,
    KernelLayer,
    MirroredMlp,
    Mlp,
    Normalise,
    Skip,
    sub_block,
)
from skipless.theory.shapes import AttentionShape, ShapeByHead

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


def attention_shapes(config: ModelConfig) -> list[AttentionShape]:
    """One AttentionShape per block: the one place where depth meets the scheme."""
    scheme, mlp = config.scheme, mlp_layer(config)
    through = mlp.forward if mlp is not None else None
    context = {"length": config.length, "mlp": through, "normalised": config.norm == "pre"}
    shapes = scheme.shapes(config.depth, config.attention_skip.shortcut, config.causal, **context)
    name, seen = type(scheme).__name__, f"{len(shapes)} shapes"
    if len(shapes) != config.depth:
        raise ValueError(f"{name}.shapes gave {seen} for {config.depth} blocks; it must give one for each")
    for block, shape in enumerate(shapes, start=1):
        if not isinstance(shape, AttentionShape):
            raise ValueError(
                f"{name}.shapes gave a {type(shape).__name__} for block {block}; it must be an AttentionShape: "
                f"DenseShape(matrix, causal={config.causal}) makes one of a T×T matrix"
            )
        if shape.causal != config.causal:
            raise ValueError(
                f"{name}.shapes gave block {block} a shape with causal={shape.causal}, and the network has "
                f"causal={config.causal}; give the shape what `shapes` was given"
            )
        if scheme.by_head and not isinstance(shape, ShapeByHead):
            raise ValueError(
                f"{name} is by head and its shapes gave block {block} a {type(shape).__name__}; it must be a "
                f"ShapeByHead of {config.heads} shapes"
            )
        if isinstance(shape, ShapeByHead) and shape.heads != config.heads:
            raise ValueError(
                f"{name}.shapes gave block {block} {shape.heads} shapes by head, and heads={config.heads}; give one "
                "for each head"
            )
    return shapes


def mlp_layer(config: ModelConfig) -> KernelLayer | None:
    """The MLP sub-block's kernel map, or None in attention-only models."""
    if not config.hidden:
        return None
    mirrored = config.mlp_init == "mirrored"
    mlp = MirroredMlp() if mirrored else Mlp(config.shaped_activation, mlp_gain(config))
    return sub_block(mlp, config.mlp_skip, config.norm)


def mlp_gain(config: ModelConfig) -> float:
    """σ of the matrix behind the activation: 1 for DKS and TAT by construction, else what keeps q: 1 → 1. App. H.

    Not for mirrored MLPs, whose two matrices are made together.
    """
    return variance_gain(config.shaped_activation)


def input_norm(config: ModelConfig) -> float:
    """The diagonal of Σ_0: 1, or 1/d where looked-up rows are not multiplied by √d. App. H."""
    return 1.0 if config.scales_embedding else 1.0 / config.width

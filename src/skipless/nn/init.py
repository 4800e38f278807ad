"""Initialisation of weight matrices laid out (out, in), as torch.nn.Linear keeps them."""

import math

import torch
from torch import Tensor


@torch.no_grad()
def gaussian_(weight: Tensor, gain: float = 1.0) -> Tensor:
    """Fan-in Gaussian N(0, σ²/in) with σ = gain. He et al. 2023, App. H."""
    return weight.normal_(0.0, gain / math.sqrt(weight.shape[1]))


@torch.no_grad()
def orthogonal_(weight: Tensor, gain: float = 1.0) -> Tensor:
    """Scale-corrected uniform orthogonal: a Haar-distributed (semi-)orthogonal matrix times σ·max(√(out/in), 1).

    Mean squared entries of the output equal those of the input whichever side is longer. Martens et al. 2021; their
    formula is for weights laid out (in, out), this one for (out, in).
    """
    if weight.is_meta:
        return weight
    out_features, in_features = weight.shape
    dtype = torch.promote_types(weight.dtype, torch.float32)  # QR has no half-precision form
    dense = torch.empty(out_features, in_features, device=weight.device, dtype=dtype)
    torch.nn.init.orthogonal_(dense, gain * max(math.sqrt(out_features / in_features), 1.0))
    return weight.copy_(dense)

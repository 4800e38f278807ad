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


def mirrored(pairs: Tensor, rotation: Tensor, odd_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """W_up = s[U; −U] and W_down = [RUᵀ, −RUᵀ]/(sc), for which W_down φ(W_up x) = R x whatever x is.

    pairs is U (p, d) with orthonormal columns, p ≥ d; rotation is R (d, d); odd_factor is c of φ(x) − φ(−x) = c·x (see
    `theory.activations.odd_factor`): each pair of hidden units ±u adds RUᵀ(φ(su) − φ(−su))/(sc) = RUᵀu. With
    s = √(p/d), which is √2 for a hidden width 4d, the hidden units see the input's own mean square, as behind
    `orthogonal_`. Training parts the pairs. Balduzzi et al. 2017, for ReLU and convolutions.
    """
    scale = math.sqrt(pairs.shape[0] / pairs.shape[1])
    up, down = scale * pairs, rotation @ pairs.mT / (scale * odd_factor)
    return torch.cat([up, -up]), torch.cat([down, -down], dim=1)


@torch.no_grad()
def mirrored_(up: Tensor, down: Tensor, odd_factor: float = 1.0, streams: int = 1) -> None:
    """Fill an MLP's two matrices, (2p, d) and (d, 2p), with `mirrored` of a Haar-distributed U and R.

    streams: R rotates so many equal parts of the channels each in itself, such as those of the heads.
    """
    hidden, width = up.shape
    if hidden % 2 or hidden < 2 * width:
        raise ValueError(
            f"hidden width {hidden} behind width {width}: mirrored units come in pairs, at least one for each of the "
            f"{width} directions of the input; use hidden={max(2 * width, hidden + 1)}"
        )
    if width % streams:
        raise ValueError(f"streams={streams} does not divide the width {width}, so that its parts are not equal")
    if up.is_meta:
        return
    dtype = torch.promote_types(up.dtype, torch.float32)  # QR has no half-precision form
    pairs = torch.nn.init.orthogonal_(torch.empty(hidden // 2, width, device=up.device, dtype=dtype))
    part = width // streams
    parts = (torch.empty(part, part, device=up.device, dtype=dtype) for _ in range(streams))
    rotation = torch.block_diag(*map(torch.nn.init.orthogonal_, parts))
    for weight, filled in zip((up, down), mirrored(pairs, rotation, odd_factor), strict=True):
        weight.copy_(filled)

"""What autocast makes of a product."""

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """Of x times a matrix: x's own, or autocast's where it is on, which leaves float64 alone."""
    kind = x.device.type
    lowered = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lowered else x.dtype

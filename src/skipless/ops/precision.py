"""The precision that a network runs in, by name; where autocast is on; the scale that float16's gradients need."""

from contextlib import AbstractContextManager, nullcontext

import torch

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Where products are computed in `precision`, which is bf16, fp16 or fp32."""
    return torch.autocast(device.type, dtype=HALF[precision]) if precision in HALF else nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Where products keep their operands' precision. A meta device, which has no autocast, needs nothing for that."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for products on this device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def loss_scale(precision: str, tokens: int) -> float:
    """What the loss, a mean over `tokens`, is multiplied by before the backward pass. Micikevicius et al. 2018.

    In float16 the power of two below the number of tokens, over 16: a network that preserves its signal hands back
    gradients of the size of one token's, which then neither vanish below 6e-8 nor, but for spikes, pass 65504.
    """
    return max(2.0 ** (tokens.bit_length() - 5), 1.0) if precision == "fp16" else 1.0

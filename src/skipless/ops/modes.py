"""What torch is doing around a call: autocast, a transform of torch.func, tracing; and the precisions by name."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PLAIN = (Tensor, nn.Parameter)


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


def is_transformed() -> bool:
    """Whether vmap, grad, jvp, hessian or another transform of torch.func, or forward_ad, is at work.

    A forward then reads no numbers, and has derivatives of any order.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_traced() -> bool:
    """Whether the call is recorded, by torch.compile, torch.export or torch.jit.trace, or transformed."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed()


def is_readable(tensor: Tensor) -> bool:
    """Whether its numbers can be checked at no cost: not on a GPU, which would be waited for, nor while compiled.

    Of a tensor of another class, such as FakeTensor, there may be none.
    """
    if torch.compiler.is_compiling() or type(tensor) not in _PLAIN:
        return False
    return tensor.device.type == "cpu" and not is_transformed()

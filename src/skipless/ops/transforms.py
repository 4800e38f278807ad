"""What torch.func's transforms need of a forward: it reads no numbers, and has derivatives of any order."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_PLAIN = (Tensor, nn.Parameter)


def is_transformed() -> bool:
    """Whether vmap, grad, jvp, hessian or another transform of torch.func, or forward_ad, is at work."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_readable(tensor: Tensor) -> bool:
    """Whether its numbers can be checked at no cost: not on a GPU, which would be waited for, nor while traced.

    Of a tensor of another class, such as FakeTensor, there may be none.
    """
    if torch.compiler.is_compiling() or type(tensor) not in _PLAIN:
        return False
    return tensor.device.type == "cpu" and not is_transformed()

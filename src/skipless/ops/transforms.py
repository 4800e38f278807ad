"""What torch.func's transforms need of a forward: it reads no numbers, and has derivatives of any order."""

import torch
from torch import Tensor


def is_transformed() -> bool:
    """Whether vmap, grad, jvp, hessian or another transform of torch.func is at work."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_readable(tensor: Tensor) -> bool:
    """Whether its numbers can be checked at no cost: not on a GPU, which would be waited for, nor while traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()

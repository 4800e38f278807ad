"""The symmetric products of Newton–Schulz: on a Hopper GPU only half of each is computed, and the rest mirrored."""

import torch
from torch import Tensor

from skipless.ops.triton import INSTALLED

_HOPPER = 9  # other GPUs may lack the shared memory for its tiles
_FEWEST_ROWS = 256
_ALIGNMENT = 16  # bytes, of every row: the copy engine's


def gram(x: Tensor) -> Tensor:
    """X·Xᵀ of each X in x (n, rows, cols)."""
    if applies(x):
        from skipless.train.optim.symmetric_kernel import product

        return product(x, 1.0)
    return torch.bmm(x, x.mT)


def quadratic(g: Tensor, b: float, c: float) -> Tensor:
    """b·G + c·G² of each symmetric G in g (n, rows, rows)."""
    if applies(g):
        from skipless.train.optim.symmetric_kernel import product

        return product(g, c, b)  # G² = G·Gᵀ
    return torch.baddbmm(g, g, g, beta=b, alpha=c)


def applies(x: Tensor) -> bool:
    """Whether the kernel serves x: half precision, on a GPU that it was written for, and nobody asks for a gradient."""
    if not (x.is_cuda and INSTALLED and x.dtype in (torch.bfloat16, torch.float16)):
        return False
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return False
    if torch.version.cuda is None or torch.cuda.get_device_capability(x.device)[0] != _HOPPER:
        return False
    _, rows, columns = x.shape
    aligned = columns * x.element_size() % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0
    return aligned and rows >= _FEWEST_ROWS and rows % 64 == 0

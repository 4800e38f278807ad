"""Linear layers of one input: called as they are, or for a decoding step's few rows by one GPU kernel for all."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from skipless.ops import gpu

_HALF = (torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)
_MOST_ROWS, _MOST_MATRICES = 4, 3
_ALIGNMENT = 16  # of a matrix's sides, so that every row starts where Triton may read 16 bytes
# Larger matrices are left to torch: its kernel reads an unembedding at 3.4 TB/s, this one a block of width 1024 at 1.5.
_FEWEST_COLUMNS, _MOST_ENTRIES = 256, 2**25


def serves(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether few_rows_linear can compute x (…, k) times these matrices (n, k), and no gradient is asked of it."""
    if not (x.is_cuda and gpu.INSTALLED and torch.version.hip is None) or torch.is_autocast_enabled(x.device.type):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights)):
        return False
    return fits(x, weights)


def fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether these are few rows in half precision, of sizes that the kernel takes and is made for."""
    k = x.shape[-1]
    if not all(type(t) in _PLAIN for t in (x, *weights)):  # others, such as quantised ones, hold no such memory
        return False
    alike = all((w.dtype, w.device, w.shape[1]) == (x.dtype, x.device, k) for w in weights)
    if not alike or x.dtype not in _HALF or not 1 <= len(weights) <= _MOST_MATRICES:
        return False
    aligned = k % _ALIGNMENT == 0 and all(w.shape[0] and w.shape[0] % _ALIGNMENT == 0 for w in weights)
    entries = sum(w.numel() for w in weights)
    return aligned and k >= _FEWEST_COLUMNS and 0 < x.numel() <= _MOST_ROWS * k and entries <= _MOST_ENTRIES


def is_bare(module: nn.Module) -> bool:
    """Calling the module is its class's forward and nothing else: no hook, and no forward of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in module.__dict__


def applied(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """layer(x) of each. Modules in a Linear's place, or hooks on one, are called as they are."""
    bare = [type(layer) is nn.Linear and is_bare(layer) for layer in layers]
    plain = [cast(nn.Linear, layer) for layer, is_plain in zip(layers, bare, strict=True) if is_plain]
    biased = len(plain) > 1 and any(layer.bias is not None for layer in plain)
    if not plain or biased or not serves(x, [layer.weight for layer in plain]):
        return [layer(x) for layer in layers]
    from skipless.ops.gpu.linear import few_rows_linear

    together = few_rows_linear(x, [layer.weight for layer in plain], plain[0].bias)
    parts = iter(together.split([layer.out_features for layer in plain], dim=-1))
    return [next(parts) if is_plain else layer(x) for layer, is_plain in zip(layers, bare, strict=True)]

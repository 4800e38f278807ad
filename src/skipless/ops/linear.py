"""Linear layers of one input: called as they are, as one product, or for a small batch by one GPU kernel for all."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from skipless.ops import gpu
from skipless.ops.modes import autocasts

_HALF = (torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)
_MOST_ROWS, _MOST_MATRICES = 4, 3
_ALIGNMENT = 16  # of a matrix's sides, so that every row starts where Triton may read 16 bytes
# Larger matrices are left to torch: its kernel reads an unembedding at 3.4 TB/s, ours a block of width 1024 at 1.5.
_FEWEST_COLUMNS, _MOST_ENTRIES = 256, 2**25


def project(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """layer(x) of each. Modules in a Linear's place, and layers with hooks, are called as they are.

    For a decoding step's few rows one GPU kernel multiplies by all matrices.
    """
    plain = [is_plain_linear(layer) for layer in layers]
    linear = [cast(nn.Linear, layer) for layer, is_plain in zip(layers, plain, strict=True) if is_plain]
    biased = len(linear) > 1 and any(layer.bias is not None for layer in linear)
    if not linear or biased or not supports(x, [layer.weight for layer in linear]):
        return [layer(x) for layer in layers]
    from skipless.ops.gpu.linear import small_batch_linear

    joint = small_batch_linear(x, [layer.weight for layer in linear], linear[0].bias)
    products = iter(joint.split([layer.out_features for layer in linear], dim=-1))
    return [next(products) if is_plain else layer(x) for layer, is_plain in zip(layers, plain, strict=True)]


def project_jointly(
    x: Tensor, layers: Sequence[nn.Linear], weight: Tensor | None = None, *, sharded: bool = False
) -> Tensor | None:
    """x times all matrices as one product, in compiled training, where putting them together costs nothing; else None.

    weight: the matrices one below the other, where they are stored so. None also where a layer has hooks.
    sharded: join the products and not the matrices, since the backward pass would keep the joined matrix whole.
    """
    if not layers or any(has_hooks(layer) for layer in layers):
        return None
    if not (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return None
    if sharded:
        return torch.cat([nn.functional.linear(x, layer.weight) for layer in layers], dim=-1)
    return nn.functional.linear(x, torch.cat([layer.weight for layer in layers]) if weight is None else weight)


def joint_layers(*layers: nn.Module) -> tuple[nn.Linear, ...]:
    """The leading layers whose products of one input may be one product; none where that is a single layer.

    They are all trained or all frozen: one product of both kinds would compute gradients that nothing uses.
    """
    joint: list[nn.Linear] = []
    for layer in layers:
        if type(layer) is not nn.Linear or (joint and layer.weight.requires_grad != joint[0].weight.requires_grad):
            break
        joint.append(layer)
    return tuple(joint) if len(joint) > 1 else ()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x times a matrix: x's own, or autocast's where it is on, which leaves float64 alone."""
    lowered = autocasts(x.device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if lowered else x.dtype


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module is more than its class's forward: a hook, or a forward of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling the module is one product with its weight."""
    return type(module) is nn.Linear and not has_hooks(module)


def supports(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether small_batch_linear can compute x (…, k) times these matrices (n, k), and no gradient is asked of it."""
    if not (x.is_cuda and gpu.INSTALLED and torch.version.hip is None) or autocasts(x.device):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights)):
        return False
    return fits(x, weights)


def fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether these are few rows in half precision, of sizes that the GPU kernel takes and is made for."""
    k = x.shape[-1]
    if not all(type(t) in _PLAIN for t in (x, *weights)):  # others, such as quantised ones, hold no such memory
        return False
    alike = all((w.dtype, w.device, w.shape[1]) == (x.dtype, x.device, k) for w in weights)
    if not alike or x.dtype not in _HALF or not 1 <= len(weights) <= _MOST_MATRICES:
        return False
    aligned = k % _ALIGNMENT == 0 and all(w.shape[0] and w.shape[0] % _ALIGNMENT == 0 for w in weights)
    entries = sum(w.numel() for w in weights)
    return aligned and k >= _FEWEST_COLUMNS and 0 < x.numel() <= _MOST_ROWS * k and entries <= _MOST_ENTRIES

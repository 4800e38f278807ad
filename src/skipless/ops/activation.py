"""A shaped activation of x plus a bias: one fused GPU kernel where there is one, torch's own operations elsewhere."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.ops import gpu
from skipless.theory.activations import ShapedActivation

_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # of n, so that every row starts where Triton may read 16 bytes

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu": F.relu,
    "sin": torch.sin,
    "identity": lambda x: x,
}


def shaped_activation(x: Tensor, spec: ShapedActivation) -> Tensor:
    """φ̂(x) = γ(φ(αx+β)+δ) in torch's operations. Constants that do nothing are left out."""
    if spec.input_scale != 1.0:
        x = x * spec.input_scale
    if spec.input_shift != 0.0:
        x = x + spec.input_shift
    x = F.leaky_relu(x, spec.negative_slope) if spec.base == "leaky_relu" else _FUNCTIONS[spec.base](x)
    if spec.output_shift != 0.0:
        x = x + spec.output_shift
    return x * spec.output_scale if spec.output_scale != 1.0 else x


def biased_activation(x: Tensor, bias: Tensor | None, spec: ShapedActivation) -> Tensor:
    """φ̂(x + bias) in x's dtype; x (…, n), bias (n,) of any floating dtype.

    The GPU kernel works in float32 between x and the result, and reads and writes no more than those; its backward pass
    sums the gradient of the bias on the way. The exact GELU on a GPU in half precision takes it: see `kernel_supports`.
    """
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias is shaped {tuple(bias.shape)} and x {tuple(x.shape)}; bias must be (n,) for x (…, n)")
    if not kernel_supports(x.device, x.dtype, x.shape[-1], spec):
        return plain_biased_activation(x, bias, spec)
    from skipless.ops.gpu.activation import biased_gelu

    return biased_gelu(x, bias, spec.input_scale, spec.input_shift, spec.output_shift, spec.output_scale)


def kernel_supports(device: torch.device, dtype: torch.dtype, n: int, spec: ShapedActivation) -> bool:
    """Whether biased_activation of such an x (…, n) is the fused GPU kernel."""
    possible = device.type == "cuda" and torch.version.hip is None and gpu.INSTALLED
    return possible and dtype in _HALF and spec.base == "gelu" and n > 0 and n % _ALIGNMENT == 0


def plain_biased_activation(x: Tensor, bias: Tensor | None, spec: ShapedActivation) -> Tensor:
    """The definition in torch's own operations: the oracle of the GPU kernel."""
    return shaped_activation(x if bias is None else (x + bias).to(x.dtype), spec)

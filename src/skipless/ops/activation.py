"""A shaped activation of x plus a bias: one fused GPU kernel where there is one, torch's own operations elsewhere.

`register_activation` adds an activation of your own.
"""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.ops import gpu
from skipless.theory.activations import BASE_NAMES, ShapedActivation, Smooth, add_base
from skipless.theory.local_maps import expectation

Function = Callable[[Tensor], Tensor]
_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # of n, so that every row starts where Triton may read 16 bytes

_FUNCTIONS: dict[str, Function] = {
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


_GRID = torch.linspace(-12.0, 12.0, 1201, dtype=torch.float64, device="cpu")


def register_activation(name: str) -> Callable[[Function], Function]:
    """Make φ known by its name, for MLPs, DKS and TAT, JSON and the command line: a decorator of a torch function.

        @skipless.register_activation("soft")
        def soft(x):
            return x * (1 + x / torch.sqrt(1 + x * x)) / 2

    ModelConfig(activation="dks-soft"), skipless.tat(soft, 36) and activation=soft all take it then. It must act on each
    number by itself, in its dtype, and be smooth: theory reads φ, φ' and φ'' from it, by autograd in float64. Where
    φ(x) − φ(−x) is a multiple of x it can be mirrored. Import its code before you load a model of it.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"an activation's name is {name!r}; use small letters, digits and underscores, such as 'soft'")

    def register(function: Function) -> Function:
        values = _checked(name, function)
        known = _FUNCTIONS.get(name)
        if name in BASE_NAMES or (known is not None and not torch.equal(known(_GRID), values)):
            raise ValueError(f"the name {name!r} belongs to another activation: choose a new one")
        smooth = Smooth(*(partial(_derivative, function, order) for order in range(3)), _odd(values), function)
        _check_smooth(name, smooth)
        _FUNCTIONS[name] = function
        add_base(name, smooth)
        return function

    return register


def _checked(name: str, function: Function) -> Tensor:
    """φ on a grid; ValueError where it is no function of each number by itself."""
    try:
        values, part = function(_GRID), function(_GRID[300:900])
        _derivative(function, 2, _GRID.numpy())
    except Exception as error:
        raise ValueError(
            f"activation {name!r} does not take a float64 tensor, or has no gradient ({error}): write it in torch's "
            "functions"
        ) from error
    if not isinstance(values, Tensor) or values.shape != _GRID.shape or values.dtype != _GRID.dtype:
        seen = f"{tuple(values.shape)}, {values.dtype}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"activation {name!r} makes {seen} of a float64 tensor; it must give back its shape and dtype")
    if not torch.allclose(values[300:900], part, rtol=1e-12, atol=1e-14) or not values.isfinite().all():
        raise ValueError(f"activation {name!r} must be finite, and act on each number by itself; it is not or does not")
    return values.detach()


def _derivative(function: Function, order: int, x: np.ndarray) -> np.ndarray:
    """φ, φ' or φ'' by autograd, on the CPU also where a model is being built elsewhere."""
    with torch.enable_grad(), torch.inference_mode(False), torch.device("cpu"):
        at = torch.tensor(np.asarray(x, dtype=np.float64)).requires_grad_()
        value = function(at)
        for _ in range(order):
            total = value.sum()
            known = total.requires_grad
            value = torch.autograd.grad(total, at, create_graph=True)[0] if known else torch.zeros_like(at)
    return value.detach().numpy()


def _odd(values: Tensor) -> float | None:
    """c where φ(x) − φ(−x) = c·x on the grid, to rounding."""
    right = _GRID > 0.1
    ratio = (values - values.flip(0))[right] / _GRID[right]
    factor = float(ratio.mean())
    return round(factor, 12) if factor and (ratio - factor).abs().max() <= 1e-12 * max(1.0, abs(factor)) else None


def _check_smooth(name: str, smooth: Smooth) -> None:
    """Refuse a φ whose moments two quadratures disagree about: it is kinked, and theory would be wrong about it."""
    shift = 0.37  # where no symmetry of the nodes hides a kink
    for words, moment in {
        "E[φ²]": lambda x: smooth.value(x + shift) ** 2,
        "E[φ'²]": lambda x: smooth.slope(x + shift) ** 2,
        "E[φ''²]": lambda x: smooth.curvature(x + shift) ** 2,
    }.items():
        fine, coarse = (float(expectation(moment, order=order)) for order in (1000, 600))
        if not abs(fine - coarse) <= 1e-8 * max(abs(fine), 1e-8):
            raise ValueError(
                f"activation {name!r} is not smooth: two quadratures find {words} = {fine:.9g} and {coarse:.9g}, so "
                "that its kernel maps would be wrong; use 'relu', 'leaky_relu', or a smooth form of it"
            )


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

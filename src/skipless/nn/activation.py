"""The MLP's nonlinearity as a module: theory's ShapedActivation on tensors."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.theory.activations import ShapedActivation

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


class Activation(nn.Module):
    """φ̂(x) = γ(φ(αx+β)+δ). Constants that do nothing are left out, so an untransformed φ costs what φ costs.

    Elementwise with constant scalars: torch.compile fuses it with its neighbours.
    """

    def __init__(self, spec: ShapedActivation):
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor) -> Tensor:
        spec = self.spec
        if spec.input_scale != 1.0:
            x = x * spec.input_scale
        if spec.input_shift != 0.0:
            x = x + spec.input_shift
        x = F.leaky_relu(x, spec.negative_slope) if spec.base == "leaky_relu" else _FUNCTIONS[spec.base](x)
        if spec.output_shift != 0.0:
            x = x + spec.output_shift
        return x * spec.output_scale if spec.output_scale != 1.0 else x

    def extra_repr(self) -> str:
        return repr(self.spec)

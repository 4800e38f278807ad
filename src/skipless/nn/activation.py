"""The MLP's nonlinearity as a module: theory's ShapedActivation on tensors."""

from torch import Tensor, nn

from skipless.ops.activation import shaped_activation
from skipless.theory.activations import ShapedActivation


class Activation(nn.Module):
    """φ̂(x) = γ(φ(αx+β)+δ). Constants that do nothing are left out, so an untransformed φ costs what φ costs.

    Elementwise with constant scalars: torch.compile fuses it with its neighbours.
    """

    def __init__(self, spec: ShapedActivation):
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor) -> Tensor:
        return shaped_activation(x, self.spec)

    def extra_repr(self) -> str:
        return repr(self.spec)

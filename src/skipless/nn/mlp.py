"""The MLP sub-block's computation: one hidden layer with a shaped activation."""

from torch import Tensor, nn

from skipless.nn import init
from skipless.nn.activation import Activation
from skipless.theory.activations import ShapedActivation


class MLP(nn.Module):
    """W₂ φ̂(W₁x + b₁) + b₂. Hidden width 4d in the paper."""

    def __init__(self, width: int, hidden: int, activation: ShapedActivation, bias: bool = True):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.activation = Activation(activation)
        self.down = nn.Linear(hidden, width, bias=bias)

    def reset_parameters(self, gain: float = 1.0, orthogonal: bool = True) -> None:
        """Both matrices at unit scale, W₂ times `gain`: the σ that takes unit variance to unit variance. Biases 0."""
        fill = init.orthogonal_ if orthogonal else init.gaussian_
        fill(self.up.weight)
        fill(self.down.weight, gain)
        for layer in (self.up, self.down):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

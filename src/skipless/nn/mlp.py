"""The MLP sub-block's computation: one hidden layer with a shaped activation."""

from torch import Tensor, nn

from skipless.nn import init
from skipless.nn.activation import Activation
from skipless.nn.bare import is_bare
from skipless.nn.linear import applied
from skipless.ops.activation import biased_activation, kernel_serves
from skipless.ops.precision import product_dtype
from skipless.theory.activations import ShapedActivation, odd_factor

_FEWEST_ROWS = 256  # a decoding step's few rows are sooner done by kernels that torch.compile makes of them


class MLP(nn.Module):
    """W₂ φ̂(W₁x + b₁) + b₂. Hidden width 4d in the paper.

    On a GPU in half precision the exact GELU of many rows is one kernel with b₁, and b₁'s gradient one with φ̂'s.
    """

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
        self._reset_biases()

    def reset_mirrored(self) -> None:
        """Hidden units in pairs of opposite sign, so that the MLP starts as a rotation: W₂ φ̂(W₁x) = Rx. Biases 0."""
        factor = odd_factor(self.activation.spec)
        if not factor:
            raise ValueError(f"a mirrored MLP needs φ(x) − φ(−x) = c·x with c ≠ 0, which {self.activation.spec} is not")
        init.mirrored_(self.up.weight, self.down.weight, factor)
        self._reset_biases()

    def _reset_biases(self) -> None:
        for layer in (self.up, self.down):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self._fuses(x):
            (hidden,) = applied(x, self.up)
            return applied(self.activation(hidden), self.down)[0]
        product = nn.functional.linear(x, self.up.weight)
        return self.down(biased_activation(product, self.up.bias, self.activation.spec))

    def _fuses(self, x: Tensor) -> bool:
        """Whether b₁ and φ̂ are one kernel on x; modules in their place, or hooks on them, are called as they are."""
        up, activation = self.up, self.activation
        if type(up) is not nn.Linear or type(activation) is not Activation or x.numel() < _FEWEST_ROWS * x.shape[-1]:
            return False
        served = kernel_serves(x.device, product_dtype(x), up.out_features, activation.spec)
        return served and is_bare(up) and is_bare(activation)

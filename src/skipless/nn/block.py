"""A block: attention and MLP, each a sub-block with its norm and its skip."""

from typing import cast

import torch
from torch import Tensor, nn

from skipless.nn import init
from skipless.nn.attention import LayerCache, ShapedAttention
from skipless.nn.position import Positions
from skipless.ops.activation import biased_activation, kernel_supports, shaped_activation
from skipless.ops.linear import has_hooks, product_dtype, project
from skipless.theory.activations import ShapedActivation, base_name, odd_factor
from skipless.theory.propagation import NormPlacement, Skip


class Activation(nn.Module):
    """φ̂(x) = γ(φ(αx+β)+δ). Constants that do nothing are left out, so an untransformed φ costs what φ costs.

    Elementwise with constant scalars: torch.compile fuses it with its neighbours. A bare name is φ as it is.
    """

    def __init__(self, spec: ShapedActivation | str):
        super().__init__()
        method, _, base = spec.partition("-") if isinstance(spec, str) else ("", "", "")
        if method in ("dks", "tat"):
            raise ValueError(
                f"activation is {spec!r}, which is solved for a depth: give skipless.{method}({base!r}, depth)"
            )
        self.spec = spec if isinstance(spec, ShapedActivation) else ShapedActivation(base_name(spec))

    def forward(self, x: Tensor) -> Tensor:
        return shaped_activation(x, self.spec)

    def extra_repr(self) -> str:
        return repr(self.spec)


_FEWEST_ROWS = 256  # a decoding step's few rows are sooner done by kernels that torch.compile makes of them


class MLP(nn.Module):
    """W₂ φ̂(W₁x + b₁) + b₂. Hidden width 4d in the paper.

    On a GPU in half precision the exact GELU of many rows is one kernel with b₁, and b₁'s gradient one with φ̂'s.
    """

    def __init__(self, width: int, hidden: int, activation: ShapedActivation | str, bias: bool = True):
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

    def reset_mirrored(self, streams: int = 1) -> None:
        """Hidden units in pairs of opposite sign, so that the MLP starts as a rotation: W₂ φ̂(W₁x) = Rx. Biases 0.

        With streams = heads R rotates the channels of each head in themselves, and mixes none of two heads.
        """
        factor = odd_factor(self.activation.spec)
        if not factor:
            raise ValueError(f"a mirrored MLP needs φ(x) − φ(−x) = c·x with c ≠ 0, which {self.activation.spec} is not")
        init.mirrored_(self.up.weight, self.down.weight, factor, streams)
        self._reset_biases()

    def _reset_biases(self) -> None:
        for layer in (self.up, self.down):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self._fuses(x):
            (hidden,) = project(x, self.up)
            return project(self.activation(hidden), self.down)[0]
        product = nn.functional.linear(x, self.up.weight)
        return self.down(biased_activation(product, self.up.bias, self.activation.spec))

    def _fuses(self, x: Tensor) -> bool:
        """Whether b₁ and φ̂ are one kernel on x; other modules, and ones with hooks, are called as they are."""
        up, activation = self.up, self.activation
        if type(up) is not nn.Linear or type(activation) is not Activation or has_hooks(up) or has_hooks(activation):
            return False
        fused = kernel_supports(x.device, product_dtype(x), up.out_features, activation.spec)
        return fused and x.numel() >= _FEWEST_ROWS * x.shape[-1]


class SubBlock(nn.Module):
    """x ← α·x + β·f(norm(x)) ("pre"), norm(α·x + β·f(x)) ("post"), or without norm. He et al. 2023, Eq. 1.

    With skip.trainable β is a parameter that starts at its given value: SkipInit when that is 0.
    """

    def __init__(self, inner: nn.Module, width: int, skip: Skip, norm: NormPlacement):
        super().__init__()
        self.inner = inner
        self.shortcut, self.norm_placement = skip.shortcut, norm
        self.norm = nn.RMSNorm(width, eps=1e-6) if norm != "none" else nn.Identity()
        self.residual = nn.Parameter(torch.tensor(float(skip.residual))) if skip.trainable else skip.residual
        self.initial_residual = skip.residual

    def reset_parameters(self) -> None:
        """The norm's gains to 1 and a trainable β to its start; the inner module has its own."""
        if isinstance(self.norm, nn.RMSNorm):
            self.norm.reset_parameters()
        if isinstance(self.residual, nn.Parameter):
            nn.init.constant_(self.residual, self.initial_residual)

    def forward(self, x: Tensor, *args) -> Tensor:
        branch = self.inner(self.norm(x) if self.norm_placement == "pre" else x, *args)
        if isinstance(self.residual, nn.Parameter) or self.residual != 1.0:
            branch = branch * self.residual
        if self.shortcut == 1.0:
            branch = x + branch
        elif self.shortcut != 0.0:
            branch = self.shortcut * x + branch
        return self.norm(branch) if self.norm_placement == "post" else branch


class Block(nn.Module):
    """Attention, then the MLP (absent in attention-only models). It knows its shape, not its depth."""

    def __init__(self, attention: SubBlock, mlp: SubBlock | None):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    @classmethod
    def build(
        cls, attention: ShapedAttention, mlp: MLP | None, width: int, skips: tuple[Skip, Skip], norm: NormPlacement
    ) -> "Block":
        """The block with skips = (attention's, MLP's) and one norm placement."""
        second = SubBlock(mlp, width, skips[1], norm) if mlp is not None else None
        return cls(SubBlock(attention, width, skips[0], norm), second)

    def reset_parameters(self) -> None:
        """Norms and trainable skip weights to their start; layers() have their own."""
        self.attention.reset_parameters()
        if self.mlp is not None:
            self.mlp.reset_parameters()

    def layers(self) -> tuple[ShapedAttention, MLP | None]:
        """What the sub-blocks wrap."""
        return cast(ShapedAttention, self.attention.inner), cast(MLP, self.mlp.inner) if self.mlp is not None else None

    def forward(self, x: Tensor, positions: Positions | None = None, cache: LayerCache | None = None) -> Tensor:
        x = self.attention(x, positions, cache)
        return self.mlp(x) if self.mlp is not None else x

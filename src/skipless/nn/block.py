"""A transformer block: two residual sub-blocks, each with its own skip weights, and a norm before, after or nowhere."""

from typing import cast

import torch
from torch import Tensor, nn

from skipless.nn.attention import LayerCache, Placement, ShapedAttention
from skipless.nn.mlp import MLP
from skipless.theory.propagation import NormPlacement, Skip


class SubBlock(nn.Module):
    """x ← α·x + β·f(norm(x)) ("pre"), norm(α·x + β·f(x)) ("post"), or without norm. He et al. 2023, Eq. 1.

    With skip.trainable β is a parameter that starts at its given value: SkipInit when that is 0.
    """

    def __init__(self, inner: nn.Module, width: int, skip: Skip, norm: NormPlacement):
        super().__init__()
        self.inner = inner
        self.shortcut, self.placement = skip.shortcut, norm
        self.norm = nn.RMSNorm(width, eps=1e-6) if norm != "none" else nn.Identity()
        self.residual = nn.Parameter(torch.tensor(float(skip.residual))) if skip.trainable else skip.residual
        self.initial_residual = skip.residual

    def reset_parameters(self) -> None:
        """The norm's gains to 1 and a trainable β to its start; the inner module has its own."""
        if isinstance(self.norm, nn.RMSNorm):
            self.norm.reset_parameters()
        if isinstance(self.residual, nn.Parameter):
            nn.init.constant_(self.residual, self.initial_residual)

    def set_skip(self, skip: Skip) -> None:
        """Other weights α and β from now on, neither of them trained."""
        if isinstance(self.residual, nn.Parameter) or skip.trainable:
            raise ValueError("β is trained here; a skip that is set from outside needs trainable=False")
        self.shortcut, self.residual, self.initial_residual = skip.shortcut, skip.residual, skip.residual

    def forward(self, x: Tensor, *args) -> Tensor:
        branch = self.inner(self.norm(x) if self.placement == "pre" else x, *args)
        if isinstance(self.residual, nn.Parameter) or self.residual != 1.0:
            branch = branch * self.residual
        if self.shortcut == 1.0:
            branch = x + branch
        elif self.shortcut != 0.0:
            branch = self.shortcut * x + branch
        return self.norm(branch) if self.placement == "post" else branch


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

    def forward(self, x: Tensor, placement: Placement | None = None, cache: LayerCache | None = None) -> Tensor:
        x = self.attention(x, placement, cache)
        return self.mlp(x) if self.mlp is not None else x

"""A kernel through a network: each layer beside its map of Σ forward and of the gradient's kernel backward.

Forward, Σ = X Xᵀ/d. Backward, G = E[g gᵀ] over locations, g the gradient at each; both maps are exact in the wide
limit, and attention's at any width when its weights are orthogonal (He et al. 2023, Sec. 3 and App. H).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from skipless.schema import check, check_own
from skipless.theory import kernels
from skipless.theory.activations import ShapedActivation
from skipless.theory.local_maps import derivative_kernel_map, kernel_map
from skipless.theory.shapes import AttentionShape

NormPlacement = Literal["none", "pre", "post"]
QueryKeyInit = Literal["zero-query", "zero-key", "small", "normal"]
ValueOutput = Literal["trained", "identity"]
_LARGEST_WEIGHT = 1e100  # squares are finite


class KernelLayer(Protocol):
    """A layer seen by its kernels."""

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        """Σ at the output from Σ at the input."""
        ...

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        """G at the input from G at the output, given Σ at the input."""
        ...


@dataclass(frozen=True)
class Skip:
    """Weights of x ← α·x + β·f(x): shortcut α and residual β. (0, 1) is skipless, (1, 1) the usual skip.

    trainable makes β a parameter that starts here: SkipInit is Skip(1, 0, trainable=True).
    """

    shortcut: float = 0.0
    residual: float = 1.0
    trainable: bool = False

    def __post_init__(self):
        check_own(self)
        for name in ("shortcut", "residual"):
            if not abs(value := getattr(self, name)) <= _LARGEST_WEIGHT:
                raise ValueError(
                    f"{name} is {value!r}; a skip's weights must be finite, and at most {_LARGEST_WEIGHT:g}"
                )

    @classmethod
    def normalised(cls, weight: float) -> "Skip":
        """α with β = √(1−α²). Sec. 3.4."""
        if not -1.0 <= check(weight, float, "a normalised skip's weight") <= 1.0:
            raise ValueError(f"a normalised skip's weight is {weight!r}; it must lie in [-1, 1]: β = √(1−α²)")
        return cls(weight, float(np.sqrt(1.0 - weight**2)))


@dataclass(frozen=True)
class Attend:
    """Attention by fixed matrices with values and outputs mixed orthogonally: the mean of A_h Σ A_hᵀ over heads."""

    shape: AttentionShape

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        heads = _heads(self.shape, len(kernel))
        return sum(a @ kernel @ a.T for a in heads) / len(heads)

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        heads = _heads(self.shape, len(kernel))
        return sum(a.T @ gradient @ a for a in heads) / len(heads)


@dataclass(frozen=True)
class AttendByHead:
    """Attention without W_V and W_O, each head a stream of its own: Σ^h ↦ A_h Σ^h A_hᵀ, exact at any width.

    Kernels are those of all heads, (heads, T, T); one alone (T, T) is that of every head. Σ is the mean of them.
    """

    shape: AttentionShape

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        heads = _heads(self.shape, kernel.shape[-1])
        return heads @ kernel @ heads.mT

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        heads = _heads(self.shape, kernel.shape[-1])
        return heads.mT @ gradient @ heads


@dataclass(frozen=True)
class AttendInput:
    """α·x + β·A_h·x, attention without W_V and W_O beside a skip, exact at any width.

    Both terms are the input's own channels, so their cross terms stay: Σ ↦ MΣMᵀ, M = αI + βA_h, averaged over heads.
    With `normalised` what is attended to is x after RMSNorm: M = αI + βA_h·diag(Σ)^−½.
    """

    shape: AttentionShape
    skip: Skip
    normalised: bool = False

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        mixing = self._mixing(kernel)
        return (mixing @ kernel @ mixing.mT).mean(axis=0)

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        mixing = self._mixing(kernel)
        return (mixing.mT @ gradient @ mixing).mean(axis=0)

    def _mixing(self, kernel: np.ndarray) -> np.ndarray:
        heads = _heads(self.shape, len(kernel))
        heads = heads / np.sqrt(np.diagonal(kernel)) if self.normalised else heads
        return self.skip.shortcut * np.eye(len(kernel)) + self.skip.residual * heads


def whole(kernel: np.ndarray) -> np.ndarray:
    """Σ of a stream given by its heads (heads, T, T): their mean. One that is whole already is left as it is."""
    return kernel if kernel.ndim == 2 else kernel.mean(axis=0)


@lru_cache(maxsize=1)
def _heads(shape: AttentionShape, length: int) -> np.ndarray:
    """A per head, (heads, T, T); kept for the next block, which in standard attention has the same."""
    dense = shape.dense(length)
    return dense if dense.ndim == 3 else dense[None]


@dataclass(frozen=True)
class Mlp:
    """A one-hidden-layer MLP, in the wide limit: σ² E[φ(u)φ(v)] forward, σ² E[φ'(u)φ'(v)] times G backward."""

    activation: ShapedActivation
    weight_gain: float = 1.0

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        return kernel_map(self.activation, kernel, self.weight_gain)

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        return gradient * derivative_kernel_map(self.activation, kernel, self.weight_gain)


@dataclass(frozen=True)
class MirroredMlp:
    """An MLP of mirrored pairs at its start, which is a rotation: both kernels pass unchanged, at any width."""

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        return kernel

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        return gradient


@dataclass(frozen=True)
class Normalise:
    """RMSNorm: the cosine form. Backward divides by the norms; the projection it also makes is O(1/d)."""

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        return kernels.cosine(kernel)

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.diagonal(kernel))
        return gradient / np.outer(scale, scale)


@dataclass(frozen=True)
class Chain:
    """Layers one after another."""

    layers: tuple[KernelLayer, ...]

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        for layer in self.layers:
            kernel = layer.forward(kernel)
        return kernel

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        inputs = [kernel]
        for layer in self.layers[:-1]:
            inputs.append(layer.forward(inputs[-1]))
        for layer, before in zip(reversed(self.layers), reversed(inputs), strict=True):
            gradient = layer.backward(gradient, before)
        return gradient


@dataclass(frozen=True)
class Residual:
    """α·x + β·branch(x): the cross terms vanish in the wide limit. App. F."""

    branch: KernelLayer
    skip: Skip

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        return self.skip.shortcut**2 * kernel + self.skip.residual**2 * self.branch.forward(kernel)

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        through = self.branch.backward(gradient, kernel)
        return self.skip.shortcut**2 * gradient + self.skip.residual**2 * through


def sub_block(layer: KernelLayer, skip: Skip, norm: NormPlacement) -> KernelLayer:
    """One residual sub-block with its norm inside the branch ("pre"), after the sum ("post") or nowhere. Sec. 2."""
    if norm == "pre":
        return Residual(Chain((Normalise(), layer)), skip)
    if norm == "post":
        return Chain((Residual(layer, skip), Normalise()))
    if norm == "none":
        return Residual(layer, skip)
    raise ValueError(f"norm is {norm!r}; it must be 'none', 'pre' or 'post'")


def forward(
    blocks: Sequence[KernelLayer], kernel: np.ndarray, stop: Callable[[np.ndarray], bool] | None = None
) -> list[np.ndarray]:
    """Σ_0, Σ_1, …, Σ_L: the input's kernel and the kernel after each block, up to the first that `stop` is true of.

    kernel is Σ_0 (T, T); where heads are streams of their own it may be theirs, (heads, T, T).
    """
    state = np.asarray(kernel, dtype=np.float64)
    states = [whole(state)]
    for block in blocks:
        state = block.forward(state)
        states.append(whole(state))
        if stop is not None and stop(states[-1]):
            break
    return states


def backward(blocks: Sequence[KernelLayer], states: Sequence[np.ndarray]) -> list[np.ndarray]:
    """diag G_0, …, diag G_L: the squared gradient norm per location before each block and after the last reached.

    The gradient at the output is taken as one independent unit vector per location, so each entry is a gain.
    """
    gradient = np.eye(len(states[0]))
    gains = [np.diagonal(gradient).copy()]
    reached = blocks[: len(states) - 1]
    for block, before in zip(reversed(reached), reversed(states[:-1]), strict=True):
        gradient = block.backward(gradient, before)
        gains.append(np.diagonal(whole(gradient)).copy())
    return gains[::-1]

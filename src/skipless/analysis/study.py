"""A network and an input, followed by theory: kernels after every block, and the certificate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from skipless.model.config import ModelConfig
from skipless.model.signal import kernel_blocks
from skipless.theory import kernels, propagation
from skipless.theory.activations import ShapedActivation
from skipless.theory.certificate import Certificate, Verdict, judge
from skipless.theory.propagation import KernelLayer, Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA
from skipless.theory.tokens import sample_tokens

InputKind = Literal["sample", "average"]


@dataclass(frozen=True)
class InputSignal:
    """The kernel that enters: of one sequence with repeated tokens ("sample"), or its mean ("average"). App. B."""

    repeat_rate: float = 0.02
    length: int = 100
    kind: InputKind = "sample"
    seed: int = 0

    def kernel(self) -> np.ndarray:
        """Σ_0: ones where tokens agree, or (1−r)I + r11ᵀ."""
        if self.kind == "sample":
            return kernels.of_tokens(sample_tokens(self.repeat_rate, self.length, self.seed))
        return kernels.uniform(self.repeat_rate, self.length)

    def describe(self) -> str:
        """In words, for a subtitle."""
        which = "one sequence" if self.kind == "sample" else "mean over sequences"
        return f"T = {self.length} locations, repeat rate r = {self.repeat_rate:g} ({which})"


@dataclass(frozen=True)
class Network:
    """A configuration with the name it has in a figure. start: the squared norm of its embedded tokens."""

    label: str
    config: ModelConfig
    start: float = 1.0

    def details(self) -> list[str]:
        """What sets it apart, in words: attention, skips, norm, MLP."""
        config = self.config
        parts = [_attention_words(config), _skip_words(config.attention_skip), _norm_words(config)]
        if config.hidden:
            parts.append(f"{_activation_words(config)} MLP")
            if config.mlp_skip != config.attention_skip:
                parts.append(f"MLP {_skip_words(config.mlp_skip)}")
        return parts


@dataclass(frozen=True, eq=False)
class Study:
    """Σ_0 … Σ_L of a network for an input, and the certificate over them."""

    network: Network
    signal: InputSignal
    states: Sequence[np.ndarray]
    certificate: Certificate

    def normalised(self, block: int) -> np.ndarray:
        """Cosines after a block; NaN throughout where a norm is zero or not finite, since then there are none."""
        kernel = self.states[block]
        diagonal = np.diagonal(kernel)
        if not (np.isfinite(kernel).all() and (diagonal > 0).all()):
            return np.full_like(kernel, np.nan)
        return kernels.cosine(kernel)

    def diagonals(self) -> np.ndarray:
        """diag Σ_l, shaped (depth + 1, T)."""
        return np.array([np.diagonal(kernel) for kernel in self.states])


@dataclass(frozen=True)
class _Watched:
    """A layer that tells when it has been passed, forward or backward."""

    layer: KernelLayer
    passed: Callable[[], None]

    def forward(self, kernel: np.ndarray) -> np.ndarray:
        out = self.layer.forward(kernel)
        self.passed()
        return out

    def backward(self, gradient: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        out = self.layer.backward(gradient, kernel)
        self.passed()
        return out


def study(network: Network, signal: InputSignal, passed: Callable[[], None] = lambda: None) -> Study:
    """Propagate and judge. `passed` is called twice per block: on the way forward and on the way back."""
    blocks = [_Watched(block, passed) for block in kernel_blocks(network.config)]
    states = propagation.forward(blocks, network.start * signal.kernel())
    gains = propagation.backward(blocks, states)
    certificate = judge(states, gains, normalised=network.config.norm != "none")
    return Study(network, signal, states, certificate)


def verdict_words(verdict: Verdict) -> str:
    """A verdict in three or four words: "collapse at block 11"."""
    if verdict.block is None:
        return verdict.kind
    return f"{verdict.kind} {'from' if verdict.kind == 'drift' else 'at'} block {verdict.block}"


def _attention_words(config: ModelConfig) -> str:
    scheme = config.scheme
    if isinstance(scheme, ExponentialSPA):
        return f"γ_L = {scheme.gamma_final:g}"
    if isinstance(scheme, UniformSPA):
        return f"ρ_L = {scheme.rho_final:g}"
    if isinstance(scheme, StandardAttention):
        return "ALiBi" if scheme.alibi_heads else "plain softmax"
    return "identity attention"


def _skip_words(skip: Skip) -> str:
    if skip.shortcut == 0:
        return "no skip"
    if skip.shortcut == skip.residual == 1:
        return "α = β = 1"
    return f"α = {skip.shortcut:g}, β = {skip.residual:.3g}"


def _norm_words(config: ModelConfig) -> str:
    return {"none": "no norm", "pre": "RMSNorm in the branch", "post": "RMSNorm after the sum"}[config.norm]


def _activation_words(config: ModelConfig) -> str:
    shaped = config.shaped_activation
    name = shaped.base.replace("_", " ")
    name = name if shaped == ShapedActivation(shaped.base) else f"shaped {name}"
    return f"mirrored {name}" if config.mlp_init == "mirrored" else name

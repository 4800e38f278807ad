"""Networks followed by theory, block by block: the certificates and kernels behind the paper's figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from skipless.inspection.inspection import cosines_of
from skipless.model.config import ModelConfig
from skipless.model.kernel_maps import kernel_blocks
from skipless.theory import kernels, propagation
from skipless.theory.activations import ShapedActivation
from skipless.theory.certificate import Certificate, judge
from skipless.theory.propagation import (
    KernelLayer,
    NormPlacement,
    Skip,
)
from skipless.theory.schemes import ExponentialSPA, Scheme, StandardAttention, UniformSPA

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
            return kernels.of_tokens(kernels.sample_tokens(self.repeat_rate, self.length, self.seed))
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
        parts = [config.scheme.describe(), _skip_words(config.attention_skip), _norm_words(config)]
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
        return cosines_of(self.states[block])

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


# Figs. 1, 5, 6 and 7: attention-only. Fig. 1 is the first three rows of Fig. 7. Rows other than SPA have ALiBi.
DEPTH = 100
SIGNAL = InputSignal(repeat_rate=0.02, length=100)
GAMMA_FINAL, RHO_FINAL = 0.005, 0.8

CORRECTION_DEPTH = 36
CORRECTION_SIGNAL = InputSignal(repeat_rate=0.05, length=100)
CORRECTION_GAMMA = 0.02

# Fig. 5's rates are not printed: none, 32k SentencePiece, Fig. 1's and characters are those the text speaks of.
TOKEN_RATES = (0.0, 0.008, 0.02, 0.05)

_HEADS = 8
_USUAL = Skip(1.0, 1.0)


def attention_only(
    scheme: Scheme, depth: int, length: int, skip: Skip | None = None, norm: NormPlacement = "none"
) -> ModelConfig:
    """A network of attention blocks without MLPs."""
    return ModelConfig(
        depth=depth,
        heads=_HEADS,
        hidden=0,
        length=length,
        scheme=scheme,
        attention_skip=skip or Skip(),
        norm=norm,
        position="none",
        activation="identity",
    )


def networks(
    depth: int = DEPTH, signal: InputSignal = SIGNAL, gamma_final: float = GAMMA_FINAL, rho_final: float = RHO_FINAL
) -> list[Network]:
    """The seven rows of Fig. 7, top to bottom."""
    alibi, rate = StandardAttention(alibi_heads=_HEADS), signal.repeat_rate

    def row(label: str, scheme: Scheme, skip: Skip | None = None, norm: NormPlacement = "none") -> Network:
        return Network(label, attention_only(scheme, depth, signal.length, skip, norm))

    return [
        row("Standard", alibi),
        row("U-SPA", UniformSPA(rho_final, rate)),
        row("E-SPA", ExponentialSPA(gamma_final, rate)),
        row("Skipless + LN", alibi, norm="pre"),
        row("Pre-LN", alibi, _USUAL, "pre"),
        row("Pre-LN, α = 0.98", alibi, Skip.normalised(0.98), "pre"),
        row("Post-LN", alibi, _USUAL, "post"),
    ]


def correction_networks(
    depth: int = CORRECTION_DEPTH, signal: InputSignal = CORRECTION_SIGNAL, gamma_final: float = CORRECTION_GAMMA
) -> list[Network]:
    """The two lines of Fig. 6: E-SPA that assumes Σ_0 = I, and E-SPA corrected for repeated tokens."""
    schemes = {
        "Assuming no repeats": ExponentialSPA(gamma_final),
        "Corrected for repeats": ExponentialSPA(gamma_final, signal.repeat_rate),
    }
    return [Network(label, attention_only(scheme, depth, signal.length)) for label, scheme in schemes.items()]


def token_signals(length: int = SIGNAL.length, seed: int = 0) -> list[InputSignal]:
    """The inputs of Fig. 5: sequences by repeat rate."""
    return [replace(SIGNAL, repeat_rate=rate, length=length, seed=seed) for rate in TOKEN_RATES]


def default_blocks(depth: int) -> list[int]:
    """Blocks to show: the input, the first, then 5, 10, 25, 50 and 100% of the depth."""
    return sorted({0, 1, *(max(1, round(share * depth)) for share in (0.05, 0.1, 0.25, 0.5, 1.0))})

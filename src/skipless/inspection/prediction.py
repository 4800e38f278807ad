"""What theory predicts of a network by depth: in NumPy for the paper's figures, in torch beside a measurement.

`study` follows kernels through the networks of Figs. 1, 5, 6 and 7 (App. B and H). `predict` uses the same maps as
`theory.propagation`, but on a device: a GPU takes a tenth of a second for 36 blocks, and a processor several.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from skipless.model.config import ModelConfig
from skipless.model.transformer import kernel_blocks
from skipless.nn.block import Activation
from skipless.ops.bias import BiasVectors
from skipless.theory import kernels, local_maps, propagation
from skipless.theory.activations import ShapedActivation
from skipless.theory.certificate import Certificate, judge
from skipless.theory.propagation import (
    Attend,
    Chain,
    KernelLayer,
    MirroredMlp,
    Mlp,
    Normalise,
    NormPlacement,
    Residual,
    Skip,
)
from skipless.theory.schemes import ExponentialSPA, Scheme, StandardAttention, UniformSPA
from skipless.theory.shapes import AttentionShape, IdentityShape

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


_PARSEVAL = 1e-12  # as in theory.local_maps
_NEGLIGIBLE = 1e-13
_MOST_TERMS = 256


@torch.no_grad()
def predict(layers: Sequence[KernelLayer], kernel: Tensor) -> list[dict[str, float]]:
    """Mean norm, mean cosine and mean gradient gain of Σ_0, Σ_1, …, up to the last kernel that is finite with norms
    above 0. kernel is Σ_0, (T, T) in float64. Gains count from the last block: they are NaN if it is not reached.
    """
    states = [kernel]
    for layer in layers:
        state = _forward(layer, states[-1])
        if not bool((torch.isfinite(state).all()) & (torch.diagonal(state) > 0).all()):
            break
        states.append(state)
    gains = [torch.full_like(kernel[0], math.nan) for _ in states]
    if len(states) > len(layers):
        gradient = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        gains[-1] = torch.diagonal(gradient)
        for index in range(len(layers) - 1, -1, -1):
            gradient = _backward(layers[index], gradient, states[index])
            gains[index] = torch.diagonal(gradient)
    pairs = zip(states, gains, strict=True)
    rows = torch.stack([torch.stack([torch.diagonal(s).mean(), _mean_cosine(s), g.mean()]) for s, g in pairs])
    return [dict(zip(("norm", "cosine", "gradient"), row, strict=True)) for row in rows.tolist()]


def _forward(layer: KernelLayer, kernel: Tensor) -> Tensor:
    match layer:
        case Attend():
            heads = _heads(layer.shape, kernel)
            return (heads @ kernel @ heads.mT).mean(0)
        case Mlp():
            return _mapped(layer, 0, kernel)
        case MirroredMlp():
            return kernel
        case Normalise():
            scale = torch.diagonal(kernel).sqrt()
            return kernel / torch.outer(scale, scale)
        case Residual():
            return layer.skip.shortcut**2 * kernel + layer.skip.residual**2 * _forward(layer.branch, kernel)
        case Chain():
            for each in layer.layers:
                kernel = _forward(each, kernel)
            return kernel
    raise TypeError(f"{type(layer).__name__} has no map of kernels here; add it to inspection.prediction")


def _backward(layer: KernelLayer, gradient: Tensor, kernel: Tensor) -> Tensor:
    """G at the input from G at the output, given Σ at the input."""
    match layer:
        case Attend():
            heads = _heads(layer.shape, kernel)
            return (heads.mT @ gradient @ heads).mean(0)
        case Mlp():
            return gradient * _mapped(layer, 1, kernel)
        case MirroredMlp():
            return gradient
        case Normalise():
            scale = torch.diagonal(kernel).sqrt()
            return gradient / torch.outer(scale, scale)
        case Residual():
            through = _backward(layer.branch, gradient, kernel)
            return layer.skip.shortcut**2 * gradient + layer.skip.residual**2 * through
        case Chain():
            inputs = [kernel]
            for each in layer.layers[:-1]:
                inputs.append(_forward(each, inputs[-1]))
            for each, before in zip(reversed(layer.layers), reversed(inputs), strict=True):
                gradient = _backward(each, gradient, before)
            return gradient
    raise TypeError(f"{type(layer).__name__} has no map of gradients here; add it to inspection.prediction")


def _heads(shape: AttentionShape, like: Tensor) -> Tensor:
    """A per head, (1 or heads, T, T)."""
    length = len(like)
    if isinstance(shape, IdentityShape):
        return torch.eye(length, dtype=like.dtype, device=like.device)[None]
    parts = BiasVectors.of(shape, length, like.device, like.dtype)
    here = torch.arange(length, device=like.device)
    bias, row_scale = parts.between(here, here)
    if shape.causal:
        bias = bias.masked_fill(here[:, None] < here, -math.inf)
    return bias.softmax(-1) * row_scale[:, None]


def _mapped(layer: Mlp, order: int, kernel: Tensor) -> Tensor:
    """σ²E[φ⁽ᵏ⁾(u)φ⁽ᵏ⁾(v)], k = `order`: by Mehler's series where at most 256 terms reach rounding, else by theory's own
    maps, which have closed forms for kinks and for large variances, on the processor."""
    found = None if layer.activation.rectified else _series(layer.activation, order, torch.diagonal(kernel))
    if found is None:
        exact: Callable = local_maps.derivative_kernel_map if order else local_maps.kernel_map
        return torch.from_numpy(exact(layer.activation, kernel.cpu().numpy(), layer.weight_gain)).to(kernel)
    coefficients, square = found
    scale = torch.diagonal(kernel).sqrt()
    cosine = (kernel / torch.outer(scale, scale)).clamp(-1.0, 1.0).fill_diagonal_(0.0)
    total = _mehler_sum(coefficients, square, cosine)
    return layer.weight_gain**2 * total.diagonal_scatter(square)


def _mehler_sum(coefficients: Tensor, square: Tensor, cosine: Tensor) -> Tensor:
    """Σ_k a_k(i) a_k(j) c_ij^k over the k that matter, by Horner's rule."""
    exponents = torch.arange(coefficients.shape[1], device=cosine.device)
    share = (coefficients.square() / square[:, None]).amax(0) * cosine.abs().amax() ** exponents
    kept = torch.nonzero(share > _NEGLIGIBLE / len(share)).flatten().tolist()
    gaps = [after - before for before, after in zip([0, *kept], kept, strict=False)]
    powers = {gap: cosine**gap for gap in set(gaps) if gap}
    total = torch.zeros_like(cosine)
    for k, gap in zip(reversed(kept), reversed(gaps), strict=True):
        total.addr_(coefficients[:, k], coefficients[:, k])
        if gap:
            total.mul_(powers[gap])
    return total


def _series(activation: ShapedActivation, order: int, variance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Hermite coefficients (T, terms) of φ⁽ᵒʳᵈᵉʳ⁾(√q x) and E[φ⁽ᵒʳᵈᵉʳ⁾²], or None where 256 terms are too few."""
    spread = abs(activation.input_scale) * math.sqrt(float(variance.max()))
    if spread > 2.0:
        return None
    nodes, weights = (_on(array, variance) for array in local_maps.nodes())
    values = _predicted_values(activation, order, variance.sqrt()[:, None] * nodes)
    square = values.square() @ weights
    terms = 64
    while terms <= _MOST_TERMS:
        coefficients = values @ _on(local_maps.weighted_hermite(local_maps.ORDER, terms), variance)
        missing = (square - coefficients.square().sum(-1)).abs()
        if bool((missing <= _PARSEVAL * square).all()):
            return coefficients, square
        terms *= 2
    return None


def _predicted_values(activation: ShapedActivation, order: int, x: Tensor) -> Tensor:
    if order == 0:
        return Activation(activation)(x)
    with torch.enable_grad():
        x = x.requires_grad_()
        return torch.autograd.grad(Activation(activation)(x).sum(), x)[0]


def _on(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.tensor(array, dtype=like.dtype, device=like.device)


def _mean_cosine(kernel: Tensor) -> Tensor:
    scale = torch.diagonal(kernel).rsqrt()
    length = len(kernel)
    return ((scale @ kernel @ scale) - length) / (length * (length - 1))

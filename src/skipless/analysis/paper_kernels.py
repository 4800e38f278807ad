"""The networks and inputs behind the paper's pictures of kernels: Fig. 1, 5, 6 and 7 as data. App. B and H.

All are attention-only. Fig. 1 is the first three rows of Fig. 7. Rows other than SPA have ALiBi with 8 heads.
"""

from dataclasses import replace

from skipless.analysis.study import InputSignal, Network
from skipless.model.config import ModelConfig
from skipless.theory.propagation import NormPlacement, Skip
from skipless.theory.schemes import ExponentialSPA, Scheme, StandardAttention, UniformSPA

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

"""Kernel matrices over locations: the two families of the paper, their factors, collapse, and repeated tokens.

A kernel is Σ = X Xᵀ / d for T representation vectors of width d (rows of X): a T×T matrix of inner products.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy

from skipless.theory.feasibility import check_correlation, check_decay_rate, check_length, check_repeat_rate


def exponential(gamma: float, length: int) -> np.ndarray:
    """Σ(γ)_ij = exp(−γ|i−j|), the E-SPA family. γ = ∞ is the identity. He et al. 2023, Sec. 3.2."""
    check_decay_rate("gamma", gamma)
    location = np.arange(check_length(length), dtype=np.float64)
    if np.isinf(gamma):
        return np.eye(length)
    return np.exp(-gamma * np.abs(location[:, None] - location[None, :]))


def exponential_grid(gamma: float, rows: int, columns: int) -> np.ndarray:
    """exp(−γ(|Δrow| + |Δcolumn|)) between the places of a grid in reading order: Σ_rows(γ) ⊗ Σ_columns(γ).

    E-SPA's family for images, which the paper does not have: docs/derivations.md.
    """
    return np.kron(exponential(gamma, rows), exponential(gamma, columns))


def uniform(rho: float, length: int) -> np.ndarray:
    """Σ(ρ) = (1−ρ) I + ρ 11ᵀ, the U-SPA family. He et al. 2023, Sec. 3.2."""
    check_correlation("rho", rho)
    return (1.0 - rho) * np.eye(check_length(length)) + rho


def exponential_chol(gamma: float, length: int) -> np.ndarray:
    """Lower Cholesky factor of `exponential`: e^{−γ(i−j)}, times a(γ) in every column but the first.

    He et al. 2023, Lemma 1, with a(γ) = √(1−e^{−2γ}).
    """
    chol = np.tril(exponential(gamma, length))
    chol[:, 1:] *= innovation(gamma)
    return chol


def exponential_chol_inverse(gamma: float, length: int) -> np.ndarray:
    """Inverse of `exponential_chol`: diag(1, 1/a, 1/a, …)(I − e^{−γ} S), S the shift by one location."""
    check_decay_rate("gamma", gamma)
    inverse = np.eye(check_length(length)) - np.exp(-gamma) * np.eye(length, k=-1)
    inverse[1:] /= innovation(gamma)
    return inverse


def innovation(gamma: float) -> float:
    """a(γ) = √(1−e^{−2γ}): the part of a location that its predecessor does not explain. App. C."""
    return float(np.sqrt(-np.expm1(-2.0 * gamma)))


def uniform_chol(rho: float, length: int) -> np.ndarray:
    """Lower Cholesky factor of `uniform`. With p_n = 1+nρ (0-based n): He et al. 2023, proof of Thm 1,

    L_nn = √((1−ρ) p_n / p_{n−1}),   L_ij = ρ √(1−ρ) / √(p_j p_{j−1})  for i > j.
    """
    p, p_before = _uniform_pivots(rho, length)
    column = rho * np.sqrt((1.0 - rho) / (p * p_before))
    chol = np.tril(np.broadcast_to(column, (length, length)), k=-1)
    np.fill_diagonal(chol, np.sqrt((1.0 - rho) * p / p_before))
    return chol


def uniform_chol_inverse(rho: float, length: int) -> np.ndarray:
    """Inverse of `uniform_chol`: row n holds −ρ/√((1−ρ) p_n p_{n−1}) before its diagonal √(p_{n−1}/((1−ρ) p_n))."""
    p, p_before = _uniform_pivots(rho, length)
    row = -rho / np.sqrt((1.0 - rho) * p * p_before)
    inverse = np.tril(np.broadcast_to(row[:, None], (length, length)), k=-1)
    np.fill_diagonal(inverse, np.sqrt(p_before / ((1.0 - rho) * p)))
    return inverse


def _uniform_pivots(rho: float, length: int) -> tuple[np.ndarray, np.ndarray]:
    """p_n and p_{n−1} for n = 0 … T−1, with p_n = 1 + nρ."""
    check_correlation("rho", rho)
    n = np.arange(check_length(length), dtype=np.float64)
    return 1.0 + n * rho, 1.0 + (n - 1.0) * rho


def uniform_root(rho: float, length: int) -> np.ndarray:
    """Symmetric square root of `uniform`: √(1−ρ) on the complement of 1, √(1+(T−1)ρ) along it. App. A."""
    check_correlation("rho", rho)
    across, along = np.sqrt(1.0 - rho), np.sqrt(1.0 + (check_length(length) - 1) * rho)
    return across * np.eye(length) + (along - across) / length


def symmetric_root(kernel: np.ndarray) -> np.ndarray:
    """The symmetric square root R with R R = Σ, by eigendecomposition: non-causal SPA's factor. App. A."""
    values, vectors = scipy.linalg.eigh(kernel)
    floor = -1e-10 * max(values[-1], 1.0)
    if values[0] < floor:
        raise ValueError(
            f"the kernel's smallest eigenvalue is {values[0]:.3g}, so it is not positive semi-definite "
            "and has no real square root; a kernel X Xᵀ / d always has one"
        )
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


def of_activations(activations: np.ndarray) -> np.ndarray:
    """Σ = X Xᵀ / d of activations shaped (…, T, d); leading axes are kept."""
    activations = np.asarray(activations, dtype=np.float64)
    return activations @ activations.swapaxes(-1, -2) / activations.shape[-1]


def of_tokens(tokens: np.ndarray) -> np.ndarray:
    """Σ_0 of tokens (…, T) in the wide limit: 1 where two locations hold the same token, else 0. App. B."""
    tokens = np.asarray(tokens)
    return (tokens[..., :, None] == tokens[..., None, :]).astype(np.float64)


def cosine(kernel: np.ndarray) -> np.ndarray:
    """Normalised kernel Σ_ij / √(Σ_ii Σ_jj): RMSNorm's effect, and what the paper's figures show."""
    scale = np.sqrt(np.diagonal(kernel, axis1=-2, axis2=-1))
    if not np.all(scale > 0):
        worst = np.unravel_index(int(np.argmin(scale > 0)), scale.shape)
        raise ValueError(
            f"Σ_ii is {scale[worst] ** 2:g} at location {worst[-1]}: with a zero norm, or none, it has no cosines; "
            "leave it out, or look at an earlier block"
        )
    return kernel / (scale[..., :, None] * scale[..., None, :])


def mean_cosine(kernel: np.ndarray) -> float:
    """Mean of the off-diagonal cosines: 1 is rank collapse. A single location has none: NaN."""
    kernel = _square(kernel)
    length = len(kernel)
    if length == 1:
        return float("nan")
    normalised = cosine(kernel)
    return float((normalised.sum() - np.trace(normalised)) / (length * (length - 1)))


def effective_rank(kernel: np.ndarray) -> float:
    """exp of the entropy of the normalised spectrum: T for the identity, 1 at rank collapse.

    Roy & Vetterli 2007.
    """
    share = _spectrum(kernel)
    share = share[share > 0]
    return float(np.exp(-np.sum(share * np.log(share))))


def stable_rank(kernel: np.ndarray) -> float:
    """tr Σ / λ_max: the number of directions as strong as the strongest."""
    return float(1.0 / _spectrum(kernel)[-1])


def _spectrum(kernel: np.ndarray) -> np.ndarray:
    values = np.maximum(scipy.linalg.eigvalsh(_square(kernel)), 0.0)
    return values / values.sum()


def rank_one_residual(kernel: np.ndarray) -> float:
    """‖X − 1x̄ᵀ‖_F / ‖X‖_F, how far the locations are from all being equal. Dong et al. 2021.

    From the kernel alone: √(1 − 1ᵀΣ1 / (T tr Σ)).
    """
    kernel = _square(kernel)
    share = kernel.mean() * len(kernel) / np.trace(kernel)
    return float(np.sqrt(max(1.0 - share, 0.0)))


def _square(kernel: np.ndarray) -> np.ndarray:
    """One kernel as an array: of several at once a spectrum or a mean would mix them, in silence."""
    kernel = np.asarray(kernel)
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or not kernel.size:
        raise ValueError(
            f"the kernel is shaped {kernel.shape}; it must be one square matrix (T, T): of a batch take each by itself"
        )
    return kernel


def repeat_rate(tokens: np.ndarray | Iterable[np.ndarray]) -> float:
    """r = P(x_i = x_j), the probability that two locations hold the same token, from a stream of token ids.

    Unbiased: Σ_v n_v(n_v−1) / (N(N−1)), where n_v counts token v among N. Takes one array or an iterable of arrays,
    read once and not kept.
    """
    pieces = [tokens] if isinstance(tokens, np.ndarray) else tokens
    counts = np.zeros(0, dtype=np.int64)
    for piece in pieces:
        found = np.bincount(_ids(piece))
        if len(found) > len(counts):
            found[: len(counts)] += counts
            counts = found
        else:
            counts[: len(found)] += found
    total = int(counts.sum())
    if total < 2:
        raise ValueError(f"{total} tokens were given; a repeat rate needs at least 2")
    return float(np.sum(counts * (counts - 1.0)) / (total * (total - 1.0)))


def _ids(piece: Any) -> np.ndarray:
    """Token ids as a flat array; anything else would be cut to whole numbers and counted."""
    ids = np.asarray(piece).ravel()
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0):
        what = f"{ids.min()}" if ids.dtype.kind == "i" else f"{ids[0]!r} ({ids.dtype})"
        raise ValueError(f"among the tokens is {what}; a repeat rate is of token ids, integers of at least 0")
    return ids.astype(np.int64)


def sample_tokens(rate: float, length: int, seed: int = 0) -> np.ndarray:
    """Tokens of which two agree with probability r: ⌈1/r⌉ symbols, all but one equally likely; r = 0 repeats none."""
    check_repeat_rate(rate)
    if rate == 0.0:
        return np.arange(length)
    symbols, draw = math.ceil(1.0 / rate - 1e-9), np.random.default_rng(seed)
    if math.isclose(symbols * rate, 1.0):
        return draw.integers(0, symbols, size=length)
    # (n−1)p² + (1−(n−1)p)² = r, by the root at which n equal symbols have p = 1/n
    others = (1.0 + math.sqrt((symbols * rate - 1.0) / (symbols - 1))) / symbols
    likely = np.full(symbols, others)
    likely[-1] = 1.0 - (symbols - 1) * others
    return draw.choice(symbols, size=length, p=likely)

"""AttentionShape: a block's attention matrix at initialisation, as a few scalars and O(T) vectors.

Any non-negative A is D·softmax(B) with D its row sums (Sec. 3.3). Every structured shape here has a bias of one form,

    B_ij = logaddexp(column_j − slope·|i−j|, row_i)  (i ≠ j),     B_ii = diagonal_i,

up to a constant per row, which the softmax forgets. `compact` hands out these parts; `dense`, `bias` and `row_scale`
are the T×T oracles.
Non-causal E-SPA and tables of numbers have no such form.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import scipy

from skipless.theory import exponential, kernels, uniform
from skipless.theory.exponential import ExponentialStep
from skipless.theory.feasibility import Grid, check_grid, check_length, check_repeat_rate, grid_sides


@dataclass(frozen=True, eq=False)
class CompactBias:
    """The parts of B and D that an attention kernel reads, in float64.

    A vector shorter than the sequence has converged: its last entry stands for every later location.
    slope is a number, or one per head. row is None where the shape has no row term; the GPU kernels take a slope or a
    row term, and leave a shape with both to slower code.
    """

    slope: np.ndarray
    column: np.ndarray
    diagonal: np.ndarray
    row_scale: np.ndarray
    row: np.ndarray | None = None

    def at(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Unnormalised B between query and key locations, shaped (heads?, queries, keys). No mask."""
        distance = np.abs(queries[:, None] - keys[None, :])
        bias = take(self.column, keys) - self.slope[..., None, None] * distance
        if self.row is not None:
            bias = np.logaddexp(bias, take(self.row, queries)[:, None])
        return np.where(distance == 0, take(self.diagonal, queries)[:, None], bias)


def take(vector: np.ndarray, locations: np.ndarray) -> np.ndarray:
    """vector[locations], the last entry standing for all beyond it."""
    return vector[np.minimum(locations, len(vector) - 1)]


class AttentionShape(ABC):
    """An attention matrix A = D·P at initialisation. P has unit row sums; D rescales locations.

    tabled: whether the shape has no O(T) parts, and its T×T table is read. limit: how many locations it was calibrated
    for, where it serves no more; None where any number will do.
    """

    @property
    @abstractmethod
    def causal(self) -> bool:
        """Whether no location attends to a later one."""

    @property
    def tabled(self) -> bool:
        return False

    @property
    def limit(self) -> int | None:
        return None

    @abstractmethod
    def compact(self, length: int) -> CompactBias:
        """The O(T) parts that reproduce A up to `length` locations."""

    def bias(self, length: int) -> np.ndarray:
        """B = log P, T×T (heads×T×T for per-head shapes); −∞ above the diagonal of a causal shape."""
        location = np.arange(check_length(length))
        bias = self.compact(length).at(location, location)
        if self.causal:
            bias = np.where(location[:, None] >= location[None, :], bias, -np.inf)
        return bias - scipy.special.logsumexp(bias, axis=-1, keepdims=True)

    def row_scale(self, length: int) -> np.ndarray:
        """D, the row sums of A: one positive number per location."""
        return take(self.compact(length).row_scale, np.arange(check_length(length)))

    def dense(self, length: int) -> np.ndarray:
        """A itself, T×T (heads×T×T for per-head shapes)."""
        return self.row_scale(length)[:, None] * np.exp(self.bias(length))


class TableShape(AttentionShape):
    """A shape that `dense` gives whole. Attention reads it as a T×T table, which is slow."""

    @property
    def tabled(self) -> bool:
        return True

    def compact(self, length: int) -> CompactBias:
        raise ValueError(
            f"{type(self).__name__} has no O(T) form; use its dense table: bias(length) and row_scale(length)"
        )

    @abstractmethod
    def dense(self, length: int) -> np.ndarray:
        """A itself, T×T, one for all heads, without negative entries."""

    def bias(self, length: int) -> np.ndarray:
        matrix = self.dense(length)
        with np.errstate(divide="ignore"):  # log 0 = −∞ is the mask
            return np.log(matrix / matrix.sum(axis=-1, keepdims=True))

    def row_scale(self, length: int) -> np.ndarray:
        return self.dense(length).sum(axis=-1)


@dataclass(frozen=True)
class PlainShape(AttentionShape):
    """Standard attention with zero logits: the running average over what the mask admits."""

    causal: bool = True

    def compact(self, length: int) -> CompactBias:
        one = np.zeros(1)
        return CompactBias(np.zeros(()), one, one, np.ones(1))


@dataclass(frozen=True)
class AlibiShape(AttentionShape):
    """Standard attention with ALiBi's fixed slope per head, B = −m_h|i−j|. Press et al. 2022."""

    heads: int = 8
    causal: bool = True

    def compact(self, length: int) -> CompactBias:
        one = np.zeros(1)
        return CompactBias(alibi_slopes(self.heads), one, one, np.ones(1))


def alibi_slopes(heads: int) -> np.ndarray:
    """ALiBi's slopes: 2^{−8/n}, 2^{−16/n}, … for n a power of two, else filled up from the next power's odd terms."""
    if heads < 1:
        raise ValueError(f"heads is {heads}; ALiBi needs at least 1 head")
    power = 2 ** int(np.floor(np.log2(heads)))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    extra = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1, 2) / power)
    return np.concatenate([slopes, extra])[:heads]


@dataclass(frozen=True)
class IdentityShape(AttentionShape):
    """Every location attends to itself alone: Value-SkipInit at initialisation. Sec. 3.1.

    A softmax reaches it only by saturating, so it has no compact bias; the model builds it from gains.
    """

    causal: bool = True

    def compact(self, length: int) -> CompactBias:
        raise ValueError("identity attention has no finite bias; Value-SkipInit realises it as αI + βA with α=1, β=0")

    def bias(self, length: int) -> np.ndarray:
        return np.where(np.eye(check_length(length), dtype=bool), 0.0, -np.inf)

    def row_scale(self, length: int) -> np.ndarray:
        return np.ones(check_length(length))


@dataclass(frozen=True)
class ExponentialShape(AttentionShape):
    """Causal E-SPA between two decay rates, corrected for repeated tokens. Thm 3, App. B."""

    step: ExponentialStep
    repeat_rate: float = 0.0
    causal: bool = field(default=True, init=False, repr=False)

    def __post_init__(self):
        check_repeat_rate(self.repeat_rate)

    @classmethod
    def between(cls, gamma_in: float, gamma_out: float, repeat_rate: float = 0.0) -> "ExponentialShape":
        """The shape that carries Σ(γ_in) to Σ(γ_out); γ_in may be ∞."""
        return cls(ExponentialStep.between(gamma_in, gamma_out), repeat_rate)

    def compact(self, length: int) -> CompactBias:
        stored = min(check_length(length), exponential.converged_length(self.step))
        column, diagonal = exponential.log_columns(self.step, self.repeat_rate, stored)
        scale = exponential.row_sums(self.step, self.repeat_rate, stored)
        return CompactBias(np.array(self.step.gamma_out), column, diagonal, scale)

    def dense(self, length: int) -> np.ndarray:
        return exponential.attention(self.step, self.repeat_rate, check_length(length))


@dataclass(frozen=True)
class SymmetricExponentialShape(TableShape):
    """Non-causal E-SPA, A = Σ(γ')^{½} Σ(γ)^{−½}, by eigendecomposition: it has no closed form. App. A.

    With a grid locations are the places of an image in reading order, (rows, columns) of them or a "square" of any
    size, Σ is `kernels.exponential_grid` and A = A_rows ⊗ A_columns before the correction for repeated tokens.

    Departs: the paper checks non-negativity by experiment; rounding-sized negative entries (≤ 1e-12) become 0 here,
    and anything larger is refused.
    """

    step: ExponentialStep
    repeat_rate: float = 0.0
    causal: bool = False
    grid: Grid | None = None

    def __post_init__(self):
        check_repeat_rate(self.repeat_rate)
        object.__setattr__(self, "grid", check_grid(self.grid))

    def dense(self, length: int) -> np.ndarray:
        sides = grid_sides(self.grid, length)
        roots_in, roots_out = (
            [kernels.symmetric_root(kernels.exponential(gamma, side)) for side in sides]
            for gamma in (self.step.gamma_in, self.step.gamma_out)
        )
        matrix = np.kron(*(np.linalg.solve(*roots).T for roots in zip(roots_in, roots_out, strict=True)))
        norm_in, norm_out = self._mean_norms(roots_in), self._mean_norms(roots_out)
        instead = f"decay rates above {self.step.gamma_out:g}, at which {length} locations coincide to rounding"
        return non_negative(matrix * norm_in[None, :] / norm_out[:, None], "non-causal E-SPA", instead)

    def _mean_norms(self, roots: list[np.ndarray]) -> np.ndarray:
        """√diag(R Σ̄_0 R) for the root R = R_rows ⊗ R_columns, where (R R)_ii = 1: √(1 − r + r(R1)_i²). App. B."""
        sums = np.kron(*(root.sum(axis=1) for root in roots))
        return np.sqrt(1.0 + self.repeat_rate * (sums - 1.0) * (sums + 1.0))


@dataclass(frozen=True)
class UniformShape(AttentionShape):
    """Causal U-SPA between two uniform correlations. Thm 1."""

    rho_in: float
    rho_out: float
    causal: bool = field(default=True, init=False, repr=False)

    def __post_init__(self):
        uniform.check_step(self.rho_in, self.rho_out)

    def compact(self, length: int) -> CompactBias:
        column, row, diagonal = uniform.factors(self.rho_in, self.rho_out, check_length(length))
        scale = uniform.row_sums(column, row, diagonal)
        log_row = np.log(row) if row.any() else None
        return CompactBias(np.zeros(()), np.log(column), np.log(diagonal), scale, log_row)

    def dense(self, length: int) -> np.ndarray:
        return uniform.attention(self.rho_in, self.rho_out, check_length(length))


@dataclass(frozen=True)
class SymmetricUniformShape(AttentionShape):
    """Non-causal U-SPA: A = κI + b11ᵀ, a bias on the diagonal alone. It depends on the length. App. A."""

    rho_in: float
    rho_out: float
    causal: bool = False

    def __post_init__(self):
        uniform.check_step(self.rho_in, self.rho_out)

    def compact(self, length: int) -> CompactBias:
        kappa, spread = uniform.symmetric_factors(self.rho_in, self.rho_out, check_length(length))
        scale = uniform.symmetric_row_sum(self.rho_in, self.rho_out, length)
        return CompactBias(np.zeros(()), np.zeros(1), np.log1p([kappa / spread]), np.array([scale]))

    def dense(self, length: int) -> np.ndarray:
        kappa, spread = uniform.symmetric_factors(self.rho_in, self.rho_out, check_length(length))
        return kappa * np.eye(length) + spread


@dataclass(frozen=True, eq=False)
class DenseShape(TableShape):
    """An explicit non-negative matrix. A causal one serves every shorter length by its leading block."""

    matrix: np.ndarray = field(repr=False)
    causal: bool = True

    def __post_init__(self):
        matrix = np.asarray(self.matrix, dtype=np.float64)
        object.__setattr__(self, "matrix", matrix)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ValueError(
                f"the matrix is shaped {matrix.shape}; it must be (T, T), one for all heads: tables by head are a "
                "ShapeByHead"
            )
        if not (np.isfinite(matrix).all() and matrix.min() >= 0.0 and matrix.sum(axis=1).min() > 0.0):
            row = int(np.argmax(~(np.isfinite(matrix) & (matrix >= 0.0)).all(axis=1) | ~(matrix.sum(axis=1) > 0.0)))
            raise ValueError(
                f"row {row} of the matrix runs from {matrix[row].min():.3g} to {matrix[row].max():.3g} and sums to "
                f"{matrix[row].sum():.3g}; attention is finite, at least 0, and looks somewhere from every location"
            )
        if self.causal and np.triu(matrix, 1).max() > 1e-12 * matrix.max():
            i, j = np.unravel_index(np.triu(matrix, 1).argmax(), matrix.shape)
            raise ValueError(
                f"the matrix looks ahead, by {matrix[i, j]:.3g} from location {i} to {j}, and a causal mask would hide "
                "that: use np.tril(matrix), or causal=False in an encoder"
            )

    @property
    def limit(self) -> int | None:
        return len(self.matrix)

    def dense(self, length: int) -> np.ndarray:
        limit = _check_table(length, len(self.matrix), self.causal)
        return self.matrix[:limit, :limit]


@dataclass(frozen=True, eq=False)
class RescaledShape(AttentionShape):
    """Another shape's P with row scales of its own: what the "exact" calibration returns."""

    base: AttentionShape
    scales: np.ndarray = field(repr=False)

    @property
    def causal(self) -> bool:
        return self.base.causal

    @property
    def tabled(self) -> bool:
        return self.base.tabled

    @property
    def limit(self) -> int | None:
        return len(self.scales)

    def compact(self, length: int) -> CompactBias:
        parts = self.base.compact(length)
        return CompactBias(parts.slope, parts.column, parts.diagonal, self.row_scale(length), parts.row)

    def bias(self, length: int) -> np.ndarray:
        return self.base.bias(length)

    def row_scale(self, length: int) -> np.ndarray:
        return self.scales[: _check_table(length, len(self.scales), self.causal)]


@dataclass(frozen=True)
class ShapeByHead(AttentionShape):
    """A shape for each head, A_1 … A_H, all of one kind. Neighbouring heads of one shape are computed together."""

    shapes: tuple[AttentionShape, ...]

    def __post_init__(self):
        object.__setattr__(self, "shapes", tuple(self.shapes))
        if not self.shapes:
            raise ValueError("shapes is empty; give one for each head")
        kinds = {(type(shape).__name__, shape.causal, shape.limit) for shape in self.shapes}
        if len(kinds) > 1:
            seen = ", ".join(f"{name}(causal={causal})" for name, causal, _ in sorted(kinds, key=str))
            raise ValueError(f"heads have {seen}; give all of them one kind of shape, for as many locations")

    @property
    def heads(self) -> int:
        return len(self.shapes)

    @property
    def causal(self) -> bool:
        return self.shapes[0].causal

    @property
    def tabled(self) -> bool:
        return self.shapes[0].tabled

    @property
    def limit(self) -> int | None:
        return self.shapes[0].limit

    def runs(self) -> list[tuple[AttentionShape, int]]:
        """Each shape with the number of neighbouring heads that have it, first to last."""
        return [(shape, len(list(heads))) for shape, heads in groupby(self.shapes)]

    def compact(self, length: int) -> CompactBias:
        raise ValueError("ShapeByHead has no one set of vectors: each of its `shapes` has its own")

    def bias(self, length: int) -> np.ndarray:
        return np.stack([shape.bias(length) for shape in self.shapes])

    def row_scale(self, length: int) -> np.ndarray:
        return np.stack([shape.row_scale(length) for shape in self.shapes])

    def dense(self, length: int) -> np.ndarray:
        return np.stack([shape.dense(length) for shape in self.shapes])


def non_negative(matrix: np.ndarray, name: str, instead: str = "calibration='paper'") -> np.ndarray:
    """The matrix with rounding-sized negative entries set to 0; refuses larger ones, which no softmax can make."""
    lowest = matrix.min()
    if lowest < -1e-12 * max(np.abs(matrix).max(), 1.0):
        i, j = np.unravel_index(matrix.argmin(), matrix.shape)
        raise ValueError(
            f"{name} needs attention {lowest:.3g} from location {i} to {j}, and a softmax gives none below 0; "
            f"use {instead}"
        )
    return np.maximum(matrix, 0.0)


def _check_table(length: int, stored: int, causal: bool) -> int:
    check_length(length)
    if length > stored or (length != stored and not causal):
        rule = "at most" if causal else "exactly"
        raise ValueError(
            f"length is {length}, but this shape was calibrated for {stored} locations and serves {rule} as many; "
            f"calibrate for {length} (ModelConfig(length={length}), or the scheme's shapes with length={length}), or "
            "use a scheme without such a limit, as with calibration='paper'"
        )
    return length

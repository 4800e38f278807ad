"""High-precision oracles: Cholesky factors and square roots with 60 digits, by the textbook recursion."""

import mpmath
import numpy as np
import pytest


def _chol(kernel: mpmath.matrix) -> list[list[mpmath.mpf]]:
    return mpmath.cholesky(kernel).tolist()


def _ratio(target: mpmath.matrix, source: mpmath.matrix) -> np.ndarray:
    """L(target) L(source)⁻¹ row by row: solve x L_source = row of L_target by back substitution."""
    size = target.rows
    out, lower = _chol(target), _chol(source)
    ratio = np.zeros((size, size), dtype=object)
    for i in range(size):
        row = [mpmath.mpf(0)] * size
        for j in range(i, -1, -1):
            rest = mpmath.fsum(row[k] * lower[k][j] for k in range(j + 1, i + 1))
            row[j] = (out[i][j] - rest) / lower[j][j]
        ratio[i] = row
    return ratio


def _kernel(entry, length: int) -> mpmath.matrix:
    return mpmath.matrix([[entry(i, j) for j in range(length)] for i in range(length)])


class HighPrecision:
    """Dense references as object arrays of mpmath numbers."""

    def exponential(self, gamma_in, gamma_out, length, repeat_rate=0.0) -> np.ndarray:
        """D̄_out^{−½} L(γ_out) L(γ_in)⁻¹ D̄_in^{½} straight from the definitions of Sec. 3.2 and App. B."""

        def kernel(gamma):
            if np.isinf(gamma):
                return _kernel(lambda i, j: mpmath.mpf(i == j), length)
            return _kernel(lambda i, j: mpmath.exp(-mpmath.mpf(gamma) * abs(i - j)), length)

        def mean_norm(gamma):
            rows, rate = _chol(kernel(gamma)), mpmath.mpf(repeat_rate)
            squares = [mpmath.fsum(x * x for x in row) for row in rows]
            totals = [mpmath.fsum(row) ** 2 for row in rows]
            return [mpmath.sqrt((1 - rate) * s + rate * t) for s, t in zip(squares, totals, strict=True)]

        ratio = _ratio(kernel(gamma_out), kernel(gamma_in))
        norm_in, norm_out = mean_norm(gamma_in), mean_norm(gamma_out)
        return np.array([[ratio[i, j] * norm_in[j] / norm_out[i] for j in range(length)] for i in range(length)])

    def uniform(self, rho_in, rho_out, length) -> np.ndarray:
        """L(ρ_out) L(ρ_in)⁻¹."""

        def kernel(rho):
            return _kernel(lambda i, j: mpmath.mpf(1) if i == j else mpmath.mpf(rho), length)

        return _ratio(kernel(rho_out), kernel(rho_in))


@pytest.fixture
def high_precision():
    with mpmath.workdps(60):
        yield HighPrecision()


@pytest.fixture
def relative_error():
    def measure(ours: np.ndarray, exact: np.ndarray) -> float:
        """Largest relative error over the entries that are not exactly zero."""
        return max(float(abs((a - b) / b)) for a, b in zip(ours.ravel(), exact.ravel(), strict=True) if b != 0)

    return measure

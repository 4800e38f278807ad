"""GELU's kernel in closed form: exact at any variance, where a Hermite series needs thousands of terms.

gelu(x) = xΦ(x). For (u, v) Gaussian with covariance [[p, c], [c, q]], integrating by parts twice,

    E[gelu(u) gelu(v)] = c P + F (Δ + c² s),     Δ = pq − c²,  s = 1/(1+p) + 1/(1+q),

with P = E[Φ(u)Φ(v)] = ¼ + arctan(c/√(1+p+q+Δ))/2π and F = E[φ(u)φ(v)] = 1/(2π√(1+p+q+Δ)).
E[gelu'(u) gelu'(v)] is its derivative in c (Price's theorem), and dP/dc = F. Compare Tsuchida et al. 2021, who have
(1+p)(1+q) − c² for 1+p+q+Δ: at large variances the difference of two numbers that agree in all their digits.
"""

import numpy as np

Array = np.ndarray


def pair_moment(covariance: Array, p: Array, q: Array) -> Array:
    """E[gelu(u) gelu(v)], elementwise in the covariance c and the variances p, q."""
    apart, determinant = _determinants(covariance, p, q)
    both, density = _orthant(covariance, determinant)
    return covariance * both + density * (apart + covariance**2 * (1.0 / (1.0 + p) + 1.0 / (1.0 + q)))


def derivative_pair_moment(covariance: Array, p: Array, q: Array) -> Array:
    """E[gelu'(u) gelu'(v)] = d/dc of `pair_moment`.

    With m = 1+p+q and k = (1+p)(1+q) it is P + c F (2(m+1) − (m² − pq + (m+1)Δ)/(m+Δ)) / k.
    """
    apart, determinant = _determinants(covariance, p, q)
    both, density = _orthant(covariance, determinant)
    sizes, outer = 1.0 + (p + q), (1.0 + p) * (1.0 + q)
    loss = (sizes**2 - p * q + (sizes + 1.0) * apart) / determinant
    return both + covariance * density * (2.0 * (sizes + 1.0) - loss) / outer


def mean(variance: Array) -> Array:
    """E[gelu(u)] = p / √(2π(1+p))."""
    return variance / np.sqrt(2.0 * np.pi * (1.0 + variance))


def _determinants(c: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """Δ = pq − c² and 1+p+q+Δ, the determinants of the covariance of (u, v) and of that of (u+z, v+z')."""
    across = np.sqrt(p * q)
    apart = np.maximum((across - c) * (across + c), 0.0)  # of a kernel rounded to |c| > √(pq): 0
    return apart, 1.0 + (p + q) + apart  # (p + q) first: a kernel stays symmetric to the last bit


def _orthant(c: Array, determinant: Array) -> tuple[Array, Array]:
    """(P, F) of the module's docstring."""
    root = np.sqrt(determinant)
    return 0.25 + np.arctan2(c, root) / (2.0 * np.pi), 1.0 / (2.0 * np.pi * root)

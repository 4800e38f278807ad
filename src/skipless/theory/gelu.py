"""GELU's kernel in closed form: exact at any variance, where a Hermite series needs thousands of terms.

gelu(x) = xΦ(x). For (u, v) Gaussian with covariance [[p, c], [c, q]], integrating by parts twice,

    E[gelu(u) gelu(v)] = c P + F (p q + c²(1/(1+q) − p/(1+p))),

with P = E[Φ(u)Φ(v)] = ¼ + arcsin(c/√((1+p)(1+q)))/2π and F = E[φ(u)φ(v)] = 1/(2π√((1+p)(1+q)−c²)).
E[gelu'(u) gelu'(v)] is its derivative in c (Price's theorem), and dP/dc = F. Compare Tsuchida et al. 2021.
"""

import numpy as np

Array = np.ndarray


def pair_moment(covariance: Array, p: Array, q: Array) -> Array:
    """E[gelu(u) gelu(v)], elementwise in the covariance c and the variances p, q."""
    both, density = _orthant(covariance, p, q)
    return covariance * both + density * (p * q + covariance**2 * _curve(p, q))


def derivative_pair_moment(covariance: Array, p: Array, q: Array) -> Array:
    """E[gelu'(u) gelu'(v)] = d/dc of `pair_moment`."""
    both, density = _orthant(covariance, p, q)
    density_slope = density * covariance / ((1.0 + p) * (1.0 + q) - covariance**2)
    even = p * q + covariance**2 * _curve(p, q)
    return both + covariance * density * (1.0 + 2.0 * _curve(p, q)) + density_slope * even


def mean(variance: Array) -> Array:
    """E[gelu(u)] = p / √(2π(1+p))."""
    return variance / np.sqrt(2.0 * np.pi * (1.0 + variance))


def _orthant(c: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """(P, F) of the module's docstring."""
    scale = (1.0 + p) * (1.0 + q)
    both = 0.25 + np.arcsin(c / np.sqrt(scale)) / (2.0 * np.pi)
    return both, 1.0 / (2.0 * np.pi * np.sqrt(scale - c**2))


def _curve(p: Array, q: Array) -> Array:
    """1/(1+q) − p/(1+p) = 1/(1+p) + 1/(1+q) − 1."""
    return 1.0 / (1.0 + p) + 1.0 / (1.0 + q) - 1.0

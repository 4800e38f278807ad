"""Gaussian expectations: E[f(z)], E[f(u)f(v)] and the Hermite coefficients of f.

With z ~ N(0, 1), the normalised Hermite polynomials h_k = He_k/√k! are orthonormal: E[h_j(z)h_k(z)] = 1{j=k}. Writing
f(√q x) = Σ_k a_k(q) h_k(x), jointly Gaussian u, v of variances q, q' and correlation c obey Mehler's formula

    E[f(u) f(v)] = Σ_k a_k(q) a_k(q') c^k,

which turns a T×T table of double integrals into T single ones and a power series (Daniely et al. 2016).
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import roots_hermitenorm

Array = np.ndarray
Function = Callable[[Array], Array]

ORDER = 1000
_LARGEST_SPREAD = 16.0
# |h_k(x)| e^(-x²/4) < 1.1 for every k, so a node beyond this radius adds less than e^(-radius²/4) = 2e-20 to any a_k.
_RADIUS = 13.5


class OutOfReach(ValueError):
    """An input so wide that a smooth activation is a kink in all but name, and its expectations are not computed."""


@lru_cache(maxsize=8)
def nodes(order: int = ORDER) -> tuple[Array, Array]:
    """Gauss-Hermite points x and weights w for N(0, 1): Σ w f(x) = E[f(z)], exact for polynomials below 2·`order`.

    Points whose weight cannot matter in double precision (|x| > 13.5) are left out: 270 of 1000 remain, a distance
    π/√order apart at the centre. That spacing, and so `order`, must resolve f: for an f with a pole at distance d from
    the real axis the error falls as exp(−2d√order).
    """
    x, w = roots_hermitenorm(order)
    kept = np.abs(x) <= _RADIUS
    x, w = x[kept], w[kept] / math.sqrt(2 * math.pi)
    x.setflags(write=False)
    w.setflags(write=False)
    return x, w


def order_for(spread: float) -> int:
    """Quadrature order for φ(s·z + shift) with s = `spread`: 1000 up to s = 2, four times more for each doubling.

    The poles of tanh(s·z) lie π/2s from the real axis, so this keeps exp(−2d√order) below 1e-20. Beyond s = 16 an
    activation is a kink in all but name, and is refused.
    """
    if not spread <= _LARGEST_SPREAD:
        raise OutOfReach(
            f"input of standard deviation {spread:g} saturates or kinks the activation: quadrature holds to "
            f"{_LARGEST_SPREAD:g}. Normalise the stream or lower input_scale"
        )
    return ORDER * 4 ** max(0, math.ceil(math.log2(max(spread, 1.0) / 2)))


def sample(f: Function, variance: ArrayLike, order: int = ORDER) -> Array:
    """f(√q x) at the quadrature points x, for each q in `variance`: shape (*variance.shape, points)."""
    return f(np.sqrt(np.asarray(variance, dtype=np.float64))[..., None] * nodes(order)[0])


def expectation(f: Function, variance: ArrayLike = 1.0, order: int = ORDER) -> Array:
    """E[f(√q z)] for each q in `variance`, in the shape of `variance`; `f` acts elementwise."""
    return sample(f, variance, order) @ nodes(order)[1]


def pair_expectation(f: Function, correlation: float, variance: float = 1.0, order: int = ORDER) -> float:
    """E[f(u) f(v)] for u, v of equal `variance` and the given `correlation`, by a two-dimensional product rule.

    (u, v) = √q(√((1+c)/2)·x ± √((1−c)/2)·y) with x, y independent. Quadratic in the number of nodes: the oracle
    against which the Mehler series is tested, not the way to fill a kernel.
    """
    if not -1.0 <= correlation <= 1.0:
        raise ValueError(f"correlation={correlation} must lie in [-1, 1]")
    x, w = nodes(order)
    shared = math.sqrt(0.5 * variance * (1 + correlation)) * x[:, None]
    opposed = math.sqrt(0.5 * variance * (1 - correlation)) * x[None, :]
    return float(w @ (f(shared + opposed) * f(shared - opposed)) @ w)


@lru_cache(maxsize=4)
def weighted_hermite(order: int, terms: int) -> Array:
    """w_n h_k(x_n), shape (points, terms), by h_{k+1} = (x h_k − √k h_{k−1})/√(k+1).

    The normalised recurrence never meets a factorial, so nothing overflows at k in the thousands.
    """
    x, w = nodes(order)
    h = np.empty((terms, x.size))
    h[0] = 1.0
    if terms > 1:
        h[1] = x
    for k in range(1, terms - 1):
        h[k + 1] = (x * h[k] - math.sqrt(k) * h[k - 1]) / math.sqrt(k + 1)
    table = (w * h).T
    table.setflags(write=False)
    return table


def hermite_coefficients(f: Function, variance: ArrayLike, terms: int, order: int = ORDER) -> Array:
    """a_k(q) = E[f(√q z) h_k(z)] for each q in the vector `variance`: shape (len(variance), terms).

    Then f(√q x) = Σ_k a_k(q) He_k(x)/√k!, and Σ_k a_k(q)² = E[f(√q z)²] (Parseval): the missing part of that sum
    bounds what a truncated Mehler series leaves out, at every correlation.
    """
    return sample(f, np.atleast_1d(variance), order) @ weighted_hermite(order, terms)


def hermite_expansion(
    f: Function, variance: Array, tolerance: float, most_terms: int, order: int = ORDER
) -> tuple[Array, Array]:
    """`hermite_coefficients` with as many terms as Parseval asks for, and E[f(√q z)²] itself.

    Terms are doubled from 64 until Σ_k a_k² misses at most `tolerance`·E[f²] at every variance; ValueError when
    `most_terms` are too few. `f` is evaluated once.
    """
    values = sample(f, variance, order)
    square = values**2 @ nodes(order)[1]
    terms = 64
    while terms <= most_terms:
        a = values @ weighted_hermite(order, terms)
        missing = np.abs(square - np.einsum("qk,qk->q", a, a))
        if (missing <= tolerance * square).all():
            return a, square
        terms *= 2
    raise ValueError(f"more than {most_terms} Hermite terms are needed at variance {np.max(variance):g}")

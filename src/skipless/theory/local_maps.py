"""What one activation does to variances and correlations: the Q map, the C map, and the map of a whole kernel.

A wide layer x ↦ φ(Wx) with W_ij ~ N(0, σ²/fan_in) sends the kernel K = XXᵀ/d to σ²E[φ(u)φ(v)], where (u, v) is
Gaussian with covariance [[K_ii, K_ij], [K_ij, K_jj]]. Its diagonal is the Q map, its cosine at unit variance the C map
(Poole et al. 2016; Martens et al. 2021). Smooth activations go through their Hermite coefficients; GELU has a
closed form, and ReLU and leaky ReLU the arc-cosine formula (Cho & Saul 2009).

With z ~ N(0, 1), the normalised Hermite polynomials h_k = He_k/√k! are orthonormal: E[h_j(z)h_k(z)] = 1{j=k}. Writing
f(√q x) = Σ_k a_k(q) h_k(x), jointly Gaussian u, v of variances q, q' and correlation c obey Mehler's formula

    E[f(u) f(v)] = Σ_k a_k(q) a_k(q') c^k,

which turns a T×T table of double integrals into T single ones and a power series (Daniely et al. 2016).
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import scipy
from numpy.typing import ArrayLike

from skipless.theory.activations import ShapedActivation

Array = np.ndarray
Function = Callable[[Array], Array]
ORDER = 1000
_LARGEST_SPREAD = 16.0
# |h_k(x)| e^(-x²/4) < 1.1 for every k, so a node beyond this radius adds less than e^(-radius²/4) = 2e-20 to any a_k.
_RADIUS = 13.5
_SERIES_TOLERANCE = 1e-13  # share of E[φ²] that a truncated Mehler series may leave out
_PARSEVAL_TOLERANCE = 1e-12  # above the rounding of the sums, far below any wrong quadrature
_MOST_TERMS = 4096
_ONE = np.ones(())
_ROUNDING = 1e-6  # a cosine above 1 by less is rounding (float32 kernels too), by more a wrong kernel
_ROWS_PER_BLOCK = 64  # three 64×T blocks of doubles stay in cache


class OutOfReach(ValueError):
    """An input so wide that a smooth activation is a kink in all but name, and its expectations are not computed."""


def q_map(activation: ShapedActivation, q: ArrayLike = 1.0, weight_gain: float = 1.0) -> Array:
    """Q(q) = σ²E[φ(√q z)²]: the variance that leaves the layer when q enters, elementwise in q."""
    return weight_gain**2 * _second_moment(activation, 0, np.asarray(q, dtype=np.float64))


def q_slope(activation: ShapedActivation, q: ArrayLike = 1.0, weight_gain: float = 1.0) -> Array:
    """Q'(q) = σ²E[φ'(√q z)² + φ(√q z)φ''(√q z)] = σ²E[zφφ']/√q (Stein's lemma; the first form holds at q = 0 too)."""
    q = np.asarray(q, dtype=np.float64)
    f = activation
    if f.rectified:
        curved = f.output_shift * _mean_of_rectified(f, 1.0) / np.sqrt(q) if f.output_shift else 0.0
        return weight_gain**2 * (_second_moment(f, 1, q) + f.output_scale**2 * curved)

    def integrand(x: Array) -> Array:
        return f.derivative(x) ** 2 + f(x) * f.derivative(x, order=2)

    return weight_gain**2 * expectation(integrand, q, _order(f, q))


def c_map(activation: ShapedActivation, c: ArrayLike) -> Array:
    """C(c) = E[φ(u)φ(v)]/E[φ(u)²] for u, v of unit variance and correlation c, elementwise in c."""
    return _pair_moment(activation, 0, c) / _second_moment(activation, 0, _ONE)


def c_slope(activation: ShapedActivation, c: ArrayLike = 1.0) -> Array:
    """C'(c) = E[φ'(u)φ'(v)]/E[φ(u)²]; C'(1) > 1 drives two inputs apart, C'(1) < 1 together."""
    return _pair_moment(activation, 1, c) / _second_moment(activation, 0, _ONE)


def c_curvature(activation: ShapedActivation, c: ArrayLike = 1.0) -> Array:
    """C''(c) = E[φ''(u)φ''(v)]/E[φ(u)²]; infinite at c = ±1 for a rectifier, whose C map is not smooth there."""
    return _pair_moment(activation, 2, c) / _second_moment(activation, 0, _ONE)


def network_c_map(activation: ShapedActivation, c: ArrayLike, depth: int, skip_weight: float = 0.0) -> Array:
    """C_f(c): the map c ↦ α²c + (1−α²)C(c) composed `depth` times; α = `skip_weight`, 0 for a plain stack.

    Correlations only: exact while Q(1) = 1, as for every activation made by `shaping`.
    """
    c = np.asarray(c, dtype=np.float64)
    for _ in range(depth):
        c = skip_weight**2 * c + (1 - skip_weight**2) * c_map(activation, c)
        c = np.clip(c, -1.0, 1.0)  # C(1) = 1 up to rounding
    return c


def variance_gain(activation: ShapedActivation) -> float:
    """σ with σ²E[φ(z)²] = 1: the gain of the weights behind φ that keeps unit variance (ReLU: √2, He et al. 2015)."""
    second = float(_second_moment(activation, 0, _ONE))
    if second == 0.0:
        raise ValueError(f"{activation} is zero almost everywhere: no weight gain restores unit variance")
    return 1 / math.sqrt(second)


def kernel_map(activation: ShapedActivation, kernel: Array, weight_gain: float = 1.0) -> Array:
    """K_ij ↦ σ²E[φ(u)φ(v)], cov(u, v) = [[K_ii, K_ij], [K_ij, K_jj]], for a T×T kernel with any diagonal.

    Absolute error below 1e-11·max_i E[φ(√K_ii z)²] at every correlation, ±1 included: the number of terms is chosen
    by Parseval's identity, whose remainder bounds the series uniformly in c; beyond 4096 terms the map refuses (GELU
    and rectifiers without an input shift have closed forms at any scale, and GELU's stands for its tanh form there,
    with which it agrees to 1e-5). Cosines above 1 by less than 1e-6 are
    rounding and count as 1. A row with K_ii = 0 is the constant φ(0).
    """
    return weight_gain**2 * _map_kernel(activation, 0, kernel)


def derivative_kernel_map(activation: ShapedActivation, kernel: Array, weight_gain: float = 1.0) -> Array:
    """K_ij ↦ σ²E[φ'(u)φ'(v)], laid out and as accurate as `kernel_map`: ∂(kernel_map)_ij/∂K_ij off the diagonal.

    It multiplies the kernel of gradients on the way back through φ (Jacot et al. 2018). In a row with K_ii = 0 a
    rectifier's φ'(0) counts as the mean of its two slopes.
    """
    return weight_gain**2 * _map_kernel(activation, 1, kernel)


def _map_kernel(activation: ShapedActivation, order: int, kernel: Array) -> Array:
    variance, cosine = _split(kernel)
    if activation.rectified:
        return _rectified_pairs(activation, order, cosine, variance[:, None], variance[None, :])
    if activation.base == "gelu" and activation.input_shift == 0.0:
        return _gelu_pairs(activation, order, cosine, variance)
    distinct, where = np.unique(variance, return_inverse=True)
    np.fill_diagonal(cosine, 0.0)  # the diagonal comes from quadrature, and must not decide how many terms are kept
    reach = max(cosine.max(), -cosine.min())
    try:
        exponents, coefficients, square = _series(activation, order, distinct, reach)
    except OutOfReach:
        if activation.base == "gelu_tanh" and activation.input_shift == 0.0:
            return _gelu_pairs(activation, order, cosine + np.eye(len(cosine)), variance)
        raise
    mapped = _mehler_sum(exponents, coefficients[:, where], cosine)
    np.fill_diagonal(mapped, square[where])
    return mapped


def _split(kernel: Array) -> tuple[Array, Array]:
    """A kernel's diagonal and its cosines (1 on the diagonal), after checking that some vectors can have it."""
    kernel = np.asarray(kernel, dtype=np.float64)
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or not kernel.size:
        raise ValueError(f"a kernel is a square matrix (T, T) with T ≥ 1, got shape {kernel.shape}")
    variance = np.diagonal(kernel).copy()
    if not (np.isfinite(kernel.sum()) and (variance >= 0).all()):
        raise ValueError(f"a kernel is finite with a diagonal ≥ 0, got {kernel.min():g} … {kernel.max():g}")
    norm = np.where(variance > 0, np.sqrt(variance), 1.0)
    cosine = np.multiply.outer(norm, norm)
    np.divide(kernel, cosine, out=cosine)
    worst = np.unravel_index(np.argmax(np.abs(cosine)), kernel.shape)
    if abs(cosine[worst]) > 1 + _ROUNDING or kernel[variance == 0].any():
        raise ValueError(
            f"kernel{list(map(int, worst))} has cosine {cosine[worst]:g}, or a row with K_ii = 0 is not zero: "
            "not the kernel XXᵀ/d of any vectors, which obeys |K_ij| ≤ √(K_ii K_jj)"
        )
    if np.abs(cosine - cosine.T).max() > _ROUNDING:
        raise ValueError("kernel is not symmetric: pass XXᵀ/d, or (K + Kᵀ)/2")
    return variance, np.clip(cosine, -1.0, 1.0, out=cosine)


def _series(f: ShapedActivation, order: int, variance: Array, reach: float) -> tuple[Array, Array, Array]:
    """Exponents k that matter for |c| ≤ `reach`, coefficients a_k of φ⁽ᵒʳᵈᵉʳ⁾ (kept, len(variance)), and E[φ⁽ᵒʳᵈᵉʳ⁾²].

    Many do not matter: GELU is x/2 plus an even function, so its odd coefficients beyond the first vanish.
    """
    try:
        a, square = hermite_expansion(
            partial(f.derivative, order=order), variance, _PARSEVAL_TOLERANCE, _MOST_TERMS, _order(f, variance)
        )
    except OutOfReach as error:
        raise OutOfReach(f"{f}: {error}") from error
    except ValueError as error:
        raise OutOfReach(
            f"{f}: {error}; at this scale it is nearly kinked. Normalise the stream or lower input_scale: "
            f"variance {variance.max() / 4:g} takes a quarter of the terms"
        ) from error
    share = (a**2 / np.where(square > 0, square, 1.0)[:, None]).max(axis=0)
    kept = np.flatnonzero(share * reach ** np.arange(share.size) > _SERIES_TOLERANCE / share.size)
    return kept, np.ascontiguousarray(a[:, kept].T), square


def _mehler_sum(exponents: Array, coefficients: Array, cosine: Array) -> Array:
    """Σ_k a_k(i) a_k(j) c_ij^k over the kept k, by Horner's rule on the lower triangle; `coefficients` is (kept, T)."""
    gaps = np.diff(exponents, prepend=0)
    out = np.empty_like(cosine)
    for start in range(0, len(cosine), _ROWS_PER_BLOCK):
        stop = min(start + _ROWS_PER_BLOCK, len(cosine))
        c = cosine[start:stop, :stop]
        powers = {gap: c**gap for gap in set(gaps.tolist())}
        total, term = np.zeros_like(c), np.empty_like(c)
        for a, gap in zip(coefficients[::-1], gaps[::-1].tolist(), strict=True):
            total += np.multiply(a[start:stop, None], a[:stop], out=term)
            if gap:
                total *= powers[gap]
        out[start:stop, :stop] = total
        out[:start, start:stop] = total[:, :start].T
    return out


def _order(activation: ShapedActivation, variance: Array) -> int:
    return order_for(abs(activation.input_scale) * math.sqrt(np.max(variance)))


@lru_cache(maxsize=64)
def _unit_series(activation: ShapedActivation, order: int) -> Array:
    """a_k² at unit variance: the Taylor coefficients of C(c)·E[φ²] (order 0), C'(c)·E[φ²] (1), C''(c)·E[φ²] (2)."""
    exponents, coefficients, _ = _series(activation, order, np.ones(1), reach=1.0)
    taylor = np.zeros(exponents.max(initial=0) + 1)
    taylor[exponents] = coefficients[:, 0] ** 2
    return taylor


def _pair_moment(activation: ShapedActivation, order: int, c: ArrayLike) -> Array:
    """E[φ⁽ᵏ⁾(u)φ⁽ᵏ⁾(v)] at unit variance and correlation c, k = `order`."""
    c = np.asarray(c, dtype=np.float64)
    if not (np.abs(c) <= 1).all():
        raise ValueError(f"a correlation lies in [-1, 1], got values in [{c.min():g}, {c.max():g}]")
    if c.ndim == 0 and c == 1:
        return _second_moment(activation, order, c)
    if activation.rectified:
        return _rectified_pairs(activation, order, c, _ONE, _ONE)
    return np.polynomial.polynomial.polyval(c, _unit_series(activation, order))


def _second_moment(activation: ShapedActivation, order: int, variance: Array) -> Array:
    """E[φ⁽ᵏ⁾(√q z)²] for each q, k = `order`."""
    if activation.rectified:
        return _rectified_pairs(activation, order, np.ones_like(variance), variance, variance)
    f = partial(activation.derivative, order=order)
    return expectation(lambda x: f(x) ** 2, variance, _order(activation, variance))


def _rectified_pairs(f: ShapedActivation, order: int, c: Array, q: Array, p: Array) -> Array:
    """E[φ⁽ᵏ⁾(u)φ⁽ᵏ⁾(v)] for leaky ReLU of slope a, variances q and p, correlation c, k = `order`.

    At α = γ = 1, δ = 0 and q = p = 1 (Cho & Saul 2009; Zhang et al. 2022):
    k=0: ac + (1−a)²(√(1−c²) + (π − arccos c)c)/2π;  k=1: a + (1−a)²(π − arccos c)/2π;  k=2: (1−a)²/(2π√(1−c²)).
    """
    a, alpha, delta = f.negative_slope, abs(f.input_scale), f.output_shift
    mean_q, mean_p = _mean_of_rectified(f, q), _mean_of_rectified(f, p)
    bend = (1 - a) ** 2 / (2 * math.pi)
    if order == 0:
        unit = a * c + bend * (np.sqrt(1 - c**2) + (math.pi - np.arccos(c)) * c)
        return f.output_scale**2 * (alpha**2 * np.sqrt(q * p) * unit + delta * (mean_q + mean_p) + delta**2)
    if order == 1:
        return f.output_scale**2 * alpha**2 * (a + bend * (math.pi - np.arccos(c))) * np.ones_like(q * p)
    with np.errstate(divide="ignore"):
        return f.output_scale**2 * alpha**2 * bend / np.sqrt((1 - c**2) * q * p)


def _mean_of_rectified(f: ShapedActivation, variance: ArrayLike) -> Array:
    """E[φ(α√q z)] = (1−a)|α|√(q/2π) for leaky ReLU without an input shift."""
    if f.input_shift != 0.0:
        raise ValueError(
            f"{f.base!r} with input_shift={f.input_shift:g} has no arc-cosine form: use input_shift=0.0 "
            "(DKS and TAT need none: `shaping.dks` moves the mean by output_shift)"
        )
    return (1 - f.negative_slope) * abs(f.input_scale) * np.sqrt(np.asarray(variance) / (2 * math.pi))


def _gelu_pairs(f: ShapedActivation, order: int, cosine: Array, variance: Array) -> Array:
    """`gelu_pair_moment` for γ(φ(αx)+δ): αx has variance α²K_ii, and δ adds γ²δ(E[φ(u)]+E[φ(v)]+δ)."""
    inner = f.input_scale**2 * variance
    p, q = inner[:, None], inner[None, :]
    covariance = cosine * np.sqrt(p * q)
    if order == 1:
        return (f.output_scale * f.input_scale) ** 2 * gelu_derivative_pair_moment(covariance, p, q)
    shifted = f.output_shift * (gelu_mean(p) + gelu_mean(q) + f.output_shift)
    return f.output_scale**2 * (gelu_pair_moment(covariance, p, q) + shifted)


def gelu_pair_moment(covariance: Array, p: Array, q: Array) -> Array:
    """E[gelu(u) gelu(v)] of gelu(x) = xΦ(x), elementwise in the covariance c and the variances p, q, exact at any.

    A Hermite series would need thousands of terms at large variances. For (u, v) Gaussian with covariance
    [[p, c], [c, q]], integrating by parts twice,

        E[gelu(u) gelu(v)] = c P + F (Δ + c² s),     Δ = pq − c²,  s = 1/(1+p) + 1/(1+q),

    with P = E[Φ(u)Φ(v)] = ¼ + arctan(c/√(1+p+q+Δ))/2π and F = E[φ(u)φ(v)] = 1/(2π√(1+p+q+Δ)).
    E[gelu'(u) gelu'(v)] is its derivative in c (Price's theorem), and dP/dc = F. Compare Tsuchida et al. 2021, who have
    (1+p)(1+q) − c² for 1+p+q+Δ: at large variances the difference of two numbers that agree in all their digits.
    """
    apart, determinant = _determinants(covariance, p, q)
    both, density = _orthant(covariance, determinant)
    return covariance * both + density * (apart + covariance**2 * (1.0 / (1.0 + p) + 1.0 / (1.0 + q)))


def gelu_derivative_pair_moment(covariance: Array, p: Array, q: Array) -> Array:
    """E[gelu'(u) gelu'(v)] = d/dc of `gelu_pair_moment`.

    With m = 1+p+q and k = (1+p)(1+q) it is P + c F (2(m+1) − (m² − pq + (m+1)Δ)/(m+Δ)) / k.
    """
    apart, determinant = _determinants(covariance, p, q)
    both, density = _orthant(covariance, determinant)
    sizes, outer = 1.0 + (p + q), (1.0 + p) * (1.0 + q)
    loss = (sizes**2 - p * q + (sizes + 1.0) * apart) / determinant
    return both + covariance * density * (2.0 * (sizes + 1.0) - loss) / outer


def gelu_mean(variance: Array) -> Array:
    """E[gelu(u)] = p / √(2π(1+p))."""
    return variance / np.sqrt(2.0 * np.pi * (1.0 + variance))


def _determinants(c: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """Δ = pq − c² and 1+p+q+Δ, the determinants of the covariance of (u, v) and of that of (u+z, v+z')."""
    across = np.sqrt(p * q)
    apart = np.maximum((across - c) * (across + c), 0.0)  # of a kernel rounded to |c| > √(pq): 0
    return apart, 1.0 + (p + q) + apart  # (p + q) first: a kernel stays symmetric to the last bit


def _orthant(c: Array, determinant: Array) -> tuple[Array, Array]:
    """P = E[Φ(u)Φ(v)] and F = E[φ(u)φ(v)] of `gelu_pair_moment`."""
    root = np.sqrt(determinant)
    return 0.25 + np.arctan2(c, root) / (2.0 * np.pi), 1.0 / (2.0 * np.pi * root)


@lru_cache(maxsize=8)
def nodes(order: int = ORDER) -> tuple[Array, Array]:
    """Gauss-Hermite points x and weights w for N(0, 1): Σ w f(x) = E[f(z)], exact for polynomials below 2·`order`.

    Points whose weight cannot matter in double precision (|x| > 13.5) are left out: 270 of 1000 remain, a distance
    π/√order apart at the centre. That spacing, and so `order`, must resolve f: for an f with a pole at distance d from
    the real axis the error falls as exp(−2d√order).
    """
    x, w = scipy.special.roots_hermitenorm(order)
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

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.theory import local_maps
from skipless.theory.activations import ShapedActivation

GELU = ShapedActivation("gelu")


@given(st.floats(0.01, 4.0), st.floats(0.01, 4.0), st.floats(-0.95, 0.95))
def test_closed_form_is_the_double_integral(p, q, correlation):
    covariance = correlation * np.sqrt(p * q)
    points, weights = local_maps.nodes(200)
    u = np.sqrt(p) * points
    v = np.sqrt(q) * (correlation * points[:, None] + np.sqrt(1 - correlation**2) * points[None, :])
    direct = weights @ (GELU(u)[:, None] * GELU(v)) @ weights
    slope = weights @ (GELU.derivative(u)[:, None] * GELU.derivative(v)) @ weights
    assert local_maps.gelu_pair_moment(covariance, p, q) == pytest.approx(direct, abs=1e-9)
    assert local_maps.gelu_derivative_pair_moment(covariance, p, q) == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("variance", [0.0, 1e-6, 1.0, 427.0, 1e8])
def test_equal_arguments_give_the_second_moment_at_any_variance(variance):
    """Against a fine trapezoid of z ↦ gelu(√p z)² φ(z), and half the variance (ReLU's moment) as p → ∞."""
    z = np.linspace(-12, 12, 2_000_001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    direct = np.sum(GELU(np.sqrt(variance) * z) ** 2 * density) * (z[1] - z[0])
    assert local_maps.gelu_pair_moment(variance, variance, variance) == pytest.approx(direct, rel=1e-9, abs=1e-300)
    mean = np.sum(GELU(np.sqrt(variance) * z) * density) * (z[1] - z[0])
    assert local_maps.gelu_mean(variance) == pytest.approx(mean, rel=1e-9, abs=1e-20)


def test_derivative_moment_is_the_slope():
    step = 1e-6
    rise = local_maps.gelu_pair_moment(0.7 + step, 1.3, 2.1) - local_maps.gelu_pair_moment(0.7 - step, 1.3, 2.1)
    assert local_maps.gelu_derivative_pair_moment(0.7, 1.3, 2.1) == pytest.approx(rise / (2 * step), rel=1e-8)


@pytest.mark.parametrize("variance", [1e-12, 1.0, 1e6, 1e10, 1e16, 1e20])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_large_variances_lose_no_digits(variance, ratio):
    """GELU is a ReLU there, with E[φ'(u)φ'(v)] → ½ at c = √(pq) and 0 at −√(pq); both against 120 digits."""
    other = ratio * variance
    edge = float(np.sqrt(variance * other))
    for covariance in (edge, 0.5 * edge, 0.0, -0.5 * edge, -edge):
        value, slope = _in_many_digits(covariance, variance, other)
        scale = 1e-13 * edge
        assert local_maps.gelu_pair_moment(covariance, variance, other) == pytest.approx(value, rel=1e-13, abs=scale)
        assert local_maps.gelu_derivative_pair_moment(covariance, variance, other) == pytest.approx(
            slope, rel=1e-13, abs=1e-13
        )


def _in_many_digits(c: float, p: float, q: float) -> tuple[float, float]:
    with mpmath.workdps(120):
        c, p, q = (mpmath.mpf(each) for each in (c, p, q))
        if abs(c * c - p * q) < 1e-14 * p * q:  # √(pq) as a double: the edge is meant
            c = mpmath.sign(c) * mpmath.sqrt(p * q)
        outer = (1 + p) * (1 + q)
        both = mpmath.mpf(1) / 4 + mpmath.asin(c / mpmath.sqrt(outer)) / (2 * mpmath.pi)
        density = 1 / (2 * mpmath.pi * mpmath.sqrt(outer - c**2))
        curve = 1 / (1 + p) + 1 / (1 + q) - 1
        even = p * q + c**2 * curve
        slope = both + c * density * (1 + 2 * curve) + density * c / (outer - c**2) * even
        return float(c * both + density * even), float(slope)


def test_kernels_stay_symmetric_to_the_last_bit():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 5)) * np.exp(3.0 * rng.standard_normal((60, 1)))
    kernel = x @ x.T
    kernel = (kernel + kernel.T) / 2.0
    variance = np.diagonal(kernel)
    for moment in (local_maps.gelu_pair_moment, local_maps.gelu_derivative_pair_moment):
        mapped = moment(kernel, variance[:, None], variance[None, :])
        np.testing.assert_array_equal(mapped, mapped.T)

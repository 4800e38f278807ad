import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.theory import gaussian, gelu
from skipless.theory.activations import ShapedActivation

GELU = ShapedActivation("gelu")


@given(st.floats(0.01, 4.0), st.floats(0.01, 4.0), st.floats(-0.95, 0.95))
def test_closed_form_is_the_double_integral(p, q, correlation):
    covariance = correlation * np.sqrt(p * q)
    points, weights = gaussian.nodes(200)
    u = np.sqrt(p) * points
    v = np.sqrt(q) * (correlation * points[:, None] + np.sqrt(1 - correlation**2) * points[None, :])
    direct = weights @ (GELU(u)[:, None] * GELU(v)) @ weights
    slope = weights @ (GELU.derivative(u)[:, None] * GELU.derivative(v)) @ weights
    assert gelu.pair_moment(covariance, p, q) == pytest.approx(direct, abs=1e-9)
    assert gelu.derivative_pair_moment(covariance, p, q) == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("variance", [0.0, 1e-6, 1.0, 427.0, 1e8])
def test_equal_arguments_give_the_second_moment_at_any_variance(variance):
    """Against a fine trapezoid of z ↦ gelu(√p z)² φ(z), and half the variance (ReLU's moment) as p → ∞."""
    z = np.linspace(-12, 12, 2_000_001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    direct = np.sum(GELU(np.sqrt(variance) * z) ** 2 * density) * (z[1] - z[0])
    assert gelu.pair_moment(variance, variance, variance) == pytest.approx(direct, rel=1e-9, abs=1e-300)
    mean = np.sum(GELU(np.sqrt(variance) * z) * density) * (z[1] - z[0])
    assert gelu.mean(variance) == pytest.approx(mean, rel=1e-9, abs=1e-20)


def test_derivative_moment_is_the_slope():
    step = 1e-6
    rise = gelu.pair_moment(0.7 + step, 1.3, 2.1) - gelu.pair_moment(0.7 - step, 1.3, 2.1)
    assert gelu.derivative_pair_moment(0.7, 1.3, 2.1) == pytest.approx(rise / (2 * step), rel=1e-8)

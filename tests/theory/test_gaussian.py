import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import eval_hermitenorm, factorial2

from skipless.theory import local_maps
from skipless.theory.activations import ShapedActivation

GELU, TANH = ShapedActivation("gelu"), ShapedActivation("tanh")


@pytest.mark.parametrize("order", [200, 1000, 4000, 16000])
def test_even_moments_of_the_normal(order):
    for power in range(0, 21, 2):
        expected = max(1.0, factorial2(power - 1))
        assert local_maps.expectation(lambda x, p=power: x**p, order=order) == pytest.approx(expected, rel=1e-12)


@given(st.floats(0.0, 4.0), st.floats(-2.0, 2.0))
def test_characteristic_function(variance, shift):
    value = local_maps.expectation(lambda x: np.cos(x + shift), variance)
    assert value == pytest.approx(math.exp(-variance / 2) * math.cos(shift), abs=1e-13)


def test_expectation_keeps_the_shape_of_the_variances():
    variance = np.array([[0.0, 0.5, 1.0], [2.0, 3.0, 4.0]])
    np.testing.assert_allclose(local_maps.expectation(np.square, variance), variance, rtol=1e-13)


@pytest.mark.parametrize("spread", [0.3, 2.0, 4.0, 8.0])
def test_order_for_resolves_the_poles_of_tanh(spread):
    def f(x):
        return np.tanh(spread * x) ** 2

    order = local_maps.order_for(spread)
    finer = local_maps.expectation(f, order=4 * order)
    assert local_maps.expectation(f, order=order) == pytest.approx(finer, rel=1e-12)


def test_order_for_refuses_a_saturated_activation():
    with pytest.raises(ValueError, match="saturates"):
        local_maps.order_for(17.0)


@pytest.mark.parametrize("correlation", [-1.0, -0.4, 0.0, 0.7, 1.0])
def test_pair_expectation_of_sine(correlation):
    value = local_maps.pair_expectation(np.sin, correlation, variance=1.7)
    assert value == pytest.approx(math.exp(-1.7) * math.sinh(1.7 * correlation), abs=1e-13)


def test_pair_expectation_refuses_a_correlation_beyond_one():
    with pytest.raises(ValueError, match=r"correlation=1\.5"):
        local_maps.pair_expectation(np.sin, 1.5)


def test_hermite_coefficients_of_the_exponential():
    """e^(√q x) = e^(q/2) Σ q^(k/2)/√k! h_k(x)."""
    variance, terms = np.array([0.0, 0.5, 2.0]), 30
    k = np.arange(terms)
    root_factorial = np.array([math.sqrt(math.factorial(i)) for i in k])
    expected = np.exp(variance / 2)[:, None] * variance[:, None] ** (k / 2) / root_factorial
    np.testing.assert_allclose(local_maps.hermite_coefficients(np.exp, variance, terms), expected, atol=1e-12)


def test_recurrence_gives_scipy_s_hermite_polynomials():
    x, w = local_maps.nodes(1000)
    h = local_maps.weighted_hermite(1000, 120) / w[:, None]
    for k in (0, 1, 2, 17, 60, 119):
        expected = eval_hermitenorm(k, x) / math.sqrt(math.factorial(k))
        np.testing.assert_allclose(h[:, k], expected, rtol=1e-9, atol=1e-9)
    assert np.abs(local_maps.weighted_hermite(4000, 3000)).max() < 1  # e^(-x²/4) bounds it: no overflow


@pytest.mark.parametrize("f", [GELU, TANH, ShapedActivation("silu", 0.5, 0.3)])
def test_derivative_coefficients_come_from_the_function(f):
    """b_{k−1} = √k a_k/√q, since h_k' = √k h_{k−1}."""
    variance = np.array([0.3, 1.0, 1.8])
    a = local_maps.hermite_coefficients(f, variance, 40)
    b = local_maps.hermite_coefficients(f.derivative, variance, 39)
    np.testing.assert_allclose(b, np.sqrt(np.arange(1, 40)) * a[:, 1:] / np.sqrt(variance)[:, None], atol=1e-13)


def test_expansion_satisfies_parseval_and_refuses_too_few_terms():
    variance = np.array([0.5, 1.0, 4.0])
    a, square = local_maps.hermite_expansion(TANH, variance, 1e-12, 4096)
    np.testing.assert_allclose((a**2).sum(axis=1), square, rtol=1e-12)
    np.testing.assert_allclose(square, local_maps.expectation(lambda x: np.tanh(x) ** 2, variance), rtol=1e-14)
    with pytest.raises(ValueError, match="more than 64 Hermite terms"):
        local_maps.hermite_expansion(TANH, variance, 1e-12, 64)

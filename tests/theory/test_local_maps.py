import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from skipless.model.config import ModelConfig
from skipless.theory import local_maps
from skipless.theory.activations import ShapedActivation
from skipless.theory.local_maps import (
    c_curvature,
    c_map,
    c_slope,
    derivative_kernel_map,
    kernel_map,
    network_c_map,
    q_map,
    q_slope,
    variance_gain,
)
from skipless.theory.shaping import dks, tat

GELU = ShapedActivation("gelu")
DKS_GELU = ShapedActivation("gelu", 0.298536, 0.244322, -0.177922, 4.841736)
TANH = ShapedActivation("tanh", 0.8, 0.3, -0.2, 1.7)
SIN = ShapedActivation("sin")
RELU = ShapedActivation("relu")
LEAKY = ShapedActivation("leaky_relu", 1.3, 0.0, -0.2, 0.9, negative_slope=0.35)
SHIFTED_GELU = ShapedActivation("gelu", 0.8, 0.0, -0.2, 1.7)
EVERY = [
    GELU,
    SHIFTED_GELU,
    DKS_GELU,
    TANH,
    SIN,
    RELU,
    LEAKY,
    ShapedActivation("softplus"),
    ShapedActivation("identity"),
]
SMOOTH = [f for f in EVERY if not f.rectified]


def random_kernel(length: int, seed: int = 0) -> np.ndarray:
    """Uneven diagonal, one repeated row and one opposite row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(length, length + 3)) * rng.uniform(0.6, 1.5, size=(length, 1)) + 0.5
    x[1], x[2] = x[0], -x[0]
    return x @ x.T / x.shape[1]


vectors = hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.floats(-2, 2, width=16))


@pytest.mark.parametrize(
    ("base", "gain"), [("gelu", 1.533530), ("sigmoid", 1.846229), ("relu", math.sqrt(2)), ("identity", 1.0)]
)
def test_variance_gain(base, gain):
    f = ShapedActivation(base)
    assert variance_gain(f) == pytest.approx(gain, abs=5e-7)
    assert q_map(f, 1.0, variance_gain(f)) == pytest.approx(1.0, abs=1e-14)


def test_variance_gain_of_zero_is_refused():
    with pytest.raises(ValueError, match="no weight gain"):
        variance_gain(ShapedActivation("gelu", output_scale=0.0))


@pytest.mark.parametrize("f", EVERY)
def test_q_slope_is_the_derivative_of_q_map(f):
    q, h = np.array([0.2, 1.0, 2.5]), 1e-5
    difference = (q_map(f, q + h, 1.2) - q_map(f, q - h, 1.2)) / (2 * h)
    np.testing.assert_allclose(q_slope(f, q, 1.2), difference, rtol=1e-8)


@pytest.mark.parametrize("f", SMOOTH)
def test_q_slope_is_stein_s_form(f):
    expected = local_maps.expectation(lambda x: x * f(x) * f.derivative(x))
    assert q_slope(f) == pytest.approx(float(expected), abs=1e-13)


@pytest.mark.parametrize("f", EVERY)
def test_c_map_ends_and_derivatives(f):
    second = float(q_map(f))
    assert c_map(f, 1.0) == pytest.approx(1.0, abs=1e-12)
    c, h = np.array([-0.7, 0.0, 0.4, 0.9]), 1e-5
    np.testing.assert_allclose(c_slope(f, c), (c_map(f, c + h) - c_map(f, c - h)) / (2 * h), atol=1e-9)
    np.testing.assert_allclose(c_curvature(f, c), (c_slope(f, c + h) - c_slope(f, c - h)) / (2 * h), atol=1e-8)
    if not f.rectified:
        assert c_map(f, 0.0) == pytest.approx(float(local_maps.expectation(f)) ** 2 / second, abs=1e-13)
        assert c_slope(f, 0.0) == pytest.approx(float(local_maps.expectation(f.derivative)) ** 2 / second, abs=1e-13)


@pytest.mark.parametrize("f", SMOOTH)
def test_scalar_one_and_the_series_agree(f):
    for one_sided in (c_map, c_slope, c_curvature):
        assert one_sided(f, np.array([1.0]))[0] == pytest.approx(float(one_sided(f, 1.0)), abs=1e-11)


def test_relu_is_the_arc_cosine_kernel():
    assert c_map(RELU, 0.0) == pytest.approx(1 / math.pi, abs=1e-15)
    assert c_slope(RELU, 0.0) == pytest.approx(0.5, abs=1e-15)
    assert c_slope(RELU) == pytest.approx(1.0, abs=1e-15)
    assert c_curvature(RELU) == math.inf


@given(st.sampled_from(EVERY), hnp.arrays(np.float64, 8, elements=st.floats(0, 1)))
def test_c_map_rises_and_is_convex_on_the_unit_interval(f, c):
    c = np.sort(c)
    assert (np.diff(c_map(f, c)) >= -1e-13).all()
    assert (np.diff(c_slope(f, c)) >= -1e-13).all()
    assert (np.abs(c_map(f, -c)) <= c_map(f, c) + 1e-12).all()


def test_network_c_map_composes():
    once = 0.36 * 0.2 + 0.64 * c_map(GELU, 0.2)
    assert network_c_map(GELU, 0.2, 2, skip_weight=0.6) == pytest.approx(0.36 * once + 0.64 * c_map(GELU, once))
    assert network_c_map(DKS_GELU, 1.0, 36) == pytest.approx(1.0, abs=1e-9)


def test_kernel_of_sine_is_known():
    """E[sin u sin v] = e^(−(K_ii+K_jj)/2) sinh K_ij, and cosh for the derivative, cos."""
    k = random_kernel(40)
    d = np.diagonal(k)
    damping = np.exp(-(d[:, None] + d) / 2)
    np.testing.assert_allclose(kernel_map(SIN, k, 1.3), 1.69 * damping * np.sinh(k), atol=1e-12)
    np.testing.assert_allclose(derivative_kernel_map(SIN, k, 1.3), 1.69 * damping * np.cosh(k), atol=1e-12)


@pytest.mark.parametrize("f", [*SMOOTH, ShapedActivation("gelu_tanh"), ShapedActivation("silu")])
@pytest.mark.parametrize("q", [0.4, 1.0, 4.0])
def test_kernel_map_against_a_double_integral(f, q):
    for c in (-1.0, -0.95, 0.0, 0.5, 0.99, 0.99999, 1.0):
        kernel = q * np.array([[1.0, c], [c, 1.0]])
        assert kernel_map(f, kernel)[0, 1] == pytest.approx(local_maps.pair_expectation(f, c, q, 2000), abs=1e-11)
        expected = local_maps.pair_expectation(f.derivative, c, q, 2000)
        assert derivative_kernel_map(f, kernel)[0, 1] == pytest.approx(expected, abs=1e-11)


def test_large_variance_still_converges():
    kernel = 13.0 * np.array([[1.0, 1.0, 0.6], [1.0, 1.0, 0.6], [0.6, 0.6, 1.0]])
    mapped = kernel_map(GELU, kernel)
    assert mapped[0, 1] == pytest.approx(mapped[0, 0], abs=1e-9)
    assert mapped[0, 2] == pytest.approx(local_maps.pair_expectation(GELU, 0.6, 13.0, 4000), abs=1e-10)


@pytest.mark.parametrize("f", EVERY)
def test_repeated_tokens_stay_repeated(f):
    for mapping in (kernel_map, derivative_kernel_map):
        mapped = mapping(f, random_kernel(12))
        assert mapped[0, 1] == pytest.approx(mapped[0, 0], abs=1e-10)
        np.testing.assert_allclose(mapped[0], mapped[1], atol=1e-10)


@pytest.mark.parametrize("f", EVERY)
def test_kernel_map_against_monte_carlo(f):
    rng, samples = np.random.default_rng(7), 400_000
    k = random_kernel(5, seed=3)[1:, 1:]
    z = rng.multivariate_normal(np.zeros(4), k, size=samples, method="eigh")
    for mapping, g in ((kernel_map, f), (derivative_kernel_map, f.derivative)):
        products = np.einsum("ni,nj->nij", g(z), g(z))
        error = np.abs(mapping(f, k) - products.mean(axis=0))
        assert (error <= 5 * products.std(axis=0) / math.sqrt(samples) + 1e-9).all()


@pytest.mark.parametrize("f", EVERY)
def test_derivative_kernel_is_the_slope_of_the_kernel(f):
    k, h = random_kernel(6)[2:, 2:], 1e-5
    bump = h * (1 - np.eye(4))
    difference = (kernel_map(f, k + bump) - kernel_map(f, k - bump)) / (2 * h)
    off = ~np.eye(4, dtype=bool)
    np.testing.assert_allclose(derivative_kernel_map(f, k)[off], difference[off], atol=1e-7)


@settings(deadline=None)
@given(st.sampled_from(EVERY), vectors)
def test_output_is_a_kernel(f, x):
    """Positive semi-definite, also with zero and repeated rows."""
    kernel = x @ x.T / x.shape[1]
    for mapping in (kernel_map, derivative_kernel_map):
        if mapping is derivative_kernel_map and f.rectified and (np.diagonal(kernel) == 0).any():
            continue
        mapped = mapping(f, kernel)
        np.testing.assert_array_equal(mapped, mapped.T)
        assert np.linalg.eigvalsh(mapped)[0] >= -1e-10 * (1 + np.trace(mapped))


@given(vectors, st.floats(0.1, 10), st.floats(-1, 1))
def test_rectifiers_are_homogeneous(x, scale, slope):
    f = ShapedActivation("leaky_relu", negative_slope=slope)
    kernel = x @ x.T
    np.testing.assert_allclose(
        kernel_map(f, scale**2 * kernel), scale**2 * kernel_map(f, kernel), rtol=1e-6, atol=1e-12
    )


def test_zero_rows_are_the_constant_of_the_activation():
    mapped = kernel_map(TANH, np.diag([0.0, 1.0]))
    at_zero = float(TANH(np.zeros(1))[0])
    np.testing.assert_allclose(mapped[0], [at_zero**2, at_zero * local_maps.expectation(TANH)], atol=1e-14)


def test_lengths_around_the_block_size():
    whole = random_kernel(130)
    for length in (1, 2, 63, 64, 65, 130):
        part = kernel_map(GELU, whole[:length, :length])
        np.testing.assert_allclose(part, kernel_map(GELU, whole)[:length, :length], atol=1e-12)


def test_speed_at_length_512():
    kernel = random_kernel(512)
    kernel_map(DKS_GELU, kernel)
    start = time.process_time()
    for _ in range(12):
        kernel_map(DKS_GELU, kernel)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (np.ones((2, 3)), "square"),
        (np.ones((0, 0)), "T ≥ 1"),
        (np.array([[1.0, np.nan], [np.nan, 1.0]]), "finite"),
        (np.diag([1.0, -1.0]), "≥ 0"),
        (np.array([[1.0, 1.1], [1.1, 1.0]]), "cosine 1.1"),
        (np.array([[1.0, 1.00001], [1.00001, 1.0]]), "cosine 1.00001"),
        (np.array([[0.0, 0.1], [0.1, 1.0]]), "K_ii = 0"),
        (np.array([[1.0, 0.2], [0.1, 1.0]]), "symmetric"),
        (np.array([[1.0, 0.20001], [0.2, 1.0]]), "symmetric"),
    ],
)
def test_matrices_that_are_no_kernels(kernel, message):
    with pytest.raises(ValueError, match=message):
        kernel_map(GELU, kernel)


def test_rounding_beyond_a_cosine_of_one_is_one():
    rounded = np.array([[1.0, 1.0 + 5e-7], [1.0 + 5e-7, 1.0]])
    np.testing.assert_allclose(kernel_map(GELU, rounded), q_map(GELU) * np.ones((2, 2)), rtol=1e-12)


@pytest.mark.parametrize("mapped", [kernel_map, derivative_kernel_map])
def test_gelu_stands_for_its_tanh_form_where_quadrature_ends(mapped):
    kernel = np.outer([20.0, 30.0, 40.0], [20.0, 30.0, 40.0]) * np.array(
        [[1, 0.5, -0.2], [0.5, 1, 0.1], [-0.2, 0.1, 1]]
    )
    constants = (0.9, 0.0, -0.3, 1.2)
    exact, tanh = (mapped(ShapedActivation(base, *constants), kernel) for base in ("gelu", "gelu_tanh"))
    np.testing.assert_array_equal(tanh, exact)


def test_other_refusals():
    assert kernel_map(GELU, 1e6 * np.eye(2))[0, 0] == pytest.approx(5e5, rel=1e-5)  # GELU's closed form refuses nothing
    with pytest.raises(ValueError, match="arc-cosine"):
        kernel_map(ShapedActivation("relu", input_shift=0.1), np.eye(2))
    with pytest.raises(ValueError, match="saturates"):
        kernel_map(ShapedActivation("tanh"), 1e6 * np.eye(2))
    with pytest.raises(ValueError, match="Hermite terms"):
        kernel_map(ShapedActivation("tanh"), 100 * np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        c_map(GELU, 1.1)


@pytest.mark.parametrize(("base", "q_slope", "c_slope"), [("silu", 2.1726, 2.0666), ("gelu", 2.1441, 2.0720)])
def test_gated_mlps_double_what_is_wrong(base, q_slope, c_slope):
    """Σ ↦ σ²K_φ(Σ)⊙Σ for φ(u)·g with independent u and g: against samples, and its slopes at 1."""
    kernel = np.array([[1.0, 0.4], [0.4, 0.8]])
    plain = ShapedActivation(base)
    u, g = np.linalg.cholesky(kernel) @ np.random.default_rng(0).standard_normal((2, 2, 400_000))
    gated = plain(u) * g
    np.testing.assert_allclose(gated @ gated.T / u.shape[1], local_maps.kernel_map(plain, kernel) * kernel, rtol=0.03)
    gain = local_maps.variance_gain(plain)

    def q_map(q):
        return q * local_maps.q_map(plain, q, gain)

    step = 1e-5
    assert float(q_map(1 + step) - q_map(1 - step)) / (2 * step) == pytest.approx(q_slope, abs=1e-4)
    assert 1 + float(local_maps.c_slope(plain)) == pytest.approx(c_slope, abs=1e-4)
    for shaped in (dks(base, 36), tat(base, 36)):
        assert 1 + float(local_maps.q_slope(shaped)) == pytest.approx(2.0, abs=1e-9)
    with pytest.raises(ValueError, match=f"a gated MLP, .* use 'dks-{base}'"):
        ModelConfig(activation={"silu": "swiglu", "gelu": "geglu"}[base])

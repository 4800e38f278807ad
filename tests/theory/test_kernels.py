import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.theory import kernels

LENGTHS = st.integers(1, 60)
DECAY_RATES = st.floats(1e-4, 20.0)
CORRELATIONS = st.floats(0.0, 0.999)


@given(DECAY_RATES, LENGTHS)
def test_exponential_factor_multiplies_back_and_inverts(gamma, length):
    chol = kernels.exponential_chol(gamma, length)
    assert np.allclose(chol, np.tril(chol))
    np.testing.assert_allclose(chol @ chol.T, kernels.exponential(gamma, length), atol=1e-13)
    np.testing.assert_allclose(kernels.exponential_chol_inverse(gamma, length) @ chol, np.eye(length), atol=1e-11)


@given(CORRELATIONS, LENGTHS)
def test_uniform_factors_multiply_back_and_invert(rho, length):
    kernel, chol = kernels.uniform(rho, length), kernels.uniform_chol(rho, length)
    np.testing.assert_allclose(chol @ chol.T, kernel, atol=1e-13)
    np.testing.assert_allclose(kernels.uniform_chol_inverse(rho, length) @ chol, np.eye(length), atol=1e-10)
    root = kernels.uniform_root(rho, length)
    np.testing.assert_allclose(root, root.T)
    np.testing.assert_allclose(root @ root, kernel, atol=1e-12)


def test_factors_equal_lapack():
    np.testing.assert_allclose(
        kernels.exponential_chol(0.1, 50), np.linalg.cholesky(kernels.exponential(0.1, 50)), atol=1e-13
    )
    np.testing.assert_allclose(kernels.uniform_chol(0.3, 50), np.linalg.cholesky(kernels.uniform(0.3, 50)), atol=1e-13)


def test_infinite_decay_is_the_identity():
    np.testing.assert_array_equal(kernels.exponential(np.inf, 5), np.eye(5))
    np.testing.assert_array_equal(kernels.exponential_chol(np.inf, 5), np.eye(5))


def test_symmetric_root_squares_back_and_refuses_an_indefinite_matrix():
    kernel = kernels.exponential(0.05, 40)
    root = kernels.symmetric_root(kernel)
    np.testing.assert_allclose(root @ root, kernel, atol=1e-12)
    np.testing.assert_allclose(root, root.T, atol=1e-14)
    with pytest.raises(ValueError, match="not positive semi-definite"):
        kernels.symmetric_root(np.array([[1.0, 2.0], [2.0, 1.0]]))


def test_symmetric_root_tells_rounding_from_an_indefinite_matrix():
    np.testing.assert_allclose(kernels.symmetric_root(np.diag([1.0, -1e-12])), np.diag([1.0, 0.0]), atol=1e-15)
    with pytest.raises(ValueError, match="smallest eigenvalue is -1e-08"):
        kernels.symmetric_root(np.diag([1.0, -1e-8]))


def test_kernel_of_activations_divides_by_width_and_keeps_leading_axes():
    x = np.random.default_rng(0).normal(size=(2, 3, 7, 11))
    sigma = kernels.of_activations(x)
    assert sigma.shape == (2, 3, 7, 7)
    assert sigma[1, 2, 3, 4] == pytest.approx(x[1, 2, 3] @ x[1, 2, 4] / 11)


def test_kernel_of_tokens_marks_repeats():
    np.testing.assert_array_equal(
        kernels.of_tokens(np.array([7, 3, 7])), [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    )


def test_measures_at_their_extremes():
    distinct, collapsed = np.eye(8), np.ones((8, 8))
    assert kernels.mean_cosine(distinct) == 0.0
    assert kernels.mean_cosine(collapsed) == pytest.approx(1.0)
    assert kernels.effective_rank(distinct) == pytest.approx(8.0)
    assert kernels.effective_rank(collapsed) == pytest.approx(1.0)
    assert kernels.stable_rank(distinct) == pytest.approx(8.0)
    assert kernels.stable_rank(collapsed) == pytest.approx(1.0)
    assert kernels.rank_one_residual(collapsed) == pytest.approx(0.0, abs=1e-7)
    assert np.isnan(kernels.mean_cosine(np.ones((1, 1))))


def test_rank_one_residual_is_the_distance_to_the_mean_row():
    x = np.random.default_rng(1).normal(size=(9, 5)) + 2.0
    direct = np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x)
    assert kernels.rank_one_residual(kernels.of_activations(x)) == pytest.approx(direct, rel=1e-12)


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=10))
def test_cosine_ignores_norms(norms):
    kernel = kernels.exponential(0.3, len(norms))
    scaled = kernel * np.sqrt(np.outer(norms, norms))
    np.testing.assert_allclose(kernels.cosine(scaled), kernel, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.exponential(0.0, 4), "gamma is 0.0; a decay rate must be positive"),
        (lambda: kernels.exponential(float("nan"), 4), "gamma is nan"),
        (lambda: kernels.uniform(1.0, 4), r"rho is 1.0; .*\[0, 1\)"),
        (lambda: kernels.uniform(0.5, 0), "length is 0"),
        (lambda: kernels.uniform_chol(-0.1, 4), "rho is -0.1"),
        (lambda: kernels.cosine(np.zeros((2, 2))), "zero norm"),
    ],
)
def test_bad_values_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "measure", [kernels.mean_cosine, kernels.effective_rank, kernels.stable_rank, kernels.rank_one_residual]
)
def test_measures_are_of_one_kernel(measure):
    """Those of a batch would be mixed: its effective rank was the sum of them, nearly."""
    kernel = kernels.exponential(0.1, 6)
    assert measure(kernel.tolist()) == measure(kernel)
    for wrong in (np.stack([kernel, kernel]), kernel[:3], kernel[0]):
        with pytest.raises(ValueError, match=r"the kernel is shaped .*; it must be one square matrix \(T, T\)"):
            measure(wrong)


def test_kernels_of_several_sequences_of_tokens():
    tokens = np.random.default_rng(0).integers(0, 3, (2, 5))
    np.testing.assert_array_equal(kernels.of_tokens(tokens), np.stack([kernels.of_tokens(row) for row in tokens]))

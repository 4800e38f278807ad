import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from skipless.theory import exponential, kernels
from skipless.theory.exponential import ExponentialStep

RATES = st.tuples(st.floats(1e-4, 10.0), st.floats(1e-3, 0.999)).map(lambda pair: (pair[0], pair[0] * pair[1]))


def _theorem_3(gamma_in, gamma_out, length):
    """The paper's case distinction, word for word (1-based)."""
    a_in, a_out = kernels.innovation(gamma_in), kernels.innovation(gamma_out)
    matrix = np.zeros((length, length))
    for i in range(1, length + 1):
        for j in range(1, i + 1):
            tail = np.exp(-gamma_out * (i - j - 1))
            if i == j:
                matrix[i - 1, j - 1] = 1.0 if i == 1 else a_out / a_in
            elif j == 1:
                matrix[i - 1, j - 1] = (np.exp(-gamma_out) - a_out / a_in * np.exp(-gamma_in)) * tail
            else:
                matrix[i - 1, j - 1] = a_out / a_in * (np.exp(-gamma_out) - np.exp(-gamma_in)) * tail
    return matrix


@pytest.mark.parametrize(("gamma_in", "gamma_out"), [(np.inf, 0.5), (2.0, 0.3), (0.3, 0.05)])
def test_attention_is_theorem_3(gamma_in, gamma_out):
    ours = exponential.attention(ExponentialStep.between(gamma_in, gamma_out), 0.0, 30)
    np.testing.assert_allclose(ours, _theorem_3(gamma_in, gamma_out, 30), atol=1e-14)


@given(RATES, st.integers(1, 40))
def test_attention_carries_one_kernel_to_the_other(rates, length):
    gamma_in, gamma_out = rates
    attention = exponential.attention(ExponentialStep.between(gamma_in, gamma_out), 0.0, length)
    assert (attention >= 0).all()
    carried = attention @ kernels.exponential(gamma_in, length) @ attention.T
    np.testing.assert_allclose(carried, kernels.exponential(gamma_out, length), atol=1e-11)


@given(RATES, st.floats(0.0, 0.3), st.integers(1, 40))
def test_repeat_correction_keeps_the_average_diagonal_at_one(rates, repeat_rate, length):
    """With Π = D̄^{−½}L the average kernel Π Σ̄_0 Πᵀ has a unit diagonal after every block (App. B)."""
    gamma_in, gamma_out = rates
    average = kernels.uniform(repeat_rate, length)
    first = exponential.attention(ExponentialStep.between(np.inf, gamma_in), repeat_rate, length)
    second = exponential.attention(ExponentialStep.between(gamma_in, gamma_out), repeat_rate, length)
    for product in (first, second @ first):
        np.testing.assert_allclose(np.diagonal(product @ average @ product.T), 1.0, atol=1e-10)


@pytest.mark.parametrize("repeat_rate", [0.0, 0.008, 0.05])
@pytest.mark.parametrize(
    ("gamma_in", "gamma_out"),
    [(np.inf, 3.0), (np.inf, 1e-4), (1.0593, 0.5), (0.0052, 0.005), (0.005, 0.0049999), (1.001e-4, 1e-4)],
)
def test_closed_form_against_60_digit_cholesky(high_precision, relative_error, gamma_in, gamma_out, repeat_rate):
    step = ExponentialStep.between(gamma_in, gamma_out)
    exact = high_precision.exponential(gamma_in, gamma_out, 40, repeat_rate)
    assert relative_error(exponential.attention(step, repeat_rate, 40), exact) < 1e-11
    assert relative_error(exponential.row_sums(step, repeat_rate, 40), exact.sum(axis=1)) < 1e-13


@given(RATES, st.floats(0.0, 0.3), st.integers(1, 40))
def test_row_sums_and_bias_columns_rebuild_the_matrix(rates, repeat_rate, length):
    step = ExponentialStep.between(*rates)
    column, diagonal = exponential.log_columns(step, repeat_rate, length)
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    bias = np.where(distance == 0, diagonal, column - step.gamma_out * distance)
    weights = np.tril(np.exp(bias - bias.max(axis=1, keepdims=True)))
    rebuilt = exponential.row_sums(step, repeat_rate, length)[:, None] * weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(rebuilt, exponential.attention(step, repeat_rate, length), rtol=1e-9, atol=1e-15)


@given(st.floats(1e-6, 50.0), st.integers(1, 300))
def test_the_filter_is_scipy_s_to_the_bit(gamma, length):
    """scipy.signal takes a second to import, so the recursion is written out."""
    drive, decay = np.random.default_rng(length).normal(size=length), float(np.exp(-gamma))
    expected = lfilter([1.0], [1.0, -decay], drive)
    np.testing.assert_array_equal(exponential._decaying_sum(drive.tolist(), decay), expected)


@pytest.mark.parametrize("gamma", [700.0, 900.0, 1e6])
def test_locations_far_apart_are_as_good_as_uncorrelated(gamma):
    """e^γ overflows from 710 on; the diagonal is 1 there all the same."""
    np.testing.assert_array_equal(exponential.mean_diagonal(gamma, 0.05, 5), np.ones(5))
    near, far = (ExponentialStep.between(rate, 0.3) for rate in (gamma, np.inf))
    np.testing.assert_array_equal(exponential.attention(near, 0.05, 5), exponential.attention(far, 0.05, 5))


def test_row_sums_without_repeats_have_a_closed_form():
    """D_n = y* + (1−y*) e^{−γ'n} with y* = M_out/M_in, M² = coth(γ/2)."""
    step = ExponentialStep.between(0.4, 0.05)
    limit = np.sqrt(np.tanh(0.2) / np.tanh(0.025))
    expected = limit + (1 - limit) * np.exp(-0.05 * np.arange(500))
    np.testing.assert_allclose(exponential.row_sums(step, 0.0, 500), expected, rtol=1e-12)


def test_everything_has_converged_where_we_say_so():
    step = ExponentialStep.between(0.0052, 0.005)
    stored = exponential.converged_length(step)
    for sequence in (*exponential.log_columns(step, 0.008, 3 * stored), exponential.row_sums(step, 0.008, 3 * stored)):
        np.testing.assert_allclose(sequence[stored:], sequence[stored - 1], rtol=1e-13)


@pytest.mark.parametrize(("location", "golden"), [(50, 3.19), (99, 4.78)])
def test_uncorrected_diagonal_drift_of_figure_6(location, golden):
    """Fig. 6: without the correction the diagonal at γ = .02, r = .05 has grown to these values (0-based)."""
    assert exponential.mean_diagonal(0.02, 0.05, 100)[location] == pytest.approx(golden, abs=0.005)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((0.1, 0.2), r"gamma_out=0.2 exceeds gamma_in=0.1.*use gamma_out < 0.1"),
        ((0.1, 0.1), r"both 0.1; attention is then the identity.*ValueSkipInit"),
        ((0.1, 0.0), "gamma_out is 0.0; a decay rate must be positive"),
        ((-1.0, 0.5), "gamma_in is -1.0"),
    ],
)
def test_infeasible_steps_are_refused(rates, words):
    with pytest.raises(ValueError, match=words):
        ExponentialStep.between(*rates)

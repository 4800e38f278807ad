import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skipless.theory import kernels, uniform

PAIRS = st.tuples(st.floats(0.0, 0.98), st.floats(1e-3, 0.99)).map(
    lambda pair: (pair[0], pair[0] + (0.999 - pair[0]) * pair[1])
)


@given(PAIRS, st.integers(1, 40))
def test_attention_carries_one_kernel_to_the_other(pair, length):
    attention = uniform.attention(*pair, length)
    assert (attention >= 0).all()
    carried = attention @ kernels.uniform(pair[0], length) @ attention.T
    np.testing.assert_allclose(carried, kernels.uniform(pair[1], length), atol=1e-11)


@pytest.mark.parametrize(
    ("rho_in", "rho_out"),
    [(0.0, 0.1), (0.0, 0.8), (1e-6, 0.5), (0.008, 0.03), (0.7777, 0.8), (0.4, 0.4008), (0.008, 0.0088), (0.99, 0.9999)],
)
def test_closed_form_against_60_digit_cholesky(high_precision, relative_error, rho_in, rho_out):
    exact = high_precision.uniform(rho_in, rho_out, 48)
    assert relative_error(uniform.attention(rho_in, rho_out, 48), exact) < 1e-11
    sums = uniform.row_sums(*uniform.factors(rho_in, rho_out, 48))
    assert relative_error(sums, exact.sum(axis=1)) < 1e-13


@pytest.mark.parametrize("pair", [(0.008, 0.8), (0.7777, 0.8), (0.4, 0.4008)])
def test_long_sequences_extend_short_ones(pair):
    """Causal attention at T is the leading block of any longer one, across the switch from sum to tail."""
    short, long = uniform.factors(*pair, 20_000), uniform.factors(*pair, 50_000)
    for a, b in zip(short, long, strict=True):
        np.testing.assert_allclose(a, b[:20_000], rtol=1e-12)


@given(PAIRS, st.integers(1, 64))
def test_non_causal_form_is_the_ratio_of_square_roots(pair, length):
    assume(pair[0] < 0.95)
    kappa, spread = uniform.symmetric_factors(*pair, length)
    assert spread >= 0
    matrix = kappa * np.eye(length) + spread
    expected = kernels.uniform_root(pair[1], length) @ np.linalg.inv(kernels.uniform_root(pair[0], length))
    np.testing.assert_allclose(matrix, expected, atol=1e-10)
    np.testing.assert_allclose(matrix.sum(axis=1), uniform.symmetric_row_sum(*pair, length), rtol=1e-12)


def test_far_rows_attend_to_the_first_tokens():
    """U_n falls like κd/(2n²), d = 1/ρ − 1/ρ': off the diagonal U-SPA looks at the start of the sequence."""
    column, row, _ = uniform.factors(0.1, 0.3, 1_000_000)
    asymptote = np.sqrt(0.7 / 0.9) * (10 - 1 / 0.3) / (2 * 999_999.0**2)
    assert column[-1] == pytest.approx(asymptote, rel=1e-4)
    assert row[-1] == pytest.approx(asymptote, rel=1e-4)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((0.5, 0.4), r"rho_out=0.4 is below rho_in=0.5.*use rho_out > 0.5"),
        ((0.5, 0.5), r"both 0.5; attention is then the identity"),
        ((0.5, 1.0), r"rho_out is 1.0"),
        ((-0.5, 0.1), r"rho_in is -0.5"),
    ],
)
def test_infeasible_steps_are_refused(pair, words):
    with pytest.raises(ValueError, match=words):
        uniform.check_step(*pair)

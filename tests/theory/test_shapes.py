import time
import tracemalloc

import numpy as np
import pytest

from skipless.theory import kernels
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit
from skipless.theory.shapes import (
    AlibiShape,
    DenseShape,
    ExponentialShape,
    IdentityShape,
    PlainShape,
    RescaledShape,
    SymmetricExponentialShape,
    SymmetricUniformShape,
    UniformShape,
    alibi_slopes,
)

SHAPES = [
    PlainShape(),
    PlainShape(causal=False),
    AlibiShape(8),
    AlibiShape(6, causal=False),
    IdentityShape(),
    ExponentialShape.between(np.inf, 0.7),
    ExponentialShape.between(0.2, 0.05, repeat_rate=0.05),
    UniformShape(0.0, 0.3),
    UniformShape(0.3, 0.35),
    SymmetricUniformShape(0.1, 0.4),
    SymmetricExponentialShape(ExponentialShape.between(0.5, 0.1).step, repeat_rate=0.02),
    DenseShape(np.tril(np.random.default_rng(0).uniform(0.1, 1.0, (64, 64)))),
]


@pytest.mark.parametrize("length", [1, 2, 63, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: type(s).__name__)
def test_dense_is_row_scale_times_softmax_of_bias(shape, length):
    dense, bias, scale = shape.dense(length), shape.bias(length), shape.row_scale(length)
    np.testing.assert_allclose(np.exp(bias).sum(axis=-1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(dense, scale[:, None] * np.exp(bias), rtol=1e-10, atol=1e-300)
    assert (scale > 0).all()
    if shape.causal:
        assert (np.triu(dense, k=1) == 0).all()


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.causal], ids=lambda s: type(s).__name__)
def test_a_shorter_sequence_sees_the_leading_block(shape):
    np.testing.assert_allclose(shape.dense(20), shape.dense(64)[..., :20, :20], rtol=1e-12)


def test_bias_is_finite_where_the_attention_underflows():
    shape = ExponentialShape.between(2.0, 1.5)
    assert shape.dense(1000)[-1, 0] == 0.0
    assert np.isfinite(np.tril(shape.bias(1000))).all()


def test_alibi_slopes_are_those_of_the_paper():
    np.testing.assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8])
    np.testing.assert_allclose(alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    with pytest.raises(ValueError, match="heads is 0"):
        alibi_slopes(0)


def test_plain_attention_averages():
    np.testing.assert_allclose(PlainShape().dense(3), [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])


@pytest.mark.parametrize("depth", [1, 2, 36])
@pytest.mark.parametrize("repeat_rate", [0.0, 0.008, 0.05])
def test_products_of_attention_reach_every_target_kernel(depth, repeat_rate):
    """Π_l Σ_0 Π_lᵀ = Σ_l to 1e-10, for both families, at every block. Sec. 3.2, App. B."""
    length, average = 64, kernels.uniform(repeat_rate, 64)
    product = np.eye(length)
    for shape in ExponentialSPA(0.005, repeat_rate).shapes(depth):
        product = shape.dense(length) @ product
        factor = kernels.exponential_chol(shape.step.gamma_out, length)
        target = kernels.cosine(factor @ average @ factor.T)
        np.testing.assert_allclose(product @ average @ product.T, target, atol=1e-10)
    product = np.eye(length)
    for shape in UniformSPA(0.8, repeat_rate).shapes(depth):
        product = shape.dense(length) @ product
        np.testing.assert_allclose(product @ average @ product.T, kernels.uniform(shape.rho_out, length), atol=1e-10)


def test_a_thousand_blocks_stay_exact():
    length, product = 48, np.eye(48)
    for shape in ExponentialSPA(0.005).shapes(1000):
        product = shape.dense(length) @ product
    np.testing.assert_allclose(product @ product.T, kernels.exponential(0.005, length), atol=1e-10)


@pytest.mark.parametrize("scheme", [ExponentialSPA(0.05, 0.02), UniformSPA(0.6, 0.02)])
def test_non_causal_products_reach_their_kernel(scheme):
    length, product = 40, np.eye(40)
    average = kernels.uniform(0.02, length)
    for shape in scheme.shapes(8, causal=False):
        assert not shape.causal
        assert (shape.dense(length) >= 0).all()
        product = shape.dense(length) @ product
    reached = product @ average @ product.T
    np.testing.assert_allclose(np.diagonal(reached), 1.0, atol=1e-10)
    if isinstance(scheme, UniformSPA):
        np.testing.assert_allclose(reached, kernels.uniform(0.6, length), atol=1e-10)


def test_36_blocks_at_a_million_locations_are_small():
    """O(1) memory in T: vectors stop where they have converged. By allocation, not by eye."""
    tracemalloc.start()
    began = time.process_time()
    compact = [shape.compact(1_000_000) for shape in ExponentialSPA(0.005, 0.008).shapes(36)]
    seconds = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(compact) == 36
    assert seconds < 2.0
    assert peak < 50e6


@pytest.mark.parametrize("shape", [UniformShape(0.1, 0.2), ExponentialShape.between(1e-5, 0.9e-5, 0.008)])
def test_compact_parts_allocate_no_square_array(shape):
    """At T = 20,000 a T×T float64 array would be 3.2 GB; O(T) parts are under 10 MB."""
    tracemalloc.start()
    shape.compact(20_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6


def test_standard_and_value_skip_init_do_not_depend_on_depth_or_skips():
    assert StandardAttention().shapes(3) == [PlainShape()] * 3
    assert StandardAttention(alibi_heads=8).shapes(2, 0.9) == [AlibiShape(8)] * 2
    assert ValueSkipInit().shapes(2, causal=False) == [IdentityShape(False)] * 2
    np.testing.assert_array_equal(IdentityShape().dense(3), np.eye(3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: IdentityShape().compact(4), "no finite bias"),
        (lambda: SHAPES[-1].compact(4), "no O.T. form"),
        (lambda: SHAPES[-1].dense(65), "calibrated for 64 locations and serves at most.*length=65"),
        (lambda: DenseShape(np.ones((4, 4)), causal=False).dense(3), "serves exactly as many"),
        (lambda: RescaledShape(PlainShape(), np.ones(4)).row_scale(5), "length=5"),
        (lambda: ExponentialShape.between(1.0, 0.5, repeat_rate=1.2), "repeat_rate is 1.2"),
        (lambda: PlainShape().dense(0), "length is 0"),
    ],
)
def test_bad_requests_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ([[1.0, 0.0], [-0.5, 1.5]], "row 1 of the matrix runs from -0.5 to 1.5 .* attention is .* at least 0"),
        ([[1.0, 0.0], [0.0, 0.0]], "row 1 of the matrix .* sums to 0; .* looks somewhere from every location"),
        ([[np.nan, 0.0], [0.5, 0.5]], "row 0 of the matrix runs from nan"),
        (np.ones((2, 3)), r"shaped \(2, 3\); it must be \(T, T\)"),
        (np.full((3, 3), 1 / 3), r"looks ahead, by 0.333 from location 0 to 1, .*np.tril\(matrix\), or causal=False"),
    ],
)
def test_matrices_that_are_no_attention_are_refused(matrix, words):
    """They gave NaN, or under a causal mask the attention of another matrix."""
    with pytest.raises(ValueError, match=words):
        DenseShape(matrix)


def test_a_list_is_a_matrix():
    np.testing.assert_array_equal(DenseShape([[2, 0], [1, 1]]).row_scale(2), [2.0, 2.0])


def test_non_causal_decay_rates_that_rounding_defeats_are_named():
    """Locations that coincide to rounding have no square root to speak of; no calibration would help."""
    with pytest.raises(ValueError, match="use decay rates above 1e-13, at which 64 locations coincide to rounding"):
        SymmetricExponentialShape(ExponentialShape.between(1e-12, 1e-13).step).dense(64)

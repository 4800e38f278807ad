"""The reference against theory: with q = 0 shaped attention is A·v, at every length; and the O(T) scan is the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.ops.attention import shaped_attention
from skipless.ops.bias import BiasVectors
from skipless.ops.reference import filtered, initial_attention
from skipless.theory.exponential import ExponentialStep
from skipless.theory.schemes import ExponentialSPA, UniformSPA
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
)

HEADS = 2
SHAPES = {
    "plain": PlainShape(),
    "symmetric-plain": PlainShape(causal=False),
    "alibi": AlibiShape(HEADS),
    "symmetric-alibi": AlibiShape(HEADS, causal=False),
    "exponential-first": ExponentialShape.between(np.inf, 0.7, 0.008),
    "exponential": ExponentialShape.between(0.7, 0.6, 0.008),
    "exponential-last": ExponentialShape.between(0.00507, 0.005, 0.008),
    "uniform-first": UniformShape(0.0, 0.1),
    "uniform": UniformShape(0.7778, 0.8),
    "symmetric-uniform": SymmetricUniformShape(0.2, 0.3),
    "symmetric-exponential": SymmetricExponentialShape(ExponentialStep.between(0.5, 0.4), 0.008),
}


def at_start(shape, values: torch.Tensor) -> torch.Tensor:
    """shaped_attention with q = 0, for values (…, T, d) shared by the heads."""
    v = values.expand(1, HEADS, *values.shape[-2:])
    return shaped_attention(torch.zeros_like(v), torch.randn_like(v), v, shape, impl="reference")[0]


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("length", [1, 2, 63, 300])
@pytest.mark.parametrize("kind", SHAPES)
def test_with_zero_queries_it_is_the_shape(kind, length):
    values = normal(length, 5)
    want = torch.tensor(SHAPES[kind].dense(length)) @ values
    torch.testing.assert_close(at_start(SHAPES[kind], values), want.expand(HEADS, -1, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "scheme", [ExponentialSPA(0.05, 0.008), UniformSPA(0.8, 0.008)], ids=["exponential", "uniform"]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("calibration", ["paper", "exact"])
def test_every_block_of_a_scheme(scheme, causal, calibration):
    values = normal(40, 3)
    for shape in replace(scheme, calibration=calibration).shapes(6, causal=causal, length=40):
        want = torch.tensor(shape.dense(40)) @ values
        torch.testing.assert_close(at_start(shape, values), want.expand(HEADS, -1, -1), rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(
    st.floats(1e-3, 3.0),
    st.floats(1e-3, 0.9),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.integers(1, 400),
)
def test_scan_is_the_dense_exponential(gamma, fraction, repeat_rate, length):
    shape = ExponentialShape.between(gamma, gamma * fraction, repeat_rate)
    values = normal(2, length, 3)
    want = torch.tensor(shape.dense(length)) @ values
    torch.testing.assert_close(initial_attention(shape, values), want, rtol=1e-11, atol=1e-12)


@settings(max_examples=25)
@given(st.floats(0.0, 0.9), st.floats(0.01, 0.99), st.integers(1, 400))
def test_scan_is_the_dense_uniform(rho, fraction, length):
    shape = UniformShape(rho, rho + (1.0 - rho) * fraction)
    values = normal(2, length, 3)
    want = torch.tensor(shape.dense(length)) @ values
    torch.testing.assert_close(initial_attention(shape, values), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["exponential-first", "exponential-last", "uniform-first", "uniform"])
def test_scan_has_the_right_gradient_and_dtype(kind):
    values = normal(130, 3).requires_grad_()
    (grad,) = torch.autograd.grad(initial_attention(SHAPES[kind], values), values, torch.ones(130, 3).double())
    want = torch.tensor(SHAPES[kind].dense(130)).T @ torch.ones(130, 3).double()
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)
    assert initial_attention(SHAPES[kind], values.float()).dtype == torch.float32


def test_scan_at_a_length_no_matrix_reaches():
    """At T = 300,000 the filter still answers an impulse by its closed form, and attention to the last row agrees."""
    length, gamma = 300_000, 2e-5
    drive = torch.zeros(length, 1, dtype=torch.float64)
    drive[7] = 1.0
    response = filtered(drive, torch.tensor(np.exp(-gamma)))[:, 0]
    want = torch.exp(-gamma * (torch.arange(length) - 7.0).double()) * (torch.arange(length) >= 7)
    torch.testing.assert_close(response, want, rtol=1e-10, atol=0)

    shape = SHAPES["exponential-last"]
    values = normal(length, 2)
    k = values.expand(1, 1, -1, -1)
    last = shaped_attention(torch.zeros_like(k[:, :, -3:]), k, k, shape, impl="reference", decoding=True)[0, 0]
    torch.testing.assert_close(last, initial_attention(shape, values)[-3:], rtol=0, atol=1e-11)


def test_scan_refuses_what_has_none():
    with pytest.raises(ValueError, match=r"AlibiShape has no scan.*dense\(length\)"):
        initial_attention(AlibiShape(2), normal(4, 2))


@pytest.mark.parametrize("kind", [k for k in SHAPES if SHAPES[k].causal])
def test_beyond_the_training_length_the_start_is_unchanged(kind):
    """A causal A is the leading block of every longer one, so a longer input changes no earlier output."""
    q, k, v = (normal(1, HEADS, 500, 4) for _ in range(3))
    long = shaped_attention(q, k, v, SHAPES[kind], impl="reference")
    short = shaped_attention(*(t[:, :, :90] for t in (q, k, v)), SHAPES[kind], impl="reference")
    torch.testing.assert_close(long[:, :, :90], short, rtol=0, atol=1e-12)


def test_a_gain_that_is_a_number_keeps_the_precision_of_the_queries():
    q, k, v = (normal(1, HEADS, 40, 8) for _ in range(3))
    number, tensor = (
        shaped_attention(q, k, v, SHAPES["uniform"], impl="reference", bias_gain=gain)
        for gain in (0.3, torch.tensor(0.3, dtype=torch.float64))
    )
    assert torch.equal(number, tensor)


@pytest.mark.parametrize("kind", SHAPES)
def test_parts_between_is_theory_bias(kind):
    """Up to a constant per row, which a softmax forgets."""
    shape, here = SHAPES[kind], torch.arange(50)
    bias, row_scale = BiasVectors.of(shape, 50, dtype=torch.float64).between(here, here)
    if shape.causal:
        bias = bias.masked_fill(here[:, None] < here[None, :], -torch.inf)
    want = torch.tensor(shape.bias(50)).reshape(-1, 50, 50)
    torch.testing.assert_close(bias.log_softmax(-1), want, rtol=0, atol=1e-10)
    torch.testing.assert_close(row_scale[0, :, 0], torch.tensor(shape.row_scale(50)), rtol=1e-13, atol=0)


def test_parts_are_tensors_that_a_module_can_keep():
    parts = BiasVectors.of(SHAPES["uniform"], 20)
    assert {t.dtype for t in parts.tensors().values()} == {torch.float32}
    assert set(parts.tensors()) == {"slope", "column", "diagonal", "row_scale", "row"}
    assert {t.dtype for t in parts.to(dtype=torch.float64).tensors().values()} == {torch.float64}


def test_parts_know_how_far_they_reach():
    assert BiasVectors.of(PlainShape(), 1).reach is None
    assert BiasVectors.of(SHAPES["exponential-first"], 50).reach == 50
    assert {t.shape for t in BiasVectors.of(SHAPES["exponential-first"], 5000).tensors().values()} == {(), (5000,)}
    assert BiasVectors.of(SHAPES["uniform"], 5000).reach == 5000
    assert BiasVectors.of(SHAPES["symmetric-uniform"], 50).exact_reach
    rescaled = RescaledShape(SHAPES["exponential-first"], np.ones(70))
    assert BiasVectors.of(rescaled, 70).reach == 70
    assert BiasVectors.of(RescaledShape(DenseShape(np.eye(9)), np.ones(9)), 9).table is not None


def test_identity_and_half_precision_parts_are_refused():
    with pytest.raises(ValueError, match=r"IdentityShape has no finite bias.*gains"):
        BiasVectors.of(IdentityShape(), 4)
    with pytest.raises(ValueError, match=r"bfloat16.*float32 or torch\.float64"):
        BiasVectors.of(PlainShape(), 4, dtype=torch.bfloat16)

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from skipless.training.optim.adam import clip_gradients
from skipless.training.optim.build import warmup_cosine

runs = st.tuples(st.integers(1, 10_000), st.integers(0, 10_000)).filter(lambda pair: pair[1] < pair[0])


@given(runs)
def test_the_rate_starts_at_zero_peaks_after_warm_up_and_ends_at_exactly_zero(run):
    total, warmup = run
    assert warmup_cosine(0, total, warmup) == (0.0 if warmup else 1.0)
    assert warmup_cosine(warmup, total, warmup) == 1.0
    assert warmup_cosine(total, total, warmup) == 0.0


@given(runs, st.floats(0, 1))
def test_warm_up_is_linear_and_the_cosine_symmetric(run, share):
    total, warmup = run
    step = round(share * warmup)
    if step < warmup:
        assert warmup_cosine(step, total, warmup) == step / warmup
    rest = total - warmup
    after = round(share * rest)
    pair = warmup_cosine(warmup + after, total, warmup) + warmup_cosine(total - after, total, warmup)
    assert pair == pytest.approx(1.0, abs=1e-12)


def test_golden_values_of_the_paper():
    assert warmup_cosine(2000, 100_000) == 0.5
    assert warmup_cosine(52_000, 100_000) == pytest.approx(0.5)
    assert warmup_cosine(28_000, 100_000) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_after_warm_up_the_rate_never_rises():
    factors = [warmup_cosine(step, 300, 50) for step in range(301)]
    assert factors[:51] == sorted(factors[:51])
    assert factors[50:] == sorted(factors[50:], reverse=True)


def test_warm_up_without_end_and_steps_outside_are_errors():
    with pytest.raises(ValueError, match="such as 200"):
        warmup_cosine(0, 2000, 4000)
    with pytest.raises(ValueError, match="0 … 10"):
        warmup_cosine(11, 10, 2)


def parameters_with_gradients(scale):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in [(3, 4), (5,), ()]]
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return parameters


def norm_of(parameters):
    return math.sqrt(sum(p.grad.square().sum().item() for p in parameters))


def test_clipping_scales_all_gradients_together_and_returns_the_norm_before():
    parameters = parameters_with_gradients(10.0)
    before, first = norm_of(parameters), parameters[0].grad.clone()
    norm = clip_gradients(parameters, 0.1)
    assert isinstance(norm, torch.Tensor)
    assert norm.item() == pytest.approx(before, rel=1e-12)
    assert norm_of(parameters) == pytest.approx(0.1, rel=1e-6)
    torch.testing.assert_close(parameters[0].grad, first * (0.1 / before), rtol=1e-6, atol=0)


@pytest.mark.parametrize("limit", [0.1, None])
def test_small_gradients_and_no_limit_leave_gradients_alone(limit):
    scale = 1e-3 if limit else 10.0
    parameters = [*parameters_with_gradients(scale), nn.Parameter(torch.zeros(2))]  # the last has no gradient
    before = [p.grad.clone() for p in parameters[:3]]
    assert clip_gradients(iter(parameters), limit).item() == pytest.approx(norm_of(parameters[:3]))
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters[:3], before, strict=True))

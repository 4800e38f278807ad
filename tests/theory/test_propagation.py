import numpy as np
import pytest
import torch
from scipy.stats import ortho_group

from skipless.theory import kernels, propagation
from skipless.theory.activations import ShapedActivation
from skipless.theory.exponential import decay_rates
from skipless.theory.kernels import sample_tokens
from skipless.theory.local_maps import variance_gain
from skipless.theory.propagation import Attend, AttendInput, Chain, Mlp, Normalise, Residual, Skip, forward, sub_block
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA
from skipless.theory.shapes import ExponentialShape, TableShape
from skipless.theory.shaping import dks


def test_uniform_attention_collapses_at_the_golden_rate():
    """Mean off-diagonal cosine of the running average from Σ_0 = I at T = 100."""
    states = forward([Attend(s) for s in StandardAttention().shapes(25)], np.eye(100))
    assert kernels.mean_cosine(states[1]) == pytest.approx(0.669, abs=5e-4)
    assert kernels.mean_cosine(states[5]) == pytest.approx(0.988, abs=5e-4)
    assert kernels.mean_cosine(states[10]) == pytest.approx(0.9998, abs=5e-5)
    assert 1 - kernels.mean_cosine(states[25]) == pytest.approx(7e-13, abs=1e-12)


def _random_network(shapes, width, rng, heads=4):
    """A finite attention-only network with orthogonal values and outputs, one attention matrix per head."""

    def run(x):
        for shape in shapes:
            dense = shape.dense(len(x))
            dense = np.broadcast_to(dense, (heads, *dense.shape[-2:]))
            values = x @ ortho_group.rvs(width, random_state=rng)
            split = values.reshape(len(x), heads, width // heads)
            mixed = np.einsum("hij,jhd->ihd", dense, split).reshape(len(x), width)
            x = mixed @ ortho_group.rvs(width, random_state=rng)
        return x

    return run


@pytest.mark.parametrize("scheme", [ExponentialSPA(0.05, 0.02), UniformSPA(0.8, 0.02), StandardAttention()])
def test_orthogonal_attention_networks_follow_theory_exactly_at_any_width(scheme):
    """Eq. 6 is exact at finite width when weights are orthogonal and heads agree: here width 32, T = 20."""
    rng = np.random.default_rng(0)
    shapes = scheme.shapes(8)
    x = rng.normal(size=(20, 32))
    measured = kernels.of_activations(_random_network(shapes, 32, rng)(x))
    predicted = forward([Attend(s) for s in shapes], kernels.of_activations(x))[-1]
    np.testing.assert_allclose(measured, predicted, atol=1e-11)


def test_heads_that_differ_average_their_kernels():
    """Eight ALiBi heads: the mean over networks approaches the mean over heads of A_h Σ A_hᵀ. App. H."""
    rng = np.random.default_rng(0)
    shapes = StandardAttention(alibi_heads=8).shapes(1)
    width, x = 512, kernels.exponential_chol(0.2, 12) @ rng.normal(size=(12, 512))
    start = kernels.of_activations(x)
    samples = [kernels.of_activations(_random_network(shapes, width, rng, heads=8)(x)) for _ in range(24)]
    spread = np.std(samples, axis=0) / np.sqrt(len(samples))
    error = np.abs(np.mean(samples, axis=0) - Attend(shapes[0]).forward(start))
    assert (error <= 5 * spread + 1e-12).all()


@pytest.mark.parametrize("name", ["dks", "gelu"])
def test_wide_mlps_follow_theory_at_the_monte_carlo_rate(name):
    """One random hidden layer of width n: the kernel's error falls like c/√n, checked at two widths."""
    activation = dks("gelu", 12) if name == "dks" else ShapedActivation("gelu")
    gain = 1.0 if name == "dks" else variance_gain(activation)
    kernel = kernels.exponential(0.1, 12)
    layer, rng = Mlp(activation, gain), np.random.default_rng(1)
    chol = np.linalg.cholesky(kernel)
    for hidden in (2_000, 200_000):
        features = gain * activation(chol @ rng.normal(size=(12, hidden)))
        error = np.abs(features @ features.T / hidden - layer.forward(kernel)).max()
        assert error < 12 / np.sqrt(hidden)


LAYERS = [
    Attend(ExponentialSPA(0.1, 0.05).shapes(3)[1]),
    Attend(StandardAttention(alibi_heads=4).shapes(1)[0]),
    Mlp(dks("gelu", 8)),
    Normalise(),
    sub_block(Mlp(ShapedActivation("gelu"), 1.5), Skip.normalised(0.9), "pre"),
    sub_block(Attend(UniformSPA(0.5).shapes(2)[1]), Skip(1.0, 1.0), "post"),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_backward_is_linear_and_positive(layer):
    kernel = 1.3 * kernels.exponential(0.2, 10)
    first, second = np.eye(10), kernels.uniform(0.5, 10)
    both = layer.backward(first + 2 * second, kernel)
    np.testing.assert_allclose(both, layer.backward(first, kernel) + 2 * layer.backward(second, kernel), atol=1e-12)
    assert np.linalg.eigvalsh(both).min() > -1e-10


def test_attention_gradients_match_a_finite_network():
    """G_in = Aᵀ G_out A, exactly, for orthogonal weights: gradients of a fixed linear functional."""
    rng = np.random.default_rng(2)
    shapes, width = ExponentialSPA(0.1).shapes(5), 24
    weights = [ortho_group.rvs(width, random_state=rng) for _ in shapes]
    out = rng.normal(size=(15, width))
    gradient, predicted = out, out @ out.T
    for shape, weight in zip(reversed(shapes), reversed(weights), strict=True):
        gradient = shape.dense(15).T @ gradient @ weight.T
        predicted = Attend(shape).backward(predicted, np.eye(15))
    np.testing.assert_allclose(gradient @ gradient.T, predicted, atol=1e-10)


def test_mean_gradient_gain_of_spa_is_one():
    """tr ΠᵀΠ = tr ΠΠᵀ = tr Σ_L = T: without repeats SPA neither grows nor shrinks the mean gradient."""
    blocks = [Attend(s) for s in ExponentialSPA(0.005).shapes(36)]
    states = forward(blocks, np.eye(64))
    assert propagation.backward(blocks, states)[0].mean() == pytest.approx(1.0, abs=1e-10)


def test_norm_gradients_match_a_finite_network():
    """Those that a norm does not project out, being orthogonal to its input, are divided by the norms of both ends."""
    draw = torch.Generator().manual_seed(3)
    x, gradient = (torch.randn(7, 40, dtype=torch.float64, generator=draw) for _ in range(2))
    x = (x * torch.linspace(0.3, 3.0, 7)[:, None].double()).requires_grad_()
    gradient -= (gradient * x).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x.detach()
    (before,) = torch.autograd.grad(torch.nn.functional.rms_norm(x, (40,), eps=0.0), x, gradient)
    start = kernels.of_activations(x.detach().numpy())
    predicted = Normalise().backward((gradient @ gradient.T).detach().numpy(), start)
    np.testing.assert_allclose((before @ before.T).numpy(), predicted, atol=1e-11)


def test_chain_and_residual_compose():
    kernel = kernels.exponential(0.2, 10)
    attend, mlp = LAYERS[0], LAYERS[2]
    chained = Chain((attend, mlp))
    np.testing.assert_allclose(chained.forward(kernel), mlp.forward(attend.forward(kernel)))
    gradient = kernels.uniform(0.3, 10)
    np.testing.assert_allclose(
        chained.backward(gradient, kernel),
        attend.backward(mlp.backward(gradient, attend.forward(kernel)), kernel),
    )
    skip = Residual(attend, Skip(1.0, 0.5))
    np.testing.assert_allclose(skip.forward(kernel), kernel + 0.25 * attend.forward(kernel))
    through = attend.backward(gradient, kernel)
    np.testing.assert_allclose(skip.backward(gradient, kernel), gradient + 0.25 * through)


def test_individual_sequences_stay_near_the_average_diagonal():
    """Fig. 6: with the correction one real sequence keeps its mean diagonal near 1; without it the mean passes 2."""
    tokens = kernels.of_tokens(sample_tokens(0.05, 100, seed=3))

    def mean_diagonal(rate):
        return np.diagonal(forward([Attend(s) for s in ExponentialSPA(0.02, rate).shapes(36)], tokens)[-1]).mean()

    assert mean_diagonal(0.05) == pytest.approx(1.0, abs=0.15)
    assert mean_diagonal(0.0) > 2.0


def test_unknown_norm_placement_is_named():
    with pytest.raises(ValueError, match="'none', 'pre' or 'post'"):
        sub_block(Normalise(), Skip(), "before")


def test_heads_of_several_decays():
    """What docs/derivations.md says of them: the mean over heads, negative steps from it, and chains of each head."""

    class Heads(TableShape):
        causal = True

        def __init__(self, matrices):
            self.matrices = np.stack(matrices)

        def dense(self, length):
            return self.matrices

    rates, factors, size = decay_rates(0.05, 12)[1:], np.array([1 / 1.5, 1.5]), 64
    kernel = chained = np.eye(size)
    lowest, before = 0.0, None
    for gamma in rates:
        roots = [np.linalg.cholesky(kernels.exponential(gamma * f, size)) for f in factors]
        steps = [root @ np.linalg.inv(np.linalg.cholesky(kernel)) for root in roots]
        lowest = min(lowest, *(step.min() for step in steps))
        kernel = Attend(Heads(steps)).forward(kernel)
        np.testing.assert_allclose(kernel, sum(root @ root.T for root in roots) / 2, atol=1e-9)
        own = [ExponentialShape.between(np.inf if before is None else before * f, gamma * f) for f in factors]
        assert min(shape.dense(size).min() for shape in own) >= 0.0
        chained, before = Attend(Heads([shape.dense(size) for shape in own])).forward(chained), gamma
    assert lowest == pytest.approx(-0.0636, abs=1e-3)
    assert np.diagonal(chained).max() == pytest.approx(1.038, abs=2e-3)


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_a_skip_beside_attention_to_the_input_itself_keeps_its_cross_terms(norm):
    """Without W_V and W_O both terms are the same channels: theory equals αX + βA·norm(X) of one matrix X."""
    rng, shape = np.random.default_rng(0), ExponentialShape.between(0.5, 0.3)
    x, skip = rng.standard_normal((20, 16)), Skip(0.6, 0.8)

    def rms(x):
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True))

    expected = skip.shortcut * x + skip.residual * shape.dense(20) @ (rms(x) if norm == "pre" else x)
    expected = rms(expected) if norm == "post" else expected
    layer = AttendInput(shape, skip, normalised=norm == "pre")
    found = (Chain((layer, Normalise())) if norm == "post" else layer).forward(x @ x.T / 16)
    np.testing.assert_allclose(found, expected @ expected.T / 16, rtol=0, atol=1e-12)


def test_gradients_of_attention_to_the_input_itself_beside_a_skip_match_autograd():
    shape, skip = StandardAttention().shapes(1)[0], Skip(1.0, 0.5)
    mixing = torch.eye(12, dtype=torch.float64) + 0.5 * torch.as_tensor(shape.dense(12))
    gradient = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.zeros(12, 8, dtype=torch.float64, requires_grad=True)
    (mixing @ x).backward(gradient)
    found = AttendInput(shape, skip).backward((gradient @ gradient.mT).numpy(), np.eye(12))
    np.testing.assert_allclose(found, (x.grad @ x.grad.mT).numpy(), rtol=0, atol=1e-12)

import numpy as np
import pytest

from skipless.theory import kernels
from skipless.theory.activations import ShapedActivation
from skipless.theory.local_maps import kernel_map, variance_gain
from skipless.theory.propagation import Attend, Mlp, Residual, Skip, forward, sub_block
from skipless.theory.schemes import ExponentialSPA, UniformSPA
from skipless.theory.shaping import dks, tat_leaky_relu


def _dks_map(depth):
    activation = dks("gelu", depth)
    return lambda kernel: kernel_map(activation, kernel)


@pytest.mark.parametrize(
    ("depth", "gamma", "alpha", "repeat_rate", "paper"),
    [
        (36, 0.2, 0.98, 0.0, 11.2),
        (36, 0.4, 0.99, 0.0, 5.0),
        (32, 1.0, 0.9975, 0.0, 1.3),
        (36, 0.2, 0.98, 0.008, 7.4),
    ],
)
def test_exact_keeps_the_diagonal_that_appendix_f_lets_grow(depth, gamma, alpha, repeat_rate, paper):
    """The largest diagonal after the last block at T = 512: the paper's approximation, and exactly 1."""
    kernel = kernels.uniform(repeat_rate, 512)

    def final_diagonal(calibration):
        scheme = ExponentialSPA(gamma, repeat_rate, calibration)
        shapes = scheme.shapes(depth, alpha, **({"length": 512} if calibration == "exact" else {}))
        blocks = [Residual(Attend(shape), Skip.normalised(alpha)) for shape in shapes]
        return np.diagonal(forward(blocks, kernel)[-1])

    assert final_diagonal("paper").max() == pytest.approx(paper, abs=0.06)
    np.testing.assert_allclose(final_diagonal("exact"), 1.0, atol=1e-10)


def test_exact_without_skips_is_the_paper_itself():
    """Skipless E-SPA already has a unit average diagonal, so there is nothing to correct."""
    paper = ExponentialSPA(0.02, 0.05).shapes(6)
    exact = ExponentialSPA(0.02, 0.05, "exact").shapes(6, length=50)
    for ours, theirs in zip(exact, paper, strict=True):
        np.testing.assert_allclose(ours.row_scale(50), theirs.row_scale(50), rtol=1e-10)
        np.testing.assert_array_equal(ours.bias(30), theirs.bias(30))
        np.testing.assert_array_equal(ours.compact(30).column, theirs.compact(30).column)


def test_exact_with_an_mlp_keeps_unit_norms_through_it():
    mlp = _dks_map(12)
    kernel = kernels.uniform(0.008, 64)
    for shape in ExponentialSPA(0.05, 0.008, "exact").shapes(12, length=64, mlp=mlp):
        kernel = Attend(shape).forward(kernel)
        np.testing.assert_allclose(np.diagonal(kernel), 1.0, atol=1e-9)
        kernel = mlp(kernel)


def test_mlp_aware_attention_reaches_its_target_through_the_mlps():
    """A_l f(Σ_{l−1}) A_lᵀ = Σ_l for every block: the paper's formula with the MLP taken seriously."""
    depth, length = 36, 64
    mlp = _dks_map(depth)
    kernel, rates = np.eye(length), [s.step.gamma_out for s in ExponentialSPA(0.005).shapes(depth)]
    shapes = ExponentialSPA(0.005, calibration="mlp-aware").shapes(depth, length=length, mlp=mlp)
    for shape, gamma in zip(shapes, rates, strict=True):
        kernel = Attend(shape).forward(kernel)
        np.testing.assert_allclose(kernel, kernels.exponential(gamma, length), atol=1e-9)
        kernel = mlp(kernel)


def test_mlp_aware_attention_keeps_unit_norms_with_repeated_tokens():
    mlp, kernel = _dks_map(36), kernels.uniform(0.008, 64)
    for shape in ExponentialSPA(0.005, 0.008, "mlp-aware").shapes(36, length=64, mlp=mlp):
        assert (shape.dense(64) >= 0).all()
        kernel = Attend(shape).forward(kernel)
        np.testing.assert_allclose(np.diagonal(kernel), 1.0, atol=1e-9)
        kernel = mlp(kernel)


def test_mlp_aware_uniform_stays_in_closed_form():
    depth, mlp = 36, _dks_map(36)
    kernel = kernels.uniform(0.008, 30)
    shapes = UniformSPA(0.8, 0.008, calibration="mlp-aware").shapes(depth, mlp=mlp)
    for level, shape in enumerate(shapes, start=1):
        kernel = Attend(shape).forward(kernel)
        np.testing.assert_allclose(kernel, kernels.uniform(0.008 + level * 0.792 / depth, 30), atol=1e-9)
        kernel = mlp(kernel)


def test_mlp_aware_is_refused_where_attention_would_be_negative():
    """TAT and plain GELU raise cosines, which only negative attention could undo."""
    tat = tat_leaky_relu(36)
    with pytest.raises(ValueError, match=r"in block .* a softmax gives none below 0"):
        ExponentialSPA(0.005, calibration="mlp-aware").shapes(36, length=64, mlp=lambda k: kernel_map(tat, k))
    gelu = ShapedActivation("gelu")
    gain = variance_gain(gelu)
    with pytest.raises(ValueError, match=r"in block .* above its target .*, and attention cannot lower them"):
        UniformSPA(0.8, calibration="mlp-aware").shapes(36, mlp=lambda k: kernel_map(gelu, k, gain))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ExponentialSPA(calibration="fancy"), "must be one of 'paper', 'exact', 'mlp-aware'"),
        (lambda: ExponentialSPA(calibration="exact").shapes(4), "say for which length"),
        (lambda: UniformSPA(calibration="mlp-aware").shapes(4), "needs mlp="),
        (lambda: ExponentialSPA(calibration="mlp-aware").shapes(4, mlp=lambda k: k), "say for which length"),
        (
            lambda: ExponentialSPA(0.5, calibration="mlp-aware").shapes(4, 0.5, mlp=lambda k: k),
            r"no form with skips .skip_weight=0.5.: use calibration='exact'",
        ),
    ],
)
def test_missing_or_impossible_options_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
@pytest.mark.parametrize("mlp_skip", [Skip(1.0, 1.0), Skip(1.0, 0.2), Skip()])
@pytest.mark.parametrize(("calibration", "skip"), [("exact", Skip.normalised(0.98)), ("mlp-aware", Skip())])
def test_every_branch_keeps_a_unit_diagonal_whatever_the_norm(norm, mlp_skip, calibration, skip):
    """A norm before attention takes the stream's growth out of the branch, which the row scales must not undo."""
    shaped = dks("gelu", 36) if calibration == "mlp-aware" else ShapedActivation("gelu")
    mlp = sub_block(Mlp(shaped, variance_gain(shaped)), mlp_skip, norm).forward
    scheme = ExponentialSPA(0.2, 0.008, calibration)
    shapes = scheme.shapes(36, skip.shortcut, length=48, mlp=mlp, normalised=norm == "pre")
    kernel = kernels.uniform(0.008, 48)
    for shape in shapes:
        branch = Attend(shape).forward(kernels.cosine(kernel) if norm == "pre" else kernel)
        np.testing.assert_allclose(np.diagonal(branch), 1.0, rtol=1e-12)
        kernel = skip.shortcut**2 * kernel + skip.residual**2 * branch
        kernel = mlp(kernels.cosine(kernel) if norm == "post" else kernel)


def test_correlations_that_an_mlp_has_raised_above_the_target_are_named():
    mlp = sub_block(Mlp(ShapedActivation("gelu"), 1.5), Skip(), "none").forward
    with pytest.raises(
        ValueError, match=r"'mlp-aware' in block 2: the MLP before it leaves cosines of .* use calibration"
    ):
        UniformSPA(0.8, 0.008, calibration="mlp-aware").shapes(6, mlp=mlp)

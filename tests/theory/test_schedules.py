import re

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.theory import exponential, feasibility, kernels, uniform
from skipless.theory.exponential import ExponentialStep
from skipless.theory.schemes import ExponentialSPA, UniformSPA


@pytest.mark.parametrize(
    ("gamma_final", "depth", "golden"),
    [(0.005, 36, 0.937977), (0.005, 32, 0.930499), (0.005, 108, 0.978883), (0.2, 36, 0.984707), (1.0, 32, 0.997730)],
)
def test_attention_diagonal_is_constant_over_depth(gamma_final, depth, golden):
    lams = [step.lam for step in exponential.exponential_steps(gamma_final, depth)]
    np.testing.assert_allclose(lams, lams[0], rtol=1e-13)
    assert lams[0] == pytest.approx(golden, abs=5e-7)


def test_golden_decay_rates():
    rates = exponential.decay_rates(0.005, 36)
    assert rates[0] == np.inf
    assert rates[36] == pytest.approx(0.005, rel=1e-12)
    assert rates[1] == pytest.approx(1.05930, abs=5e-6)
    assert rates[18] == pytest.approx(0.052542, abs=5e-7)
    assert exponential.decay_rates(0.005, 32)[1] == pytest.approx(1.00432, abs=5e-6)
    assert kernels.innovation(0.005) == pytest.approx(0.0997505, abs=5e-8)


@given(st.floats(1e-5, 3.0), st.sampled_from([1, 2, 36, 1000]))
def test_rates_follow_appendix_c(gamma_final, depth):
    """a(γ_l) = a(γ_L)^{l/L}, and rates fall."""
    rates = exponential.decay_rates(gamma_final, depth)
    assert (np.diff(rates) < 0).all()
    expected = kernels.innovation(gamma_final) ** (np.arange(depth + 1) / depth)
    np.testing.assert_allclose([kernels.innovation(g) for g in rates], expected, rtol=1e-11)


@pytest.mark.parametrize("gamma_final", [5.0, 15.0, 20.0, 50.0])
def test_fast_decay_keeps_its_digits(gamma_final):
    """1−a² = e^{−2γ} is what is left of it: below rounding beside 1 from γ = 18.4 on."""
    with mpmath.workdps(80):
        tau = -mpmath.log(1 - mpmath.exp(-2 * mpmath.mpf(gamma_final))) / 4
        expected = [float(-mpmath.log(1 - mpmath.exp(-n * tau)) / 2) for n in range(1, 5)]
    np.testing.assert_allclose(exponential.decay_rates(gamma_final, 4)[1:], expected, rtol=1e-14)


@pytest.mark.parametrize("depth", [1, 2, 36, 1000])
def test_scheduled_steps_equal_the_pairwise_formula(depth):
    """The schedule's scalars are built without subtracting rates; where that is harmless both must agree."""
    rates = exponential.decay_rates(0.005, depth)
    for level, step in enumerate(exponential.exponential_steps(0.005, depth), start=1):
        pair = ExponentialStep.between(rates[level - 1], rates[level])
        assert (step.gamma_in, step.gamma_out) == (rates[level - 1], rates[level])
        assert step.gap == pytest.approx(pair.gap, rel=1e-9)
        assert step.excess == pytest.approx(pair.excess, rel=1e-9)


@pytest.mark.parametrize("gamma_final", [1e-9, 1e-12])
def test_a_single_block_that_nearly_collapses_keeps_its_digits(gamma_final):
    """λ = a(γ_L) is what is left of 1 − (1−λ²)."""
    (step,) = exponential.exponential_steps(gamma_final, 1)
    assert step.lam == pytest.approx(kernels.innovation(gamma_final), rel=1e-12, abs=0.0)


@pytest.mark.parametrize(("depth", "alpha", "gamma"), [(36, 0.98, 0.2), (32, 0.9975, 1.0), (36, 0.99, 0.4)])
def test_skip_adjusted_steps_are_equation_of_appendix_f(depth, alpha, gamma):
    rates = exponential.decay_rates(gamma, depth)
    for level, step in enumerate(exponential.exponential_steps(gamma, depth, alpha), start=1):
        lam0 = kernels.innovation(rates[level]) / kernels.innovation(rates[level - 1])
        lam = np.sqrt((lam0**2 - alpha**2) / (1 - alpha**2))
        assert step.lam == pytest.approx(lam, rel=1e-9)
        gamma_alpha = -0.5 * np.log1p(-((lam * kernels.innovation(rates[level - 1])) ** 2))
        assert step.gamma_out == pytest.approx(gamma_alpha, rel=1e-9)
        assert step.gap == pytest.approx(ExponentialStep.between(step.gamma_in, step.gamma_out).gap, rel=1e-9)


@pytest.mark.parametrize(
    ("depth", "alpha", "bound"),
    [
        (36, 0.98, 0.133),
        (36, 0.99, 0.332),
        (36, 0.995, 0.597),
        (32, 0.98, 0.160),
        (32, 0.99, 0.373),
        (32, 0.995, 0.647),
        (32, 0.9975, 0.955),
        (32, 0.999, 1.39),
    ],
)
def test_feasible_decay_rates_explain_the_papers_grids(depth, alpha, bound):
    exact = feasibility.smallest_gamma_final(alpha, depth)
    assert exact == pytest.approx(bound, abs=0.005)
    assert feasibility.largest_skip_weight(exact, depth) == pytest.approx(alpha, rel=1e-12)
    suggested = feasibility.round_up(exact)
    assert exponential.exponential_steps(suggested, depth, alpha)[0].lam > 0
    with pytest.raises(ValueError, match=f"use gamma_final ≥ {suggested}"):
        exponential.exponential_steps(exact * 0.99, depth, alpha)


@pytest.mark.parametrize(("depth", "gamma"), [(1, 1e-30), (1, 0.005), (2, 1e-6), (36, 1e-30), (36, 0.2)])
def test_at_the_largest_skip_weight_a_step_is_finite_or_refused(depth, gamma):
    """λ_α is 0 at the bound, so that rounding decides; it must decide for the check and for the step alike."""
    alpha = feasibility.largest_skip_weight(gamma, depth)
    for _ in range(30):
        alpha = float(np.nextafter(alpha, 0.0))
        steps = _unless_refused("not positive (App. F)", exponential.exponential_steps, gamma, depth, alpha)
        assert all(np.isfinite(step.excess) and step.gamma_out > 0 for step in steps)


@pytest.mark.parametrize("schedule", ["linear", "quadratic", "geometric"])
@pytest.mark.parametrize(("depth", "alpha", "initial"), [(1, 0.9, 0.008), (36, 0.98, 0.008), (36, 0.999, 0.5)])
def test_at_the_largest_correlation_the_error_is_that_of_the_skip(depth, alpha, initial, schedule):
    rho = feasibility.largest_rho_final(alpha, depth, initial, schedule)
    for _ in range(30):
        rho = float(np.nextafter(rho, 0.0))
        arguments = rho, depth, initial, schedule, alpha
        steps = _unless_refused("needs a residual branch", uniform.uniform_steps, *arguments)
        assert all(after < 1 for _, after in steps)


def _unless_refused(words, make, *arguments):
    """What it makes, or nothing where it is refused in these words."""
    try:
        return make(*arguments)
    except ValueError as error:
        if words not in str(error):
            raise
        return []


@pytest.mark.parametrize(("depth", "alpha", "gamma"), [(1, 0.3, 1e-30), (36, 0.5, 1e-30), (300, 0.9, 1e-300)])
def test_both_hints_of_an_infeasible_skip_work_at_tiny_decay_rates(depth, alpha, gamma):
    with pytest.raises(ValueError, match="gamma_final ≥ ") as caught:
        exponential.exponential_steps(gamma, depth, alpha)
    rate, weight = (float(text) for text in re.findall(r"[≥≤] ([0-9.]+(?:e-?[0-9]+)?)", str(caught.value)))
    assert exponential.exponential_steps(rate, depth, alpha)[0].lam > 0
    assert exponential.exponential_steps(gamma, depth, weight)[0].lam > 0


def test_the_hint_of_an_infeasible_correlation_is_above_the_inputs():
    with pytest.raises(ValueError, match="use rho_final ≤ ") as caught:
        uniform.uniform_steps(0.8, 36, 0.29, "linear", 0.999999)
    rho = float(str(caught.value).split("≤ ")[1].split()[0])
    assert all(0.29 <= before < after < 1 for before, after in uniform.uniform_steps(rho, 36, 0.29, "linear", 0.999999))


@pytest.mark.parametrize(("alpha", "limit"), [(0.98, 0.572), (0.995, 0.250)])
def test_feasible_correlations_with_skips(alpha, limit):
    """PAPER: its own ρ_L = .8 is infeasible at its own α; the error names the largest ρ_L that works."""
    bound = feasibility.largest_rho_final(alpha, 32, 0.008, "linear")
    assert bound == pytest.approx(limit, abs=5e-4)
    with pytest.raises(ValueError, match=f"use rho_final ≤ {feasibility.round_down(bound)}"):
        uniform.uniform_steps(0.8, 32, 0.008, "linear", alpha)
    steps = uniform.uniform_steps(feasibility.round_down(bound), 32, 0.008, "linear", alpha)
    assert all(before < after < 1 for before, after in steps)


@pytest.mark.parametrize("schedule", ["linear", "quadratic", "geometric"])
@pytest.mark.parametrize("rho_initial", [0.0, 0.008, 0.3])
def test_the_largest_correlation_is_where_a_branch_would_need_one(schedule, rho_initial):
    bound = feasibility.largest_rho_final(0.98, 32, rho_initial, schedule)
    below, above = bound - 1e-9 * (1.0 - bound), bound + 1e-9 * (1.0 - bound)
    residuals = [residual for _, residual in uniform.uniform_steps(below, 32, rho_initial, schedule, 0.98)]
    assert max(residuals) == pytest.approx(1.0, abs=1e-7)
    with pytest.raises(ValueError, match="ρ_res"):
        uniform.uniform_steps(above, 32, rho_initial, schedule, 0.98)


@pytest.mark.parametrize("schedule", ["linear", "quadratic", "geometric"])
def test_uniform_skips_compose_to_the_schedule(schedule):
    """α²Σ(ρ_{l−1}) + β²Σ(ρ_res) = Σ(ρ_l). Sec. 3.4."""
    rho = uniform.correlations(0.4, 12, 0.008, schedule)
    for level, (before, residual) in enumerate(uniform.uniform_steps(0.4, 12, 0.008, schedule, 0.9), start=1):
        assert before == rho[level - 1]
        assert 0.81 * before + 0.19 * residual == pytest.approx(rho[level], rel=1e-12)


def test_geometric_schedule_loses_the_same_share_in_every_block():
    rho = uniform.correlations(0.8, 10, 0.1, "geometric")
    np.testing.assert_allclose((1 - rho[1:]) / (1 - rho[:-1]), (0.2 / 0.9) ** 0.1, rtol=1e-12)


def test_rounding_helpers_stay_on_the_feasible_side():
    assert feasibility.round_up(0.13296) == 0.133
    assert feasibility.round_up(0.132961) == 0.133
    assert feasibility.round_up(0.5) == 0.5001
    assert feasibility.round_up(0.0213, 2) == 0.022
    assert feasibility.round_down(0.937977) == 0.9379
    assert feasibility.round_down(0.5) == 0.4999
    assert feasibility.round_down(0.0) == 0.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: exponential.exponential_steps(0.0, 4), "gamma_final is 0.0"),
        (lambda: exponential.exponential_steps(np.inf, 4), "use ValueSkipInit"),
        (lambda: exponential.exponential_steps(400.0, 4), "gamma_final is 400; .*use ValueSkipInit"),
        (lambda: exponential.exponential_steps(0.1, 0), "depth is 0"),
        (lambda: exponential.exponential_steps(0.1, 4, 1.0), "skip_weight is 1.0"),
        (lambda: exponential.exponential_steps(0.1, 4, -0.2), "skip_weight is -0.2"),
        (lambda: uniform.uniform_steps(0.005, 4, 0.008, "linear"), "use rho_final > 0.008"),
        (lambda: uniform.correlations(0.5, 4, 0.0, "cubic"), "'linear', 'quadratic' or 'geometric'"),
    ],
)
def test_bad_values_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("skip_weight", [0.0, 0.5, 0.98])
def test_the_papers_schedules_given_by_block_are_themselves(skip_weight):
    rates = exponential.decay_rates(0.2, 36)[1:]
    ours = exponential.steps_through(rates.tolist(), skip_weight)
    for own, paper in zip(ours, exponential.exponential_steps(0.2, 36, skip_weight), strict=True):
        np.testing.assert_allclose(
            [own.gamma_in, own.gamma_out, own.gap, own.excess],
            [paper.gamma_in, paper.gamma_out, paper.gap, paper.excess],
            rtol=1e-10,
        )
    rhos = uniform.correlations(0.3, 36, 0.05, "linear")[1:]
    ours = uniform.steps_through(rhos.tolist(), 0.05, skip_weight)
    np.testing.assert_allclose(ours, uniform.uniform_steps(0.3, 36, 0.05, "linear", skip_weight), rtol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("skip_weight", [0.0, 0.6])
def test_decays_and_correlations_by_block_are_reached(causal, skip_weight):
    """Σ_l = α²Σ_{l−1} + (1−α²)AΣAᵀ has the correlation asked for; E-SPA's decay without skips, A's diagonal with."""
    gammas, rhos = (3.0, 0.9, 0.8, 0.7), (0.1, 0.15, 0.5, 0.6)
    kernel = np.eye(12)
    for rho, shape in zip(rhos, UniformSPA(rhos=rhos).shapes(4, skip_weight, causal), strict=True):
        branch = shape.dense(12) @ kernel @ shape.dense(12).T
        kernel = skip_weight**2 * kernel + (1 - skip_weight**2) * branch
        np.testing.assert_allclose(kernel, kernels.uniform(rho, 12), atol=1e-12)
    kernel = np.eye(12)
    before = np.inf
    for gamma, shape in zip(gammas, ExponentialSPA(gammas=gammas).shapes(4, skip_weight, causal), strict=True):
        if skip_weight == 0.0:
            kernel = shape.dense(12) @ kernel @ shape.dense(12).T
            np.testing.assert_allclose(kernel, kernels.exponential(gamma, 12), atol=1e-12)
        asked = (kernels.innovation(gamma) / kernels.innovation(before)) ** 2
        assert skip_weight**2 + (1 - skip_weight**2) * shape.step.lam**2 == pytest.approx(asked, rel=1e-12)
        before = gamma


@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=5, unique=True), st.floats(0.1, 0.95), st.integers(0, 4))
def test_a_refused_value_names_one_that_works(values, alpha, at):
    for kind, through in (
        ("gammas", exponential.steps_through),
        ("rhos", lambda v, a: uniform.steps_through(v, 0.0, a)),
    ):
        given_ = sorted(values, reverse=True) if kind == "gammas" else sorted(v / 3.001 for v in values)
        for _ in range(len(given_) + 1):
            try:
                through(given_, alpha)
                break
            except ValueError as error:
                block = int(re.search(rf"{kind}\[(\d+)\]", str(error)).group(1))
                given_ = [*given_[:block], float(re.search(r"use [≥≤] ([\d.e-]+\d)", str(error)).group(1))]
        else:
            raise AssertionError(given_)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ExponentialSPA(gammas=()), "gammas is empty; give one decay rate for each block"),
        (lambda: ExponentialSPA(gammas=[1.0, 2.0]), r"gammas\[1\]=2.0 is not below gammas\[0\]=1.0; .*less than 1.0"),
        (lambda: ExponentialSPA(gammas=[1.0, 1.0]), r"use less than 1.0"),
        (lambda: ExponentialSPA(gammas=[1.0, 0.0]), r"gammas\[1\] is 0.0; a decay rate must be positive"),
        (lambda: ExponentialSPA(gammas=[np.inf, 1.0]), r"gammas\[0\] is ∞; .*use ValueSkipInit"),
        (lambda: ExponentialSPA(gammas="1,2"), "gammas is '1,2'; it must be a list"),
        (lambda: ExponentialSPA(gammas=["x"]), r"gammas\[0\] is 'x'; it must be a number"),
        (lambda: ExponentialSPA(0.2, gammas=[1.0, 0.5]), "gamma_final=0.2 beside gammas, which ends at 0.5"),
        (lambda: ExponentialSPA(gammas=[1.0, 0.5]).shapes(3), "gammas has 2 values and depth is 3; give 3"),
        (lambda: ExponentialSPA(gammas=[0.1]).shapes(1, 0.9), r"gammas\[0\]=0.1 with skip_weight=0.9.*use ≥ 0.8304"),
        (lambda: UniformSPA(rhos=[0.5, 0.4]), r"rhos\[1\]=0.4 is not above rhos\[0\]=0.5; .*more than 0.5"),
        (lambda: UniformSPA(rhos=[0.1], repeat_rate=0.2), r"rhos\[0\]=0.1 is not above repeat_rate=0.2"),
        (lambda: UniformSPA(rhos=[1.0]), r"rhos\[0\] is 1.0; a uniform correlation must lie in \[0, 1\)"),
        (lambda: UniformSPA(rhos=[0.5], schedule="geometric"), "schedule='geometric' beside rhos"),
        (lambda: UniformSPA(rhos=[0.9]).shapes(1, 0.9), r"rhos\[0\]=0.9 with skip_weight=0.9.*use ≤ 0.1899"),
    ],
)
def test_bad_schedules_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()

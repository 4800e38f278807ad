import math
import re
import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.theory import local_maps as maps
from skipless.theory.activations import ShapedActivation
from skipless.theory.shaping import dks, local_curvature, local_slope, tat, tat_leaky_relu

SMOOTH = ["gelu", "gelu_tanh", "sigmoid", "silu", "sin", "softplus", "tanh"]
DEPTHS = [12, 36, 108]


def exactly(value: float):
    return pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("depth", [8, 12, 36, 108, 1000])
@pytest.mark.parametrize("base", [*SMOOTH, "leaky_relu"])
def test_dks_conditions(base, depth):
    f = dks(base, depth, xi=5.0)
    assert maps.q_map(f) == exactly(1)
    assert maps.q_slope(f) == exactly(1)
    assert maps.c_map(f, 0.0) == exactly(0)
    assert maps.c_slope(f) ** depth == pytest.approx(5.0, rel=1e-8)
    assert f.input_scale > 0


@pytest.mark.parametrize("depth", [1, 12, 36, 108, 1000])
@pytest.mark.parametrize("base", SMOOTH)
def test_tat_conditions(base, depth):
    f = tat(base, depth, tau=0.3)
    assert maps.q_map(f) == exactly(1)
    assert maps.q_slope(f) == exactly(1)
    assert maps.c_slope(f) == exactly(1)
    assert maps.c_curvature(f) * depth == exactly(0.3)


@pytest.mark.parametrize("eta", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("base", [*SMOOTH, "leaky_relu"])
def test_tat_by_eta_conditions(base, eta):
    f = tat(base, 36, eta=eta, skip_weight=0.3)
    assert maps.network_c_map(f, 0.0, 36, skip_weight=0.3) == exactly(eta)
    assert maps.q_map(f) == exactly(1)
    assert maps.q_slope(f) == exactly(1)
    assert maps.c_slope(f) == exactly(1)


@given(st.floats(1.05, 4.0), st.integers(6, 200), st.floats(0, 0.5))
@settings(deadline=None, max_examples=20)
def test_dks_reaches_the_network_s_slope_through_skips(xi, depth, skip):
    f = dks("gelu", depth, xi, skip)
    block = skip**2 + (1 - skip**2) * float(maps.c_slope(f))
    assert block**depth == pytest.approx(xi, rel=1e-7)


@given(st.floats(0.01, 1), st.integers(1, 200), st.floats(0, 0.9))
@settings(deadline=None, max_examples=30)
def test_tat_leaky_relu_reaches_any_eta_up_to_that_of_relu(share, depth, skip):
    eta = share * float(maps.network_c_map(ShapedActivation("relu"), 0.0, depth, skip))
    f = tat_leaky_relu(depth, eta, skip)
    assert maps.network_c_map(f, 0.0, depth, skip) == exactly(eta)
    assert maps.q_map(f, 3.0) == pytest.approx(3.0, rel=1e-12)
    assert 0 <= f.negative_slope < 1


@pytest.mark.parametrize("skip", [0.0, 0.7])
def test_local_targets_come_from_composed_maps(skip):
    """Slope and curvature of the composed map c ↦ α²c + (1−α²)C(c), by one-sided differences at c = 1."""
    depth, h = 12, 1e-4
    f, g = dks("gelu", depth, 1.5, skip), tat("gelu", depth, tau=0.3, skip_weight=skip)
    c = 1 - h * np.arange(4)
    slope = np.array([11, -18, 9, -2]) / (6 * h)
    curvature = np.array([2, -5, 4, -1]) / h**2
    assert slope @ maps.network_c_map(f, c, depth, skip) == pytest.approx(1.5, rel=1e-6)
    assert curvature @ maps.network_c_map(g, c, depth, skip) == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize(
    ("depth", "constants"),
    [
        (32, (0.319010, 0.242039, -0.180754, 4.540907)),
        (36, (0.298536, 0.244322, -0.177922, 4.841736)),
        (72, (0.205091, 0.252827, -0.167083, 6.988952)),
        (108, (0.165902, 0.255446, -0.163628, 8.616865)),
    ],
)
def test_dks_gelu_golden(depth, constants):
    f = dks("gelu", depth)
    found = (f.input_scale, f.input_shift, f.output_shift, f.output_scale)
    assert found == pytest.approx(constants, abs=5.1e-7)


@pytest.mark.parametrize(
    ("depth", "slope", "scale"),
    [(32, 0.320223, 1.346844), (36, 0.351121, 1.334350), (72, 0.508389, 1.260653), (108, 0.583959, 1.221235)],
)
def test_tat_leaky_relu_golden(depth, slope, scale):
    f = tat_leaky_relu(depth)
    assert f.negative_slope == pytest.approx(slope, abs=5.1e-7)
    assert f.output_scale == pytest.approx(scale, abs=5.1e-7)
    assert tat("leaky_relu", depth) == f


def test_branches_start_at_the_predicted_shift():
    """DKS: φ''² + 2φ'φ''' = 0, so tanh² β₀ = 1/4; TAT: φ''² + √2φ'φ''' = 0, so tanh² β₀ = 1/(3+√2)."""
    assert dks("tanh", 10**6).input_shift == pytest.approx(math.atanh(0.5), abs=1e-4)
    assert tat("tanh", 10**6).input_shift == pytest.approx(math.atanh(1 / math.sqrt(3 + math.sqrt(2))), abs=1e-4)


@pytest.mark.parametrize("base", ["gelu", "tanh", "softplus"])
def test_a_solve_takes_less_than_a_second(base):
    dks(base, 12)  # scipy.optimize is imported by the first
    dks.cache_clear()
    tat.cache_clear()
    for solve in (lambda: dks(base, 36), lambda: tat(base, 36), lambda: tat(base, 36, eta=0.8)):
        start = time.process_time()
        solve()
        assert time.process_time() - start < 1.0


@pytest.fixture(scope="module")
def reference():
    """The authors' `dks` package as (name, method, depth, skip, parameters) -> constants. It reseeds NumPy; undone."""
    state = np.random.get_state()  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform = pytest.importorskip("dks.base.activation_transform")

    def solve(name, method, depth, skip=0.0, **parameters):
        def network(x, local):
            for _ in range(depth):
                x = skip**2 * x + (1 - skip**2) * local(x)
            return x

        key = {"DKS": "dks_params", "TAT": "tat_params"}[method]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = transform._get_activations_params(
                [name], method=method, subnet_max_func=network, **{key: parameters}
            )
        return found[name]

    solve.transform = transform
    yield solve
    np.random.set_state(state)  # noqa: NPY002


ORACLE_NAMES = {"gelu": "gelu_exact", "gelu_tanh": "gelu"}


def assert_same(ours: ShapedActivation, theirs: dict) -> None:
    for name, value in theirs.items():
        assert getattr(ours, name) == pytest.approx(float(value), rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("base", ["gelu", "gelu_tanh", "tanh", "softplus", "leaky_relu"])
def test_dks_agrees_with_the_reference(reference, base, depth):
    theirs = reference(ORACLE_NAMES.get(base, base), "DKS", depth, c_slope_1_target=5.0)
    assert_same(dks(base, depth, xi=5.0), theirs)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("base", ["gelu", "gelu_tanh", "tanh", "softplus"])
def test_tat_agrees_with_the_reference(reference, monkeypatch, base, depth):
    if base == "tanh":  # its own starting points reach the same root, after a search of 6 to 20 s
        starts = {"input_scale": (0.1,), "input_shift": (0.5,), "output_shift": (-0.5,)}
        monkeypatch.setattr(reference.transform, "_ALWAYS_TRY_VALUES", starts)
    theirs = reference(ORACLE_NAMES.get(base, base), "TAT", depth, c_curve_target=0.3)
    assert_same(tat(base, depth), theirs)


@pytest.mark.parametrize(("depth", "eta"), [(12, 0.8), (36, 0.9), (108, 0.9)])
def test_tat_leaky_relu_agrees_with_the_reference(reference, depth, eta):
    assert_same(tat_leaky_relu(depth, eta), reference("leaky_relu", "TAT", depth, c_val_0_target=eta))


def test_skips_agree_with_the_reference(reference):
    assert_same(dks("gelu", 36, 3.0, 0.7), reference("gelu_exact", "DKS", 36, 0.7, c_slope_1_target=3.0))
    assert_same(tat("gelu", 36, skip_weight=0.7), reference("gelu_exact", "TAT", 36, 0.7, c_curve_target=0.3))
    assert_same(tat_leaky_relu(36, 0.8, 0.5), reference("leaky_relu", "TAT", 36, 0.5, c_val_0_target=0.8))


def named_limit(error: ValueError, before: str) -> float:
    return float(str(error).split(before)[1].split("]")[0].split(",")[0].split(" ")[0])


@pytest.mark.parametrize(
    "asked",
    [
        lambda: dks("gelu", 3, xi=50.0),
        lambda: dks("leaky_relu", 2, xi=9.0),
        lambda: dks("softplus", 4, xi=50.0, skip_weight=0.5),
        lambda: tat("leaky_relu", 12),
        lambda: tat("leaky_relu", 6, eta=0.99, skip_weight=0.3),
        lambda: tat("gelu", 12, eta=0.99),
        lambda: tat("softplus", 1, tau=40.0),
    ],
)
def test_a_target_out_of_reach_names_a_call_that_works(asked):
    with pytest.raises(ValueError, match="cannot reach") as caught:
        asked()
    named = re.search(r"skipless\.((?:dks|tat)\([^)]*\))", str(caught.value))[1]
    shaped = eval(named, {"dks": dks, "tat": tat})
    assert maps.q_map(shaped, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("base", ["gelu", "softplus", "leaky_relu", "sin"])
def test_infeasible_xi_names_one_that_works(base):
    with pytest.raises(ValueError, match="cannot reach xi=50") as caught:
        dks(base, 3, xi=50.0)
    limit = named_limit(caught.value, "Take xi below ")
    assert maps.c_slope(dks(base, 3, xi=0.995 * limit)) ** 3 == pytest.approx(0.995 * limit)


def test_infeasible_eta_names_one_that_works():
    for base in ("gelu", "leaky_relu"):
        with pytest.raises(ValueError, match=r"cannot reach eta=0.99 in 12 layers") as caught:
            tat(base, 12, eta=0.99)
        limit = named_limit(caught.value, "lies in (0, ")
        feasible = tat(base, 12, eta=0.999 * limit)
        assert maps.network_c_map(feasible, 0.0, 12) == exactly(0.999 * limit)
    assert tat_leaky_relu(1, 1 / math.pi).negative_slope == pytest.approx(0.0, abs=1e-12)


def test_infeasible_tau_names_one_that_works():
    with pytest.raises(ValueError, match="cannot reach tau=40") as caught:
        tat("softplus", 1, tau=40.0)
    limit = named_limit(caught.value, "take tau below ")
    assert maps.c_curvature(tat("softplus", 1, tau=0.99 * limit)) == pytest.approx(0.99 * limit)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dks("gelu", 36, xi=1.0), "xi > 1"),
        (lambda: dks("gelu", 0), "depth is 0"),
        (lambda: dks("gelu", 36, skip_weight=1.0), "skip_weight is 1.0"),
        (lambda: dks("relu", 36), "'leaky_relu' or a smooth"),
        (lambda: dks("identity", 36), "no constant left"),
        (lambda: dks("gleu", 36), "did you mean 'gelu'"),
        (lambda: tat("gelu", 36, tau=0.0), "tau > 0"),
        (lambda: tat("gelu", 36, eta=0.5, tau=0.3), "not both"),
        (lambda: tat("gelu", 36, eta=1.0), "eta=1"),
        (lambda: tat("leaky_relu", 36, tau=0.3), "infinite"),
        (lambda: tat_leaky_relu(36, 0.0), "eta=0"),
        (lambda: tat_leaky_relu(36, float("nan")), r"cannot reach eta=nan .* in \(0, 0.9791\]"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_local_targets():
    assert local_slope(36, 5.0) ** 36 == pytest.approx(5.0)
    assert (0.98**2 + (1 - 0.98**2) * local_slope(36, 1.5, 0.98)) ** 36 == pytest.approx(1.5)
    assert local_curvature(10, 0.3, 0.6) == pytest.approx(0.3 / 6.4)

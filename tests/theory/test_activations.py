import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.theory.activations import BASE_NAMES, ShapedActivation, odd_factor

SMOOTH = [name for name in BASE_NAMES if name not in ("relu", "leaky_relu")]
X = np.linspace(-6.0, 6.0, 241) + 0.0123


def shaped(base: str) -> ShapedActivation:
    slope = {"negative_slope": 0.3} if base == "leaky_relu" else {}
    return ShapedActivation(base, 0.7, 0.2, -0.1, 1.9, **slope)


@pytest.mark.parametrize("base", BASE_NAMES)
def test_affine_form_of_the_definition(base):
    f = shaped(base)
    plain = ShapedActivation(base, negative_slope=f.negative_slope)
    np.testing.assert_allclose(f(X), 1.9 * (plain(0.7 * X + 0.2) - 0.1), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("base", BASE_NAMES)
def test_derivative_is_the_central_difference(base):
    f, h = shaped(base), 1e-5
    np.testing.assert_allclose(f.derivative(X), (f(X + h) - f(X - h)) / (2 * h), atol=1e-9)


@pytest.mark.parametrize("base", SMOOTH)
def test_second_derivative_is_the_central_difference_of_the_first(base):
    f, h = shaped(base), 1e-5
    difference = (f.derivative(X + h) - f.derivative(X - h)) / (2 * h)
    np.testing.assert_allclose(f.derivative(X, order=2), difference, atol=1e-9)


def test_golden_values():
    at = np.array([1.0])
    golden = {
        "gelu": 0.8413447460685429,
        "gelu_tanh": 0.8411919906082768,
        "silu": 0.7310585786300049,
        "softplus": 1.3132616875182228,
        "sigmoid": 0.7310585786300049,
        "tanh": 0.7615941559557649,
        "identity": 1.0,
        "relu": 1.0,
        "leaky_relu": 1.0,
        "sin": 0.8414709848078965,
    }
    assert set(golden) == set(BASE_NAMES)
    for base, value in golden.items():
        assert ShapedActivation(base)(at)[0] == pytest.approx(value, abs=1e-15)
    assert ShapedActivation("leaky_relu", negative_slope=0.25)(-at)[0] == -0.25


@pytest.mark.parametrize("base", BASE_NAMES)
def test_no_overflow_far_from_the_origin(base):
    far = np.array([-1e3, 1e3])
    with np.errstate(over="raise", invalid="raise"):
        assert np.isfinite(shaped(base)(far)).all()
        assert np.isfinite(shaped(base).derivative(far)).all()


@given(
    st.sampled_from(BASE_NAMES),
    st.lists(st.floats(-10, 10, allow_nan=False), min_size=4, max_size=4),
)
def test_json_round_trip(base, constants):
    f = ShapedActivation(base, *constants)
    assert ShapedActivation(**json.loads(json.dumps(dataclasses.asdict(f)))) == f


def test_numpy_scalars_are_stored_as_python_floats():
    f = ShapedActivation("tanh", np.float64(0.5), np.float32(1))
    assert json.dumps(dataclasses.asdict(f)) == json.dumps(dataclasses.asdict(ShapedActivation("tanh", 0.5, 1)))


def test_unknown_name_lists_names_or_the_nearest():
    with pytest.raises(ValueError, match=r"'zzz'; there are .*, leaky_relu, .*"):
        ShapedActivation("zzz")
    with pytest.raises(ValueError, match=r"'gellu'; did you mean 'gelu'"):
        ShapedActivation("gellu")


def test_refusals():
    with pytest.raises(ValueError, match="'leaky_relu' only"):
        ShapedActivation("gelu", negative_slope=0.1)
    with pytest.raises(ValueError, match="input_scale=nan"):
        ShapedActivation("gelu", input_scale=float("nan"))
    with pytest.raises(ValueError, match="no second derivative"):
        ShapedActivation("relu").derivative(X, order=2)
    with pytest.raises(ValueError, match="order 3"):
        ShapedActivation("tanh").derivative(X, order=3)


@pytest.mark.parametrize("base", BASE_NAMES)
@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_the_odd_factor_is_there_exactly_where_the_odd_part_is_linear(base, shift):
    """φ̂(x) − φ̂(−x) = c·x on a grid, or a curve that no multiple of x comes near."""
    slope = {"negative_slope": 0.3} if base == "leaky_relu" else {}
    f = ShapedActivation(base, 0.7, shift, -0.1, 1.9, **slope)
    odd, factor = f(X) - f(-X), odd_factor(f)
    best = (odd @ X) / (X @ X)
    if factor is None:
        assert np.abs(odd - best * X).max() > 1e-3
    else:
        np.testing.assert_allclose(odd, factor * X, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("activation", "factor"),
    [
        (ShapedActivation("gelu"), 1.0),
        (ShapedActivation("silu"), 1.0),
        (ShapedActivation("relu"), 1.0),
        (ShapedActivation("leaky_relu", negative_slope=0.2), 1.2),
        (ShapedActivation("leaky_relu", negative_slope=1.0, input_shift=3.0), 2.0),
        (ShapedActivation("leaky_relu", negative_slope=-1.0), 0.0),
        (ShapedActivation("identity", input_shift=3.0), 2.0),
        (ShapedActivation("tanh"), None),
        (ShapedActivation("sigmoid"), None),
        (ShapedActivation("gelu", input_shift=0.1), None),
    ],
)
def test_odd_factors(activation, factor):
    assert odd_factor(activation) == factor

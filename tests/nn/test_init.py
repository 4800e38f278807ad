import math

import pytest
import torch

from skipless.nn import init
from skipless.nn.block import MLP
from skipless.theory.activations import ShapedActivation, odd_factor
from skipless.theory.shaping import dks, tat

MIRRORABLE = {
    "gelu": ShapedActivation("gelu"),
    "silu": ShapedActivation("silu"),
    "relu": ShapedActivation("relu"),
    "softplus": ShapedActivation("softplus"),
    "leaky_relu": ShapedActivation("leaky_relu", negative_slope=0.2),
    "tat-leaky_relu": tat("leaky_relu", 36),
    "scaled": ShapedActivation("gelu", input_scale=0.7, output_shift=0.3, output_scale=1.9),
}


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (64, 256)])
def test_orthogonal_keeps_the_mean_square_of_its_input(shape):
    """Σ = XXᵀ/d is carried exactly when the output is at least as wide, and on average otherwise."""
    torch.manual_seed(0)
    weight = init.orthogonal_(torch.empty(shape), gain=1.5).double()
    out_features, in_features = shape
    if out_features >= in_features:
        expected = 2.25 * out_features / in_features * torch.eye(in_features).double()
        torch.testing.assert_close(weight.T @ weight, expected, atol=1e-5, rtol=0)
    else:
        torch.testing.assert_close(weight @ weight.T, 2.25 * torch.eye(out_features).double(), atol=1e-5, rtol=0)
    x = torch.randn(2000, in_features).double()
    ratio = (x @ weight.T).square().mean() / x.square().mean()
    assert ratio.item() == pytest.approx(2.25, rel=0.02)


def test_gaussian_has_fan_in_variance():
    torch.manual_seed(0)
    weight = init.gaussian_(torch.empty(400, 900), gain=2.0)
    assert weight.std().item() == pytest.approx(2.0 / math.sqrt(900), rel=0.01)


def test_meta_weights_are_left_alone():
    assert init.orthogonal_(torch.empty(8, 8, device="meta")).is_meta
    assert init.gaussian_(torch.empty(8, 8, device="meta")).is_meta
    up, down = torch.empty(32, 8, device="meta"), torch.empty(8, 32, device="meta")
    init.mirrored_(up, down)
    assert up.is_meta


@pytest.mark.parametrize("name", MIRRORABLE)
@pytest.mark.parametrize("hidden", [32, 64, 48])
def test_a_mirrored_mlp_is_a_rotation_whatever_its_input(name, hidden):
    """W₂ φ(W₁x) = Rx with RRᵀ = I, far from the origin too, and its Jacobian is R. (torch's softplus is x above 20.)"""
    torch.manual_seed(0)
    mlp = MLP(16, hidden, MIRRORABLE[name]).double()
    mlp.reset_mirrored()
    x = 3.0 * torch.randn(40, 16).double()
    y = mlp(x)
    rotation = torch.linalg.lstsq(x, y).solution
    torch.testing.assert_close(x @ rotation, y, atol=1e-12, rtol=0)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(16).double(), atol=1e-12, rtol=0)
    jacobian = torch.autograd.functional.jacobian(mlp, x[0])
    torch.testing.assert_close(jacobian, rotation.T, atol=1e-12, rtol=0)


def test_mirrored_matrices_at_the_usual_hidden_width():
    """Singular values 2 and 1, as those of the scale-corrected orthogonal matrices; units in pairs of opposite sign."""
    torch.manual_seed(0)
    mlp = MLP(16, 64, ShapedActivation("gelu")).double()
    mlp.reset_mirrored()
    up, down = mlp.up.weight, mlp.down.weight
    torch.testing.assert_close(up.T @ up, 4.0 * torch.eye(16).double())
    torch.testing.assert_close(down @ down.T, torch.eye(16).double())
    assert torch.equal(up[:32], -up[32:])
    assert torch.equal(down[:, :32], -down[:, 32:])
    pairs, rotation = up[:32] / math.sqrt(2.0), down @ up / 2.0 / math.sqrt(2.0)
    again = init.mirrored(pairs, math.sqrt(2.0) * rotation)
    torch.testing.assert_close(again, (up.detach(), down.detach()))


def test_pairs_part_at_the_first_update():
    torch.manual_seed(0)
    mlp = MLP(16, 64, ShapedActivation("gelu")).double()
    mlp.reset_mirrored()
    mlp(torch.randn(9, 16).double()).square().mul(torch.randn(9, 16).double()).sum().backward()
    gradient = mlp.up.weight.grad
    assert (gradient[:32] + gradient[32:]).abs().max() > 0.1 * gradient.abs().max()


@pytest.mark.parametrize(("hidden", "nearest"), [(33, 34), (24, 32), (31, 32)])
def test_odd_or_too_few_hidden_units_cannot_be_mirrored(hidden, nearest):
    with pytest.raises(ValueError, match=f"hidden={nearest}"):
        init.mirrored_(torch.empty(hidden, 16), torch.empty(16, hidden))


def test_streams_are_rotated_each_in_itself():
    up, down = torch.empty(64, 16, dtype=torch.float64), torch.empty(16, 64, dtype=torch.float64)
    init.mirrored_(up, down, streams=4)
    x = torch.randn(5, 16, dtype=torch.float64)
    rotation = down @ torch.relu(up)
    assert rotation[~torch.block_diag(*torch.ones(4, 4, 4)).bool()].abs().max() < 1e-12
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.relu(x @ up.mT) @ down.mT, x @ rotation.mT)
    with pytest.raises(ValueError, match="streams=3 does not divide the width 16"):
        init.mirrored_(up, down, streams=3)


def test_an_activation_whose_odd_part_is_curved_cannot_be_mirrored():
    with pytest.raises(ValueError, match="tanh"):
        MLP(16, 64, ShapedActivation("tanh")).reset_mirrored()


@pytest.mark.parametrize("name", MIRRORABLE)
def test_the_odd_factor_is_that_of_the_torch_activation(name):
    x = torch.linspace(-9.0, 9.0, 101).double()
    phi = MLP(1, 1, MIRRORABLE[name]).activation
    torch.testing.assert_close(phi(x) - phi(-x), odd_factor(MIRRORABLE[name]) * x, atol=1e-13, rtol=1e-13)


def test_smooth_dks_has_no_odd_factor():
    assert odd_factor(dks("gelu", 36)) is None

import math

import pytest
import torch

from skipless.nn import init


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

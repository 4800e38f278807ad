"""A sub-block is Eq. 1 with its norm where it is asked for, and its weights may be set or trained."""

import pytest
import torch
from torch import nn

from skipless.nn.block import MLP, SubBlock
from skipless.theory.activations import ShapedActivation
from skipless.theory.propagation import Skip

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def sub_block(skip: Skip, norm: str) -> SubBlock:
    """Around a linear map, with a norm whose gains have moved."""
    torch.manual_seed(1)
    block = SubBlock(nn.Linear(8, 8), 8, skip, norm).double()
    if norm != "none":
        nn.init.uniform_(block.norm.weight, 0.5, 2.0)
    return block


def normalised(block: SubBlock, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * block.norm.weight


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(("shortcut", "residual"), [(0.0, 1.0), (1.0, 1.0), (0.6, 0.8), (1.0, 0.0), (-0.5, 1.0)])
def test_weights_and_norm_stand_where_the_equation_has_them(shortcut, residual, trainable):
    skip = Skip(shortcut, residual, trainable)
    plain, pre, post = (sub_block(skip, norm) for norm in ("none", "pre", "post"))
    torch.testing.assert_close(plain(X), shortcut * X + residual * plain.inner(X))
    torch.testing.assert_close(pre(X), shortcut * X + residual * pre.inner(normalised(pre, X)))
    torch.testing.assert_close(post(X), normalised(post, shortcut * X + residual * post.inner(X)))


def test_a_trained_weight_goes_back_to_its_start():
    block = sub_block(Skip(1.0, 0.25, trainable=True), "pre")
    with torch.no_grad():
        block.residual.fill_(3.0)
    block.reset_parameters()
    assert block.residual.item() == 0.25
    assert torch.equal(block.norm.weight, torch.ones(8, dtype=torch.float64))


def test_an_mlp_takes_an_activation_by_its_bare_name():
    mlp, same = MLP(8, 16, "gelu").double(), MLP(8, 16, ShapedActivation("gelu")).double()
    same.load_state_dict(mlp.state_dict())
    assert torch.equal(mlp(X), same(X))


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        ("gleu", r"no activation 'gleu'; did you mean 'gelu'\? \(one of your own"),
        ("dks-gelu", r"'dks-gelu', which is solved for a depth: give skipless\.dks\('gelu', depth\)"),
        (nn.GELU(), r"the activation is GELU\(approximate='none'\); it must be a name such as 'gelu'"),
    ],
)
def test_an_activation_that_is_none_is_named_before_anything_runs(activation, words):
    with pytest.raises(ValueError, match=words):
        MLP(8, 16, activation)

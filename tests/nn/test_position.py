import pytest
import torch

from skipless.nn.position import RelativePosition
from skipless.ops.attention import Rotation
from skipless.ops.layout import Layout


def test_rotated_products_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()

    def product(i, j):
        turned = [Rotation.at(torch.tensor([[n]]), 16).rotate(x) for n, x in ((i, q), (j, k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(7, 3), product(104, 100), atol=1e-5, rtol=0)
    torch.testing.assert_close(product(0, 0), (q * k).sum())


def test_rotation_keeps_norms_and_starts_as_the_identity():
    x = torch.randn(2, 3, 5, 8).double()
    turned = Rotation.at(torch.arange(5)[None], 8).rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])


def test_an_odd_head_width_is_refused():
    with pytest.raises(ValueError, match=r"head_width is 7; .* use 8"):
        Rotation.at(torch.arange(3)[None], 7)


def test_relative_terms_are_those_of_transformer_xl():
    """(q_i+v)·W_KR R_{i−j} + u·k_j over √d_k, entry by entry."""
    torch.manual_seed(0)
    module = RelativePosition(width=12, heads=2, head_width=6).double()
    torch.nn.init.normal_(module.content_bias)
    torch.nn.init.normal_(module.position_bias)
    q, k = torch.randn(1, 2, 4, 6).double(), torch.randn(1, 2, 4, 6).double()
    scores = module(q, k, Layout.continuing(0, 4))
    for h in range(2):
        for i in range(4):
            for j in range(4):
                sinusoid = module._sinusoids(torch.tensor([i - j])).double()
                key = module.key(sinusoid).view(2, 6)[h]
                expected = (q[0, h, i] + module.position_bias[h]) @ key + module.content_bias[h] @ k[0, h, j]
                torch.testing.assert_close(scores[0, h, i, j], expected / 6**0.5)


def test_relative_terms_start_at_zero_with_zero_queries():
    module = RelativePosition(width=12, heads=2, head_width=6)
    module.reset_parameters()
    scores = module(torch.zeros(1, 2, 4, 6), torch.randn(1, 2, 4, 6), Layout.continuing(0, 4))
    assert (scores == 0).all()

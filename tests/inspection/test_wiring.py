"""What the watch over a block sees: the scale of scores, heads, activations, and what doubling the input does."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skipless.inspection.wiring import Wired, Wiring

WIDTH, HEADS, LENGTH = 32, 4, 12


class Block(nn.Module):
    """Each slip has its own word in `slip`."""

    def __init__(self, slip: str = "", fused: bool = True):
        super().__init__()
        self.norm, self.slip, self.fused = nn.LayerNorm(WIDTH), slip, fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def _cut(self, x: Tensor) -> Tensor:
        if self.slip == "values":
            return x.reshape(len(x), HEADS, LENGTH, -1)
        return x.view(len(x), LENGTH, HEADS, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self._cut, self.qkv(self.norm(x)).chunk(3, -1))
        scale = 1.0 if self.slip == "scale" else q.shape[-1] ** -0.5
        by_hand = (q @ k.mT * scale).softmax(-1) @ v if not self.fused else None
        y = F.scaled_dot_product_attention(q, k, v, scale=scale) if by_hand is None else by_hand
        y = y.reshape(x.shape) if self.slip == "result" else y.transpose(1, 2).reshape(x.shape)
        x = (self.norm(x) if self.slip == "norm" else 2 * x if self.slip == "twice" else x) + self.out(y)
        hidden = self.up(self.norm(x))
        hidden = hidden if self.slip == "linear" else F.relu(hidden, inplace=True)
        return x + self.down(hidden)


def wired(block: nn.Module) -> Wired:
    watch, x = Wiring([block]), torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with watch.around():
            plain = block(x)
        with watch.doubled():
            twice = block(x)
    assert torch.equal(plain[:2], twice[:2])
    assert torch.equal(twice[2], block(2 * x)[2])
    return watch.found[0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_sound_block(fused):
    """An activation in place counts as one."""
    torch.manual_seed(0)
    found = wired(Block(fused=fused))
    assert found.scale == pytest.approx(1.0, rel=1e-4)
    assert found.mixed == ""
    assert found.straight is None
    assert found.gain == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("slip", "field", "expected"),
    [
        ("scale", "scale", pytest.approx((WIDTH // HEADS) ** 0.5, rel=1e-4)),
        ("result", "mixed", "result"),
        ("values", "mixed", "values"),
        ("linear", "straight", ("up.weight", "down.weight")),
        ("norm", "gain", pytest.approx(0.0, abs=0.02)),
        ("twice", "gain", pytest.approx(2.0, abs=0.02)),
    ],
)
def test_a_slip_shows_in_its_own_number(slip, field, expected, fused):
    torch.manual_seed(0)
    assert getattr(wired(Block(slip, fused)), field) == expected


def test_a_block_that_reads_zeros_is_not_called_mixed():
    """Zeros look the same in any order."""
    block = Block()
    nn.init.zeros_(block.qkv.weight)
    nn.init.zeros_(block.qkv.bias)
    assert wired(block).mixed == ""


def test_a_gain_that_may_be_chance_is_not_given():
    class Loud(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 100 * torch.sin(37 * x)

    assert wired(Loud()).gain is None

"""One block that differs from all others is pointed out, by what it holds and by what it calls; and norms are asked."""

import pytest
import torch
import transformers
from tests.inspection.catalogue import build
from tests.inspection.mistakes import ARCHITECTURES
from torch import nn
from torch.nn import functional as F

from skipless.inspection.inspect import inspect
from skipless.inspection.wiring import idle_norms


@pytest.fixture
def minigpt():
    return build(ARCHITECTURES["minigpt"])


def epsilon(block) -> None:
    block.ln2.eps = 1e-3


def activation(block) -> None:
    block.activation = nn.SiLU()


def mask(block) -> None:
    block.attn.tril[5, 0] = False


def bias(block) -> None:
    nn.init.constant_(block.ln1.bias, 0.1)


def matrix(block) -> None:
    block.fc.weight.data *= 2.0


def norm(block) -> None:
    block.ln1.weight.data *= 1.1


def added(block) -> None:
    block.register_forward_hook(lambda module, args, out: out + 1e-3 * out)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (epsilon, "ln2.eps of block 3 (blocks.2) differs from that of the other blocks: it is 0.001, and 1e-05"),
        (activation, "activation of block 3 (blocks.2) is a SiLU, where all other blocks have a GELU"),
        (mask, "attn.tril, a buffer of block 3 (blocks.2), holds other values"),
        (bias, "ln1.bias (where theirs are zero)"),
        (matrix, "fc.weight (2 times larger)"),
        (norm, "ln1.weight (1.1 times larger)"),
        (added, "It has, beyond theirs: a sum (add); a product (mul(0.001))."),
    ],
)
def test_the_odd_block_is_noted(minigpt, change, words):
    with torch.no_grad():
        change(minigpt.model.blocks[2])
    found = inspect(minigpt.model, minigpt.batch)
    assert found.healthy
    assert any(words in note and "block 3 (blocks.2)" in note.lower() for note in found.notes), found.notes


def test_of_two_halves_the_one_unlike_its_blocks_is_odd(minigpt):
    blocks = minigpt.model.blocks
    with torch.no_grad():
        for block in blocks[len(blocks) // 2 :]:
            block.fc.weight *= 12.0
    found = inspect(minigpt.model, minigpt.batch)
    assert found.verdict.block == len(blocks) // 2 + 1
    assert "fc.weight" in found.verdict.text
    assert "larger than those of the other blocks" in found.verdict.text


def test_a_branch_that_adds_what_it_reads_is_no_factor_on_the_shortcut():
    """As trained networks learn to: twice the input goes in, and the shortcut hands on just that."""
    torch.manual_seed(0)
    stack = nn.ModuleList([Adding(16) for _ in range(6)])
    assert inspect(nn.Sequential(nn.Linear(16, 16), *stack), torch.randn(2, 12, 16)).healthy
    stack[1].share = 8.0
    found = inspect(nn.Sequential(nn.Linear(16, 16), *stack), torch.randn(2, 12, 16))
    assert found.blocks[2].coefficient > 2
    assert found.healthy
    stack[1].shortcut = 2.0
    assert "with a factor of" in inspect(nn.Sequential(nn.Linear(16, 16), *stack), torch.randn(2, 12, 16)).verdict.text


class Adding(nn.Module):
    """Attention, and beside it a branch that adds a share of what it reads, normalised."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.share, self.shortcut = 0.0, 1.0

    def forward(self, x):
        y = self.norm(x)
        return self.shortcut * x + self.attention(y, y, y, need_weights=False)[0] + self.share * y


def test_no_shortcut_in_any_block_is_noted():
    case = build(ARCHITECTURES["minigpt"])
    for block in case.model.blocks:
        block.register_forward_hook(lambda module, args, out: out - args[0])
    found = inspect(case.model, case.batch)
    assert any("No block carries its input on" in note for note in found.doubts) or found.verdict.lost


@pytest.mark.parametrize("change", [epsilon, activation, mask, bias, matrix, norm, added])
def test_where_every_other_block_has_it_nothing_is_odd(minigpt, change):
    with torch.no_grad():
        for block in minigpt.model.blocks[::2]:
            change(block)
    assert inspect(minigpt.model, minigpt.batch).doubts == ()


def test_two_blocks_of_one_number_are_noted():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    assert inspect(model, torch.randint(0, 64, (3, 12))).doubts == ()
    model.model.layers[2].self_attn.layer_idx = 1
    (note,) = inspect(model, torch.randint(0, 64, (3, 12))).doubts
    assert "model.layers.1, model.layers.2 have the same self_attn.layer_idx, 1" in note


class NormOverLocations(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x.mT, x.shape[1:2]).mT


class IdleNorm(nn.LayerNorm):
    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize(
    ("norm", "idle"),
    [
        (nn.LayerNorm(8), False),
        (nn.RMSNorm(8), False),
        (nn.LayerNorm(8, eps=1e-2), False),
        (nn.LayerNorm(8, eps=4.0), True),
        (NormOverLocations(8), True),
        (IdleNorm(8), True),
        (nn.BatchNorm1d(8), False),  # it is not to normalise locations by themselves
    ],
)
def test_a_norm_that_does_not_normalise_is_told(norm, idle):
    if isinstance(norm, nn.LayerNorm):
        nn.init.normal_(norm.weight)
    assert idle_norms([[("norm", norm.eval())]]) == [("norm",) if idle else ()]

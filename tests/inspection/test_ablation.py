"""Blocks dropped, swapped and read, outliers, and blocks run backwards: each against the same thing done by hand."""

import pytest
import torch
from torch import nn

from skipless.inspection import ablation
from skipless.inspection.inverse import recomputed
from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.theory.schemes import ExponentialSPA

ROWS = torch.randint(300, (18, 25), generator=torch.Generator().manual_seed(0))
MIRRORED = {"mlp_init": "mirrored", "activation": "gelu", "scheme": ExponentialSPA(0.05, 0.008)}


def network(name: str = "e-spa", depth: int = 5, **changes) -> Transformer:
    torch.manual_seed(0)
    sizes = {"width": 32, "heads": 2, "depth": depth, "vocab_size": 300, "length": 24}
    return Transformer(preset(f"wikitext103/{name}", **sizes, **changes)).eval()


def by_hand(model: Transformer, blocks: list[nn.Module]) -> float:
    with torch.no_grad():
        x = model.embed(ROWS[:, :-1])
        positions = model.positions(x)
        for block in blocks:
            x = block(x, positions)
        logits = model.logits(model.norm(x)).flatten(0, 1)
        return float(nn.functional.cross_entropy(logits, ROWS[:, 1:].flatten()))


@pytest.mark.parametrize("name", ["e-spa", "pre-ln"])
def test_dropped_and_swapped_blocks_are_those_left_out_and_exchanged(name):
    model = network(name)
    blocks = list(model.blocks)
    assert ablation.text_loss(model, ROWS) == pytest.approx(by_hand(model, blocks), rel=1e-5)
    dropped, swapped = ablation.dropped_losses(model, ROWS), ablation.swapped_losses(model, ROWS)
    assert (len(dropped), len(swapped)) == (5, 4)
    for at in range(5):
        assert dropped[at] == pytest.approx(by_hand(model, blocks[:at] + blocks[at + 1 :]), rel=1e-5)
    for at in range(4):
        order = [*blocks[:at], blocks[at + 1], blocks[at], *blocks[at + 2 :]]
        assert swapped[at] == pytest.approx(by_hand(model, order), rel=1e-5)
    assert list(model.blocks) == blocks


def test_a_block_that_does_nothing_can_be_spared():
    model = network("pre-ln")
    attention, mlp = model.blocks[2].layers()
    nn.init.zeros_(attention.output.weight)
    nn.init.zeros_(mlp.down.weight)
    loss, dropped = ablation.text_loss(model, ROWS), ablation.dropped_losses(model, ROWS)
    assert dropped[2] == pytest.approx(loss, rel=1e-6)
    assert abs(dropped[0] - loss) > 1e-3


def test_what_is_read_after_the_last_block_is_the_networks_own_loss():
    model = network()
    losses = ablation.readout_losses(model, ROWS, ROWS)
    assert len(losses) == 6
    assert losses[-1] == pytest.approx(ablation.text_loss(model, ROWS), rel=1e-3)


def test_what_is_linear_can_be_read_from_every_block():
    """Without mixing and nonlinearity every state is a linear map of the input."""
    model = network(**MIRRORED)
    for block in model.each_block():
        block.attention.forward = lambda x, *_: x
    losses = ablation.readout_losses(model, ROWS, ROWS)
    assert losses == pytest.approx([losses[-1]] * 6, rel=1e-4)


def test_outliers_are_of_what_enters_the_matrices():
    model = network("pre-ln")
    with torch.no_grad():
        model.blocks[3].mlp.norm.weight[7] = 100.0
    found = ablation.outliers(model, ROWS)
    assert max(range(5), key=lambda at: found[at].kurtosis) == 3
    seen = []
    hook = model.blocks[3].layers()[1].up.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model.hidden(ROWS[:, :-1])
    hook.remove()
    x = seen[0].double()
    power = x.pow(2).mean()
    assert found[3].kurtosis == pytest.approx(float(x.pow(4).mean() / power**2), rel=1e-5)
    assert found[3].largest == pytest.approx(float(x.abs().max() / power.sqrt()), rel=1e-5)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("values", ["trained", "identity"])
def test_a_mirrored_network_starts_invertible(values):
    model = network(depth=12, value_output=values, **MIRRORED).double()
    found = recomputed(model, ROWS[:2, :-1])
    assert (len(found.alone), len(found.chained)) == (12, 12)
    assert max(found.alone) < 1e-12
    assert max(found.chained) < 1e-11


def test_a_mirrored_network_off_its_start_takes_sweeps():
    """Queries and MLPs that have moved: one sweep no longer does, twenty do."""
    model = network(depth=4, **MIRRORED).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    once, often = recomputed(model, ROWS[:2, :-1], sweeps=2), recomputed(model, ROWS[:2, :-1], sweeps=40)
    assert min(once.alone) > 1e-4
    assert max(often.alone) < 1e-6


def test_skips_are_inverted_where_the_branch_is_a_contraction():
    model = network("e-spa-skip", depth=36).double()
    assert max(recomputed(model, ROWS[:2, :-1], sweeps=60).chained) < 1e-6


def test_what_cannot_be_inverted_is_named():
    with pytest.raises(ValueError, match="a norm without a skip cannot be inverted"):
        recomputed(network("e-spa-ln"), ROWS[:2, :-1])
    with pytest.raises(ValueError, match="only causal attention without gains on values"):
        recomputed(network("v-skipinit", activation="identity"), ROWS[:2, :-1])

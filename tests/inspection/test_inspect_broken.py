"""Zeros and what is not a number are never taken for a healthy signal, forward or backward."""

import math

import pytest
import torch

import skipless
from skipless.inspection.callback import SignalCallback
from skipless.inspection.inspect import inspect
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.schemes import ExponentialSPA, StandardAttention


def network(scheme=None, depth: int = 24) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "width": 64, "heads": 4, "length": 16}
    return Transformer(ModelConfig(**sizes, depth=depth, hidden=0, scheme=scheme or ExponentialSPA()))


IDS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def test_a_location_of_norm_zero_does_not_hide_a_collapse():
    model, ids = network(StandardAttention()), IDS.clone()
    whole = inspect(model, ids)
    with torch.no_grad():
        model.embedding.weight[0] = 0
    ids[0, 0] = 0
    found = inspect(model, ids)
    assert found.verdict.kind == whole.verdict.kind == "collapse"
    assert found.verdict.block == pytest.approx(whole.verdict.block, abs=2)
    with pytest.raises(AssertionError, match="Rank collapse at block"):
        skipless.assert_signal_preserved(model, ids)


def test_one_location_alone_is_no_signal():
    model = network(depth=4)
    alone = torch.zeros(16, 1)
    alone[-1] = 1.0
    model.blocks[1].register_forward_hook(lambda module, args, out: out * alone)
    found = inspect(model, IDS)
    assert (found.verdict.kind, found.verdict.block) == ("vanishing", 2)
    assert "at most one location" in found.verdict.text


def poisoned(value: float):
    """A hook that multiplies the gradient of one location of one row."""
    factor = torch.ones(2, 16, 1)
    factor[1, 3] = value

    def hook(module, args, out):
        out.register_hook(lambda gradient: gradient * factor)

    return hook


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("block", [1, 3, 6])
def test_gradients_that_are_not_finite_are_a_loss_and_named(value, block):
    model = network(depth=6)
    model.blocks[block - 1].register_forward_hook(poisoned(value))
    found = inspect(model, IDS, labels=IDS)
    assert (found.verdict.kind, found.verdict.block) == ("explosion", block), found.verdict.text
    assert "not finite" in found.verdict.text
    assert not math.isfinite(found.locations["gradient"][0, 3])
    with pytest.raises(AssertionError, match=f"not finite at block {block}"):
        skipless.assert_signal_preserved(model, IDS)


def test_a_loss_that_is_not_a_number_is_a_loss():
    with pytest.raises(AssertionError, match=r"not finite at block 4.*look at the head and at the loss"):
        skipless.assert_signal_preserved(network(depth=4), IDS, loss=lambda logits: logits.sum() * math.nan)


def test_a_stream_that_is_cut_between_two_blocks_names_both():
    model = network(depth=4)
    model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
    found = inspect(model, IDS)
    assert (found.verdict.kind, found.verdict.block) == ("vanishing", 3)
    assert found.verdict.text.startswith("No gradient passes from block 2 (blocks.1) to block 3 (blocks.2): ")
    assert "blocks.1 and blocks.2 for detach()" in found.advice
    assert not found.doubts  # what is before the cut gets no gradient either, and that is not another fault


def test_a_first_block_that_cuts_its_input_off_is_named():
    model = network(depth=4)
    kind = type(model.blocks[0])
    reading = type(kind.__name__, (kind,), {"forward": lambda self, x, *given: kind.forward(self, x.detach(), *given)})
    model.blocks[0].__class__ = reading
    found = inspect(model, IDS)
    assert (found.verdict.kind, found.verdict.block) == ("vanishing", 1)
    assert "Look in blocks.0 for detach()" in found.advice


@pytest.mark.parametrize("factor", [1e-5, 1e5])
def test_a_factor_on_the_gradient_of_the_first_block_is_named(factor):
    model = network(depth=1)
    with torch.no_grad():
        model.embedding.weight *= 0.02  # which makes its gradient larger by as much
    assert inspect(model, IDS).healthy
    model.blocks[0].register_forward_hook(lambda module, args, out: Scaled.apply(out, factor))
    found = inspect(model, IDS)
    assert found.verdict.lost
    assert "Gradients" in found.verdict.text


class Scaled(torch.autograd.Function):
    """Nothing on the way there, a factor on the way back."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def test_locations_on_one_line_are_told_where_rows_differ():
    model = network(depth=4)
    line = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(1)), dim=0)
    model.blocks[1].register_forward_hook(lambda module, args, out: (out @ line)[..., None] * line)
    found = inspect(model, IDS)
    assert (found.verdict.kind, found.verdict.block) == ("collapse", 2)
    assert "on one line" in found.verdict.text


def test_a_parameter_that_is_not_finite_comes_first_in_the_verdict():
    model = network(depth=4)
    name = next(name for name, _ in model.blocks[2].named_parameters())
    with torch.no_grad():
        model.blocks[2].get_parameter(name).fill_(math.nan)
    found = inspect(model, IDS)
    assert found.verdict.text.startswith(f"{name} of block 3 (blocks.2) holds entries that are not finite")
    assert f"blocks.2.{name} again" in found.advice


def test_a_gradient_of_zero_is_said():
    with pytest.raises(AssertionError, match=r"all zero at block 4.*look at the head and at the loss"):
        skipless.assert_signal_preserved(network(depth=4), IDS, loss=lambda logits: logits.sum() * 0.0)


def test_a_step_that_diverges_is_logged_as_lost():
    model = network(depth=4)
    callback = SignalCallback(model, every=1, budget=1.0)
    logged = []
    for ids in (IDS, IDS):
        callback.start(len(logged))
        (model(ids).sum() * math.nan).backward()
        logged.append(callback.finish(len(logged)))
        callback._started -= 60.0  # so that a busy machine does not take the second step past the budget
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += parameter.grad  # from here on everything is NaN, the embedding too
    assert [metrics["signal/lost_block"] for metrics in logged] == [4, 1]

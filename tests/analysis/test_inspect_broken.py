"""Zeros and what is not a number are never taken for a healthy signal, forward or backward."""

import pytest
import torch

import skipless
from skipless.analysis.inspect import inspect
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

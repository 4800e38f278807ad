"""Rows are told from locations in every layout: batch first, batch second, and transposed inside a block."""

import pytest
import torch
from torch import nn

from skipless.inspection.callback import SignalCallback
from skipless.inspection.inspect import inspect

ROWS, LENGTH, WIDTH = 8, 24, 32


class Block(nn.Module):
    """Attention without a shortcut, whose module has the batch second as is torch's default."""

    def __init__(self, transposing: bool):
        super().__init__()
        self.transposing = transposing
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1) if self.transposing else x
        x = self.attention(x, x, x, need_weights=False)[0] * 4.0
        return x.transpose(0, 1) if self.transposing else x


class Network(nn.Module):
    """Reads ids (rows, T); the stream between its blocks is (T, rows, width) unless they transpose themselves."""

    def __init__(self, transposing: bool):
        super().__init__()
        self.transposing = transposing
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(transposing) for _ in range(8))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(input_ids)
        x = x if self.transposing else x.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x if self.transposing else x.transpose(0, 1)


def network(transposing: bool) -> Network:
    torch.manual_seed(0)
    return Network(transposing)


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("transposing", [True, False])
def test_a_collapse_is_seen_wherever_the_batch_stands(transposing):
    model, ids = network(transposing), tokens()
    found = inspect(model, ids)
    assert found.locations["norm"].shape == (9, LENGTH)
    assert found.locations["gradient"].shape == (9, LENGTH)
    with torch.no_grad():
        unit = nn.functional.normalize(model(ids).double(), dim=-1)
    mean = ((unit @ unit.mT).sum((1, 2)) - LENGTH) / (LENGTH * (LENGTH - 1))
    assert found.blocks[-1].cosine_mean == pytest.approx(float(mean.mean()), abs=1e-5)
    assert found.verdict.kind == "collapse"


def test_the_mask_tells_as_well():
    mask = torch.ones(ROWS, LENGTH)
    mask[0, 20:] = 0
    found = inspect(network(True), {"input_ids": tokens(), "attention_mask": mask})
    assert found.locations["norm"].shape == (9, LENGTH)


def test_torchs_own_layers_say_it_themselves():
    """Ids of a network that has the batch second throughout are (T, rows)."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    found = inspect(nn.Sequential(nn.Embedding(50, WIDTH), encoder), tokens().T)
    assert found.locations["norm"].shape == (4, LENGTH)


def test_a_training_step_tells_by_its_own_batch():
    model = network(True)
    callback = SignalCallback(model)
    with callback.around(0):
        model(tokens()).square().sum().backward()
    found = callback.history[0][1]
    assert found.locations["norm"].shape == (9, LENGTH)
    assert found.verdict.kind == "collapse"

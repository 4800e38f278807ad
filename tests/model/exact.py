"""Small networks in float64, of which theory is true to rounding, and what is asked of every kind of them."""

import math

import numpy as np
import torch

from skipless.model import kernel_maps
from skipless.model.config import ModelConfig
from skipless.model.generate import KVCache, decode
from skipless.model.transformer import Transformer
from skipless.theory import kernels, propagation


def build(config: ModelConfig, *, moved: float = 0.0, impl: str = "reference") -> Transformer:
    """In float64 from the start: matrices that are rounded to float32 are orthogonal to 1e-7 only.

    Away from the start where `moved` says so.
    """
    torch.manual_seed(0)
    model = Transformer(config, impl=impl).double()
    model.reset_parameters()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(moved * torch.randn_like(parameter))
    return model


def tokens_of(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def states_by_block(model: Transformer, tokens: torch.Tensor) -> list[np.ndarray]:
    """X_0 … X_L of the first row, in float64: (T, width)."""
    states, positions = [model.embed(tokens)], model.positions(tokens)
    for block in model.each_block():
        states.append(block(states[-1], positions))
    return [state[0].double().numpy() for state in states]


def kernels_by_block(model: Transformer, tokens: torch.Tensor) -> list[np.ndarray]:
    """Σ_0 … Σ_L measured on one sequence."""
    return [kernels.of_activations(state) for state in states_by_block(model, tokens)]


def check_kernels(model: Transformer, tokens: torch.Tensor) -> None:
    """Given its own Σ_0, one network has the kernels of theory at every block."""
    measured = kernels_by_block(model, tokens)
    predicted = propagation.forward(kernel_maps.kernel_blocks(model.config), measured[0])
    assert len(measured) == model.config.depth + 1
    for found, expected in zip(measured, predicted, strict=True):
        assert np.abs(found - expected).max() < 1e-10


def attention_by_hand(model: Transformer, index: int, x: torch.Tensor) -> torch.Tensor:
    """A block's attention without W_V and W_O, head by head from theory's dense bias; readers are added through W_O."""
    attention = model.blocks[index].attention.inner
    heads, length, wide = model.config.heads, x.shape[1], attention.head_width
    shapes = getattr(attention.shape, "shapes", (attention.shape,) * attention.heads)
    rotation = model.positions(x).rotation
    given = []
    for head, shape in enumerate(shapes):
        rows, own = (slice(number * wide, (number + 1) * wide) for number in (head, head - heads))
        bias = torch.from_numpy(np.where(np.tri(length, dtype=bool), shape.bias(length), 0.0))
        scale = torch.from_numpy(shape.row_scale(length))
        q, k = (rotation.rotate((x @ w.weight[rows].mT)[:, None])[:, 0] for w in (attention.query, attention.key))
        scores = q @ k.mT / math.sqrt(wide) + attention.bias_gain[head] * bias
        weights = scale[:, None] * scores.masked_fill(~torch.ones(length, length).tril().bool(), -math.inf).softmax(-1)
        given.append(weights @ (x[..., rows] if head < heads else x @ attention.value.weight[own].mT))
    carried, read = torch.cat(given[:heads], -1), given[heads:]
    return carried + torch.cat(read, -1) @ attention.output.weight.mT if read else carried


def check_attention(config: ModelConfig, impl: str) -> None:
    """Attention is what its heads give written out, and so are gradients of the input and every matrix and gain."""
    model = build(config, moved=0.1, impl=impl)
    attention = model.blocks[1].attention
    x = torch.randn(2, 24, 32, dtype=torch.float64, requires_grad=True)
    wanted = [x, *attention.parameters()]
    outputs = [attention(x, model.positions(x)), attention_by_hand(model, 1, x)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), wanted) for out in outputs]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.any()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@torch.no_grad()
def check_cache(config: ModelConfig) -> KVCache:
    """Logits of a row decoded in three parts are those of the whole row; the cache that held it."""
    model, tokens = build(config, moved=0.05), tokens_of()
    cache, parts, start = KVCache(config.depth, capacity=24), [], 0
    for count in (9, 1, 14):
        parts.append(decode(model, tokens[:, start : start + count], cache))
        start += count
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-12)
    return cache

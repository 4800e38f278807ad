"""Readers: heads with W_V and W_O of their own beside those that carry the stream."""

import math

import numpy as np
import pytest
import torch

from skipless.inspection import inverse
from skipless.model import kernel_maps
from skipless.model.config import ModelConfig
from skipless.model.fold import FoldedTransformer, fold
from skipless.model.generate import KVCache, decode
from skipless.model.transformer import Transformer
from skipless.nn.attention import AttentionOptions, ShapedAttention
from skipless.theory import kernels, propagation
from skipless.theory.schemes import ExponentialSPA, Scheme, UniformSPA, ValueSkipInit
from skipless.theory.shaping import tat
from skipless.training.config import OptimizerConfig
from skipless.training.optim.build import build_optimizer

SCHEMES = {"e-spa": ExponentialSPA(0.05, 0.02), "u-spa": UniformSPA(0.6, 0.02)}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def config_of(scheme: str | Scheme = "e-spa", **fields) -> ModelConfig:
    sizes = {"vocab_size": 64, "width": 32, "depth": 4, "heads": 4, "length": 24, "readers": 2}
    kind = {"mlp_init": "mirrored", "value_output": "identity", "bias_gain": True}
    chosen = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    return ModelConfig(**{**sizes, **kind, "scheme": chosen, **fields})


def build(config: ModelConfig, *, moved: float = 0.0, impl: str = "reference") -> Transformer:
    """In float64; away from its start where `moved` says so."""
    torch.manual_seed(0)
    model = Transformer(config, impl=impl).double()
    model.reset_parameters()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(moved * torch.randn_like(parameter))
    return model


def tokens_of(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(1))


@each_scheme
def test_one_network_has_the_kernels_of_theory_at_every_block(scheme):
    """Readers add nothing at the start: what holds without them holds with them, to rounding."""
    config, tokens = config_of(scheme, depth=36), tokens_of(1)
    model = build(config)
    states, positions = [model.embed(tokens)], model.positions(tokens)
    with torch.no_grad():
        for block in model.each_block():
            states.append(block(states[-1], positions))
    measured = [kernels.of_activations(state[0].detach().numpy()) for state in states]
    predicted = propagation.forward(kernel_maps.kernel_blocks(config), measured[0])
    for found, expected in zip(measured, predicted, strict=True):
        assert np.abs(found - expected).max() < 1e-10
    assert kernel_maps.certificate(config) == kernel_maps.certificate(config.replace(readers=0))


def by_hand(model: Transformer, index: int, x: torch.Tensor) -> torch.Tensor:
    """A block's attention head by head: those that carry and, added to them, the readers' through W_O."""
    attention, shape = model.blocks[index].attention.inner, model.blocks[index].attention.inner.shape
    length, wide = x.shape[1], attention.head_width
    bias = torch.from_numpy(np.where(np.tri(length, dtype=bool), shape.bias(length), 0.0))
    scale = torch.from_numpy(shape.row_scale(length))
    rotation = model.positions(x).rotation
    carried, read = [], []
    for head in range(6):
        rows = slice(head * wide, (head + 1) * wide)
        q, k = (rotation.rotate((x @ w.weight[rows].mT)[:, None])[:, 0] for w in (attention.query, attention.key))
        scores = q @ k.mT / math.sqrt(wide) + attention.bias_gain[head] * bias
        weights = scale[:, None] * scores.masked_fill(~torch.ones(length, length).tril().bool(), -math.inf).softmax(-1)
        if head < 4:
            carried.append(weights @ x[..., rows])
        else:
            own = slice((head - 4) * wide, (head - 3) * wide)
            read.append(weights @ (x @ attention.value.weight[own].mT))
    return torch.cat(carried, -1) + torch.cat(read, -1) @ attention.output.weight.mT


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_attention_is_what_its_heads_give_written_out(impl):
    """Gradients too, of the input and of every matrix and gain."""
    model = build(config_of(), moved=0.1, impl=impl)
    attention = model.blocks[1].attention
    x = torch.randn(2, 24, 32, dtype=torch.float64, requires_grad=True)
    wanted = [x, *attention.parameters()]
    outputs = [attention(x, model.positions(x)), by_hand(model, 1, x)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), wanted) for out in outputs]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.any()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_all_matrices_of_readers_move_after_two_steps():
    """W_O starts at 0, so that W_V and the readers' rows of W_Q and W_K wait for its first step."""
    model, tokens = build(config_of()), tokens_of()
    optimizer = build_optimizer(model, OptimizerConfig("muon", 1e-3, gain_rate=1e-2))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for step in range(3):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        if step == 0:
            assert model.blocks[0].attention.inner.output.weight.grad.any()
            assert not model.blocks[0].attention.inner.value.weight.grad.any()
        optimizer.step()
        optimizer.zero_grad()
    inner = model.blocks[0].attention.inner
    for name, rows in (("query", slice(32, None)), ("key", slice(32, None)), ("value", ...), ("output", ...)):
        moved = getattr(inner, name).weight - before[f"blocks.0.attention.inner.{name}.weight"]
        assert moved[rows].any(), name
    assert (inner.bias_gain - before["blocks.0.attention.inner.bias_gain"])[4:].all()


@torch.no_grad()
@each_scheme
@pytest.mark.parametrize("position", ["rope", "none"])
def test_cached_logits_are_those_of_the_whole_row(scheme, position):
    model, tokens = build(config_of(scheme, position=position), moved=0.05), tokens_of()
    cache, parts, start = KVCache(4, capacity=24), [], 0
    for count in (9, 1, 14):
        parts.append(decode(model, tokens[:, start : start + count], cache))
        start += count
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-12)
    assert [buffer.shape for buffer in cache[0].buffers()] == [(2, 6, 24, 8)] * 2


@torch.no_grad()
def test_folding_leaves_readers_as_they_are(tmp_path):
    model, tokens = build(config_of(activation=tat("leaky_relu", 36)), moved=0.05), tokens_of()
    folded = fold(model)
    torch.testing.assert_close(folded(tokens), model(tokens), rtol=0, atol=1e-12)
    assert torch.equal(folded.blocks[0].attention.inner.output.weight, model.blocks[0].attention.inner.output.weight)
    folded.save(tmp_path / "folded.safetensors")
    loaded = FoldedTransformer.load(tmp_path / "folded.safetensors", impl="reference")
    assert torch.equal(loaded(tokens), folded(tokens))


def test_weights_are_counted():
    config = config_of()
    matrices = [parameter for parameter in build(config).parameters() if parameter.dim() == 2]
    assert sum(parameter.numel() for parameter in matrices) == config.matrix_parameters
    alone = config.replace(readers=0).matrix_parameters
    assert config.matrix_parameters - alone == 4 * 4 * 32 * 16  # blocks, matrices, width, features of two readers


def test_a_configuration_with_readers_is_plain_json():
    config = config_of()
    assert ModelConfig.from_json(config.to_json()) == config
    assert config_of(readers=0).to_dict()["readers"] == 0


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"value_output": "trained"}, "use value_output='identity'"),
        ({"bias_gain": False}, "use bias_gain=True"),
        ({"kv_heads": 2}, "use kv_heads=4"),
        ({"position": "relative"}, "use position='rope'"),
        ({"scheme": ValueSkipInit()}, "use E-SPA"),
        ({"readers": -1}, "an integer of at least 0"),
        ({"readers": 1.5}, "an integer of at least 0"),
    ],
)
def test_readers_that_cannot_be_are_refused(fields, advice):
    with pytest.raises(ValueError, match=advice):
        config_of(**fields)


def test_attention_by_itself_refuses_them_too():
    options = AttentionOptions(readers=2, value_output="identity")
    with pytest.raises(ValueError, match="use value_output='identity', bias_gain=True and kv_heads=4"):
        ShapedAttention(32, 4, SCHEMES["e-spa"].shapes(1)[0], options=options)


@torch.no_grad()
def test_attention_with_readers_is_not_inverted():
    model = build(config_of(hidden=0), moved=0.01)
    with pytest.raises(ValueError, match="readers"):
        inverse.block_input(model.blocks[0], torch.randn(1, 24, 32).double(), model.positions(tokens_of(1)))

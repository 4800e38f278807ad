"""Readers: heads with W_V and W_O of their own beside those that carry the stream."""

import pytest
import torch
from tests.model.exact import build, check_attention, check_cache, check_kernels, tokens_of

from skipless.inspection import inverse
from skipless.model import kernel_maps
from skipless.model.config import ModelConfig
from skipless.model.fold import FoldedTransformer, fold
from skipless.nn.attention import AttentionOptions, ShapedAttention
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


@each_scheme
def test_one_network_has_the_kernels_of_theory_at_every_block(scheme):
    """Readers add nothing at the start: what holds without them holds with them, to rounding."""
    config = config_of(scheme, depth=36)
    check_kernels(build(config), tokens_of(1))
    assert kernel_maps.certificate(config) == kernel_maps.certificate(config.replace(readers=0))


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_attention_is_what_its_heads_give_written_out(impl):
    check_attention(config_of(), impl)


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


@each_scheme
@pytest.mark.parametrize("position", ["rope", "none"])
def test_cached_logits_are_those_of_the_whole_row(scheme, position):
    cache = check_cache(config_of(scheme, position=position))
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

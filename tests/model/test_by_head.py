"""Decays by head: each head a stream with a kernel of its own, from theory to an export."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.commands import check_resumed_and_exported, kill_at_a_checkpoint, training_words
from tests.model.exact import build, check_attention, check_cache, states_by_block, tokens_of
from typer.testing import CliRunner

import skipless
from skipless.cli.app import app
from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.inspection import inverse
from skipless.model import kernel_maps
from skipless.model.config import Images, ModelConfig, attention_shapes
from skipless.model.fold import FoldedTransformer, fold
from skipless.model.transformer import Transformer
from skipless.nn.attention import AttentionOptions, ShapedAttention
from skipless.theory import kernels, propagation
from skipless.theory.propagation import Skip
from skipless.theory.schemes import SCHEMES, ExponentialSPA, Scheme, register_scheme
from skipless.theory.shapes import ExponentialShape, PlainShape, ShapeByHead
from skipless.theory.shaping import tat

RATES = (0.5, 0.05, 0.05, 0.005)


def config_of(rates=RATES, **fields) -> ModelConfig:
    sizes = {"vocab_size": 64, "width": 32, "depth": 4, "heads": 4, "length": 24}
    kind = {"mlp_init": "mirrored", "value_output": "identity", "scheme": ExponentialSPA(rates, 0.02)}
    return ModelConfig(**{**sizes, **kind, **fields})


def kernels_by_head(model: Transformer, tokens: torch.Tensor) -> list[np.ndarray]:
    """Σ of each head's channels after every block, input first: (heads, T, T)."""
    split = [np.split(state, model.config.heads, axis=-1) for state in states_by_block(model, tokens)]
    return [np.stack([kernels.of_activations(head) for head in heads]) for heads in split]


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"width": 64, "heads": 2, "scheme": ExponentialSPA((0.3, 0.01))},
        {"hidden": 0},
        {"kv_heads": 2, "bias_gain": True},
        {"activation": "tat-leaky_relu", "position": "none"},
        {"causal": False, "head": "pooled", "classes": 3},
    ],
    ids=["mirrored", "two", "attention-only", "grouped", "leaky", "symmetric"],
)
def test_one_network_has_the_kernels_of_theory_at_every_block(impl, fields):
    """Given the kernels that its own heads start with, over 36 blocks and at width 32 or 64: exactly."""
    config = config_of(depth=36, **fields)
    measured = kernels_by_head(build(config, impl=impl), tokens_of(1))
    predicted = propagation.forward(kernel_maps.kernel_blocks(config), measured[0])
    assert len(measured) == 37
    for found, expected in zip(measured, predicted, strict=True):
        assert np.abs(found.mean(axis=0) - expected).max() < 1e-10


def test_each_head_is_the_stream_of_its_own_scheme():
    """Head h alone is what theory says of E-SPA with γ_L = γ_h, whatever the other heads do."""
    config = config_of(depth=12)
    measured = kernels_by_head(build(config), tokens_of(1))
    for head, rate in enumerate(RATES):
        alone = config.replace(scheme=ExponentialSPA(rate, 0.02))
        expected = propagation.forward(kernel_maps.kernel_blocks(alone), measured[0][head])
        for found, each in zip(measured, expected, strict=True):
            assert np.abs(found[head] - each).max() < 1e-10


def test_the_kernel_is_the_mean_of_the_decays_and_has_a_unit_diagonal():
    """From distinct tokens Σ_l = (1/H) Σ_h e^(−γ_(h,l) d), and gains of gradients are the mean of the heads' gains."""
    config = config_of(scheme=ExponentialSPA(RATES), depth=12)
    blocks = kernel_maps.kernel_blocks(config)
    states = propagation.forward(blocks, np.eye(24))
    expected = np.mean([kernels.exponential(rate, 24) for rate in RATES], axis=0)
    np.testing.assert_allclose(states[-1], expected, atol=1e-12)
    for state in states:
        np.testing.assert_allclose(np.diagonal(state), 1.0, atol=1e-12)
    gains = propagation.backward(blocks, states)
    alone = [kernel_maps.kernel_blocks(config.replace(scheme=ExponentialSPA(rate))) for rate in RATES]
    apart = [propagation.backward(each, propagation.forward(each, np.eye(24))) for each in alone]
    np.testing.assert_allclose(gains, np.mean(apart, axis=0), rtol=1e-12)
    assert kernel_maps.certificate(config).verdict.kind == "preserved"


def test_equal_decays_are_one_decay():
    """The certificate to rounding, and the very network but for how its MLPs rotate."""
    ours, one = (kernel_maps.certificate(config_of(rates, depth=12)) for rates in ((0.05,) * 4, 0.05))
    np.testing.assert_allclose([each.diagonal_mean for each in ours.reports], 1.0, atol=1e-12)
    for mine, theirs in zip(ours.reports, one.reports, strict=True):
        assert mine.mean_cosine == pytest.approx(theirs.mean_cosine, abs=1e-12)
        assert mine.backward_max == pytest.approx(theirs.backward_max, rel=1e-12)
    same, single = build(config_of((0.05,) * 4)), build(config_of(0.05))
    single.load_state_dict(same.state_dict())
    torch.testing.assert_close(same(tokens_of()), single(tokens_of()), rtol=0, atol=1e-12)


def test_mlps_start_as_a_rotation_of_each_head_and_only_then():
    x = torch.eye(32, dtype=torch.float64)
    apart, mixed = (build(config_of(rates)).blocks[0].mlp(x) for rates in (RATES, 0.05))
    blocks = torch.block_diag(*torch.ones(4, 8, 8)).bool()
    assert apart[~blocks].abs().max() < 1e-12
    torch.testing.assert_close(apart.mT @ apart, x, rtol=0, atol=1e-12)
    assert mixed[~blocks].abs().max() > 0.1


@pytest.mark.parametrize("calibration", ["exact", "mlp-aware"])
def test_calibrations_are_those_of_each_head(calibration):
    shapes = attention_shapes(config_of(scheme=ExponentialSPA(RATES, 0.02, calibration)))
    for head, rate in enumerate(RATES):
        alone = attention_shapes(config_of(scheme=ExponentialSPA(rate, 0.02, calibration)))
        for block, other in zip(shapes, alone, strict=True):
            np.testing.assert_allclose(block.dense(24)[head], other.dense(24), atol=1e-14)
    model = build(config_of(scheme=ExponentialSPA(RATES, 0.02, calibration)))
    assert model(tokens_of()).isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "sdpa", "auto"])
def test_attention_is_what_its_heads_give_written_out(impl):
    check_attention(config_of(bias_gain=True), impl)


@pytest.mark.parametrize("fields", [{}, {"kv_heads": 2, "position": "none"}, {"position": "relative"}])
def test_cached_logits_are_those_of_the_whole_row(fields):
    check_cache(config_of(**fields))


@torch.no_grad()
def test_folding_keeps_the_shapes_of_heads(tmp_path):
    model, tokens = build(config_of(activation=tat("leaky_relu", 36)), moved=0.05), tokens_of()
    folded = fold(model)
    torch.testing.assert_close(folded(tokens), model(tokens), rtol=0, atol=1e-12)
    folded.save(tmp_path / "folded.safetensors")
    loaded = FoldedTransformer.load(tmp_path / "folded.safetensors", impl="reference")
    assert torch.equal(loaded(tokens), folded(tokens))


@torch.no_grad()
def test_blocks_are_inverted():
    model = build(config_of(), moved=0.01)
    x, positions = torch.randn(1, 24, 32).double(), model.positions(tokens_of(1))
    found = inverse.block_input(model.blocks[0], model.blocks[0](x, positions), positions)
    torch.testing.assert_close(found, x, rtol=0, atol=1e-8)


def test_compiled_it_is_the_same():
    model, tokens = build(config_of(bias_gain=True), moved=0.05, impl="auto"), tokens_of()
    expected = model(tokens)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), expected, rtol=0, atol=1e-12)


def test_inspect_starts_theory_from_the_kernel_of_each_head():
    """A random network of width 32 has the norms that are predicted, to rounding of its float32."""
    found = skipless.inspect(build(config_of(depth=12)).float(), tokens_of(8))
    assert found.verdict.kind == "preserved"
    for each in found.blocks:
        assert each.norm_mean == pytest.approx(each.predicted["norm"], rel=1e-5)


def test_a_configuration_by_head_is_plain_json():
    config = config_of(np.array(RATES))
    assert config.scheme.gamma_final == RATES
    assert ModelConfig.from_json(config.to_json()) == config
    assert config == config_of(list(RATES))
    assert config.to_dict()["scheme"]["gamma_final"] == list(RATES)
    assert config.scheme.describe() == "γ_L = 0.5, 0.05, 0.05, 0.005 by head"
    assert ExponentialSPA(0.2).to_dict()["gamma_final"] == 0.2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"value_output": "trained"}, "its channels must not meet another's before training; use value_output='id"),
        ({"mlp_init": None}, "use mlp_init='mirrored', or one decay for all heads"),
        ({"norm": "pre"}, "use norm='none'"),
        ({"attention_skip": Skip.normalised(0.5)}, r"use attention_skip=Skip\(shortcut=0.0, residual=1.0"),
        ({"mlp_skip": Skip(1.0, 1.0)}, r"use mlp_skip=Skip\(shortcut=0.0, residual=1.0"),
        ({"readers": 2, "bias_gain": True}, "use readers=0"),
        ({"heads": 8}, "is for 4 heads, and heads=8; use heads=4, or a scheme for 8 heads"),
        ({"rates": ()}, "gamma_final is empty; give one decay rate, or one for each head"),
        ({"rates": (0.5, -1.0)}, r"gamma_final\[1\] is -1.0; a decay rate must be positive"),
        ({"rates": (0.5, math.inf)}, r"gamma_final\[1\] is ∞; .*use ValueSkipInit"),
        ({"rates": (0.5, "x")}, r"gamma_final\[1\] is 'x'; it must be a number"),
        ({"rates": "0.5"}, "gamma_final is '0.5'; it must be a number"),
        ({"rates": True}, "gamma_final is True; it must be a number"),
    ],
)
def test_what_would_mix_heads_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        config_of(**fields)


def test_decays_by_block_and_by_head_are_not_both():
    with pytest.raises(ValueError, match=r"gamma_final=\(0.5, 0.1\) beside gammas, which ends at 0.5"):
        ExponentialSPA((0.5, 0.1), gammas=(1.0, 0.5))


def test_attention_by_itself_takes_a_shape_for_each_head():
    shape = ShapeByHead(tuple(ExponentialShape.between(math.inf, rate) for rate in RATES))
    values = torch.randn(1, 10, 32)
    attention = ShapedAttention(32, 4, shape, options=AttentionOptions(value_output="identity"))
    attention.reset_parameters()
    heads = torch.from_numpy(shape.dense(10)).float() @ values.unflatten(-1, (4, 8)).transpose(1, 2)
    torch.testing.assert_close(attention(values), heads.transpose(1, 2).flatten(2))
    with pytest.raises(ValueError, match="for 4 heads with heads=8 and readers=0: give a shape for each head"):
        ShapedAttention(32, 8, shape)
    with pytest.raises(ValueError, match="readers=1: give a shape for each head, and no readers"):
        ShapedAttention(32, 4, shape, options=AttentionOptions(readers=1, value_output="identity", bias_gain=True))


@pytest.fixture
def registry():
    before = dict(SCHEMES)
    yield
    SCHEMES.clear()
    SCHEMES.update(before)


@pytest.mark.usefixtures("registry")
def test_a_scheme_of_one_s_own_may_be_by_head():
    """Trained values with shapes by head are the mean over all paths through the heads, as of ALiBi's slopes."""

    @register_scheme("two-scales")
    @dataclass(frozen=True)
    class TwoScales(Scheme):
        apart: bool = True
        count: int = 4
        preserves_signal = True

        @property
        def by_head(self):
            return self.apart

        def shapes(self, depth, skip_weight=0.0, causal=True, **context):
            if not self.count:
                return [PlainShape()] * depth
            return ExponentialSPA(RATES[: self.count]).shapes(depth)

    config = config_of(scheme=TwoScales(), depth=12)
    assert kernel_maps.certificate(config) == kernel_maps.certificate(config_of(scheme=ExponentialSPA(RATES), depth=12))
    trained = config_of(scheme=TwoScales(apart=False), value_output="trained", depth=12)
    paths = propagation.forward(kernel_maps.kernel_blocks(trained), np.eye(24))[-1]
    assert np.diagonal(paths).min() == pytest.approx(0.779, abs=2e-3)
    assert Transformer(trained)(tokens_of()).isfinite().all()
    with pytest.raises(ValueError, match="gave block 1 3 shapes by head, and heads=4; give one for each head"):
        Transformer(config_of(scheme=TwoScales(count=3)))
    with pytest.raises(ValueError, match="gave block 1 a PlainShape; it must be a ShapeByHead of 4 shapes"):
        Transformer(config_of(scheme=TwoScales(count=0)))


def test_images_on_a_grid():
    """Four scales of rows and columns in one encoder."""
    scheme = ExponentialSPA(RATES, 0.1, grid="square")
    model = Transformer("vit/mirrored", width=32, depth=3, scheme=scheme, images=Images(side=16))
    assert model(torch.randint(256, (2, 3, 16, 16))).shape == (2, 10)
    distinct = model.config.replace(scheme=ExponentialSPA(RATES, grid="square"))
    predicted = propagation.forward(kernel_maps.kernel_blocks(distinct), np.eye(16))[-1]
    expected = np.mean([kernels.exponential_grid(rate, 4, 4) for rate in RATES], axis=0)
    np.testing.assert_allclose(predicted, expected, atol=1e-10)


def test_kernels_takes_decays_by_head():
    words = ["kernels", "e-spa", "--set", "gamma_final=0.5,0.05,0.005", "--depth", "3", "--length", "12", "--json", "-"]
    done = CliRunner().invoke(app, [*words, "--no-figure"])
    assert done.exit_code == 0, done.exception
    config = json.loads(done.stdout)["networks"][0]["config"]
    assert (config["scheme"]["gamma_final"], config["heads"]) == ([0.5, 0.05, 0.005], 3)
    refused = CliRunner().invoke(app, [*words, "--activation", "dks-gelu"])
    assert "use mlp_init='mirrored'" in str(refused.exception)


def test_a_killed_run_goes_on_to_the_bit_and_is_exported(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(Path(__file__).read_text() * 4)
    prepare(Preparation("text.txt", tokenizer=Bytes()), Path("tokens"), workers=1)
    train = training_words(Path("tokens"), ["model.scheme.gamma_final=0.5,0.05,0.05,0.005"])
    kill_at_a_checkpoint(train, tmp_path / "run")
    assert check_resumed_and_exported(train, continued=40).config.scheme.gamma_final == RATES
    done = CliRunner().invoke(app, ["inspect", "run", "--corpus", "tokens", "--length", "16"])
    assert done.exit_code == 0, done.exception

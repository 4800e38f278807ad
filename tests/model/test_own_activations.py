"""Activations that users write: shaped by DKS and TAT, mirrored where their odd part allows, saved by name."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import skipless
from skipless import ModelConfig, ShapedActivation, Transformer, dks, register_activation, tat
from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.ops import activation as ops
from skipless.theory import activations, local_maps
from skipless.theory.activations import odd_factor
from skipless.training.config import DataConfig, Experiment, TrainConfig
from skipless.training.load import load
from skipless.training.trainer import OutOfTime, RunLimits, train

SMALL = {"vocab_size": 256, "width": 32, "heads": 4, "depth": 6, "length": 16}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(ops, "_FUNCTIONS", dict(ops._FUNCTIONS))
    monkeypatch.setattr(activations, "_SMOOTH", dict(activations._SMOOTH))


def soft(x):
    """x·g(x) with g(x) + g(−x) = 1, as GELU and SiLU are."""
    return x * (1 + x / torch.sqrt(1 + x * x)) / 2


def own_gelu(x):
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def mish(x):
    return x * torch.tanh(F.softplus(x))


def test_gelu_written_anew_is_gelu():
    """Its constants, derivatives and kernel map come from a torch function, and agree with the closed forms."""
    register_activation("own_gelu")(own_gelu)
    x = np.linspace(-6, 6, 101)
    for order in range(3):
        own, known = (ShapedActivation(name, 0.7, 0.1).derivative(x, order) for name in ("own_gelu", "gelu"))
        np.testing.assert_allclose(own, known, atol=1e-13)
    for solve in (dks, tat):
        constants = [dataclasses.astuple(solve(base, 36))[1:] for base in (own_gelu, "gelu")]
        np.testing.assert_allclose(*constants, rtol=1e-9)
    kernel = 0.5 * np.eye(4) + 0.5
    maps = [local_maps.kernel_map(ShapedActivation(name), kernel) for name in ("own_gelu", "gelu")]
    np.testing.assert_allclose(*maps, atol=1e-11)
    assert odd_factor(ShapedActivation("own_gelu")) == odd_factor(ShapedActivation("gelu"))


def test_dks_and_tat_shape_what_is_registered():
    register_activation("mish")(mish)
    shaped = dks(mish, 36)
    assert float(local_maps.q_map(shaped)) == pytest.approx(1.0, abs=1e-10)
    assert float(local_maps.q_slope(shaped)) == pytest.approx(1.0, abs=1e-10)
    assert float(local_maps.c_slope(shaped)) ** 36 == pytest.approx(5.0, rel=1e-8)
    config = ModelConfig(**SMALL, activation="tat-mish")
    assert config.shaped_activation == tat("mish", 6)
    assert config.replace(depth=12).shaped_activation == tat("mish", 12)
    assert ModelConfig.from_json(config.to_json()) == config
    x = torch.randn(5, dtype=torch.float64)
    np.testing.assert_allclose(ops.shaped_activation(x, shaped).numpy(), shaped(x.numpy()), atol=1e-13)


def test_one_with_a_linear_odd_part_is_mirrored_and_others_are_refused():
    register_activation("soft")(soft)
    register_activation("mish")(mish)
    config = ModelConfig(**SMALL, activation=soft, mlp_init="mirrored", scheme=skipless.ExponentialSPA(0.2))
    model, tokens = Transformer(config).double(), torch.randint(256, (1, 16))
    start, end = (t[0].detach().numpy() for t in (model.embed(tokens), model.hidden(tokens)))
    through = np.linalg.multi_dot([b.layers()[0].shape.dense(16) for b in reversed(list(model.each_block()))])
    expected = through @ start @ start.T @ through.T
    np.testing.assert_allclose(
        end @ end.T, expected, atol=1e-5 * np.abs(expected).max()
    )  # weights were drawn in float32
    assert odd_factor(ShapedActivation("soft", 2.0, output_scale=3.0)) == pytest.approx(6.0, rel=1e-11)
    assert odd_factor(dks(soft, 6)) is None
    with pytest.raises(ValueError, match=r"activation='mish' with mlp_init='mirrored': φ\(x\) − φ\(−x\) must be"):
        ModelConfig(**SMALL, activation="mish", mlp_init="mirrored")


def test_a_stopped_run_and_an_export_say_it_by_name(tmp_path):
    register_activation("mish")(mish)
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    prepare(
        Preparation(str(tmp_path / "text.txt"), tokenizer=Bytes(), valid_fraction=0.0), tmp_path / "data", workers=1
    )
    schedule = TrainConfig(steps=4, batch_size=2, precision="fp32", compile=False, eval_every=0, checkpoint_every=1)
    experiment = Experiment(
        "own", ModelConfig(**SMALL, activation="dks-mish"), DataConfig(folder=str(tmp_path / "data")), train=schedule
    )
    with pytest.raises(OutOfTime):
        train(experiment, tmp_path / "run", quiet=True, limits=RunLimits(0.0))
    train(experiment, tmp_path / "run", resume=True, quiet=True)
    model = load(tmp_path / "run")
    assert model.config.shaped_activation == dks("mish", 6)
    skipless.hf.SkiplessForCausalLM.from_native(model).save_pretrained(tmp_path / "hf")
    again = skipless.hf.SkiplessForCausalLM.from_pretrained(tmp_path / "hf")
    assert again.config.native() == model.config
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(again(tokens).logits, model(tokens))

    del activations._SMOOTH["mish"]  # as in a process that has not imported it
    with pytest.raises(ValueError, match=r"there is no activation 'mish'; .*--import FILE\.py"):
        load(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("own", F.elu, "is not smooth: two quadratures find E"),
        ("own", lambda x: F.relu(x) ** 2, "use 'relu', 'leaky_relu', or a smooth form"),
        ("own", F.hardswish, "is not smooth"),
        ("own", lambda x: x.softmax(0), "act on each number by itself"),
        ("own", lambda x: 1 / (x - x), "must be finite"),
        ("own", lambda x: x.float().tanh(), "torch.float32 of a float64 tensor; it must give back its shape and dtype"),
        ("own", lambda x: x.sum(), r"makes \(\), torch.float64"),
        ("own", np.tanh, "has no gradient .* write it in torch's functions"),
        ("own", lambda: 0, "does not take a float64 tensor"),
        ("gelu", torch.tanh, "'gelu' belongs to another activation: choose a new one"),
        ("dks-own", torch.tanh, "use small letters, digits and underscores"),
    ],
)
def test_refusals_teach(name, function, words):
    with pytest.raises(ValueError, match=words):
        register_activation(name)(function)
    assert name in activations.BASE_NAMES or name not in activations._SMOOTH


def test_a_function_without_a_name_and_one_that_cannot_be_shaped():
    for take in (lambda: ModelConfig(**SMALL, activation=torch.tanh), lambda: dks(torch.tanh, 36)):
        with pytest.raises(ValueError, match=r"a name such as 'gelu'.*@skipless.register_activation"):
            take()
    register_activation("cube")(lambda x: x**3)
    for solve in (dks, tat):
        with pytest.raises(ValueError, match=r"'cube' cannot be shaped: .* use it as it is, activation='cube'"):
            solve("cube", 36)


def test_a_name_may_be_registered_again_for_the_same_function_only():
    register_activation("soft")(soft)
    register_activation("soft")(lambda x: soft(x))
    with pytest.raises(ValueError, match="'soft' belongs to another activation"):
        register_activation("soft")(mish)

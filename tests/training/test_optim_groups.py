import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.schema import build
from skipless.theory.propagation import Skip
from skipless.theory.schemes import StandardAttention, ValueSkipInit
from skipless.training.config import ROLES, OptimizerConfig
from skipless.training.optim.build import build_optimizer, group_of, parameter_groups, set_rates

SMALL = {"vocab_size": 20, "width": 16, "depth": 2, "heads": 2, "activation": "gelu"}
TRAINABLE_SKIP = Skip(1.0, 0.0, trainable=True)
NETWORKS = {
    "vanilla": ModelConfig(**SMALL),
    "grouped-queries": ModelConfig(**SMALL, kv_heads=1, bias_gain=True),
    "value-skipinit": ModelConfig(**SMALL, scheme=ValueSkipInit(per_head=True)),
    "attention-only": ModelConfig(**SMALL, hidden=0),
    "relative": ModelConfig(**SMALL, position="relative"),
    "pre-ln-skipinit": ModelConfig(
        **SMALL,
        scheme=StandardAttention(),
        norm="pre",
        attention_skip=TRAINABLE_SKIP,
        mlp_skip=TRAINABLE_SKIP,
    ),
    "encoder": ModelConfig(**SMALL, causal=False, scheme=StandardAttention(), head="pooled", classes=3),
}


def names_by_group(model, config=None):
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        g["name"]: [names[id(p)] for p in g["params"]] for g in parameter_groups(model, config or OptimizerConfig())
    }


@pytest.mark.parametrize("network", NETWORKS)
def test_every_parameter_is_in_exactly_one_group(network):
    model = Transformer(NETWORKS[network])
    grouped = [name for names in names_by_group(model).values() for name in names]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("network", NETWORKS)
def test_groups_of_matrices_hold_the_linear_weights_of_blocks_and_nothing_else(network):
    model = Transformer(NETWORKS[network])
    expected = {f"{name}.weight" for name, m in model.blocks.named_modules() if isinstance(m, nn.Linear)}
    grouped = [n for group, names in names_by_group(model).items() if group in ROLES for n in names]
    assert {name.removeprefix("blocks.") for name in grouped} == expected


def test_position_keys_and_biases_of_relative_positions_are_told_apart():
    groups = names_by_group(Transformer(NETWORKS["relative"]))
    assert groups["position"] == [f"blocks.{i}.attention.inner.relative.key.weight" for i in range(2)]
    assert not any("relative" in name for name in groups["key"])
    assert sum("content_bias" in name for name in groups["vectors"]) == 2


def test_an_untied_head_has_its_own_group_and_its_bias_is_a_vector():
    groups = names_by_group(Transformer(NETWORKS["encoder"]))
    assert groups["head"] == ["head.weight"]
    assert "head.bias" in groups["vectors"]


def test_a_tied_embedding_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Transformer(NETWORKS["vanilla"])
            self.lm_head = nn.Linear(16, 20, bias=False)
            self.lm_head.weight = self.model.embedding.weight

    assert names_by_group(Tied())["embedding"] == ["model.embedding.weight"]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.model."])
def test_wrappers_do_not_change_a_parameters_group(prefix):
    assert group_of(f"{prefix}blocks.0.attention.inner.query.weight") == "query"
    assert group_of(f"{prefix}blocks.0._orig_mod.mlp.inner.up._checkpoint_wrapped_module.weight") == "up"
    assert group_of(f"{prefix}norm.weight") == "vectors"


def test_an_unknown_parameter_is_an_error_that_names_it():
    model = Transformer(NETWORKS["vanilla"])
    model.add_module("gate", nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"'gate.weight'.*query, key"):
        parameter_groups(model, OptimizerConfig())


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_an_error():
    model = Transformer(NETWORKS["vanilla"])
    model.embedding.requires_grad_(False)
    assert "embedding" not in names_by_group(model)
    with pytest.raises(ValueError, match="no trainable"):
        parameter_groups(model.requires_grad_(False), OptimizerConfig())


def test_weight_decay_spares_vectors():
    groups = parameter_groups(Transformer(NETWORKS["vanilla"]), OptimizerConfig("adamw", weight_decay=0.1))
    assert {g["name"]: g["weight_decay"] for g in groups} == {
        **dict.fromkeys(("embedding", "query", "key", "value", "output", "up", "down"), 0.1),
        "vectors": 0.0,
    }


@pytest.mark.parametrize("name", ["adam", "adamw", "muon", "soap"])
def test_rates_follow_the_configuration_and_the_role(name):
    config = OptimizerConfig(name, rate=1e-3, embedding_rate=7e-4, role_rates={"value": 0.5, "output": 0.25})
    optimizer = build_optimizer(Transformer(NETWORKS["encoder"]), config)
    muon = name == "muon"
    expected = {
        "embedding": 7e-4,
        "query": 1e-3,
        "key": 1e-3,
        "value": 5e-4,
        "output": 2.5e-4,
        "up": 1e-3,
        "down": 1e-3,
    }
    expected |= {"vectors": 3e-5 if muon else 1e-3, "head": 7e-4 if muon else 1e-3}
    assert {g["name"]: g["lr"] for g in optimizer.param_groups} == expected
    set_rates(optimizer, 0.5)
    set_rates(optimizer, 0.25)  # of the highest rate, not of the last
    assert {g["name"]: g["lr"] for g in optimizer.param_groups} == {k: v * 0.25 for k, v in expected.items()}


def test_rates_given_by_name_override_the_rules():
    rates = OptimizerConfig("muon", rate=1e-3, vector_rate=1e-5, head_rate=2e-5).rates
    assert (rates["vectors"], rates["head"]) == (1e-5, 2e-5)
    assert OptimizerConfig("muon").rates["query"] == 1e-3
    assert OptimizerConfig().rates["vectors"] == OptimizerConfig().rates["query"] == 3e-5


def test_rates_that_are_tensors_are_filled_in_place():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([{"params": [parameter], "rate": 3.0, "name": "a"}], lr=torch.tensor(3.0), fused=True)
    rate = optimizer.param_groups[0]["lr"]
    set_rates(optimizer, 0.5)
    assert rate.item() == 1.5
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_configuration_survives_json():
    config = OptimizerConfig("muon", rate=1e-3, role_rates={"up": 2.0}, betas=(0.8, 0.9), clip=None)
    assert build(OptimizerConfig, json.loads(json.dumps(asdict(config))), "an optimiser") == config
    hash(config)


def test_the_defaults_are_the_papers():
    config = OptimizerConfig()
    assert (config.name, config.embedding_rate, config.clip, config.weight_decay) == ("adam", 2e-4, 0.1, 0.0)
    assert (config.betas, config.eps) == ((0.9, 0.999), 1e-8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adan"}, "did you mean 'adam'"),
        ({"role_rates": {"queries": 1.0}}, "did you mean 'query'"),
        ({"gain_rate": -1.0}, "gain_rate is -1.0"),
        ({"role_rates": {"up": -1.0}}, r"role_rates\['up'\] is -1.0"),
        ({"rate": -1e-3}, "rate is -0.001"),
        ({"embedding_rate": float("nan")}, "embedding_rate is nan"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"betas": (0.9,)}, "two decays"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"newton_schulz_steps": 0}, "at least 1"),
        ({"precondition_every": 2.5}, "whole number"),
        ({"clip": 0.0}, "None for no clipping"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_bad_values_are_errors_that_teach(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)


def test_an_unknown_field_is_an_error():
    with pytest.raises(ValueError, match="did you mean 'rate'"):
        build(OptimizerConfig, {"rat": 1.0}, "an optimiser")


def test_capturable_needs_a_gpu():
    with pytest.raises(ValueError, match="CUDA"):
        build_optimizer(Transformer(NETWORKS["vanilla"]), OptimizerConfig(), capturable=True)

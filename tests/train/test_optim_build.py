import copy

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory import shaping
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, ValueSkipInit
from skipless.train.optim import OptimizerConfig, build_optimizer, clip_gradients, set_rates, warmup_cosine

NAMES = ["adam", "adamw", "muon", "soap"]
VANILLA = ModelConfig(
    vocab_size=16,
    width=32,
    depth=3,
    heads=2,
    length=16,
    scheme=ExponentialSPA(0.05, 0.06),
    activation=shaping.dks("gelu", 3, xi=2.0),
)
CONFIGS = {
    "adam": OptimizerConfig("adam", rate=1e-3, embedding_rate=1e-3),
    "adamw": OptimizerConfig("adamw", rate=1e-3, embedding_rate=1e-3, weight_decay=0.1),
    "muon": OptimizerConfig("muon", rate=1e-2, embedding_rate=1e-3, weight_decay=0.1, role_rates={"value": 0.5}),
    "soap": OptimizerConfig("soap", rate=1e-3, embedding_rate=1e-3, precondition_every=3),
}


def build(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Transformer(VANILLA, impl="sdpa").to(dtype)


def train(model, optimizer, steps, start=0, total=None):
    """Steps on a copying task: each token is one more than the last, with chance; the losses of all steps."""
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        first = torch.randint(0, 16, (8, 1), generator=generator)
        noise = torch.randint(0, 2, (8, 17), generator=generator)
        tokens = (first + torch.arange(17) + noise) % 16
        if total:
            set_rates(optimizer, warmup_cosine(step + 1, total, total // 5))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_gradients(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal_parameters(one, two):
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", NAMES)
def test_each_optimiser_trains_a_vanilla_transformer(name):
    rates = {"adam": 3e-4, "adamw": 3e-4, "muon": 3e-3, "soap": 3e-4}
    model = build()
    optimizer = build_optimizer(model, OptimizerConfig(name, rate=rates[name], embedding_rate=2e-3))
    losses = train(model, optimizer, 30, total=30)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("name", "reference"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_is_torchs_with_the_same_groups(name, reference):
    """Against torch's plain loop over parameters, with the groups written out here."""
    ours, theirs = build(dtype=torch.float64), build(dtype=torch.float64)
    config = OptimizerConfig(name, rate=1e-3, embedding_rate=5e-3, vector_rate=2e-3, weight_decay=0.05)
    optimizer = build_optimizer(ours, config)
    vectors = [p for n, p in theirs.named_parameters() if n.endswith("bias")]
    matrices = [p for n, p in theirs.named_parameters() if n.endswith("weight") and n != "embedding.weight"]
    groups = [
        {"params": [theirs.embedding.weight], "lr": 5e-3, "weight_decay": 0.05},
        {"params": matrices, "lr": 1e-3, "weight_decay": 0.05},
        {"params": vectors, "lr": 2e-3, "weight_decay": 0.0},
    ]
    other = reference(groups, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    train(ours, optimizer, 5)
    train(theirs, other, 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_what_is_no_matrix_of_a_block_moves_as_under_adamw(name):
    """One step on the same gradients."""
    ours, theirs = build(), build()
    rates = {"rate": 1e-3, "embedding_rate": 5e-3, "vector_rate": 2e-3, "weight_decay": 0.1}
    train(ours, build_optimizer(ours, OptimizerConfig(name, **rates)), 1)
    train(theirs, build_optimizer(theirs, OptimizerConfig("adamw", **rates)), 1)
    for (parameter, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if parameter == "embedding.weight" or parameter.endswith("bias"):
            assert torch.equal(a, b), parameter


def test_a_role_s_factor_scales_its_matrices_only():
    models = [build(), build()]
    before = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    for model, factors in zip(models, ({}, {"value": 0.5, "output": 0.25}), strict=True):
        train(model, build_optimizer(model, OptimizerConfig("muon", rate=1e-2, role_rates=factors)), 1)
    for (name, plain), (_, scaled) in zip(*(m.named_parameters() for m in models), strict=True):
        factor = 0.5 if ".value." in name else 0.25 if ".output." in name else 1.0
        torch.testing.assert_close(scaled - before[name], factor * (plain - before[name]), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_of_zero_freezes_a_role(name):
    """No gradient, no state, no group; to the bit where it was, also under weight decay."""
    model, frozen = build(), ("value", "output")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimizerConfig(name, rate=1e-2, weight_decay=0.1, role_rates=dict.fromkeys(frozen, 0.0))
    optimizer = build_optimizer(model, config)
    train(model, optimizer, 3)
    assert config.frozen == frozen
    assert not {group["name"] for group in optimizer.param_groups} & set(frozen)
    for path, parameter in model.named_parameters():
        still = any(f".{role}." in path for role in frozen)
        assert parameter.requires_grad is not still
        assert torch.equal(parameter, before[path]) is still
        assert (parameter.grad is None) is still
        assert (parameter in optimizer.state) is not still


def test_a_rate_of_zero_for_all_freezes_nothing():
    """It is a rate, and the schedule's; a role's factor is a choice of what is trained."""
    model = build()
    build_optimizer(model, OptimizerConfig(rate=0.0))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_gains_have_a_rate_of_their_own_if_they_are_given_one(name):
    skip = Skip(1.0, 0.0, trainable=True)
    config = ModelConfig(
        vocab_size=11, width=16, depth=2, heads=2, scheme=ValueSkipInit(), mlp_skip=skip, activation="gelu",
        bias_gain=True,
    )  # fmt: skip
    model = Transformer(config)
    gains = {path for path, _ in model.named_parameters() if path.endswith(("gains", "gain", "residual"))}
    assert len(gains) == 2 * 4
    usual, own = (
        {group["name"]: group for group in build_optimizer(model, settings).param_groups}
        for settings in (OptimizerConfig(name), OptimizerConfig(name, gain_rate=2e-3, weight_decay=0.1))
    )
    assert "gains" not in usual
    parameters = dict(model.named_parameters())
    assert {id(p) for p in own["gains"]["params"]} == {id(parameters[path]) for path in gains}
    assert (own["gains"]["lr"], own["gains"]["weight_decay"]) == (2e-3, 0.0)
    assert {id(p) for p in usual["vectors"]["params"]} == {
        id(p) for n in ("vectors", "gains") for p in own[n]["params"]
    }
    assert own["vectors"]["lr"] == usual["vectors"]["lr"]


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_optimiser_continues_bit_by_bit(name, tmp_path):
    model = build()
    optimizer = build_optimizer(model, CONFIGS[name])
    train(model, optimizer, 5, total=12)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, 5, start=5, total=12)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other = build(seed=1)
    resumed = build_optimizer(other, CONFIGS[name])
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, 5, start=5, total=12)
    assert_equal_parameters(model, other)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_optimiser_continues_bit_by_bit_through_distributed_checkpoint(name, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = build()
    optimizer = build_optimizer(model, CONFIGS[name])
    train(model, optimizer, 4)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, 4, start=4)
    other = build(seed=1)
    other.load_state_dict(weights)
    resumed = build_optimizer(other, CONFIGS[name])
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert_equal_parameters(other, _with(build(seed=1), weights))  # making room for the state moves nothing
    train(other, resumed, 4, start=4)
    assert_equal_parameters(model, other)


def _with(model, weights):
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_a_composite_is_one_optimiser(name):
    model = build()
    optimizer = build_optimizer(model, CONFIGS[name])
    assert isinstance(optimizer, torch.optim.Optimizer)
    grouped = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    train(model, optimizer, 2)
    assert len(optimizer.state) == len(grouped)
    optimizer.load_state_dict(optimizer.state_dict())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    set_rates(optimizer, 0.0)  # of the groups that loading made: the parts must see them
    train(model, optimizer, 1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    loss = optimizer.step(lambda: torch.tensor(2.0))
    assert loss == 2.0


def test_a_copied_composite_keeps_its_own_parameters():
    model = build()
    optimizer = build_optimizer(model, CONFIGS["muon"])
    train(model, optimizer, 2)
    other, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, start=2)
    train(other, copied, 2, start=2)
    assert_equal_parameters(model, other)


def test_a_state_of_other_kernels_and_of_tensor_rates_loads():
    """A run of a CUDA graph has rates as tensors and capturable=True; a CPU can take neither."""
    model = build()
    optimizer = build_optimizer(model, CONFIGS["adam"])
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group |= {"lr": torch.tensor(group["lr"], dtype=torch.float64), "capturable": True, "fused": None}
    optimizer.load_state_dict(saved)
    assert all(isinstance(g["lr"], float) and not g["capturable"] and g["fused"] for g in optimizer.param_groups)
    train(model, optimizer, 1)


def test_a_state_of_another_number_of_groups_is_refused():
    model = build()
    saved = build_optimizer(model, CONFIGS["adam"]).state_dict()
    saved["param_groups"] = saved["param_groups"][1:]
    with pytest.raises(ValueError, match="number of parameter groups"):
        build_optimizer(model, CONFIGS["adam"]).load_state_dict(saved)

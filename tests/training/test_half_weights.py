"""Training by half-precision copies of the matrices is training under autocast, number for number."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from skipless.data.loader import Batch
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.ops.modes import HALF, autocast
from skipless.theory.schemes import ExponentialSPA
from skipless.training import trainer
from skipless.training.config import OptimizerConfig, TrainConfig
from skipless.training.cuda_graph import GraphedStep
from skipless.training.distributed import World
from skipless.training.divergence import norms_by_block
from skipless.training.optim import adam as adam_module
from skipless.training.optim.build import build_optimizer, use_tensor_rates
from skipless.training.optim.half_weights import HalfWeights
from skipless.training.trainer import TrainStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# of the clipping factor, 2⁻²³, times the rate and the most that Adam makes of a gradient, 1/√(1 − β₂)
LAST_BIT = 2**-23 * 1e-2 * 0.001**-0.5
NETWORK = ModelConfig(
    vocab_size=40, width=64, depth=3, heads=2, length=16, scheme=ExponentialSPA(0.05, 0.06), activation="gelu"
)


IDENTITY = NETWORK.replace(mlp_init="mirrored", value_output="identity")
READERS = IDENTITY.replace(bias_gain=True, readers=2)
FROZEN = {"value": 0.0, "output": 0.0}
each_network = pytest.mark.parametrize(
    ("network", "roles", "joined"),
    [
        (NETWORK, {}, 3), (NETWORK, FROZEN, 2), (IDENTITY, {}, 2), (IDENTITY.replace(kv_heads=1), {}, 2),
        (READERS, {}, 2),
    ],
    ids=["all", "frozen", "identity", "identity-grouped", "readers"],
)  # fmt: skip


def build(monkeypatch, half: bool, network: ModelConfig = NETWORK, roles=None, **fields) -> TrainStep:
    """Both update by torch's Adam: its kernel for copies rounds otherwise, and is compared in test_optim_adam."""
    monkeypatch.setattr(trainer, "supports_half_weights", lambda optimizer: half)
    monkeypatch.setattr(adam_module, "kernel_supports", lambda group: False)
    torch.manual_seed(0)
    with DEVICE:
        model = Transformer(network, impl="sdpa")
    settings = OptimizerConfig("adam", rate=1e-2, embedding_rate=1e-3, weight_decay=0.1, role_rates=roles or {})
    optimizer = build_optimizer(model, settings, capturable=DEVICE.type == "cuda")
    config = TrainConfig(**{"steps": 50, "warmup": 5, "length": 16, "batch_size": 4, "precision": "bf16", **fields})
    step = TrainStep(model, optimizer, config, World(0, 1, DEVICE), clip=0.1, packed=False)
    assert step.half is None
    step.use_half_weights()
    return step


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch(torch.randint(40, (4, 17), generator=generator)).to(DEVICE)


@torch.no_grad()
def take_over(ours: TrainStep, theirs: TrainStep) -> None:
    """Parameters and Adam's state of `theirs`."""
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        mine.copy_(other)
        for name, value in theirs.optimizer.state[other].items():
            ours.optimizer.state[mine][name].copy_(value)


@pytest.mark.parametrize("precision", HALF)
def test_every_step_is_autocasts(monkeypatch, precision):
    """Clipping adds up the norm in another order: each step starts from one state, lest its last bit grow."""
    ours, theirs = (build(monkeypatch, half, precision=precision) for half in (True, False))
    assert ours.half is not None
    assert len(ours.half) == 3 * 6  # six matrices a block
    assert theirs.half is None
    for index in range(10):
        (loss, norm), (other_loss, other_norm) = (each(index, batch_of(index)) for each in (ours, theirs))
        assert torch.equal(loss, other_loss)
        torch.testing.assert_close(norm, other_norm, rtol=1e-6, atol=0.0)
        for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=LAST_BIT)
        take_over(ours, theirs)


@pytest.mark.parametrize("precision", HALF)
@each_network
def test_without_clipping_they_are_so_to_the_last_bit(monkeypatch, precision, network, roles, joined):
    ours, theirs = (build(monkeypatch, half, network, roles, precision=precision) for half in (True, False))
    ours.clip = theirs.clip = None
    for index in range(5):
        assert torch.equal(ours(index, batch_of(index))[0], theirs(index, batch_of(index))[0])
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)
        if (copy := ours.half.copy_of(a)) is not None:
            assert torch.equal(copy, a.to(HALF[precision]))


def test_gradients_are_autocasts_bit_for_bit(monkeypatch):
    ours, theirs = build(monkeypatch, True), build(monkeypatch, False)
    assert ours.half is not None
    for each, place in ((ours, ours.half.in_place()), (theirs, nullcontext())):
        with autocast("bf16", DEVICE), place:
            each.model(batch_of(0).inputs, targets=batch_of(0).targets).backward()
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        gradient = ours.half.gradient_of(a)
        assert gradient is not None
        matrix = "embedding" not in name and a.dim() == 2
        assert gradient.dtype == (torch.bfloat16 if matrix else torch.float32), name
        assert torch.equal(gradient.float(), b.grad), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # hidden by torch
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@each_network
def test_compiled_attention_reads_its_matrices_side_by_side(monkeypatch, network, roles, joined):
    """Those that are trained: values with a frozen matrix, or with none, are computed by themselves."""
    torch._dynamo.reset()  # each network is a graph of its own, and others have been compiled before
    ours, theirs = (build(monkeypatch, half, network, roles) for half in (True, False))
    for each in (ours, theirs):
        each.clip = None
        for block in each.model.blocks:
            block.compile(backend="aot_eager", dynamic=False)
    for index in range(3):
        assert torch.equal(ours(index, batch_of(index))[0], theirs(index, batch_of(index))[0])
    layers = [layer for block in ours.model.blocks for layer in block.attention.inner.qkv_layers()]
    assert len(layers) == 3 * joined
    for layer in layers:
        copy = ours.half.copy_of(layer.weight)
        assert copy is not None
        matrix, rows = ours.half._rows[layer.weight]
        assert len(matrix) == sum(each.out_features for each in layers[:joined])
        assert copy.grad is None
        assert torch.equal(ours.half.gradient_of(layer.weight), matrix.grad[rows])
        assert matrix[rows].data_ptr() == copy.data_ptr()
    for name, parameter in ours.model.named_parameters():
        frozen = any(f".{role}." in name for role in roles)
        assert (ours.half.gradient_of(parameter) is None) is frozen
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(block.attention.inner.qkv_weight is None for block in ours.model.blocks)
    ours.optimizer.zero_grad()
    assert all(ours.half.gradient_of(p) is None for p in ours.model.parameters())


def test_a_matrix_used_both_ways_has_one_gradient():
    model = Transformer(NETWORK)
    half, attention = HalfWeights(model), model.blocks[0].attention.inner
    x = torch.randn(2, 64).bfloat16()
    with half.in_place():
        assert attention.qkv_weight is not None
        (nn.functional.linear(x, attention.qkv_weight).sum() + 2 * attention.query(x).sum()).backward()
    assert torch.equal(half.gradient_of(attention.query.weight), 3 * half.gradient_of(attention.key.weight))


def test_a_frozen_matrix_is_not_joined_to_trained_ones():
    model = Transformer(NETWORK)
    model.blocks[0].attention.inner.query.weight.requires_grad_(False)
    with HalfWeights(model).in_place():
        assert [block.attention.inner.qkv_weight is None for block in model.blocks] == [True, False, False]


def fail_inside(step: TrainStep) -> None:
    assert step.half is not None
    with step.half.in_place():
        assert any(p.dtype == torch.bfloat16 for p in step.model.parameters())
        raise KeyError


def test_the_parameters_are_back_after_a_step_and_after_an_error(monkeypatch):
    step = build(monkeypatch, True)
    assert step.half is not None
    before = dict(step.model.named_parameters())
    step(0, batch_of(0))
    assert all(value is before[name] for name, value in step.model.named_parameters())
    with pytest.raises(KeyError):
        fail_inside(step)
    assert all(value is before[name] for name, value in step.model.named_parameters())
    assert all(p.dtype == torch.float32 for p in step.model.parameters())


def test_weights_loaded_between_steps_are_taken_up(monkeypatch):
    ours, theirs = build(monkeypatch, True), build(monkeypatch, False)
    weights = {name: 0.5 * value for name, value in theirs.model.state_dict().items()}
    for each in (ours, theirs):
        each(0, batch_of(0))
        each.model.load_state_dict(weights)
    torch.testing.assert_close(ours(1, batch_of(1))[0], theirs(1, batch_of(1))[0], rtol=1e-6, atol=0.0)


def test_a_replayed_step_starts_from_the_parameters_it_was_given(monkeypatch):
    class Again:
        def warm_up(self, function):
            function()

        def capture(self, function):
            return function

    ours, theirs = build(monkeypatch, True), build(monkeypatch, False)
    if DEVICE.type == "cpu":
        for each in (ours, theirs):
            use_tensor_rates(each.optimizer)
    ours.clip = theirs.clip = None
    one, other = GraphedStep(ours, Again()), GraphedStep(theirs, Again())
    for index in range(4):
        assert torch.equal(one(index, batch_of(index))[0], other(index, batch_of(index))[0])


@pytest.mark.parametrize("fields", [{"precision": "fp32"}, {"accumulate": 2}])
def test_where_they_would_change_numbers_there_are_none(monkeypatch, fields):
    assert build(monkeypatch, True, **fields).half is None


def test_divergence_names_norms_of_the_copies_gradients(monkeypatch):
    step = build(monkeypatch, True)
    step(0, batch_of(0))
    words = norms_by_block(step.model, half=step.half)
    assert "All blocks are finite" in words
    assert "/0," not in words


def test_layers_that_share_a_matrix_have_no_copies():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert len(HalfWeights(model)) == 1  # the third layer's


def test_all_gradients_are_forgotten(monkeypatch):
    step = build(monkeypatch, True)
    step(0, batch_of(0))
    step.optimizer.zero_grad()
    assert all(step.half.gradient_of(p) is None for p in step.model.parameters())

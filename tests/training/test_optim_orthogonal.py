"""Matrices kept orthogonal: the iteration by its defining identity, then under every optimiser."""

import json
import math
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch

from skipless.data.loader import Batch
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.nn.init import gaussian_, orthogonal_
from skipless.schema import build
from skipless.theory.schemes import ExponentialSPA
from skipless.training.config import OptimizerConfig, TrainConfig
from skipless.training.distributed import World
from skipless.training.optim.build import build_optimizer
from skipless.training.optim.half_weights import HalfWeights
from skipless.training.optim.muon import orthogonal_scale, towards_orthogonal
from skipless.training.trainer import TrainStep

ROLES = ("value", "output", "up", "down")
NETWORK = ModelConfig(
    vocab_size=40, width=32, depth=2, heads=2, length=16, scheme=ExponentialSPA(0.05, 0.06), activation="gelu"
)
each_shape = pytest.mark.parametrize("shape", [(12, 12), (48, 12), (12, 48)])


def singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Over their root mean square."""
    values = torch.linalg.svdvals(matrix.detach().double())
    return values / values.square().mean().sqrt()


@each_shape
def test_the_scale_is_every_singular_value_of_the_initialisation(shape):
    torch.manual_seed(0)
    matrix = orthogonal_(torch.empty(shape, dtype=torch.float64), 1.5)
    torch.testing.assert_close(torch.linalg.svdvals(matrix), orthogonal_scale(matrix).flatten().expand(12))


@each_shape
def test_each_singular_value_moves_as_it_says(shape):
    """s(1 + ε) to s(1 − 3ε²/2 − ε³/2), and the singular vectors stay."""
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    off = torch.linspace(-0.4, 0.4, 12, dtype=torch.float64)
    matrix, wanted = (2.0 * (u * values) @ v for values in (1.0 + off, 1.0 - 1.5 * off**2 - 0.5 * off**3))
    found = matrix + towards_orthogonal(matrix[None], torch.full((1, 1, 1), 2.0, dtype=torch.float64))[0]
    torch.testing.assert_close(found, wanted)


def test_it_ends_at_the_polar_factor():
    torch.manual_seed(1)
    matrix = orthogonal_(torch.empty(24, 8, dtype=torch.float64)) + 0.1 * torch.randn(24, 8, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found, scale = matrix, torch.full((1, 1, 1), 3**0.5, dtype=torch.float64)
    for _ in range(8):
        found = found + towards_orthogonal(found[None], scale)[0]
    torch.testing.assert_close(found, 3**0.5 * u @ v)


def train(name: str, roles, steps: int = 20, **fields) -> tuple[Transformer, list[float]]:
    torch.manual_seed(0)
    model = Transformer(NETWORK, impl="sdpa")
    rate = {"adam": 3e-3, "muon": 3e-2, "soap": 3e-3}[name]
    optimizer = build_optimizer(model, OptimizerConfig(name, rate=rate, keep_orthogonal=roles))
    config = TrainConfig(steps=steps, warmup=0, length=16, batch_size=4, precision="fp32", **fields)
    step = TrainStep(model, optimizer, config, World(0, 1, torch.device("cpu")), clip=0.1, packed=False)
    tokens = torch.randint(40, (4, 17), generator=torch.Generator().manual_seed(0))
    return model, [float(step(index, Batch(tokens))[0]) for index in range(steps)]


@pytest.mark.parametrize("name", ["adam", "muon", "soap"])
def test_a_network_learns_with_orthogonal_matrices(name):
    (kept, losses), (free, _) = train(name, ROLES), train(name, ())
    assert losses[-1] < losses[0] - 0.3
    for block, other in zip(kept.blocks, free.blocks, strict=True):
        matrices = [block.attention.inner.value, block.attention.inner.output, block.mlp.inner.up, block.mlp.inner.down]
        others = [other.attention.inner.value, other.attention.inner.output, other.mlp.inner.up, other.mlp.inner.down]
        off, free_off = (
            max(float((singular_values(m.weight) - 1.0).abs().max()) for m in each) for each in (matrices, others)
        )
        assert off < 0.01
        assert off < free_off / 5


def test_other_roles_are_left_alone():
    (some, _), (none, _) = train("muon", ("value",), steps=1), train("muon", (), steps=1)
    for (name, a), b in zip(some.named_parameters(), none.parameters(), strict=True):
        assert torch.equal(a, b) == (".value." not in name), name


def test_half_precision_copies_follow():
    torch.manual_seed(0)
    model = Transformer(NETWORK)
    optimizer = build_optimizer(model, OptimizerConfig("adam", rate=1e-2, keep_orthogonal=("up",)))
    optimizer.half_weights = half = HalfWeights(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    matrix = model.blocks[0].mlp.inner.up.weight
    assert torch.equal(half.copy_of(matrix), matrix.to(torch.bfloat16))


def test_matrices_that_do_not_start_orthogonal_are_refused():
    model = Transformer(NETWORK)
    gaussian_(model.blocks[1].attention.inner.value.weight)
    with pytest.raises(ValueError, match=r"singular values of one of \(32, 32\) are .* --set model.init=orthogonal"):
        build_optimizer(model, OptimizerConfig("muon", keep_orthogonal=ROLES))
    build_optimizer(model, OptimizerConfig("muon", keep_orthogonal=("up", "output")))


@pytest.mark.parametrize(("extreme", "taken"), [(0.52, True), (0.48, False), (1.48, True), (1.52, False)])
def test_singular_values_from_half_to_one_and_a_half_of_their_size_are_taken(extreme, taken):
    model = Transformer(NETWORK)
    matrix = model.blocks[0].attention.inner.value.weight
    rest = math.sqrt((32 - extreme**2) / 31)  # so that their root mean square is 1
    with torch.no_grad():
        u, _, v = torch.linalg.svd(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
        matrix.copy_(u @ torch.tensor([extreme] + 31 * [rest]).diag() @ v)
    with nullcontext() if taken else pytest.raises(ValueError, match=f"{extreme:.3g}.* times their root mean square"):
        build_optimizer(model, OptimizerConfig("muon", keep_orthogonal=ROLES))


def test_one_that_is_a_little_off_is_taken():
    model = Transformer(NETWORK)
    matrix = model.blocks[1].mlp.inner.up.weight
    with torch.no_grad():
        matrix.add_(0.05 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0)))
    assert 0.1 < float((singular_values(matrix) - 1.0).abs().max()) < 0.5
    build_optimizer(model, OptimizerConfig("muon", keep_orthogonal=ROLES))


def test_roles_are_checked_and_survive_json():
    config = OptimizerConfig("muon", keep_orthogonal=("value", "up"))
    assert build(OptimizerConfig, json.loads(json.dumps(asdict(config))), "an optimiser") == config
    assert OptimizerConfig("muon", keep_orthogonal="value").keep_orthogonal == ("value",)
    with pytest.raises(ValueError, match="do not start orthogonal, 'query'; there are value, output, up, down"):
        OptimizerConfig("muon", keep_orthogonal=("query",))

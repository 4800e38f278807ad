import copy

import pytest
import torch
from torch import nn

from skipless.training.optim.muon import COEFFICIENTS, WAYS, Muon, newton_schulz

SHAPES = [(8, 8), (8, 8), (16, 8), (8, 16), (16, 8), (5, 3), (1, 7)]


def matrices(dtype, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def train(optimizer, parameters, steps=20):
    """Steps on gradients that depend on the parameters and on chance, equal for equal parameters."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            parameter.grad = 0.1 * parameter.detach() + noise
        optimizer.step()


@pytest.fixture
def exact_reference(monkeypatch):
    """torch.optim.Muon in the parameters' precision: it always casts to bfloat16 before Newton–Schulz."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


@pytest.mark.usefixtures("exact_reference")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_muon_is_torchs_over_20_steps(nesterov, dtype, tolerance):
    ours, theirs = matrices(dtype), matrices(dtype)
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    train(Muon(ours, **settings), ours)
    train(torch.optim.Muon(theirs, **settings), theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_in_bfloat16_muon_is_torchs_within_rounding():
    """One step: afterwards rounding differences grow. Each is within bfloat16's of the exact update."""
    ours, theirs, exact = matrices(torch.float32), matrices(torch.float32), matrices(torch.float64)
    train(Muon(ours, lr=1.0, dtype=torch.bfloat16), ours, steps=1)
    train(torch.optim.Muon(theirs, lr=1.0, weight_decay=0.0), theirs, steps=1)
    train(Muon(exact, lr=1.0), exact, steps=1)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-3


def test_batching_changes_nothing():
    """One optimiser over all matrices, one optimiser per matrix, and batches cut short."""
    together, apart = matrices(torch.float64), matrices(torch.float64)
    train(Muon(together, lr=0.02), together)
    optimizers = [Muon([p], lr=0.02) for p in apart]

    class Each:
        def step(self):
            for optimizer in optimizers:
                optimizer.step()

    train(Each(), apart)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """How many matrices went through Newton–Schulz at a time."""
    seen: list[int] = []

    def counted(stack, steps):
        seen.append(len(stack))
        return newton_schulz(stack, steps)

    monkeypatch.setitem(WAYS, "direct", counted)
    return seen


def test_a_batch_larger_than_the_limit_is_split(monkeypatch, batches):
    whole, split = matrices(torch.float64), matrices(torch.float64)
    train(Muon(whole, lr=0.02), whole)
    monkeypatch.setattr("skipless.training.optim.muon._BATCH_ENTRIES", 200)
    train(Muon(split, lr=0.02), split)
    assert sorted(batches[-6:]) == [1, 1, 1, 1, 1, 2]  # of 128 entries two are too many
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_matrices_of_one_shape_share_a_batch(batches):
    parameters = matrices(torch.float32)
    train(Muon(parameters), parameters, steps=1)
    assert sorted(batches) == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12), (1, 5)])
def test_newton_schulz_keeps_singular_vectors_and_maps_values_by_its_polynomial(shape):
    a, b, c = COEFFICIENTS
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(newton_schulz(x, 5), u * s[:, None, :] @ v, rtol=1e-10, atol=1e-10)


def test_the_update_is_nearly_orthogonal():
    """φ's fifth iterate takes [0.01, 1] into [0.68, 1.14]: seen on a grid of 4·10⁵ values, here on matrices."""
    x = torch.randn(4, 48, 96, generator=torch.Generator().manual_seed(0))
    assert (torch.linalg.svdvals(x) / torch.linalg.matrix_norm(x)[:, None]).min() > 0.01
    values = torch.linalg.svdvals(newton_schulz(x))
    assert values.min() > 0.68
    assert values.max() < 1.14


def test_a_zero_gradient_moves_nothing():
    """As that of W_K while W_Q = 0."""
    parameter = matrices(torch.float32)[0]
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    Muon([parameter], lr=1.0).step()
    assert torch.equal(parameter, before)


def test_groups_of_one_shape_keep_their_own_rates():
    one, two = matrices(torch.float64, [(6, 4), (6, 4)])
    before = [one.detach().clone(), two.detach().clone()]
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one.grad, two.grad = gradient, gradient.clone()
    Muon([{"params": [one], "lr": 0.1}, {"params": [two], "lr": torch.tensor(0.3, dtype=torch.float64)}]).step()
    torch.testing.assert_close((before[1] - two.detach()), 3 * (before[0] - one.detach()))


def test_parameters_without_a_gradient_stay_and_vectors_are_refused():
    one, two = matrices(torch.float32, [(4, 4), (4, 4)])
    one.grad = torch.ones_like(one)
    before = two.detach().clone()
    Muon([one, two], lr=0.1).step()
    assert torch.equal(two, before)
    with pytest.raises(ValueError, match=r"\(3,\); leave it to Adam"):
        Muon([nn.Parameter(torch.zeros(3))])


def test_a_copy_of_the_optimiser_goes_on_alike():
    parameters = matrices(torch.float32)
    optimizer = Muon(parameters, lr=0.02)
    train(optimizer, parameters, 3)
    others = copy.deepcopy(parameters)
    other = Muon(others, lr=1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, parameters, 3)
    train(other, others, 3)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))

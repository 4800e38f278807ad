"""Newton–Schulz in Gram matrices against Newton–Schulz: the same in exact arithmetic, and nearer to it in half."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.ops.gpu import INSTALLED
from skipless.training.config import OptimizerConfig
from skipless.training.optim import muon
from skipless.training.optim.build import build_optimizer
from skipless.training.optim.muon import Muon, gram_newton_schulz, newton_schulz

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, COLS = 96, 384


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def with_values(values):
    """A matrix ROWS × COLS of these singular values."""
    left, right = (torch.linalg.qr(normal(1, rows, ROWS, seed=rows))[0] for rows in (ROWS, COLS))
    return left * values @ right.mT


def falling(condition):
    return torch.logspace(0, -math.log10(condition), ROWS, dtype=torch.float64)


HARD = {
    "gaussian": normal(1, ROWS, COLS),
    "condition 1e2": with_values(falling(1e2)),
    "condition 1e4": with_values(falling(1e4)),
    "condition 1e8": with_values(falling(1e8)),
    "power law": with_values(1.0 / torch.arange(1, ROWS + 1, dtype=torch.float64)),
    "two levels": with_values(torch.tensor([1.0, 1e-2], dtype=torch.float64).repeat_interleave(ROWS // 2)),
    "rank 1": normal(1, ROWS, 1) @ normal(1, 1, COLS, seed=1),
    "rank 8": normal(1, ROWS, 8) @ normal(1, 8, COLS, seed=1),
    "one large direction": 5.0 * normal(1, ROWS, 1) @ normal(1, 1, COLS, seed=1) + 0.1 * normal(1, ROWS, COLS, seed=2),
    "one large row": torch.cat([1e4 * normal(1, 1, COLS), normal(1, ROWS - 1, COLS, seed=1)], dim=1),
    "one large entry": normal(1, ROWS, COLS).index_put((torch.tensor(0),) * 3, torch.tensor(1e6, dtype=torch.float64)),
    "orthogonal": with_values(torch.ones(ROWS, dtype=torch.float64)),
}


def off(found, truth):
    return float((found.double().cpu() - truth.cpu()).norm())


def polynomial(values, steps=5):
    a, b, c = muon.COEFFICIENTS
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("shape", [(3, 8, 12), (3, 12, 8), (2, 6, 40), (2, 40, 6), (1, 1, 7)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7])
def test_in_exact_arithmetic_it_is_newton_schulz(shape, steps):
    x = normal(*shape)
    torch.testing.assert_close(gram_newton_schulz(x, steps), newton_schulz(x, steps), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 16, 16), (2, 16, 23), (2, 23, 16)])
def test_nearly_square_matrices_go_the_direct_way(shape, dtype):
    x = normal(*shape).to(dtype)
    assert torch.equal(gram_newton_schulz(x), newton_schulz(x))


@pytest.mark.parametrize("name", HARD)
def test_in_half_precision_it_is_nearer_to_the_truth_than_direct_steps(name):
    """Both from the same bfloat16 matrix; the truth is direct steps in float64."""
    x = HARD[name].bfloat16().to(DEVICE)
    truth = newton_schulz(x.double())
    assert off(gram_newton_schulz(x), truth) <= off(newton_schulz(x), truth)
    assert off(gram_newton_schulz(x.mT), truth.mT) <= off(newton_schulz(x.mT), truth.mT)


@pytest.mark.parametrize("name", HARD)
def test_its_singular_values_are_those_of_the_polynomial(name):
    """In half precision within 5e-3, singular values near 0 and near the polynomial's highest point included."""
    x = HARD[name].bfloat16()
    expected = polynomial(torch.linalg.svdvals(x.double()) / torch.linalg.matrix_norm(x.double())[:, None])
    found = torch.linalg.svdvals(gram_newton_schulz(x.to(DEVICE)).double().cpu())
    torch.testing.assert_close(found, expected.sort(descending=True).values, rtol=0.0, atol=5e-3)


@pytest.mark.parametrize("name", [name for name in HARD if name not in ("condition 1e8", "rank 1", "rank 8")])
def test_it_is_as_near_to_the_polar_factor_as_direct_steps(name):
    x = HARD[name].bfloat16().to(DEVICE)
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    assert off(gram_newton_schulz(x), u @ v) <= 1.01 * off(newton_schulz(x), u @ v)


def test_a_gaussian_matrix_becomes_nearly_orthogonal():
    """In the same band as by direct steps."""
    values = torch.linalg.svdvals(gram_newton_schulz(normal(4, 48, 96).bfloat16()).float())
    assert values.min() > 0.68
    assert values.max() < 1.14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nothing_is_lost_of_small_and_large_matrices(dtype):
    """Whatever float16 could not hold before it is divided by its norm. A zero matrix stays zero."""
    x = normal(1, 8, 32).to(dtype)
    expected = gram_newton_schulz(x)
    for power in (-20, 10, 50):
        torch.testing.assert_close(gram_newton_schulz(x * 2.0**power), expected)
    assert torch.equal(gram_newton_schulz(torch.zeros_like(x)).double(), torch.zeros_like(x).double())


def test_precision_is_kept_where_it_is_no_bfloat16():
    for dtype, found in ((torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16, torch.float16)):
        assert gram_newton_schulz(normal(1, 8, 32).to(dtype)).dtype == found


def test_it_takes_two_thirds_of_the_products(monkeypatch):
    """Of size rows³ at cols = 4·rows: 30 for 45; halved where symmetric, 19 for 32.5."""

    def products(function):
        counts = {"symmetric": 0, "whole": 0}
        with monkeypatch.context() as patch:
            for name in ("gram", "symmetric"):
                patch.setattr(muon, name, counted(getattr(muon, name), counts, "symmetric"))
            patch.setattr(torch, "bmm", counted(torch.bmm, counts, "whole"))
            patch.setattr(torch, "baddbmm", counted(torch.baddbmm, counts, "whole"))
            function(normal(1, 8, 32))
        return counts["symmetric"], counts["whole"] - counts["symmetric"]  # those run by torch here, and are whole

    assert products(newton_schulz) == (25, 20)
    assert products(gram_newton_schulz) == (22, 8)


def counted(function, counts, kind):
    """Counts rows·cols of the right factor in units of 8 × 8."""

    def count(x, *rest, **options):
        factor = rest[-1] if rest and isinstance(rest[-1], torch.Tensor) else x
        counts[kind] += max(x.shape[-1], factor.shape[-1]) // 8
        return function(x, *rest, **options)

    return count


def momenta(name, steps=12):
    """What Muon makes orthogonal after some steps of a small network, in bfloat16."""
    torch.manual_seed(0)
    model = Transformer(preset(name, depth=2, width=64, length=32, vocab_size=64))
    optimizer = build_optimizer(model, OptimizerConfig("muon"))
    for _ in range(steps):
        tokens = torch.randint(64, (4, 33)) ** 2 % 61
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    matrices = [p for group in optimizer.param_groups for p in group["params"] if p.ndim == 2 and p in optimizer.state]
    found = [optimizer.state[p]["momentum_buffer"] for p in matrices if "momentum_buffer" in optimizer.state[p]]
    return [matrix[None].bfloat16() for matrix in found if max(matrix.shape) > min(matrix.shape)]


@pytest.mark.parametrize("name", ["wikitext103/e-spa", "wikitext103/pre-ln"])
def test_momenta_of_networks_come_out_nearer_to_the_truth(name):
    matrices = momenta(name)
    assert len(matrices) == 4
    for x in matrices:
        truth = newton_schulz(x.double())
        assert off(gram_newton_schulz(x), truth) <= off(newton_schulz(x), truth)


def stepped(way, dtype):
    parameters = [torch.nn.Parameter(normal(*shape).to(dtype)) for shape in ((8, 8), (8, 32), (32, 8), (5, 3))]
    optimizer = Muon(parameters, lr=0.02, newton_schulz=way)
    for step in range(20):
        for index, parameter in enumerate(parameters):
            parameter.grad = normal(*parameter.shape, seed=10 * step + index).to(dtype)
        optimizer.step()
    return parameters


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_muon_takes_the_same_steps_either_way(dtype, tolerance):
    for a, b in zip(stepped("direct", dtype), stepped("gram", dtype), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_way_is_chosen_by_the_configuration():
    model = Transformer(preset("wikitext103/e-spa", depth=1, width=64, length=16, vocab_size=32))
    for way in ("direct", "gram"):
        optimizer = build_optimizer(model, OptimizerConfig("muon", newton_schulz=way))
        assert optimizer.parts[0].newton_schulz == way
    assert OptimizerConfig().newton_schulz == "direct"
    with pytest.raises(ValueError, match="newton_schulz is 'grams'; use 'direct' or 'gram'"):
        Muon([torch.nn.Parameter(normal(2, 2))], newton_schulz="grams")


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
@pytest.mark.parametrize("shape", [(2, 128, 192), (1, 320, 128)])
def test_by_the_kernel_it_is_the_same(shape, monkeypatch):
    from skipless.ops.gpu import gram as gpu_gram

    x = normal(*shape).to(torch.float16).to(DEVICE)
    truth, plain = newton_schulz(x.double()), gram_newton_schulz(x)
    monkeypatch.setattr(muon, "gram_supports", lambda x: True)
    monkeypatch.setattr(gpu_gram, "LAUNCH", gpu_gram.Launch(block=64, depth=32, warps=4, stages=2))
    assert off(gram_newton_schulz(x), truth) <= 2 * off(plain, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 1024, 4096), (3, 4096, 1024), (2, 512, 2048)])
def test_on_a_gpu_it_is_nearer_to_the_truth_than_direct_steps(shape):
    x = normal(*shape).to("cuda", torch.bfloat16)
    truth = newton_schulz(x.double())
    assert off(gram_newton_schulz(x), truth) <= off(newton_schulz(x), truth)


@pytest.mark.gpu
def test_a_captured_one_is_the_eager_one():
    x = normal(3, 512, 2048).to("cuda", torch.bfloat16)
    expected = gram_newton_schulz(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gram_newton_schulz(x)
    x.copy_(normal(3, 512, 2048, seed=1))
    graph.replay()
    assert not torch.equal(found, expected)
    assert torch.equal(found, gram_newton_schulz(x))

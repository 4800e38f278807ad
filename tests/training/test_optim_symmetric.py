"""Symmetric products against their definition, and the kernel that computes half of each against both."""

import pytest
import torch

from skipless.ops.gpu import INSTALLED
from skipless.training.optim import muon
from skipless.training.optim.muon import COEFFICIENTS, gram, gram_supports, newton_schulz, quadratic

if INSTALLED:
    import triton
    import triton.language as tl

    from skipless.ops.gpu import gram as gpu_gram
    from skipless.ops.gpu.gram import Launch, product, tile_of

    SMALL = Launch(block=64, depth=32, warps=4, stages=2)

    @triton.jit
    def tiles(first, out, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        i, j = tile_of(first + at)
        tl.store(out + at, i)
        tl.store(out + COUNT + at, j)


CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16  # Triton's interpreter does not multiply in bfloat16
_, B, C = COEFFICIENTS

needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
each_size = pytest.mark.parametrize(
    ("count", "rows", "columns"), [(1, 128, 128), (3, 192, 64), (1, 256, 328), (2, 64, 128), (1, 320, 72)]
)


def random(*shape, dtype=torch.float64, seed=0):
    """Matrices of norm 1."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x / torch.linalg.matrix_norm(x, keepdim=True)).to(DEVICE, dtype)


def off(found, truth):
    return float((found.double() - truth).norm())


def is_symmetric(x):
    return torch.equal(x, x.mT)


def test_the_plain_path_is_the_definition():
    x = random(3, 6, 10)
    torch.testing.assert_close(gram(x), torch.einsum("nik,njk->nij", x, x))
    g = gram(x)
    torch.testing.assert_close(quadratic(g, 0.3, -1.7), 0.3 * g - 1.7 * torch.einsum("nik,nkj->nij", g, g))


@pytest.mark.parametrize("shape", [(2, 12, 40), (2, 40, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_elsewhere_newton_schulz_is_torchs_products_to_the_bit(shape, dtype):
    a, b, c = COEFFICIENTS
    found = x = random(*shape, dtype=dtype).cpu()
    x = x.mT if shape[1] > shape[2] else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    for _ in range(5):
        g = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(g, g, g, beta=b, alpha=c), x, beta=a)
    assert torch.equal(newton_schulz(found, 5), x.mT if shape[1] > shape[2] else x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_kernel_serves_a_cpu(dtype):
    assert not gram_supports(torch.empty(1, 256, 256, dtype=dtype))


@needs_triton
@pytest.mark.parametrize("first", [0, 1024, 2**20, 2**28 - 512])
def test_programs_are_the_tiles_of_a_triangle(first):
    found = torch.empty(2, 1024, dtype=torch.int32, device=DEVICE)
    tiles[(1,)](first, found, COUNT=1024)
    (i, j), number = found.long().cpu(), torch.arange(first, first + 1024)
    assert torch.equal(i * (i + 1) // 2 + j, number)
    assert ((j >= 0) & (j <= i)).all()


@needs_triton
@each_size
def test_the_kernel_is_at_most_twice_as_far_from_the_truth_as_torch(count, rows, columns):
    x = random(count, rows, columns, dtype=HALF)
    found, truth = product(x, 1.0, launch=SMALL), x.double() @ x.double().mT
    assert is_symmetric(found)
    assert off(found, truth) <= 2 * off(torch.bmm(x, x.mT), truth)
    g = found
    found, truth = product(g, C, B, launch=SMALL), B * g.double() + C * g.double() @ g.double()
    assert is_symmetric(found)
    assert off(found, truth) <= 2 * off(torch.baddbmm(g, g, g, beta=B, alpha=C), truth)


@needs_triton
@pytest.mark.parametrize("rows", [64, 128, 192, 328])
def test_of_two_matrices_that_commute_too(rows):
    g = product(random(2, rows, 256, dtype=HALF), 1.0, launch=SMALL)
    w = product(g, C, B, launch=SMALL)
    found = product(g, 1.5, -2.0, w, launch=SMALL)
    truth = 1.5 * g.double() @ w.double() - 2.0 * g.double()
    assert is_symmetric(found)
    assert off(found, truth) <= 2 * off(torch.baddbmm(g, g, w, beta=-2.0, alpha=1.5), truth)


@needs_triton
def test_tiles_on_the_diagonal_are_mirrored_too():
    """So that no order of summation matters: of U + U·Uᵀ, which is not symmetric, the part above the diagonal goes."""
    u = random(1, 128, 128, dtype=HALF)
    found = product(u, 1.0, 1.0, launch=SMALL)
    assert is_symmetric(found)
    whole = torch.baddbmm(u.double(), u.double(), u.double().mT)
    torch.testing.assert_close(found.double().tril(), whole.tril(), rtol=1e-2, atol=1e-3)


@needs_triton
def test_memory_may_hold_the_transpose_or_a_slice():
    x = random(2, 192, 128, dtype=HALF)
    expected = product(x, 1.0, launch=SMALL)
    torch.testing.assert_close(product(x.mT.contiguous().mT, 1.0, launch=SMALL), expected)
    torch.testing.assert_close(product(torch.cat([x, x], dim=2)[:, :, :128], 1.0, launch=SMALL), expected)


@needs_triton
@pytest.mark.parametrize("shape", [(2, 128, 192), (2, 192, 128)])
def test_newton_schulz_by_the_kernel_is_newton_schulz(shape, monkeypatch):
    x = random(*shape, dtype=HALF)
    truth, plain = newton_schulz(x.double()), _plain(x, monkeypatch)
    calls = []
    monkeypatch.setattr(muon, "gram_supports", lambda x: calls.append(x.shape) or True)
    monkeypatch.setattr(gpu_gram, "LAUNCH", SMALL)
    found = newton_schulz(x)
    assert calls == [(2, 128, 192), (2, 128, 128)] * 5
    assert off(found, truth) <= 2 * off(plain, truth)


def _plain(x, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(muon, "gram_supports", lambda x: False)
        return newton_schulz(x)


SCRIPT = """
import torch
from hopper import compiled, intercept, usage
from skipless.ops.gpu import gram

intercept(gram, "triangle")
x = torch.empty(3, 512, 1024, dtype=torch.bfloat16)
gram.product(x, 1.0)
gram.product(x.mT.contiguous().mT, 1.0)
gram.product(x[:, :, :512], 2.0, -3.0)
gram.product(x[:, :, :512].half(), 1.0, -3.0, x[:, :, 512:].half())
assert len(compiled) == 4
for kernel in compiled:
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    assert "wgmma.wait_group.sync.aligned 1" in ptx, "a product is waited for before the next is under way"
    assert 2 * (kernel.metadata.shared + 1024) <= 228 * 1024, "two programs do not fit"
    registers, stack = usage(kernel)
    assert registers <= 128, "two programs do not fit"
    assert stack == 0, "registers spill"
"""


@needs_triton
def test_it_compiles_for_hopper_with_its_matrix_units_and_copy_engine(on_hopper):
    on_hopper(SCRIPT)


def hopper(*shape, **options):
    """Random matrices on a GPU that the kernel serves."""
    x = random(*shape, dtype=torch.bfloat16, **options)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel serves Hopper GPUs")
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5, 1024, 1024), (3, 1024, 4096), (2, 320, 1000), (1, 2048, 2048)])
def test_on_a_gpu_products_are_at_most_twice_as_far_from_the_truth(shape):
    x = hopper(*shape)
    assert gram_supports(x)
    found, truth = gram(x), x.double() @ x.double().mT
    assert is_symmetric(found)
    assert off(found, truth) <= 2 * off(torch.bmm(x, x.mT), truth)
    assert off(gram(x.mT.contiguous().mT), truth) <= 2 * off(torch.bmm(x, x.mT), truth)
    g = found
    found, truth = quadratic(g, B, C), B * g.double() + C * g.double() @ g.double()
    assert is_symmetric(found)
    assert off(found, truth) <= 2 * off(torch.baddbmm(g, g, g, beta=B, alpha=C), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 512, 512), (3, 1024, 256), (3, 256, 1024)])
def test_on_a_gpu_newton_schulz_is_at_most_twice_as_far_from_the_truth(shape, monkeypatch):
    x = hopper(*shape)
    truth = newton_schulz(x.double())
    assert off(newton_schulz(x), truth) <= 2 * off(_plain(x, monkeypatch), truth)


@pytest.mark.gpu
def test_a_captured_newton_schulz_is_the_eager_one():
    x = hopper(3, 512, 1024)
    expected = newton_schulz(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = newton_schulz(x)
    x.copy_(hopper(3, 512, 1024, seed=1))
    graph.replay()
    assert not torch.equal(found, expected)
    assert torch.equal(found, newton_schulz(x))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128, 1024), (1, 264, 1024), (1, 256, 1001)])
def test_small_and_odd_matrices_go_to_torch(shape):
    assert not gram_supports(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
def test_what_needs_a_gradient_goes_to_torch():
    x = hopper(1, 256, 256).requires_grad_()
    assert not gram_supports(x)
    with torch.no_grad():
        assert gram_supports(x)

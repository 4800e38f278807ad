"""The norm of many gradients by one kernel: that of the numbers themselves, in float64."""

import math

import pytest
import torch

from skipless.ops import gpu
from skipless.training.optim import adam
from skipless.training.optim.adam import clip_factor

pytestmark = pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(40, 64), (3,), (0, 4), (1,), (8192,), (8193,), (130, 127), (), (2, 16384)]


def gradients(dtype, copies=1):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in SIZES * copies]


def exact(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copies", [1, 4])
def test_it_is_the_norm_of_all_of_them(dtype, copies):
    from skipless.ops.gpu.adam import norm

    several = gradients(dtype, copies)
    found = norm(several)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(exact(several), rel=1e-6)
    assert torch.equal(found, norm(several))


def test_nothing_has_norm_0_and_what_is_not_finite_shows():
    from skipless.ops.gpu.adam import norm

    assert float(norm([torch.zeros(0, 3, device=DEVICE)])) == 0.0
    assert math.isinf(norm([torch.tensor([1.0, math.inf], device=DEVICE)]))
    assert math.isnan(norm([torch.tensor([math.nan, math.inf], device=DEVICE)]))


def test_clipping_takes_it_for_gradients_of_either_precision(monkeypatch):
    monkeypatch.setattr(adam, "norm_supports", lambda tensor: tensor.is_contiguous())
    several = [
        torch.nn.Parameter(torch.zeros_like(g)) for dtype in (torch.float32, torch.bfloat16) for g in gradients(dtype)
    ]
    for parameter, gradient in zip(several, gradients(torch.float32) + gradients(torch.bfloat16), strict=True):
        parameter.grad = gradient
    norm, factor = clip_factor([p.grad for p in several], 0.5)
    assert float(norm) == pytest.approx(exact([p.grad for p in several]), rel=1e-6)
    assert float(factor) == pytest.approx(0.5 / float(norm), rel=1e-6)


def test_what_the_kernel_does_not_read_is_left_to_torch():
    turned = torch.zeros(3, 4, device=DEVICE).T
    assert not adam.norm_supports(turned)
    assert not adam.norm_supports(torch.zeros(3, dtype=torch.float64, device=DEVICE))
    assert not adam.norm_supports(torch.zeros(3))


SCRIPT = """
import torch
from hopper import compiled, intercept
from skipless.ops.gpu import adam

intercept(adam, "_squares")
adam.norm([torch.zeros(64, 128, dtype=torch.bfloat16)] * 16)
(kernel,) = compiled
assert "ld.global.v4.b32" in kernel.asm["ptx"]
"""


def test_it_compiles_for_a_gpu_that_is_not_here(on_hopper):
    on_hopper(SCRIPT)

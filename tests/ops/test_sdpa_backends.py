"""Which of torch's attention kernels may add a bias: never cuDNN's, which has two faults there."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from skipless.ops import reference
from skipless.ops.attention import shaped_attention
from skipless.ops.bias import BiasVectors
from skipless.theory.shapes import PlainShape

HALF = (torch.bfloat16, torch.float16)
FLAGS = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def on(device, dtype):
    """q on a device that may not be here."""
    with FakeTensorMode():
        return torch.empty(1, 1, 64, 16, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
def test_on_a_gpu_all_but_cudnns(dtype):
    assert set(reference.backends_with_bias(on("cuda", dtype))) == set(FLAGS) - {SDPBackend.CUDNN_ATTENTION}


def test_on_a_gpu_float32_is_plain_arithmetic():
    assert reference.backends_with_bias(on("cuda", torch.float32)) == [SDPBackend.MATH]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_on_a_cpu_torch_chooses(dtype):
    assert reference.backends_with_bias(on("cpu", dtype)) is None


def inputs(length=64, device="cpu", dtype=torch.float32, width=32):
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(3, 1, 2, length, width, generator=generator)
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def enabled():
    return {backend for backend, flag in FLAGS.items() if flag()}


class Watched(torch.fx.Interpreter):
    """Runs a compiled graph, and notes what is enabled where it attends."""

    def __init__(self, graph, seen):
        super().__init__(graph)
        self.seen = seen

    def call_function(self, target, args, kwargs):
        if target is scaled_dot_product_attention:
            self.seen.append(enabled())
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("compiled", [False, True])
def test_they_are_what_is_enabled_while_it_runs(compiled, monkeypatch):
    """In a compiled graph too; afterwards torch's own choice stands again."""
    allowed, seen, tensors = reference.backends_with_bias(on("cuda", torch.bfloat16)), [], inputs()
    shape = BiasVectors.of(PlainShape(), 64, torch.device("cpu"), torch.float32)
    bias = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(reference, "backends_with_bias", lambda q: allowed)

    def attention(q, k, v):
        return shaped_attention(q, k, v, shape, impl="sdpa", score_bias=bias)

    def recorded(*tensors, **options):
        seen.append(enabled())
        return scaled_dot_product_attention(*tensors, **options)

    if compiled:
        attention = torch.compile(attention, backend=lambda graph, _: Watched(graph, seen).run, fullgraph=True)
    else:
        monkeypatch.setattr(reference, "scaled_dot_product_attention", recorded)
    expected = shaped_attention(*tensors, shape, impl="reference", score_bias=bias)
    torch.testing.assert_close(attention(*tensors), expected)
    assert seen == [set(allowed)]
    assert enabled() == set(FLAGS)


def gradients(impl, tensors, bias):
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = shaped_attention(*tensors, PlainShape(), impl=impl, score_bias=bias)
    out.backward(torch.ones_like(out) + out.detach())
    return out.detach(), *(tensor.grad for tensor in tensors)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("length", [64, 128, 192, 704])
def test_gradients_are_right_where_cudnns_are_not_numbers(length, dtype, device):
    """A log-sum-exp of about −120 in every row, at lengths with and without half a tile left over."""
    tensors = inputs(length, device, dtype)
    bias = torch.full((length, length), -120.0, device=device)
    truth = gradients("reference", [tensor.double() for tensor in tensors], bias.double())
    plain = gradients("reference", tensors, bias)
    for found, exact, usual in zip(gradients("sdpa", tensors, bias), truth, plain, strict=True):
        assert found.isfinite().all()
        error, allowed = ((each.double() - exact).norm() for each in (found, usual))
        assert error <= 2 * allowed + 1e-6 * exact.norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", HALF)
def test_a_float32_bias_is_read_as_such(dtype, device):
    """Numbers that half precision would move, and neighbours that would be halves of one another's bits."""
    q, k, v = inputs(64, device, dtype)
    bias = torch.linspace(-3.0, 3.0, 64 * 64, device=device).reshape(64, 64)
    zero = [torch.zeros_like(q), torch.zeros_like(k)]
    found = shaped_attention(*zero, v, PlainShape(), impl="sdpa", score_bias=bias)
    visible = torch.ones(64, 64, device=device, dtype=torch.bool).tril()
    weights = bias.double().masked_fill(~visible, -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(found.double(), weights @ v.double(), rtol=1e-2, atol=4e-3)

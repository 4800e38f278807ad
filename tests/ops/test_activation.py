"""The fused activation against its definition: values, gradients, precision, and who takes it."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import log_ndtr, ndtr
from torch import nn

from skipless.nn import block
from skipless.nn.block import MLP
from skipless.ops import activation
from skipless.ops import gpu as ops_gpu
from skipless.ops.activation import biased_activation, kernel_supports, plain_biased_activation
from skipless.theory.activations import ShapedActivation
from skipless.theory.shaping import dks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {
    "gelu": ShapedActivation("gelu"),
    "dks": dks("gelu", 36),
    "any": ShapedActivation("gelu", 0.8, 0.3, -0.2, -1.7),
}
SHAPES = [(1, 272), (5, 16), (3, 7, 256), (130, 48), (300, 528)]

kernels = pytest.mark.skipif(not ops_gpu.INSTALLED, reason="triton is not installed")
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def problem(shape, dtype=torch.float64):
    """(x, bias, upstream): x and upstream in `dtype`, bias in float32 where that is half precision."""
    generator = torch.Generator().manual_seed(0)
    sizes, wide = (shape, shape[-1:], shape), torch.promote_types(dtype, torch.float32)
    drawn = (torch.randn(*size, dtype=torch.float64, generator=generator).to(DEVICE) for size in sizes)
    x, bias, upstream = (t.to(kind) for t, kind in zip(drawn, (dtype, wide, dtype), strict=True))
    return (2 * x).requires_grad_(), bias.requires_grad_(), upstream


def fused(x, bias, spec):
    """The kernel, wherever x is: on a CPU in Triton's interpreter."""
    from skipless.ops.gpu.activation import biased_gelu

    return biased_gelu(x, bias, spec.input_scale, spec.input_shift, spec.output_shift, spec.output_scale)


def outcome(function, x, bias, upstream, spec):
    y = function(x, bias, spec)
    return [y.detach(), *torch.autograd.grad(y, [t for t in (x, bias) if t is not None], upstream)]


def exact(x, bias, upstream, spec):
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, bias)]
    return outcome(plain_biased_activation, *wide, upstream.double(), spec)


def relative(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


@specs
def test_the_plain_form_is_the_definition(spec):
    x, bias, _ = problem((9, 5))
    inner = spec.input_scale * (x + bias) + spec.input_shift
    found = biased_activation(x, bias, spec)
    torch.testing.assert_close(found, spec.output_scale * (F.gelu(inner) + spec.output_shift))
    np.testing.assert_allclose(found.detach().cpu(), spec((x + bias).detach().cpu().numpy()))
    torch.testing.assert_close(biased_activation(x, None, spec), biased_activation(x, torch.zeros_like(bias), spec))


def test_gradcheck_of_the_plain_form():
    x, bias, _ = problem((3, 5))
    assert torch.autograd.gradcheck(lambda x, b: biased_activation(x, b, SPECS["dks"]), (x, bias))


def test_a_bias_of_another_width_is_refused():
    x, bias, _ = problem((3, 5))
    with pytest.raises(ValueError, match=r"bias is shaped \(4,\) and x \(3, 5\)"):
        biased_activation(x, bias[:4], SPECS["gelu"])


@kernels
def test_who_the_kernel_supports():
    gpu, half, gelu = torch.device("cuda"), torch.bfloat16, SPECS["dks"]
    assert kernel_supports(gpu, half, 4096, gelu)
    assert kernel_supports(gpu, torch.float16, 16, gelu)
    assert not kernel_supports(torch.device("cpu"), half, 4096, gelu)
    assert not kernel_supports(gpu, torch.float32, 4096, gelu)
    assert not kernel_supports(gpu, torch.float64, 4096, gelu)
    assert not kernel_supports(gpu, half, 4097, gelu)
    assert not kernel_supports(gpu, half, 0, gelu)
    assert not kernel_supports(gpu, half, 4096, ShapedActivation("gelu_tanh"))


@kernels
def test_the_gaussian_tail_is_the_best_its_form_can_be():
    """Φ(−|z|) to 7e-7 of itself down to −12; nine alternating extremes of one height: no eight constants do better."""
    from skipless.ops.gpu.activation import COEFFICIENTS, LINEAR, SQUARE, UNIT

    def tail(z):
        w = UNIT * z
        return np.polyval(COEFFICIENTS, 1 / np.sqrt(1 + LINEAR * w + SQUARE * w * w)) * 2.0 ** (-w * w)

    z = np.sort(np.append(np.linspace(0, np.sqrt(126) / UNIT, 200_001), np.geomspace(1e-9, 13, 10_000)))
    error = tail(z) / np.exp(log_ndtr(-z)) - 1
    assert abs(error).max() < 7e-7
    assert abs((1 - tail(z)) / ndtr(z) - 1).max() < 7e-7
    runs = np.split(error, np.flatnonzero(np.diff(np.sign(error))) + 1)
    heights = [abs(run).max() for run in runs]
    assert len(runs) == 9
    assert max(heights) < 1.01 * min(heights)


@kernels
@specs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_in_float32_is_the_definition(shape, spec):
    x, bias, upstream = problem(shape, torch.float32)
    for inputs in ((x, bias, upstream), (x, None, upstream)):
        found, truth = outcome(fused, *inputs, spec), exact(*inputs, spec)
        assert [t.shape for t in found] == [t.shape for t in truth]
        assert max(relative(*pair) for pair in zip(found, truth, strict=True)) < 2e-6


@kernels
@specs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_at_most_twice_as_far_from_the_truth_as_torchs(dtype, spec):
    inputs = problem((130, 272), dtype)
    found, plain = (outcome(function, *inputs, spec) for function in (fused, plain_biased_activation))
    assert [t.dtype for t in found] == [t.dtype for t in plain] == [dtype, dtype, torch.float32]
    for ours, theirs, truth in zip(found, plain, exact(*inputs, spec), strict=True):
        assert relative(ours, truth) <= 2 * relative(theirs, truth)
    assert relative(found[2], exact(*inputs, spec)[2]) < 2e-6  # summed before rounding


@kernels
def test_the_tail_keeps_its_relative_precision():
    x = torch.linspace(-9, 9, 528, device=DEVICE)[None]
    y = fused(x, None, SPECS["gelu"]).double()
    truth = x.double() * torch.exp(torch.special.log_ndtr(x.double()))
    assert (y / truth - 1).abs().max() < 2e-5


@kernels
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_far_away_it_is_its_argument_or_nothing_and_nan_stays():
    far = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 100.0, -100.0, 0.0], device=DEVICE)
    x = far.repeat(2)[None].requires_grad_()
    y = fused(x, None, SPECS["gelu"])
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    nan = float("nan")
    expected = torch.tensor([float("inf"), 0.0, nan, 1e30, 0.0, 100.0, 0.0, 0.0], device=DEVICE)
    torch.testing.assert_close(y[0, :8], expected, equal_nan=True)
    slopes = torch.tensor([1.0, 0.0, nan, 1.0, 0.0, 1.0, 0.0, 0.5], device=DEVICE)
    torch.testing.assert_close(slope[0, :8], slopes, equal_nan=True)


@kernels
def test_layouts_of_x_and_of_its_gradient_are_taken_as_they_are():
    x, bias, upstream = problem((6, 32, 48), torch.float32)
    turned = x.detach().transpose(0, 1).requires_grad_()
    sparse = torch.stack([bias.detach()] * 2, dim=1)[:, 0].requires_grad_()
    assert not turned.is_contiguous()
    assert not sparse.is_contiguous()
    for gradient in (upstream.transpose(0, 1), upstream[:1, :1].expand(32, 6, 48)):
        inputs = (turned, sparse, gradient, SPECS["any"])
        assert max(relative(*pair) for pair in zip(outcome(fused, *inputs), exact(*inputs), strict=True)) < 2e-6


@kernels
def test_no_rows_give_none_and_a_zero_gradient():
    y, dx, dbias = outcome(fused, *problem((0, 32), torch.bfloat16), SPECS["dks"])
    assert y.shape == dx.shape == (0, 32)
    assert torch.equal(dbias, torch.zeros_like(dbias))


@kernels
@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=2)), ids=str)
def test_only_what_is_asked_for_gets_a_gradient(needed):
    x, bias, upstream = problem((20, 32), torch.bfloat16)
    truth = exact(x, bias, upstream, SPECS["dks"])[1:]
    x, bias = (t.detach().requires_grad_(need) for t, need in zip((x, bias), needed, strict=True))
    y = fused(x, bias, SPECS["dks"])
    assert y.requires_grad == any(needed)
    if any(needed):
        y.backward(upstream)
    for tensor, need, gradient in zip((x, bias), needed, truth, strict=True):
        assert (tensor.grad is not None) == need
        assert not need or relative(tensor.grad, gradient) < 0.01


@kernels
def test_it_compiles_whole(monkeypatch):
    monkeypatch.setattr(activation, "kernel_supports", lambda *_: True)
    inputs = problem((9, 32), torch.float32)
    compiled = torch.compile(lambda x, b, s: 2 * biased_activation(x, b, s), backend="aot_eager", fullgraph=True)
    pairs = zip(outcome(compiled, *inputs, SPECS["dks"]), exact(*inputs, SPECS["dks"]), strict=True)
    assert max(relative(ours, 2 * true) for ours, true in pairs) < 2e-6


@pytest.fixture
def network():
    torch.manual_seed(0)
    layer = MLP(32, 64, SPECS["dks"]).to(DEVICE)
    layer.reset_parameters()
    nn.init.normal_(layer.up.bias, std=0.3)
    return layer


@pytest.fixture
def taken(monkeypatch):
    """A list that grows by every fused call of an MLP, the kernel serving any device in half precision."""
    calls = []

    def record(*inputs):
        calls.append(inputs)
        return fused(*inputs)

    monkeypatch.setattr(block, "kernel_supports", lambda device, dtype, n, spec: dtype == torch.bfloat16)
    monkeypatch.setattr(block, "_FEWEST_ROWS", 100)
    monkeypatch.setattr(block, "biased_activation", record)
    return calls


def gradients(layer, x, function=None):
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.float32):
        y = (layer if function is None else function)(x)
    return [y.detach(), *torch.autograd.grad(y.double().square().sum(), [*layer.parameters()])]


@kernels
def test_an_mlp_under_autocast_takes_it_and_is_as_exact_as_without(network, taken, monkeypatch):
    x = torch.randn(4, 33, 32, device=DEVICE)
    network(x)
    assert not taken  # in float32
    gradients(network, x[:3])
    assert not taken  # 99 rows
    ours = gradients(network, x)
    assert len(taken) == 1
    assert taken[0][0].dtype == torch.bfloat16
    assert taken[0][1] is network.up.bias
    monkeypatch.setattr(block, "kernel_supports", lambda *_: False)
    theirs = gradients(network, x)
    truth = gradients(network.double(), x.double())
    assert len(taken) == 1
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, c) <= 2 * relative(b, c)


@kernels
@pytest.mark.parametrize("where", ["up", "activation"])
@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "forward", "replaced"]
)
def test_an_mlp_that_is_watched_or_changed_does_not(network, taken, where, kind):
    seen = []
    part = getattr(network, where)
    if kind == "replaced":
        setattr(network, where, nn.Sequential(part))
    elif kind == "forward":
        part.forward = lambda x: seen.append(x) or type(part).forward(part, x)
    else:
        getattr(part, f"register_{kind}")(lambda *_: seen.append(kind))
    with torch.autocast(DEVICE, torch.bfloat16):
        network(torch.randn(100, 32, device=DEVICE, requires_grad=True)).sum().backward()
    assert not taken
    assert seen or kind == "replaced"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_mlp_on_a_gpu_is_as_exact_as_plain_operations(monkeypatch):
    torch.manual_seed(0)
    layer = MLP(256, 1024, SPECS["dks"]).cuda()
    layer.reset_parameters()
    nn.init.normal_(layer.up.bias, std=0.3)
    x = torch.randn(4, 301, 256, device="cuda")
    ours = gradients(layer, x, torch.compile(layer, fullgraph=True))
    eager = gradients(layer, x)
    monkeypatch.setattr(block, "kernel_supports", lambda *_: False)
    theirs = gradients(layer, x)
    truth = gradients(layer.double(), x.double())
    for a, b, c, d in zip(ours, eager, theirs, truth, strict=True):
        assert relative(a, d) <= 2 * relative(c, d)
        assert relative(b, d) <= 2 * relative(c, d)


@pytest.mark.gpu
def test_it_can_be_captured_in_a_graph():
    x, bias, upstream = problem((300, 528), torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = outcome(biased_activation, x, bias, upstream, SPECS["dks"])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = outcome(biased_activation, x, bias, upstream, SPECS["dks"])
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

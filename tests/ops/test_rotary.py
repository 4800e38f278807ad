"""Attention that rotates inside its operator, against the composition it stands for: split, rotate, attend."""

from dataclasses import dataclass, replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, library
from torch._dynamo.backends.common import aot_autograd

from skipless.nn.attention import AttentionOptions, ShapedAttention
from skipless.nn.position import Positions
from skipless.ops import gpu
from skipless.ops.attention import Rotation, rotary_attention, shaped_attention
from skipless.ops.bias import AttentionInputs, BiasVectors
from skipless.ops.layout import Layout
from skipless.theory.schemes import ExponentialSPA, ValueSkipInit
from skipless.theory.shapes import AttentionShape, ExponentialShape, PlainShape, UniformShape

pytestmark = [
    pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed"),
    # torch's own, on the way to inductor
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16  # Triton's interpreter does not multiply in bfloat16
E_SPA, U_SPA = ExponentialShape.between(0.05, 0.04, 0.008), UniformShape(0.7, 0.72)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=lambda dtype: str(dtype)[6:])


@dataclass
class Case:
    """A product qkv, an upstream gradient, and how many heads are in it."""

    qkv: Tensor
    upstream: Tensor
    heads: int
    kv_heads: int
    shape: AttentionShape
    layout: Layout | None = None
    gain: Tensor | None = None

    @classmethod
    def make(cls, dtype, shape=E_SPA, *, length=70, width=16, kv_heads=1, documents=None, gain=None):
        generator = torch.Generator().manual_seed(length + width)
        heads, batch = 2 if kv_heads == 1 else 4, 2
        sizes = ((batch, length, (heads + 2 * kv_heads) * width), (batch, heads, length, width))
        tensors = [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes]
        layout = None if documents is None else Layout.packed(documents.to(DEVICE))
        return cls(*tensors, heads, kv_heads, shape, layout, gain)

    @property
    def width(self) -> int:
        return self.upstream.shape[3]

    def rotation(self) -> Rotation:
        here = torch.arange(self.qkv.shape[1], device=DEVICE)[None]
        return Rotation.at(here if self.layout is None else self.layout.query_locations, self.width)

    def slices(self, qkv: Tensor) -> list[Tensor]:
        counts = [self.heads, self.kv_heads, self.kv_heads]
        return [p.transpose(1, 2) for p in qkv.unflatten(-1, (-1, self.width)).split(counts, dim=2)]

    def fused(self, qkv: Tensor) -> Tensor:
        bias = BiasVectors.of(self.shape, qkv.shape[1], DEVICE)
        inputs = AttentionInputs(*self.slices(qkv), bias, self.layout, self.gain)
        out = rotary_attention(inputs, qkv, self.rotation(), "triton")
        assert out is not None
        return out

    def apart(self) -> tuple[Tensor, Tensor]:
        """The product without the values, and those by themselves."""
        features = (self.heads + self.kv_heads) * self.width
        return self.qkv[..., :features].clone(), self.slices(self.qkv)[2]

    def composed(self, qkv: Tensor, impl: str = "reference") -> Tensor:
        q, k, v = self.slices(qkv)
        rotation = self.rotation()
        q, k = rotation.rotate(q), rotation.rotate(k)
        return shaped_attention(q, k, v, self.shape, impl=impl, layout=self.layout, bias_gain=self.gain)

    def run(self, attend, dtype=None) -> tuple[Tensor, ...]:
        """The output, and the gradients by qkv and by the gain, if there is one."""
        qkv = self.qkv.to(dtype or self.qkv.dtype).clone().requires_grad_()
        out = attend(qkv)
        by = (qkv,) if self.gain is None else (qkv, self.gain)
        return out, *torch.autograd.grad(out, by, self.upstream.to(out.dtype))

    def errors(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """By name, how far ours and the same composition in the same precision are from the truth, and the truth."""
        truth = self.run(self.composed, torch.float64)
        plain = self.run(self.composed)
        names = ("out", "gradient") if self.gain is None else ("out", "gradient", "gradient of the gain")
        found = {}
        for name, ours, theirs, exact in zip(names, self.run(self.fused), plain, truth, strict=True):
            assert ours.shape == exact.shape
            assert ours.dtype == (torch.float32 if exact.dim() == 1 else self.qkv.dtype)
            found[name] = (ours.double() - exact, theirs.double() - exact, exact)
        return found

    def check(self, *others: "Case"):
        """As near the truth as the same composition in the same precision, within a factor of 2, over all cases."""
        every = [case.errors() for case in (self, *others)]
        for name in every[0]:
            pairs = [errors[name] for errors in every]
            ours, theirs, exact = (torch.cat([e.flatten() for e in each]) for each in zip(*pairs, strict=True))
            floor = 1e-6 * exact.norm() if self.qkv.dtype == torch.float32 else 0.0
            error, allowed = ours.norm(), 2 * theirs.norm()
            assert error <= max(allowed, floor), f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@each_dtype
@pytest.mark.parametrize("shape", [E_SPA, U_SPA], ids=["e-spa", "u-spa"])
@pytest.mark.parametrize("length", [70, 130])
def test_output_and_gradient(dtype, shape, length):
    Case.make(dtype, shape, length=length).check()


@each_dtype
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_gain_on_the_bias(dtype, kv_heads):
    heads = 2 if kv_heads == 1 else 4
    gain = torch.tensor([1.4, 0.3, 0.9, -0.2][:heads], device=DEVICE, requires_grad=True)
    case = Case.make(dtype, kv_heads=kv_heads, gain=gain)
    # its gradient is one number a head, whose error is small by chance for one upstream gradient or another
    case.check(*(replace(case, upstream=case.upstream.roll(places, dims=2)) for places in (9, 20, 35, 51)))


@each_dtype
@pytest.mark.parametrize("width", [32, 64, 128])
def test_head_widths(dtype, width):
    Case.make(dtype, width=width, kv_heads=1).check()


@each_dtype
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_heads_that_share_keys_or_do_not(dtype, kv_heads):
    Case.make(dtype, U_SPA, kv_heads=kv_heads).check()


@each_dtype
@pytest.mark.parametrize("shape", [E_SPA, U_SPA], ids=["e-spa", "u-spa"])
def test_packed_documents_rotate_each_row_by_its_own_locations(dtype, shape):
    documents = (torch.arange(130)[None] // torch.tensor([[47], [90]])).clone()
    documents[1, -20:] = -1
    case = Case.make(dtype, shape, length=130, documents=documents)
    assert case.rotation().cos.shape[0] == 2
    case.check()


def test_two_sided_attention():
    Case.make(torch.float32, PlainShape(causal=False)).check()


@each_dtype
def test_the_two_paths_through_the_kernels_agree(dtype):
    """The output to the last bits of the rotation; the gradient to a rounding that only the other path makes."""
    case = Case.make(dtype, E_SPA, length=130, width=64)
    (out, gradient), (same, other) = case.run(case.fused), case.run(lambda t: case.composed(t, "triton"))
    rounding = torch.finfo(dtype).eps
    assert (out - same).norm() <= rounding * same.norm()
    assert (gradient - other).norm() <= 2 * rounding * other.norm()
    values = slice((case.heads + case.kv_heads) * case.width, None)
    assert (gradient - other)[..., values].norm() <= rounding * other[..., values].norm()


@each_dtype
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_values_beside_the_product_are_values_in_it(dtype, kv_heads):
    """To the bit, and so are the gradients."""
    case = Case.make(dtype, kv_heads=kv_heads)
    out, gradient = case.run(case.fused)
    product, values = (t.clone().requires_grad_() for t in case.apart())
    q, k = (p.transpose(1, 2) for p in product.unflatten(-1, (-1, case.width)).split([case.heads, kv_heads], dim=2))
    inputs = AttentionInputs(q, k, values, BiasVectors.of(case.shape, 70, DEVICE))
    same = rotary_attention(inputs, product, case.rotation(), "triton")
    assert same is not None
    by_product, by_values = torch.autograd.grad(same, (product, values), case.upstream)
    assert torch.equal(same, out)
    assert torch.equal(torch.cat([by_product, by_values.transpose(1, 2).flatten(2)], dim=-1), gradient)


def test_what_does_not_fit_is_left_to_the_other_path():
    case = Case.make(torch.float32)
    rotation, bias = case.rotation(), BiasVectors.of(case.shape, 70, DEVICE)
    inputs = AttentionInputs(*case.slices(case.qkv), bias)
    one = Rotation(*(t[:, :, :1] for t in (rotation.cos, rotation.sin)))
    assert rotary_attention(inputs, case.qkv, rotation, "reference") is None
    assert rotary_attention(inputs, case.qkv, one, "triton") is None
    wide = case.qkv.double()
    assert rotary_attention(AttentionInputs(*case.slices(wide), bias), wide, rotation, "triton") is None
    split, options = case.slices(case.qkv), {"rotation": rotation, "qkv": case.qkv, "impl": "reference"}
    assert torch.equal(shaped_attention(*split, case.shape, **options), case.composed(case.qkv))


def test_torch_finds_no_fault_with_the_operators():
    from skipless.ops.gpu import rotary

    case = Case.make(torch.float32, length=20)
    rotation, bias = case.rotation(), BiasVectors.of(U_SPA, 20, DEVICE).for_kernels()
    heads, rest = (case.heads, case.kv_heads), (*bias, [], True)
    angles = rotation.cos, rotation.sin
    library.opcheck(rotary.rotary_attention, (case.qkv.clone().requires_grad_(), None, *angles, *heads, *rest))
    out, lse, rotated = rotary.rotary_attention(case.qkv, None, *angles, *heads, *rest)
    arguments = (case.upstream, case.qkv, None, *angles, rotated, out, lse, *heads, *rest)
    library.opcheck(rotary.rotary_attention_backward, arguments)
    product, values = (t.clone().requires_grad_() for t in case.apart())
    library.opcheck(rotary.rotary_attention, (product, values, *angles, *heads, *rest))
    arguments = (case.upstream, product.detach(), values.detach(), *angles, rotated, out, lse, *heads, *rest)
    library.opcheck(rotary.rotary_attention_backward, arguments)


@pytest.fixture
def taken(monkeypatch):
    """Modules take the path of compiled training; returns which calls of theirs went through the operator."""
    from skipless.ops import attention

    found = []

    def spy(*args):
        out = rotary_attention(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(attention, "rotary_attention", spy)
    return found


def build(shape=None, **options) -> ShapedAttention:
    torch.manual_seed(0)
    shape = shape or ExponentialSPA(0.05, 0.02).shapes(6)[3]
    kv_heads = 4 if options.get("value_output") == "identity" else 2
    module = ShapedAttention(64, 4, shape, kv_heads, AttentionOptions(**{"impl": "triton"} | options))
    module.reset_parameters("normal")
    return module.to(DEVICE)


def results(module, x, positions=None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = module(x, positions)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *(p for p in module.parameters() if p.requires_grad)])]


VALUES = {
    "identity": {"value_output": "identity"},
    "readers": {"value_output": "identity", "bias_gain": True, "readers": 2},
}


@pytest.mark.catalogue(5)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("values", ["trained", "frozen", "identity", "readers"])
def test_a_module_in_compiled_training_gives_what_it_gives_otherwise(packed, values, request):
    module = build(**VALUES.get(values, {}))
    if values == "readers":  # away from 0, where they would add nothing
        torch.nn.init.normal_(module.output.weight, std=0.1)
    if values == "frozen":
        module.value.requires_grad_(False)
    assert len(module.qkv_layers()) == (3 if values == "trained" else 2)
    x = torch.randn(2, 70, 64, device=DEVICE)
    layout = Layout.packed((torch.arange(70)[None] // torch.tensor([[30], [50]])).to(DEVICE)) if packed else None
    positions = None if layout is None else Positions(layout, Rotation.at(layout.query_locations, 16))
    want = results(module, x, positions)
    taken = request.getfixturevalue("taken")
    got = results(module, x, positions)
    assert taken == [True]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("values", ["trained", "frozen", "identity"])
def test_a_compiled_backward_pass_neither_rotates_nor_concatenates(values):
    """Nor does it multiply for the gradient of a matrix that is frozen, or absent."""
    seen: list[list[str]] = []

    def look(graph, _):
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)

    module = build(value_output="identity" if values == "identity" else "trained")
    x = torch.randn(2, 70, 64, device=DEVICE)
    if values == "frozen":
        module.value.requires_grad_(False)
        module.output.requires_grad_(False)
    module(x)  # the shape's vectors are built outside what is compiled
    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    for ours, theirs in zip(results(compiled, x), results(module, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    forward, backward = seen
    assert forward.count("skipless.rotary_attention.default") == 1
    assert backward.count("skipless.rotary_attention_backward.default") == 1
    assert not any(word in target for target in backward for word in ("cat", "mul", "zeros", "full", "clone"))
    # of the input and of the weights: two for each product, one where the matrix is frozen
    assert sum("aten.mm" in target for target in backward) == {"trained": 4, "frozen": 4, "identity": 2}[values]


class Cache:
    length = 0

    def append(self, k, v):
        return k, v


def test_modules_that_the_operator_does_not_support(taken):
    x = torch.randn(2, 70, 64, device=DEVICE)
    build()(x, None, Cache())
    build(position="none")(x, Positions())
    build(ValueSkipInit().shapes(1)[0])(x)
    build(impl="reference", position="relative")(x)
    with torch.no_grad():
        build()(x)
    build(impl="reference")(x)
    assert not any(taken)
    build()(x)
    assert taken[-1]


@pytest.mark.gpu
def test_inside_a_compiled_block_under_autocast():
    module, x = build(impl="triton"), torch.randn(2, 256, 64, device="cuda")
    compiled = torch.compile(module, fullgraph=True, dynamic=False)
    with torch.autocast("cuda", torch.bfloat16):
        want, got = results(module, x), results(compiled, x)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()

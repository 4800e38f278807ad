"""The Triton kernels where a dense reference cannot follow: a million tokens, compiled code, repeated runs, memory."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from skipless.ops import gpu
from skipless.ops.attention import is_decoding, shaped_attention
from skipless.ops.bias import AttentionInputs, BiasVectors
from skipless.ops.layout import Layout
from skipless.ops.reference import initial_attention
from skipless.theory.shapes import AlibiShape, AttentionShape, CompactBias, DenseShape, ExponentialShape, UniformShape

pytestmark = [
    pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed"),
    # torch's own, on the way to inductor
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
SHAPES = {"exponential": ExponentialShape.between(0.05, 0.04, 0.008), "uniform": UniformShape(0.7, 0.72)}


def tensors(length: int, heads: int = 2, width: int = 64, dtype=torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(length)
    made = [torch.randn(1, length, heads, width, device="cuda", generator=generator) for _ in range(4)]
    return [t.to(dtype).transpose(1, 2) for t in made]


def test_what_the_kernels_refuse():
    q = torch.randn(1, 2, 8, 16)
    spa = ExponentialShape.between(0.5, 0.4)
    for words, value, shape, options in [
        ("bias_gain", q, UniformShape(0.2, 0.3), {"bias_gain": 1.0}),
        ("score_bias", q, spa, {"score_bias": torch.zeros(8, 8)}),
        ("float64", q.double(), spa, {}),
        ("(bfloat16|q is on cpu)", q.bfloat16(), spa, {}),
        ("head_width is 24, .*16, 32, 64", torch.randn(1, 2, 8, 24), spa, {}),
        ("dense table", q, DenseShape(torch.eye(8).numpy()), {}),
    ]:
        with pytest.raises(RuntimeError, match=f"impl='triton' cannot run this: .*{words}"):
            shaped_attention(value, value, value, shape, impl="triton", **options)


@dataclass(frozen=True)
class Own(AttentionShape):
    """Compact forms that no shape of the paper has: slopes by head or rows, beside columns, a diagonal and scales."""

    slopes: tuple[float, ...]
    rows: bool
    causal: bool = True

    def compact(self, length: int) -> CompactBias:
        here = np.arange(length) / length
        row = np.log(0.05 + here) if self.rows else None
        return CompactBias(np.array(self.slopes), np.sin(9 * here) - 1, np.cos(7 * here), 1 + here, row)


@pytest.mark.parametrize(("slopes", "rows", "causal"), [((0.02, 0.3), False, True), ((0.0, 0.0), True, False)])
def test_a_compact_shape_of_one_s_own_runs_on_the_kernels(slopes, rows, causal):
    device, shape = "cuda" if torch.cuda.is_available() else "cpu", Own(slopes, rows, causal)
    tensors = torch.randn(4, 1, 2, 100, 16, generator=torch.Generator().manual_seed(0)).to(device)
    found = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        q, k, v, upstream = (t.to(dtype).requires_grad_() for t in tensors)
        out = shaped_attention(q, k, v, shape, impl=impl)
        found.append((out, *torch.autograd.grad(out, (q, k, v), upstream)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_one_with_slopes_and_rows_at_once_is_left_to_slower_code(impl):
    shape = Own((0.02, 0.3), True)
    v = torch.randn(1, 2, 50, 16, dtype=torch.float64)
    attended = shaped_attention(torch.zeros_like(v), v, v, shape, impl=impl)
    torch.testing.assert_close(attended, torch.from_numpy(shape.dense(50)) @ v)
    with pytest.raises(RuntimeError, match="both a slope and a row term"):
        shaped_attention(v.float(), v.float(), v.float(), shape, impl="triton")


def test_tensors_that_do_not_lie_in_rows_are_copied():
    q = torch.randn(1, 2, 16, 70).mT.to(torch.float16)  # features are not side by side
    k = torch.randn(1, 1, 70, 17).to(torch.float16)[..., 1:]  # rows do not start at multiples of 16 bytes
    v = torch.randn(1, 1, 1, 16).to(torch.float16).expand(1, 1, 70, 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (t.to(device) for t in (q, k, v))
    got, want = (shaped_attention(q, k, v, AlibiShape(2), impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16])
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (SHAPES["exponential"], (4, 2, 1, 200)),
        (SHAPES["uniform"], (4, 1, 3, 300)),
        (AlibiShape(4), (4, 4, 5, 130)),
        (AlibiShape(2, causal=False), (2, 2, 2, 65)),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_decoding_shares_out_the_keys(monkeypatch, shape, sizes, dtype, shared):
    from skipless.ops.gpu import decode

    heads, kv_heads, queries, keys = sizes
    monkeypatch.setattr(decode, "_KEYS_PER_SHARE", 64 if shared else 1024)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(keys)
    tensors = [(2, heads, queries, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 16)]
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for size in tensors)
    assert is_decoding(AttentionInputs(q, k, v, BiasVectors.of(shape, keys, device)))
    assert (decode.shares_of(keys, kv_heads, 2)[0] > 1) == shared
    mask = torch.ones(2, keys, dtype=torch.long, device=device)
    mask[1, : keys // 2] = 0
    for layout in (None, Layout.left_padded(mask, queries)):
        options = {"layout": layout, "decoding": True}
        got = shaped_attention(q, k, v, shape, impl="triton", **options)
        wide = [t.double() for t in (q, k, v)]
        truth = shaped_attention(*wide, shape, impl="reference", **options)
        plain = shaped_attention(q, k, v, shape, impl="reference", **options)
        assert (got - truth).norm() <= 2 * (plain - truth).norm()


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 257, 100_000])
@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (8, 1), (8, 64)])
def test_shares_cover_every_key_once(keys, heads, batch):
    from skipless.ops.gpu import decode

    number, each = decode.shares_of(keys, heads, batch)
    assert (number - 1) * each < keys <= number * each
    assert each % 64 == 0
    assert number == 1 or number * heads * batch <= 264


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("length", [100_000, 2**20])
def test_a_million_tokens_at_the_start_of_training(kind, length):
    _, k, v, dout = tensors(length, heads=1)
    v, exact = v.requires_grad_(), v.detach().double().requires_grad_()
    got = shaped_attention(torch.zeros_like(k), k, v, SHAPES[kind], impl="triton")
    want = initial_attention(SHAPES[kind], exact)
    (dv,), (true,) = torch.autograd.grad(got, v, dout), torch.autograd.grad(want, exact, dout.double())
    rounding = 2.0**-8
    for ours, theirs in ((got, want), (dv, true)):
        assert (ours.double() - theirs).norm() <= rounding * theirs.norm()
        assert (ours.double() - theirs)[:, :, -1000:].norm() <= rounding * theirs[:, :, -1000:].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_are_the_same_in_every_run(kind):
    q, k, v, dout = tensors(3000, heads=4)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    runs = [torch.autograd.grad(shaped_attention(*inputs, SHAPES[kind], impl="triton"), inputs, dout) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_inside_a_compiled_function(packed, width):
    q, k, v, dout = tensors(512, heads=4, width=width)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    parts = BiasVectors.of(SHAPES["exponential"], 512, "cuda")
    ids = torch.arange(512, device="cuda")[None] // 200
    layout = Layout.packed(ids) if packed else None

    def attend(q, k, v):
        return shaped_attention(q * 2, k, v, parts, impl="triton", layout=layout) + 1

    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    pairs = [(f(*inputs), f) for f in (attend, compiled)]
    results = [(out, *torch.autograd.grad(out, inputs, dout)) for out, _ in pairs]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_memory_of_long_rows_grows_with_length_and_not_its_square():
    q, k, v, dout = tensors(32768)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    parts = BiasVectors.of(SHAPES["exponential"], 32768, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = shaped_attention(*inputs, parts, impl="triton")
    torch.autograd.grad(out, inputs, dout)
    extra = torch.cuda.max_memory_allocated() - before - 4 * out.numel() * out.element_size()
    assert extra <= 4 * 32768 * 2 * 4  # lse and δ, with room for the allocator's rounding

"""A backward pass that saves the gradients of its scores computes what the one that forms them twice does."""

import pytest
import torch
from torch import Tensor

from skipless.ops import gpu
from skipless.ops.attention import Rotation, rotary_attention, shaped_attention
from skipless.ops.bias import AttentionInputs, BiasVectors
from skipless.ops.layout import Layout
from skipless.theory.shapes import AlibiShape, AttentionShape, ExponentialShape, PlainShape, UniformShape

pytestmark = pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16  # Triton's interpreter does not multiply in bfloat16
E_SPA, U_SPA = ExponentialShape.between(0.05, 0.04, 0.008), UniformShape(0.7, 0.72)


def tensors(length: int, batch: int = 1, heads: int = 2, kv_heads: int = 2, width: int = 16, dtype=HALF):
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, length, count, width) for count in (heads, kv_heads, kv_heads, heads)]
    made = [torch.randn(shape, generator=generator).to(DEVICE, dtype).transpose(1, 2) for shape in shapes]
    return [t.requires_grad_() for t in made[:3]], made[3]


def gradients(shape: AttentionShape, inputs: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    fewer = inputs[0].shape[2] < inputs[1].shape[2]
    return torch.autograd.grad(shaped_attention(*inputs, shape, impl="triton", decoding=fewer), inputs, upstream)


def alike(a: Tensor, b: Tensor) -> bool:
    """To the last bit of half precision, in norm: the two sides multiply in another order."""
    return bool((a.float() - b.float()).norm() <= torch.finfo(HALF).eps * b.float().norm())


@pytest.fixture
def saved(monkeypatch):
    """Calls with so many bytes to save scores in, and how many launches of the kernel that reads them there were.

    What is read and was not written is not a number.
    """
    from skipless.ops.gpu import launch

    counted = []
    real, room = launch.run_query_side_from_saved, launch._scores
    monkeypatch.setattr(launch, "_scores", lambda *args: room(*args).fill_(torch.nan))
    monkeypatch.setattr(launch, "run_query_side_from_saved", lambda *args: counted.append(real(*args)))

    def call(size: int, function, *arguments):
        monkeypatch.setattr(launch, "SAVED_SCORES_BYTES", size)
        counted.clear()
        return function(*arguments), len(counted)

    return call


@pytest.mark.parametrize("shape", [E_SPA, U_SPA, AlibiShape(2, causal=False), PlainShape()], ids=repr)
@pytest.mark.parametrize(("length", "kv_heads"), [(64, 2), (70, 1), (129, 2)])
def test_the_gradients_are_those_of_two_sides(saved, shape, length, kv_heads):
    inputs, upstream = tensors(length, kv_heads=kv_heads)
    (twice, none), (once, one) = (saved(size, gradients, shape, inputs, upstream) for size in (0, 2**29))
    assert (none, one) == (0, 1)
    assert all(alike(a, b) for a, b in zip(once, twice, strict=True))


def test_a_large_batch_saves_some_rows_at_a_time(saved):
    inputs, upstream = tensors(20, batch=5)
    bytes_of_row = 2 * 20 * 32 * 2
    whole, one = saved(2**29, gradients, E_SPA, inputs, upstream)
    parts, three = saved(2 * bytes_of_row + 100, gradients, E_SPA, inputs, upstream)
    assert (one, three) == (1, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert saved(bytes_of_row - 1, gradients, E_SPA, inputs, upstream)[1] == 0


@pytest.mark.parametrize("shape", [E_SPA, AlibiShape(10)], ids=["e-spa", "a slope a head"])
def test_a_long_row_saves_some_heads_at_a_time(saved, shape):
    """Room for four key heads of five, each with two query heads: three, then two."""
    inputs, upstream = tensors(20, batch=2, heads=10, kv_heads=5)
    bytes_of_head = 2 * 20 * 32 * 2
    whole, one = saved(2**29, gradients, shape, inputs, upstream)
    parts, four = saved(4 * bytes_of_head + 100, gradients, shape, inputs, upstream)
    assert (one, four) == (1, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert saved(2 * bytes_of_head, gradients, shape, inputs, upstream)[1] == 2 * 3
    assert saved(2 * bytes_of_head - 1, gradients, shape, inputs, upstream)[1] == 0


@pytest.mark.parametrize("rows", [1, 5])
def test_rotated_rows_are_rotated_back(saved, rows):
    """Angles of every row of the batch, or one row of angles for all."""
    length, width, heads = 70, 16, 2
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(5, length, 3 * heads * width, generator=generator).to(DEVICE, HALF).requires_grad_()
    upstream = torch.randn(5, heads, length, width, generator=generator).to(DEVICE, HALF)
    locations = torch.arange(length, device=DEVICE)[None] + 3 * torch.arange(rows, device=DEVICE)[:, None]
    rotation = Rotation.at(locations, width)
    q, k, v = (t.unflatten(-1, (heads, width)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
    inputs = AttentionInputs(q, k, v, BiasVectors.of(E_SPA, length, DEVICE))

    def gradient() -> Tensor:
        out = rotary_attention(inputs, qkv, rotation, "triton")
        assert out is not None
        return torch.autograd.grad(out, qkv, upstream)[0]

    (twice, _), (once, count) = saved(0, gradient), saved(2 * heads * length * 80 * 2, gradient)
    assert count == 3
    assert alike(once, twice)


def layouts() -> dict[str, Layout]:
    """Three rows each: documents in a row, documents that take turns, padding, and fewer queries than keys."""
    documents = torch.tensor([[0] * 80 + [1] * 50, [0] * 10 + [1] * 120, [0] * 130])
    alternating = torch.arange(130)[None] // 7 % 2
    mask = torch.ones(3, 130, dtype=torch.long)
    mask[1, :70] = mask[2, :129] = 0
    return {
        "packed": Layout.packed(documents.to(DEVICE)),
        "alternating": Layout.packed(alternating.expand(3, -1).to(DEVICE)),
        "padded": Layout.left_padded(mask.to(DEVICE), 130),
        "short": Layout.left_padded(mask.to(DEVICE), 66),
    }


@pytest.mark.catalogue(6)
@pytest.mark.parametrize("shape", [E_SPA, U_SPA, AlibiShape(2, causal=False)], ids=["e-spa", "u-spa", "all"])
@pytest.mark.parametrize("name", ["packed", "alternating", "padded", "short"])
def test_documents_and_padding(saved, name, shape):
    layout = layouts()[name]
    inputs, upstream = tensors(130, batch=3, kv_heads=1)
    queries = layout.query_locations.shape[1]
    inputs[0], upstream = inputs[0][:, :, -queries:].detach().requires_grad_(), upstream[:, :, -queries:]

    def formed() -> tuple[Tensor, ...]:
        out = shaped_attention(*inputs, shape, impl="triton", layout=layout)
        return torch.autograd.grad(out, inputs, upstream)

    two_rows = 2 * 2 * 130 * -(-queries // 16) * 16 * 2
    (twice, none), (once, two) = saved(0, formed), saved(two_rows, formed)
    assert (none, two) == (0, 2)
    assert all(alike(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("size", [0, 2**29], ids=["twice", "once"])
def test_the_order_of_tiles_changes_nothing(saved, monkeypatch, size):
    """One head after another, four at a time of the six there are, and all at once."""
    from skipless.ops.gpu import launch

    inputs, upstream = tensors(70, batch=3)
    of_head, found = 2 * 70 * 16 * 2, []
    for section in (0, 4 * of_head, 2**40):
        monkeypatch.setattr(launch, "_SECTION_BYTES", section)
        found.append(saved(size, gradients, E_SPA, inputs, upstream)[0])
        found[-1] = (*found[-1], shaped_attention(*inputs, E_SPA, impl="triton"))
    for one_by_one, *others in zip(*found, strict=True):
        assert all(torch.equal(one_by_one, other) for other in others)


def test_where_scores_are_formed_twice(saved):
    """In float32, and without a layout where queries are fewer than keys."""
    inputs, upstream = tensors(70, dtype=torch.float32)
    assert saved(2**29, gradients, E_SPA, inputs, upstream)[1] == 0
    (q, *others), upstream = tensors(70)
    last = [q[:, :, 40:].detach().requires_grad_(), *others]
    assert saved(2**29, gradients, E_SPA, last, upstream[:, :, 40:])[1] == 0

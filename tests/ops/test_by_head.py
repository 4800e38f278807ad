"""A shape for each head: every implementation against heads written out one by one, gradients included."""

import numpy as np
import pytest
import torch
from torch import Tensor

from skipless.ops import gpu, reference
from skipless.ops.attention import Rotation, shaped_attention
from skipless.ops.bias import AttentionInputs, BiasVectors
from skipless.ops.layout import Layout
from skipless.theory.exponential import ExponentialStep
from skipless.theory.shapes import (
    AttentionShape,
    DenseShape,
    ExponentialShape,
    PlainShape,
    ShapeByHead,
    SymmetricExponentialShape,
    UniformShape,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # inductor's imports
WIDTH = 16
SLOW, QUICK = ExponentialShape.between(0.05, 0.04, 0.1), ExponentialShape.between(1.2, 0.9, 0.1)
CAUSAL = ShapeByHead((QUICK, SLOW, SLOW, QUICK))
SYMMETRIC = ShapeByHead(
    tuple(
        SymmetricExponentialShape(ExponentialStep.between(*rates)) for rates in ((0.5, 0.3), (0.9, 0.8)) for _ in "ab"
    )
)
TABLES = ShapeByHead(
    tuple(DenseShape(np.tril(np.random.default_rng(head).gamma(2.0, size=(99, 99)))) for head in range(4))
)


def random(length: int, heads: int = 4, kv_heads: int = 4, queries: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = [(heads, queries or length), (kv_heads, length), (kv_heads, length)]
    return [torch.randn(2, h, t, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for h, t in sizes]


def by_hand(q: Tensor, k: Tensor, v: Tensor, shape: ShapeByHead, gain: Tensor) -> Tensor:
    """D_h·softmax(q_h k_hᵀ/√d + g_h B_h)·v_h from theory's T×T bias, one head after the other."""
    queries, length = q.shape[2], k.shape[2]
    groups, heads = q.shape[1] // k.shape[1], []
    for head, own in enumerate(shape.shapes):
        bias, scale = (torch.from_numpy(each(length)) for each in (own.bias, own.row_scale))
        seen = bias.isfinite()
        term = gain[head] * bias.masked_fill(~seen, 0.0)
        scores = q[:, head] @ k[:, head // groups].mT / WIDTH**0.5 + term[-queries:]
        weights = scores.masked_fill(~seen[-queries:], -torch.inf).softmax(-1)
        heads.append(scale[-queries:, None] * (weights @ v[:, head // groups]))
    return torch.stack(heads, dim=1)


def assert_alike(outputs: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    upstream = torch.randn(outputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    gradients = [torch.autograd.grad(out, wanted, upstream) for out in outputs]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("length", [1, 2, 63, 99])
@pytest.mark.parametrize("shape", [CAUSAL, SYMMETRIC, TABLES], ids=["causal", "symmetric", "tables"])
def test_each_head_attends_by_its_own_shape(impl, length, shape):
    inputs, gain = random(length), torch.tensor([1.0, 0.3, -0.5, 2.0], dtype=torch.float64, requires_grad=True)
    ours = shaped_attention(*inputs, shape, impl=impl, bias_gain=gain)
    assert_alike([ours, by_hand(*inputs, shape, gain)], [*inputs, gain])


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_of_a_cache_whose_groups_are_not_the_runs(impl, kv_heads):
    """Runs of heads are (0), (1, 2), (3); heads that share keys are (0, 1), (2, 3) or all."""
    inputs, ones = random(40, kv_heads=kv_heads, queries=7), torch.ones(4, dtype=torch.float64)
    ours = shaped_attention(*inputs, CAUSAL, impl=impl, decoding=True)
    assert_alike([ours, by_hand(*inputs, CAUSAL, ones)], inputs)


def test_documents_in_one_row():
    inputs, ones = random(30), torch.ones(4, dtype=torch.float64)
    layout = Layout.packed(torch.tensor([[0] * 12 + [1] * 18] * 2))
    ours = shaped_attention(*inputs, CAUSAL, impl="sdpa", layout=layout)
    parts = [by_hand(*(t[:, :, rows] for t in inputs), CAUSAL, ones) for rows in (slice(12), slice(12, 30))]
    assert_alike([ours, torch.cat(parts, dim=2)], inputs)


def test_the_definition_takes_all_heads_at_once():
    """What those read who look inside: weights and row scales of every head, with one set of inputs."""
    inputs = AttentionInputs(*random(20), BiasVectors.of(CAUSAL, 20, dtype=torch.float64)).check()
    mixed, weights = reference.attend_with_weights(inputs)
    torch.testing.assert_close(mixed, by_hand(inputs.q, inputs.k, inputs.v, CAUSAL, torch.ones(4)), rtol=0, atol=1e-12)
    bias, row_scale = inputs.bias.between(torch.arange(20), torch.arange(20))
    assert (bias.shape, row_scale.shape, weights.shape) == ((4, 20, 20), (4, 20, 1), (2, 4, 20, 20))
    np.testing.assert_allclose(row_scale[..., 0].numpy(), CAUSAL.row_scale(20), rtol=1e-13)


@pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed")
@pytest.mark.parametrize("rotated", [False, True])
def test_the_gpu_kernels_run_it_by_runs_of_heads(rotated):
    """In float32, forward and backward; with one product of q, k and v and a rotation to go around."""
    product = torch.randn(2, 70, 3 * 4 * WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    q, k, v = (t.unflatten(-1, (4, WIDTH)).transpose(1, 2) for t in product.chunk(3, dim=-1))
    rotation = Rotation.at(torch.arange(70)[None], WIDTH) if rotated else None
    outputs = [
        shaped_attention(q, k, v, CAUSAL, impl=impl, rotation=rotation, qkv=product if rotated else None)
        for impl in ("triton", "reference")
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    gradients = [torch.autograd.grad(out.sin().sum(), product)[0] for out in outputs]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-4)


def test_flex_runs_it_too():
    tensors = [t.detach().float() for t in random(64)]
    with torch.no_grad():
        outputs = [shaped_attention(*tensors, CAUSAL, impl=impl) for impl in ("flex", "reference")]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_vectors_are_one_set_for_each_run():
    bias = BiasVectors.of(CAUSAL, 32)
    assert bias.runs == (1, 2, 1)
    assert {t.shape for t in bias.tensors().values()} == {(3,), (3, 32)}
    assert bias.to(dtype=torch.float64).dtype == torch.float64
    assert ShapeByHead((SLOW,) * 4).runs() == [(SLOW, 4)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ShapeByHead(()), "shapes is empty; give one for each head"),
        (lambda: ShapeByHead((SLOW, PlainShape())), "give all of them one kind of shape"),
        (lambda: ShapeByHead((PlainShape(), PlainShape(causal=False))), "give all of them one kind of shape"),
        (lambda: CAUSAL.compact(8), "each of its `shapes` has its own"),
        (lambda: BiasVectors.of(ShapeByHead((UniformShape(0.0, 0.1), UniformShape(0.1, 0.2))), 8), "a row term"),
        (lambda: shaped_attention(*random(8, heads=8), CAUSAL), "by head, of 4, and q has 8 heads; give one for each"),
    ],
)
def test_what_cannot_be_by_head_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_it_is_a_shape_like_others():
    assert isinstance(CAUSAL, AttentionShape)
    assert (CAUSAL.heads, CAUSAL.causal, CAUSAL.tabled, CAUSAL.limit) == (4, True, False, None)
    assert (TABLES.tabled, TABLES.limit) == (True, 99)
    for head, own in enumerate(CAUSAL.shapes):
        np.testing.assert_array_equal(CAUSAL.dense(12)[head], own.dense(12))
        np.testing.assert_array_equal(CAUSAL.bias(12)[head], own.bias(12))

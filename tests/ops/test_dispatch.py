"""shaped_attention's border: what it refuses and in which words, what "auto" chooses, what autocast may not touch."""

import logging
from dataclasses import replace

import pytest
import torch

from skipless.ops import attention
from skipless.ops.attention import shaped_attention
from skipless.ops.bias import AttentionInputs, BiasVectors
from skipless.ops.layout import Layout
from skipless.theory.exponential import ExponentialStep
from skipless.theory.shapes import (
    AlibiShape,
    ExponentialShape,
    PlainShape,
    SymmetricExponentialShape,
    SymmetricUniformShape,
    UniformShape,
)

SPA = ExponentialShape.between(0.5, 0.4)


def tensors(batch=1, heads=2, length=5, width=16, **options) -> list[torch.Tensor]:
    return [torch.randn(batch, heads, length, width, **options) for _ in range(3)]


def refused(message: str, *args, error=ValueError, **options) -> None:
    with pytest.raises(error, match=message):
        shaped_attention(*args, **options)


def test_tensors_that_do_not_fit():
    q, k, v = tensors()
    refused(r"q \(2, 5, 16\).*\(batch, heads, length, head_width\)", q[0], k, v, SPA)
    refused("k and v must have one shape", q, k, v[:, :, :4], SPA)
    refused("share batch and head_width", q[..., :8], k, v, SPA)
    refused("no dimension may be empty", q[:, :, :0], k, v, SPA)
    refused("q has 2 heads and k 3; .* use 3 query heads", q, *tensors(heads=3)[:2], SPA)
    refused("q has 5 heads and k 2; .* use 4 query heads", tensors(heads=5)[0], k, v, SPA)
    refused("q is torch.float64, k torch.float32", q.double(), k, v, SPA)
    refused("q is torch.int64; attention runs in float64", q.long(), k.long(), v.long(), SPA)
    refused(
        r"2 queries and 5 keys, and the shape is causal.* 3 keys of a cache, .*continuing\(3, 2\)",
        q[:, :, :2],
        k,
        v,
        SPA,
    )
    refused("there are 5 queries and 3 keys; .*at most 3 queries, or a Layout", q, k[:, :, :3], v[:, :, :3], SPA)

    refused("5 keys, and the shape weighs distance.* decoding=True", q[:, :, :2], k, v, AlibiShape(2, causal=False))


@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize("keys", [1, 3, 5, 8])
def test_plain_attention_without_a_mask_may_be_to_another_sequence(impl, keys):
    """Of fewer or more locations: none is before another, so nothing has to be said of where queries stand."""
    q, (k, v) = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 2, keys, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(shaped_attention(q, k, v, PlainShape(causal=False), impl=impl), expected)


def test_shapes_that_do_not_fit():
    q, k, v = tensors()
    refused("the shape has 8 slopes and q 2 heads; build it with heads=2", q, k, v, AlibiShape(8))
    refused(r"locations reach 5, .* built for 4; use BiasVectors.of\(shape, 5\)", q, k, v, BiasVectors.of(SPA, 4))
    symmetric = BiasVectors.of(SymmetricUniformShape(0.1, 0.2), 6)
    refused("5 queries and 5 keys with no layout.*sequences of 6.*length=5", q, k, v, symmetric)
    packed = Layout.packed(torch.zeros(1, 5, dtype=torch.long))
    refused(
        "a layout.*depends on the length: it knows no padding.*rows of one length",
        q,
        k,
        v,
        SymmetricUniformShape(0.1, 0.2),
        layout=packed,
    )
    table = SymmetricExponentialShape(ExponentialStep.between(0.5, 0.4))
    refused(r"2 queries and 5 keys.*depends on the length.*another sequence takes Plain", q[:, :, :2], k, v, table)
    parts = BiasVectors.of(SPA, 5)
    halved = replace(parts, column=parts.column.bfloat16())
    refused("column of the shape is torch.bfloat16, which moves the bias by up to 6e-2", q, k, v, halved)
    if torch.cuda.is_available():
        refused(r"vectors are on cuda:0 and q on cpu; use BiasVectors.to\('cpu'\)", q, k, v, parts.to("cuda"))


def test_layouts_that_do_not_fit():
    q, k, v = tensors(batch=3)
    refused(r"query_locations are shaped \(1, 4\).*\(3, 5\) or \(1, 5\)", q, k, v, SPA, layout=Layout.continuing(0, 4))
    with pytest.raises(ValueError, match="query_documents are given without key_documents"):
        Layout(torch.zeros(1, 2).long(), torch.zeros(1, 2).long(), torch.zeros(1, 2).long())
    with pytest.raises(ValueError, match=r"query_locations are torch.float32 shaped \(1, 2\)"):
        Layout(torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="key_documents are shaped"):
        Layout(*(torch.zeros(1, n).long() for n in (2, 2, 2, 3)))
    with pytest.raises(ValueError, match="past=-1, new=2"):
        Layout.continuing(-1, 2)
    with pytest.raises(ValueError, match=r"document_ids are torch\.bool"):
        Layout.packed(torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="queries=5 of 4 slots"):
        Layout.left_padded(torch.ones(1, 4), queries=5)
    with pytest.raises(ValueError, match=r"attention_mask is shaped \(1, 1, 4, 4\)"):
        Layout.left_padded(torch.ones(1, 1, 4, 4))


def test_locations_of_layouts():
    packed = Layout.packed(torch.tensor([[4, 4, 4, 2, 2, -1, -1, 4]]))
    assert packed.query_locations.tolist() == [[0, 1, 2, 0, 1, 0, 1, 0]]
    assert packed.key_documents.tolist() == [[0, 0, 0, 1, 1, -1, -1, 3]]
    padded = Layout.left_padded(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), queries=2)
    assert padded.key_locations.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert padded.query_locations.tolist() == [[0, 1], [2, 3]]
    assert Layout.continuing(2, 2).query_locations.tolist() == [[2, 3]]
    assert packed.to("cpu") is packed
    assert packed.to("meta") is packed.to("meta")
    assert packed.to("meta").key_documents.is_meta
    assert padded.for_rows(2) is padded
    assert packed.for_rows(3).query_documents.shape == (3, 8)


def test_terms_that_do_not_fit():
    q, k, v = tensors()
    refused(r"bias_gain is shaped \(3,\); .*per head: \(2,\)", q, k, v, SPA, bias_gain=torch.ones(3))
    refused(r"score_bias is shaped \(4, 5\).*= \(1, 2, 5, 5\)", q, k, v, SPA, score_bias=torch.ones(4, 5))
    refused("impl is 'fast'; use 'auto' or one of 'reference', 'sdpa', 'flex'", q, k, v, SPA, impl="fast")


def test_an_explicit_impl_that_cannot_run_says_why():
    q, k, v = tensors()
    flex = {"impl": "flex", "error": RuntimeError}
    refused("score_bias is a dense.*use impl='sdpa'", q, k, v, SPA, score_bias=torch.zeros(5, 5), **flex)
    refused("q is float64; use impl='sdpa'", q.double(), k.double(), v.double(), SPA, **flex)
    refused("wrong numbers for 24 keys of head_width 16", *tensors(length=24), SPA, **flex)
    refused("no backward pass on cpu.*use impl='sdpa'", q.requires_grad_(), k, v, SPA, **flex)


def test_auto_logs_its_choice_once(caplog):
    attention._announced.clear()
    q, k, v = tensors()
    with caplog.at_level(logging.INFO, logger="skipless"):
        for _ in range(2):
            shaped_attention(q, k, v, SPA)
            shaped_attention(q, k, v, PlainShape())
            shaped_attention(q, k, v, SPA, impl="reference")
    messages = [record.getMessage() for record in caplog.records if record.name == "skipless"]
    assert [m.split(":")[0] for m in messages] == ["impl='auto' runs 'sdpa'"] * 2
    assert "quicker than compiling" in messages[0]
    assert "needs no bias" in messages[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_auto_chooses(device):
    def chosen(shape=SPA, queries=8192, keys=8192, grad=False, **options) -> str:
        (q, _, _), (_, k, v) = (tensors(length=n, device=device, **options) for n in (queries, keys))
        parts = BiasVectors.of(shape, keys, device)
        return attention.choose(AttentionInputs(q.requires_grad_(grad), k, v, parts, decoding=True).check())[0]

    assert chosen() == ("triton" if device == "cuda" else "flex")
    assert chosen(width=48) == "flex"
    assert chosen(PlainShape(), dtype=torch.bfloat16) == "sdpa"
    assert chosen(PlainShape()) == ("triton" if device == "cuda" else "sdpa")
    assert chosen(grad=True) == ("triton" if device == "cuda" else "sdpa")
    assert chosen(queries=64, keys=64) == ("triton" if device == "cuda" else "sdpa")
    if device == "cpu":
        assert [chosen(queries=n, keys=n) for n in (4096, 4097)] == ["sdpa", "flex"]
        assert [chosen(queries=n) for n in (16, 17)] == ["sdpa", "flex"]
    assert chosen(queries=1) == ("triton" if device == "cuda" else "sdpa")
    assert chosen(queries=1, width=48) == "sdpa"
    assert chosen(dtype=torch.float64) == "sdpa"
    assert chosen(queries=64, keys=64, width=8) == "sdpa"
    table = SymmetricExponentialShape(ExponentialStep.between(0.5, 0.4))
    assert chosen(table, queries=64, keys=64, width=64) == "sdpa"
    assert chosen(table, queries=64, keys=64, width=32) == ("flex" if device == "cuda" else "sdpa")


def test_a_shape_is_built_as_far_as_the_layout_reaches():
    """Four keys that stand at 7 … 10, as when a cache has lost its start."""
    q, k, v = tensors(length=4, dtype=torch.float64)
    here = torch.arange(7, 11)[None]
    out = shaped_attention(q, k, v, SPA, impl="reference", layout=Layout(here, here, extent=11))
    scores = ((q @ k.mT) / 4 + torch.tensor(SPA.bias(11))[7:, 7:]).softmax(-1)
    torch.testing.assert_close(out, torch.tensor(SPA.row_scale(11))[7:, None] * (scores @ v))


def test_score_bias_is_added():
    q, k, v = tensors(length=9, dtype=torch.float64)
    bias = torch.randn(2, 9, 9, dtype=torch.float64, requires_grad=True)
    out, grads = {}, {}
    for impl in ("reference", "sdpa"):
        out[impl] = shaped_attention(q, k, v, SPA, impl=impl, score_bias=bias)
        (grads[impl],) = torch.autograd.grad(out[impl].square().sum(), bias)
    scores = (q @ k.mT) / 4 + torch.tensor(SPA.bias(9)) + bias
    want = torch.tensor(SPA.row_scale(9))[:, None] * (scores.softmax(-1) @ v)
    for impl in out:
        torch.testing.assert_close(out[impl], want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads["sdpa"], grads["reference"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_autocast_does_not_reach_the_bias(impl):
    q, k, v = tensors(length=300)
    shape = UniformShape(0.1, 0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = shaped_attention(q, k, v, shape, impl=impl)
    assert torch.equal(inside, shaped_attention(q, k, v, shape, impl=impl))


def test_a_row_that_sees_nothing_is_zero_and_has_finite_gradients():
    q, k, v = (t.requires_grad_() for t in tensors(length=6))
    layout = Layout.left_padded(torch.tensor([[0, 0, 0, 1, 1, 1]]))
    for impl in ("reference", "sdpa"):
        out = shaped_attention(q, k, v, SPA, impl=impl, layout=layout)
        assert torch.equal(out[:, :, :3], torch.zeros(1, 2, 3, 16))
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(g.isfinite().all() and (g[:, :, :3] == 0).all() for g in grads)


def test_a_python_gain_is_a_gain():
    q, k, v = tensors()
    want = shaped_attention(q, k, v, SPA, bias_gain=torch.tensor(0.5), impl="reference")
    assert torch.equal(shaped_attention(q, k, v, SPA, bias_gain=0.5, impl="reference"), want)


def test_attention_to_another_sequence_is_plain_attention_without_an_order():
    """T_q ≠ T_k: fewer queries or more, by locations of their own; decoding is another matter, and has to be said."""
    for queries, keys in ((3, 7), (7, 3)):
        (q, _, _), (_, k, v) = (tensors(length=n) for n in (queries, keys))
        here = Layout(torch.arange(queries)[None], torch.arange(keys)[None])
        got = shaped_attention(q, k, v, PlainShape(causal=False), layout=here)
        torch.testing.assert_close(got, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    (q, _, _), (_, k, v) = (tensors(length=n) for n in (3, 7))
    said = shaped_attention(q, k, v, SPA, decoding=True)
    torch.testing.assert_close(said, shaped_attention(q, k, v, SPA, layout=Layout.continuing(4, 3)))

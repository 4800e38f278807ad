"""This library's attention tells of itself, whichever implementation runs it, a few queries at a time."""

import math

import pytest
import torch

from skipless.inspection import attention as inspection_attention
from skipless.inspection.attention import AttentionStats, of_shaped
from skipless.inspection.hooks import Recorder
from skipless.inspection.inspect import inspect
from skipless.inspection.stacks import find_blocks
from skipless.inspection.statistics import InspectOptions
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.nn.attention import AttentionOptions, ShapedAttention
from skipless.nn.position import Positions
from skipless.ops.bias import BiasVectors
from skipless.ops.layout import Layout
from skipless.theory.schemes import ExponentialSPA, StandardAttention, ValueSkipInit
from skipless.theory.shapes import AlibiShape, PlainShape


def attention(shape, **options) -> ShapedAttention:
    torch.manual_seed(0)
    module = ShapedAttention(32, 4, shape, 2, AttentionOptions(**options)).double()
    module.reset_parameters("normal")
    return module


def network(impl: str = "auto", **changes) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "width": 32, "depth": 6, "heads": 2, "length": 24}
    model = Transformer(ModelConfig(**{**sizes, **changes}), impl=impl)
    for parameter in model.parameters():  # away from the start, where all queries are zero
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def brute(module: ShapedAttention, x: torch.Tensor, layout: Layout) -> tuple[float, float, float]:
    """By the dense definition, all at once: q·k/√d + B, masked."""
    q, k = (layer(x).unflatten(-1, (-1, module.head_width)).transpose(1, 2) for layer in (module.query, module.key))
    placed = module._placed(x, None)
    if placed.rotation is not None:
        q, k = placed.rotation.rotate(q), placed.rotation.rotate(k)
    parts = BiasVectors.of(module.shape, x.shape[1], dtype=torch.float64)
    bias, _ = parts.between(layout.query_locations, layout.key_locations)
    scores = q @ k.repeat_interleave(module.heads // module.kv_heads, 1).mT / math.sqrt(module.head_width) + bias
    if module.relative is not None:
        scores = scores + module.relative(q, k, layout)
    visible = layout.visible(True)[:, None].expand_as(scores)
    weights, keys = scores.masked_fill(~visible, -math.inf).softmax(-1), visible.sum(-1)
    choosing = keys > 1
    entropy = torch.special.entr(weights).sum(-1)[choosing]
    numbers = (entropy, entropy / keys[choosing].log(), weights[..., 0][choosing])
    return tuple(float(values.mean()) for values in numbers)


@pytest.mark.parametrize("kind", ["e-spa", "plain", "alibi", "relative"])
@pytest.mark.parametrize("chunk", [2**25, 2000])
def test_the_first_rows_equal_the_definition(kind, chunk, monkeypatch):
    monkeypatch.setattr(inspection_attention, "_CHUNK", chunk)
    shape = {"alibi": AlibiShape(4), "plain": PlainShape()}.get(kind) or ExponentialSPA(0.1).shapes(4)[2]
    module = attention(shape, position="relative" if kind == "relative" else "rope")
    x = torch.randn(3, 9, 32).double()
    got = AttentionStats.of(of_shaped(module, x))
    expected = brute(module, x[:2], Layout.continuing(0, 9))
    assert (got.entropy, got.spread, got.first) == pytest.approx(expected, rel=1e-6)


def test_documents_and_padding_are_respected():
    module = attention(ExponentialSPA(0.1).shapes(4)[2], position="none")
    x = torch.randn(2, 9, 32).double()
    layout = Layout.packed(torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1], [0] * 9]))
    got = AttentionStats.of(of_shaped(module, x, Positions(layout)))
    assert (got.entropy, got.spread, got.first) == pytest.approx(brute(module, x, layout), rel=1e-6)


def test_few_queries_stand_for_many(monkeypatch):
    module, x = attention(PlainShape()), torch.randn(1, 300, 32).double()
    every = AttentionStats.of(of_shaped(module, x))
    monkeypatch.setattr(inspection_attention, "MOST_QUERIES", 100)
    some = AttentionStats.of(of_shaped(module, x))
    assert some.entropy == pytest.approx(every.entropy, rel=0.02)


@pytest.mark.parametrize("scheme", [ExponentialSPA(repeat_rate=0.05), StandardAttention(), ValueSkipInit()])
def test_every_implementation_is_seen_alike(scheme):
    ids = torch.randint(0, 64, (3, 24))
    changes = {"scheme": scheme, "activation": "gelu"}
    expected = inspect(network("reference", **changes), ids)
    found = inspect(network("sdpa", **changes), ids)
    for one, two in zip(found.blocks[1:], expected.blocks[1:], strict=True):
        assert one.attention_entropy == pytest.approx(two.attention_entropy, rel=1e-4)
        assert one.attention_first == pytest.approx(two.attention_first, rel=1e-4)
    assert all(each.attention_entropy is not None for each in found.blocks[1:])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_flex_attention_is_seen():
    """Without gradients: torch's FlexAttention has none on a CPU."""
    ids, model = torch.randint(0, 64, (2, 32)), network("flex")
    with torch.no_grad(), Recorder(find_blocks(model), InspectOptions()) as recorder:
        model(ids)
    expected = inspect(network("reference"), ids)
    assert sorted(recorder.attention) == list(range(1, 7))
    for index, seen in recorder.attention.items():
        assert seen.entropy == pytest.approx(expected.blocks[index].attention_entropy, rel=1e-4)


def test_a_packed_batch_can_be_inspected():
    layout = Layout.packed(torch.tensor([[0] * 10 + [1] * 14]))
    found = inspect(network(), {"tokens": torch.randint(0, 64, (1, 24)), "layout": layout})
    assert found.blocks[1].attention_entropy is not None

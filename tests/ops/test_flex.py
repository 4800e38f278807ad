"""What is peculiar to FlexAttention: block masks without T×T tensors, one kernel for all blocks, no silent fallback."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from skipless.ops import attention, flex
from skipless.ops import layout as ops_layout
from skipless.ops.attention import shaped_attention
from skipless.ops.bias import AttentionInputs, BiasVectors
from skipless.ops.layout import Layout
from skipless.theory.schemes import ExponentialSPA
from skipless.theory.shapes import ExponentialShape, PlainShape, UniformShape

# torch's own: inductor's imports, a hint that tensor cores are unused, the profiler's second use
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensors(*sizes: int, **options) -> list[torch.Tensor]:
    return [torch.randn(*sizes, device=DEVICE, **options) for _ in range(3)]


def dense_blocks(layout: Layout, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(any, all) visible per block of 128×128, from the dense mask; a block that is cut short is never all visible."""
    visible = layout.visible(causal)
    queries, keys = (-(-n // ops_layout.BLOCK) * ops_layout.BLOCK for n in visible.shape[1:])
    padded = torch.zeros(visible.shape[0], queries, keys, dtype=torch.bool)
    padded[:, : visible.shape[1], : visible.shape[2]] = visible
    tiles = padded.unflatten(2, (-1, ops_layout.BLOCK)).unflatten(1, (-1, ops_layout.BLOCK)).transpose(2, 3)
    return tiles.flatten(3).any(-1), tiles.flatten(3).all(-1)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 400)), min_size=1, max_size=6), st.booleans())
def test_blocks_cover_what_is_visible(documents, causal):
    ids = torch.tensor([[name for name, length in documents for _ in range(length)]])
    layout = Layout.packed(ids)
    partial, full = ops_layout.visited(layout, causal)
    some, every = dense_blocks(layout, causal)
    assert not (partial & full).any()
    assert torch.equal(full, every)
    assert not (some & ~partial & ~full).any()


@settings(max_examples=30)
@given(st.integers(0, 600), st.integers(1, 600))
def test_blocks_of_plain_causal_attention_are_exact(past, new):
    layout = Layout.continuing(past, new)
    partial, full = ops_layout.visited(layout, causal=True)
    some, every = dense_blocks(layout, causal=True)
    assert torch.equal(full, every)
    assert torch.equal(partial, some & ~every)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_not_visited(causal):
    mask = torch.ones(1, 640, dtype=torch.bool)
    mask[:, :300] = False
    partial, full = ops_layout.visited(Layout.left_padded(mask), causal)
    assert not partial[0, :2].any()
    assert not partial[0, :, :2].any()
    assert not full[0, :3].any()


def largest_allocation(call) -> int:
    """The most bytes asked of torch's allocator at once while `call` runs."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, profile_memory=True) as seen, torch.no_grad():
        call()
    return max(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.parametrize("shape", [ExponentialShape.between(0.01, 0.009, 0.01), UniformShape(0.5, 0.6)])
def test_no_square_tensor(shape):
    """At T = 8192 nothing is as large as T×T booleans; the reference, to show that the measure sees it, is larger."""
    length = 8192
    q, k, v = tensors(1, 1, length, 16)
    documents = torch.arange(length, device=DEVICE)[None] // 5000
    shaped_attention(q, k, v, shape, impl="flex")  # compiles
    ops_layout._causal.cache_clear()
    assert largest_allocation(lambda: shaped_attention(q, k, v, shape, impl="flex")) < length**2 / 16
    assert largest_allocation(lambda: ops_layout.block_mask(Layout.packed(documents), True)) < length**2 / 16
    assert (
        largest_allocation(lambda: shaped_attention(q[:, :, :2048], k, v, shape, impl="reference", decoding=True))
        >= 2048 * length
    )


def test_every_block_of_a_network_runs_one_kernel():
    q, k, v = tensors(1, 2, 80, 16)
    shapes = ExponentialSPA(0.05, 0.008).shapes(6)
    with torch.no_grad():
        shaped_attention(q, k, v, shapes[0], impl="flex")
        compiled = counters["stats"]["unique_graphs"]
        for shape in shapes[1:]:
            shaped_attention(q, k, v, shape, impl="flex")
    assert counters["stats"]["unique_graphs"] == compiled


def test_running_out_of_signatures_fails_aloud(monkeypatch):
    q, k, v = tensors(1, 2, 80, 16)
    with torch.no_grad():
        shaped_attention(q, k, v, PlainShape(), impl="flex")
        with monkeypatch.context() as patch:
            patch.setattr(flex, "_SIGNATURES", 1)
            with pytest.raises(RuntimeError, match=r"compiled for 1 signatures.*pad sequences.*impl='sdpa'"):
                shaped_attention(q[:, :, :48], k[:, :, :48], v[:, :, :48], PlainShape(), impl="flex")
        # and the function is not left switched to its eager form
        before = counters["stats"]["unique_graphs"]
        shaped_attention(q[:, :, :48], k[:, :, :48], v[:, :, :48], PlainShape(), impl="flex")
        assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("impl", [pytest.param("flex", marks=pytest.mark.gpu), "sdpa", "auto"])
@pytest.mark.parametrize("packed", [True, False])
def test_inside_a_compiled_function(impl, packed):
    """A block compiled as a whole takes the op in without a graph break, and a second block's shape without another.

    FlexAttention's mask of documents is built beforehand.
    """
    q, k, v = tensors(2, 2, 130, 16)
    layout = Layout.packed(torch.arange(260, device=DEVICE).reshape(2, 130) // 50) if packed else None
    if packed:
        layout = attention.prepare(AttentionInputs(q, k, v, BiasVectors.of(PlainShape(), 130, DEVICE), layout), impl)
    parts = [BiasVectors.of(ExponentialShape.between(g, 0.3, 0.1), 130, DEVICE) for g in (np.inf, 0.5)]

    def block(q, k, v, parts, layout):
        return shaped_attention(q.sin(), k, v, parts, impl=impl, layout=layout).cos()

    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    graphs = []
    with torch.no_grad():
        for one in parts:
            want = shaped_attention(q.sin(), k, v, one, impl="reference", layout=layout).cos()
            torch.testing.assert_close(compiled(q, k, v, one, layout), want, rtol=1e-5, atol=1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


def test_a_mask_of_documents_is_not_built_inside_a_compiled_function(monkeypatch):
    """Where it is, torch 2.11's kernel reads memory that is not its own. Asked as if this were a GPU's compiler."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k, v = (torch.empty(2, 2, 130, 16, device="meta") for _ in range(3))
    layout = Layout.packed(torch.arange(260).reshape(2, 130) // 50)
    inputs = AttentionInputs(q, k, v, BiasVectors.of(PlainShape(), 130), layout)
    assert not flex._is_prepared(inputs)
    assert flex._is_prepared(dataclasses.replace(inputs, layout=None))
    ops_layout.block_mask(layout, causal=True)
    assert not flex._is_prepared(inputs)  # inside a compiled function nothing is kept
    monkeypatch.undo()
    ops_layout.block_mask(layout, causal=True)
    assert flex._is_prepared(inputs)


@pytest.mark.parametrize("packed", [True, False])
def test_a_prepared_mask_is_found_by_compiled_blocks(packed, monkeypatch):
    """The graph of a compiled block holds no mask building, and all blocks share it. Traced only, on a CPU."""
    monkeypatch.setattr(flex, "why_not", lambda inputs: None)
    monkeypatch.setitem(
        attention.IMPLEMENTATIONS, "flex", attention.Implementation(flex.attend, lambda inputs: None, flex.prepare)
    )
    q, k, v = tensors(2, 2, 300, 16)
    layout = Layout.packed(torch.arange(600, device=DEVICE).reshape(2, 300) // 50)
    parts = BiasVectors.of(ExponentialSPA(0.05, 0.008).shapes(4)[0], 300, DEVICE)
    layout = attention.prepare(AttentionInputs(q, k, v, parts, layout if packed else None), "flex")
    assert layout is not None
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    run = torch.compile(
        lambda p: shaped_attention(q, k, v, p, impl="flex", layout=layout), backend=keep, fullgraph=True
    )
    for shape in ExponentialSPA(0.05, 0.008).shapes(4):
        parts = BiasVectors.of(shape, 300, DEVICE)
        with torch.no_grad():
            got = run(parts)
        want = shaped_attention(q, k, v, parts, impl="reference", layout=layout)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
    assert not any("argsort" in target or "scatter" in target for target in graphs[0])


@torch.no_grad()
def test_tensors_with_gradients_of_their_own_run_where_none_is_asked_for():
    q, k, v = tensors(1, 2, 40, 64, requires_grad=True)
    shape = ExponentialShape.between(0.5, 0.4)
    found, want = (shaped_attention(q, k, v, shape, impl=impl) for impl in ("flex", "reference"))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_kept_serves_training_after_inference_mode():
    ops_layout._causal.cache_clear()
    with torch.inference_mode():
        ops_layout.causal_block_mask(5, 300, DEVICE)
    assert not ops_layout.causal_block_mask(5, 300, DEVICE).kv_indices.is_inference()

import copy

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from skipless.model.generate import BlockCache
from skipless.nn.attention import AttentionOptions, ShapedAttention
from skipless.nn.position import Positions
from skipless.ops import gpu
from skipless.ops.attention import Rotation
from skipless.ops.layout import Layout
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit

WIDTH, HEADS, T = 32, 4, 20
SPA = [ExponentialSPA(0.05, 0.02).shapes(6)[0], ExponentialSPA(0.05, 0.02).shapes(6)[3], UniformSPA(0.6).shapes(4)[2]]


def build(shape, query_key="zero-query", dtype=torch.float64, kv_heads=None, **options):
    torch.manual_seed(0)
    module = ShapedAttention(WIDTH, HEADS, shape, kv_heads, AttentionOptions(impl="reference", **options))
    module.reset_parameters(query_key)
    return module.to(dtype)


@pytest.mark.parametrize("position", ["rope", "relative", "none"])
@pytest.mark.parametrize("query_key", ["zero-query", "zero-key"])
@pytest.mark.parametrize("shape", SPA, ids=["first", "middle", "uniform"])
def test_attention_at_initialisation_is_exactly_the_shape(shape, query_key, position):
    """W_O A V: every head attends by A, whatever the positions. Sec. 3.3, App. E. In float32 to 1e-6."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        module = build(shape, query_key, dtype, position=position)
        x = torch.randn(2, T, WIDTH, dtype=dtype)
        expected = module.output(torch.as_tensor(shape.dense(T), dtype=dtype) @ module.value(x))
        torch.testing.assert_close(module(x), expected, atol=tolerance, rtol=0)


def test_small_query_and_key_come_close():
    shape = SPA[1]
    module, x = build(shape, "small"), torch.randn(2, T, WIDTH).double()
    expected = module.output(torch.as_tensor(shape.dense(T)) @ module.value(x))
    error = (module(x) - expected).abs().max()
    assert 0 < error < 0.1
    for layer in (module.query, module.key):  # orthogonal, times 0.1
        torch.testing.assert_close(layer.weight @ layer.weight.T, 0.01 * torch.eye(WIDTH).double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_value_skip_init_starts_as_the_identity_and_learns(per_head, kv_heads):
    module = build(ValueSkipInit().shapes(1)[0], "normal", kv_heads=kv_heads, value_gain_per_head=per_head)
    x = torch.randn(2, T, WIDTH).double()
    values = module.value(x).unflatten(-1, (kv_heads, -1)).repeat_interleave(HEADS // kv_heads, dim=-2).flatten(-2)
    torch.testing.assert_close(module(x), module.output(values))
    module(x).square().sum().backward()
    assert module.attention_gains.shape == (HEADS if per_head else 1,)
    assert (module.attention_gains.grad != 0).all()
    assert (module.value_gains.grad != 0).all()


def test_queries_receive_a_gradient_although_they_start_at_zero():
    module = build(SPA[1])
    module(torch.randn(2, T, WIDTH).double()).square().sum().backward()
    assert module.query.weight.grad.abs().max() > 0
    assert module.key.weight.grad.abs().max() == 0  # it follows once the queries have moved


def test_a_trainable_bias_gain_starts_without_effect():
    plain, gained = build(SPA[1]), build(SPA[1], bias_gain=True)
    gained.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, T, WIDTH).double()
    torch.testing.assert_close(plain(x), gained(x))
    gained(x).square().sum().backward()
    assert gained.bias_gain.shape == (HEADS,)
    assert (gained.bias_gain.grad != 0).all()


def test_bias_vectors_stay_in_float32_and_out_of_the_checkpoint():
    module = build(SPA[1], dtype=torch.bfloat16)
    module(torch.randn(1, T, WIDTH, dtype=torch.bfloat16))
    assert module._bias.dtype == torch.float32
    assert set(module.state_dict()) == {f"{name}.weight" for name in ("query", "key", "value", "output")}


@pytest.mark.parametrize("impl", ["reference", "sdpa", "triton"])
def test_a_module_first_used_in_inference_mode_can_be_trained(impl):
    if impl == "triton" and not gpu.INSTALLED:
        pytest.skip("triton is not installed")
    module = ShapedAttention(64, HEADS, SPA[2], None, AttentionOptions(impl=impl))
    x = torch.randn(1, T, 64)
    device = torch.device("cuda" if impl == "triton" and torch.cuda.is_available() else "cpu")
    module, x = module.to(device), x.to(device)
    with torch.inference_mode():
        module(x)
    module(x).sum().backward()
    assert module.value.weight.grad is not None


def test_longer_sequences_extend_shorter_ones():
    """Nothing depends on the training length: causal outputs at T are a prefix of those at 4T."""
    module, x = build(SPA[1]), torch.randn(1, 1500, WIDTH).double()
    torch.testing.assert_close(module(x)[:, :T], module(x[:, :T]))


def test_all_blocks_store_vectors_of_one_size():
    """Compiled blocks share a graph only if their tensors have one shape."""
    sizes = set()
    for shape in ExponentialSPA(0.005, 0.008).shapes(36):
        module = build(shape)
        module(torch.randn(1, T, WIDTH).double())
        sizes.add(tuple((name, tuple(t.shape)) for name, t in module._bias.tensors().items()))
    assert len(sizes) == 1


def test_heads_must_divide_width():
    with pytest.raises(ValueError, match="width=30, heads=4"):
        ShapedAttention(30, 4, StandardAttention().shapes(1)[0])


def kept(module, x):
    """Shapes of what a compiled pass keeps for its backward pass beside its inputs, its output, and its gradient."""
    found = []

    def forward(graph, _):
        (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
        found.extend(tuple(node.meta["val"].shape) for node in results[1:] if node.op != "placeholder")
        return make_boxed_func(graph.forward)

    def backward(graph, _):
        return make_boxed_func(graph.forward)

    parts = min_cut_rematerialization_partition  # what torch's own compiler uses
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=parts)
    module.bias(T, x.device, x.dtype)
    out = torch.compile(module, backend=backend, fullgraph=True)(x)
    out.sum().backward()
    return found, out.detach(), [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize(("kv_heads", "rows"), [(None, 3 * WIDTH), (2, 2 * WIDTH)])
def test_sharded_matrices_are_not_kept_whole_for_the_backward_pass(kv_heads, rows):
    """Put together they would be: 6·d² bytes in every block of what FSDP2 shards."""
    x = torch.randn(2, T, WIDTH, dtype=torch.float64, requires_grad=True)
    whole = {(rows, WIDTH), (WIDTH, rows)}
    results = {}
    for sharded in (False, True):
        torch._dynamo.reset()
        module = build(SPA[1], "normal", kv_heads=kv_heads)
        module.sharded = sharded
        shapes, *results[sharded] = kept(module, x)
        assert bool(whole & set(shapes)) != sharded
    torch.testing.assert_close(results[True], results[False], rtol=1e-12, atol=1e-12)


def placed(layout, head_width=WIDTH // HEADS):
    return Positions(layout, Rotation.at(layout.query_locations, head_width))


def test_tokens_after_a_cache_stand_where_it_ends():
    """Without positions they were rotated as if they were the first, in silence."""
    module, cache = build(SPA[1], "normal", kv_heads=2), BlockCache()
    x = torch.randn(2, T, WIDTH).double()
    parts = [module(part, cache=cache) for part in x.split([7, 1, 12], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x))


def test_a_cache_that_does_not_count_needs_positions():
    class Cache:
        def append(self, k, v):
            return k, v

    module, x = build(SPA[1], "normal"), torch.randn(2, T, WIDTH).double()
    with pytest.raises(ValueError, match=r"the cache is a Cache, which has no `length`.*or give positions"):
        module(x, cache=Cache())
    positions = Positions(rotation=Rotation.at(torch.arange(T)[None], WIDTH // HEADS))
    torch.testing.assert_close(module(x, positions, Cache()), module(x))


def test_a_layout_alone_brings_its_rotary_positions():
    """Documents of a row are as if each were alone; without a rotation they had no positions, in silence."""
    module, x = build(SPA[1], "normal"), torch.randn(1, T, WIDTH).double()
    layout = Layout.packed((torch.arange(T)[None] >= 7).long())
    alone = torch.cat([module(x[:, :7]), module(x[:, 7:])], dim=1)
    for positions in (layout, Positions(layout), placed(layout)):
        torch.testing.assert_close(module(x, positions), alone)
    unplaced = build(SPA[1], "normal", position="none")
    torch.testing.assert_close(unplaced(x, layout), unplaced(x, Positions(layout)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, x: m(x, x, x), "positions are a Tensor; they must be a Layout, Positions or None: .* are all of x"),
        (lambda m, x: m(x[0]), r"x is shaped \(20, 32\); it must be \(batch, T, 32\)"),
        (lambda m, x: m(x[..., :16]), r"x is shaped \(2, 20, 16\); it must be \(batch, T, 32\)"),
        (lambda m, x: m(x, Layout.packed([[0, 1]])), "document_ids is a list; it must be a torch.Tensor"),
        (lambda m, x: m(x, Layout.left_padded([[0, 1]])), "attention_mask is a list; it must be a torch.Tensor"),
        (lambda m, x: ShapedAttention(32, 0, SPA[0]), "heads=0.*heads must divide width"),
        (lambda m, x: ShapedAttention(66, 4, SPA[0]), "heads must divide .*: width=64, heads=4, kv_heads=4 do"),
        (lambda m, x: ShapedAttention(32, 4, SPA[0], 3), "kv_heads=3; .* kv_heads heads: .* kv_heads=2 do"),
        (lambda m, x: ShapedAttention(32, 4, SPA[0], 0), "kv_heads=0; heads must divide width, and kv_heads heads"),
        (lambda m, x: ShapedAttention(32, 4, SPA[0], options={"kind": 1}), "options has no field 'kind'; there are"),
        (lambda m, x: m.reset_parameters("zero"), "query_key is 'zero'; it must be one of 'zero-query', 'zero-key'"),
        (lambda m, x: ShapedAttention(32, 4.5, SPA[0]), "heads is 4.5; it must be a whole number"),
        (lambda m, x: ShapedAttention(32, 4, SPA), "shape is a list; it must be the AttentionShape of one block"),
        (lambda m, x: ShapedAttention(32, 4, ExponentialSPA()), r"shape is a ExponentialSPA; .*\.shapes\(depth=12\)"),
        (lambda m, x: ShapedAttention(32, 4, torch.eye(20)), r"shape is a Tensor; .*DenseShape\(matrix\)"),
        (lambda m, x: AttentionOptions(position="alibi"), "options.position is 'alibi'; it must be one of 'rope'"),
        (lambda m, x: AttentionOptions(readers=-1), "options.readers is -1; it must be at least 0"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(build(SPA[1]), torch.randn(2, T, WIDTH).double())


def test_what_compiles_finds_the_shape_in_place(monkeypatch):
    """NumPy of the theory is no part of a graph: its kernels took minutes to make."""
    monkeypatch.setattr("skipless.nn.attention._SHORTEST_STORED", 512)
    length = torch.export.Dim("length", min=2, max=400)
    with torch.device("meta"):
        module = ShapedAttention(WIDTH, HEADS, SPA[1]).eval()
    module.to_empty(device="cpu").reset_parameters("normal")
    program = torch.export.export(module, (torch.randn(1, T, WIDTH),), dynamic_shapes=({1: length},))
    x = torch.randn(1, 99, WIDTH)
    torch.testing.assert_close(program.module()(x), module(x))

    torch.compiler.reset()
    graphs, expected = [], copy.deepcopy(module)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x = torch.randn(1, 700, WIDTH)  # more than is stored
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=backend)(x), expected(x))
    assert not any("numpy" in str(node.target) for graph in graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_cold_module_is_one_graph_at_any_usual_length(loaded):
    """2,048 tokens, which it has not met: built as it is, or on the meta device and given its parameters by a file."""
    torch.compiler.reset()
    module = build(SPA[1], "normal", torch.float32).eval()
    cold = copy.deepcopy(module)
    if loaded:
        with torch.device("meta"):
            cold = build(SPA[1], "normal", torch.float32).eval()
        cold.load_state_dict(module.state_dict(), assign=True)
    x = torch.randn(1, 2048, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(cold, fullgraph=True, backend="eager")(x), module(x))


def test_what_is_too_long_for_one_graph_says_what_to_do():
    torch.compiler.reset()
    module, x = build(SPA[1], "normal", torch.float32).eval(), torch.randn(1, 5000, WIDTH)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="not yet met 5000 locations"):
        torch.compile(module, fullgraph=True, backend="eager")(x)

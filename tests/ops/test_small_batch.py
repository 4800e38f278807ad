"""Products of a small batch by a GPU kernel of our own, against float64 and beside torch's."""

import pytest
import torch
from torch import nn

from skipless.ops import gpu, linear
from skipless.ops.linear import project

pytestmark = pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Triton's interpreter cuts bfloat16 off where a GPU rounds
each_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if CUDA else [torch.float16])


def tensors(rows: tuple[int, ...], k: int, widths: list[int], dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(*rows, k, generator=generator).to(DEVICE, dtype)
    return x, [(torch.randn(n, k, generator=generator) * k**-0.5).to(DEVICE, dtype) for n in widths]


@each_half
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "k", "widths"),
    [((1,), 256, [16]), ((1, 1), 1024, [64, 32, 48]), ((3,), 272, [16, 16]), ((2, 2), 4096, [32]), ((2, 1), 96, [160])],
)
def test_as_close_to_the_truth_as_torch(rows, k, widths, biased, dtype):
    from skipless.ops.gpu.linear import small_batch_linear

    x, weights = tensors(rows, k, widths, dtype)
    bias = torch.randn(sum(widths), generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype) if biased else None
    got, joined = small_batch_linear(x, weights, bias), torch.cat(weights)
    truth = nn.functional.linear(x.double(), joined.double(), None if bias is None else bias.double())
    plain = nn.functional.linear(x, joined, bias)
    assert got.shape == plain.shape
    assert got.dtype == dtype
    assert (got - truth).norm() <= 1.1 * (plain - truth).norm()


@pytest.mark.parametrize(
    ("widths", "k"), [([1024], 1024), ([4096], 1024), ([1024], 4096), ([64] * 3, 512), ([16], 256)]
)
def test_tiles_cover_the_matrices(widths, k):
    from skipless.ops.gpu.linear import block

    down, across = block(widths, k)
    assert all(n % down == 0 for n in widths)
    assert down * across <= 8192
    assert down == 1 or sum(widths) // down >= 264


class Quantised(torch.Tensor):
    """A kind of tensor that may keep its numbers in another form."""


def test_what_fits():
    x, weights = tensors((1, 4), 256, [32, 64], torch.bfloat16)
    assert linear.fits(x, weights)
    assert not linear.supports(x.cpu(), weights)
    for other in (
        (x.float(), [w.float() for w in weights]),  # single precision
        (x.repeat(1, 2, 1), weights),  # eight rows
        (x[:, :0], weights),  # none
        (x[..., :248], [w[:, :248] for w in weights]),  # rows that start anywhere
        (x, [weights[0][:20]]),
        (x, [weights[0].half()]),
        (x, weights * 2),  # four matrices
        (x[..., :128], [w[:, :128] for w in weights]),  # short rows
        (x, [weights[0].as_subclass(Quantised)]),
    ):
        assert not linear.fits(*other)


@pytest.fixture
def served(monkeypatch):
    """As on a GPU, whatever the device: the interpreter runs the kernel, with few programs. Returns its launches."""
    from skipless.ops.gpu import linear as gpu_linear

    monkeypatch.setattr(gpu_linear, "_PROGRAMS", 1)
    launches, real = [], gpu_linear.small_batch_linear
    monkeypatch.setattr(gpu_linear, "small_batch_linear", lambda *args: launches.append(args) or real(*args))
    monkeypatch.setattr(linear, "supports", linear.fits)
    return launches


@torch.no_grad()
def test_layers_of_one_input_are_one_kernel(served):
    query, key, value = (nn.Linear(256, n, bias=False, device=DEVICE, dtype=torch.float16) for n in (64, 32, 32))
    x = tensors((1, 2), 256, [], torch.float16)[0]
    for got, layer in zip(project(x, query, key, value), (query, key, value), strict=True):
        torch.testing.assert_close(got, layer(x), rtol=2e-3, atol=1e-3)
    assert len(served) == 1
    same, got = project(x, nn.Identity(), query)
    assert same is x
    torch.testing.assert_close(got, query(x), rtol=2e-3, atol=1e-3)
    biased = nn.Linear(256, 32, device=DEVICE, dtype=torch.float16)
    torch.testing.assert_close(project(x, biased)[0], biased(x), rtol=2e-3, atol=1e-3)
    assert len(served) == 3


@torch.no_grad()
def test_inside_a_compiled_function(served):
    layer, x = nn.Linear(256, 32, device=DEVICE, dtype=torch.float16), tensors((1,), 256, [], torch.float16)[0]
    compiled = torch.compile(lambda x: 2 * project(x, layer)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), 2 * layer(x), rtol=2e-3, atol=1e-3)


@torch.no_grad()
def test_hooks_and_several_biases_are_left_to_torch(served):
    first, second = (nn.Linear(256, 32, device=DEVICE, dtype=torch.float16) for _ in range(2))
    x = tensors((1,), 256, [], torch.float16)[0]
    assert torch.equal(project(x, first, second)[1], second(x))
    first.register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(project(x, first)[0], first(x))
    assert not served


@torch.no_grad()
def test_a_decoding_step_of_a_network(served):
    """The logits of a cached step in half precision are as close to float64 as those by torch's products."""
    from skipless.model.config import ModelConfig
    from skipless.model.generate import KVCache, decode
    from skipless.model.transformer import Transformer
    from skipless.theory.schemes import ExponentialSPA

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "width": 256, "depth": 2, "heads": 4, "length": 16}
    config = ModelConfig(**sizes, scheme=ExponentialSPA(0.05, 0.06), activation="gelu", query_key="normal")
    model = Transformer(config, impl="sdpa").to(DEVICE).eval()
    tokens = torch.randint(64, (2, 9), device=DEVICE)

    def last(model: Transformer) -> torch.Tensor:
        cache = KVCache(2)
        decode(model, tokens[:, :8], cache)
        return decode(model, tokens[:, 8:], cache).double()

    truth = last(model.double())
    ours, count = last(model.to(torch.float16)), len(served)
    served_by_torch = pytest.MonkeyPatch()
    served_by_torch.setattr(linear, "supports", lambda *args: False)
    theirs = last(model)
    served_by_torch.undo()
    assert count == 4 * 2  # the queries, keys and values of a block together, its output, up and down
    assert (ours - truth).norm() <= 1.5 * (theirs - truth).norm()


COMPILED = """
import re, torch
from hopper import compiled, intercept, usage
from skipless.ops.gpu import linear

intercept(linear, "rows_times")
for rows, k, widths in ((1, 1024, [1024] * 3), (1, 1024, [4096]), (1, 4096, [1024]), (4, 4096, [1024])):
    x, *weights = (torch.empty(n, k, dtype=torch.bfloat16) for n in (rows, *widths))
    linear.small_batch_linear._init_fn(x, weights, None)
assert len(compiled) == 4
for kernel in compiled:
    assert usage(kernel)[1] == 0, "it spills"
    assert set(re.findall(r"ld\\.global\\S*", kernel.asm["ptx"])) == {"ld.global.v4.b32"}
"""


def test_it_compiles_to_wide_loads_for_a_gpu_that_is_not_here(on_hopper):
    on_hopper(COMPILED)

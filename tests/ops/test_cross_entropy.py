"""The fused loss against F.cross_entropy on dense logits: values, gradients, precision and memory."""

import pytest
import torch
import torch.nn.functional as F

from skipless.ops.cross_entropy import linear_cross_entropy, plain_each_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(rows=(3, 7), width=5, classes=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(classes, width, dtype=torch.float64, generator=generator)
    bias = torch.randn(classes, dtype=torch.float64, generator=generator)
    targets = torch.randint(classes, rows, generator=generator)
    tensors = (t.to(DEVICE, dtype).requires_grad_() for t in (hidden, weight, bias))
    return (*tensors, targets.to(DEVICE))


def dense(hidden, weight, targets, bias=None):
    return F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, -2).float(), targets.flatten())


@pytest.mark.parametrize("chunk", [None, 1, 4, 20, 21, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_cross_entropy_of_dense_logits_with_its_gradients(chunk, biased):
    hidden, weight, bias, targets = problem()
    inputs = (hidden, weight, bias) if biased else (hidden, weight)
    ours = linear_cross_entropy(hidden, weight, targets, bias if biased else None, chunk=chunk)
    logits = F.linear(hidden, weight, bias if biased else None)
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(ours, theirs)
    upstream = torch.tensor(0.37, dtype=torch.float64, device=DEVICE)
    for a, b in zip(*(torch.autograd.grad(loss, inputs, upstream) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_that_do_not_count_are_as_if_they_were_not_there(chunk, biased):
    hidden, weight, bias, targets = problem()
    inputs = (hidden, weight, bias) if biased else (hidden, weight)
    counted = torch.arange(21, device=DEVICE).reshape(3, 7) % 3 == 1
    spoilt = torch.where(counted[..., None], hidden, torch.nan)
    bias = bias if biased else None
    ours = linear_cross_entropy(spoilt, weight, targets.masked_fill(~counted, -100), bias, counted=counted, chunk=chunk)
    theirs = F.cross_entropy(F.linear(hidden[counted], weight, bias), targets[counted])
    torch.testing.assert_close(ours, theirs)
    upstream = torch.tensor(0.37, dtype=torch.float64, device=DEVICE)
    for a, b in zip(*(torch.autograd.grad(loss, inputs, upstream) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_one_row_among_thousands_keeps_its_digits():
    hidden, weight, _, targets = problem((1, 4096), classes=100, dtype=torch.float32)
    counted = torch.zeros_like(targets, dtype=torch.bool)
    counted[0, 7] = True
    ours = linear_cross_entropy(hidden, weight, targets, counted=counted)
    torch.testing.assert_close(ours, dense(hidden[:, 7:8], weight, targets[:, 7:8]), rtol=1e-6, atol=0)


def test_no_row_that_counts_is_a_loss_of_0_and_no_gradient():
    hidden, weight, _, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets, counted=torch.zeros_like(targets, dtype=torch.bool))
    assert loss == 0
    assert all(not slope.any() for slope in torch.autograd.grad(loss, (hidden, weight)))


def test_gradcheck():
    hidden, weight, bias, targets = problem()
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, targets, b, chunk=8), (hidden, weight, bias)
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "nothing"])
def test_second_derivatives_are_those_of_dense_logits(frozen, masked):
    """With the loss as the root, a saved gradient would pass for a constant, and Hessians come out wrong in silence."""
    hidden, weight, bias, targets = problem((6,))
    counted = torch.arange(6, device=DEVICE) % 3 > 0 if masked else torch.ones_like(targets, dtype=torch.bool)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        tensor.requires_grad_(name != frozen)
    inputs = [t for t in (hidden, weight, bias) if t.requires_grad]
    results = []
    for loss in (
        linear_cross_entropy(hidden.sin(), weight, targets, bias, counted=counted if masked else None, chunk=4),
        F.cross_entropy(F.linear(hidden.sin(), weight, bias)[counted], targets[counted]),
    ):
        slopes = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = sum((slope * slope.detach().cos()).sum() for slope in slopes)
        results.append((slopes, torch.autograd.grad(penalty, inputs)))
    torch.testing.assert_close(*results)
    assert torch.autograd.gradgradcheck(
        lambda *given: linear_cross_entropy(hidden.sin(), weight, targets, given[-1]), (hidden, weight, bias)
    )


def test_rows_that_come_of_the_weight_leave_its_own_gradient_alone():
    """As where embeddings are tied. What the rows pass on to the weight was counted twice, by create_graph=True."""
    _, weight, _, targets = problem()
    results = []
    for loss in (linear_cross_entropy, lambda rows, weight, targets: F.cross_entropy(rows @ weight.T, targets)):
        value = loss((weight[targets.flatten()] @ weight.T @ weight).tanh(), weight, targets.flatten())
        plain = torch.autograd.grad(value, weight, retain_graph=True)
        slopes = torch.autograd.grad(value, weight, create_graph=True)
        torch.testing.assert_close(slopes, plain)
        results.append((slopes, torch.autograd.grad((slopes[0] * weight.detach().cos()).sum(), weight)))
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at its first jvp
@pytest.mark.parametrize("masked", [False, True])
def test_transforms_of_torch_func_have_every_derivative(masked):
    hidden, weight, bias, targets = problem((6,))
    counted = torch.arange(6, device=DEVICE) % 3 > 0 if masked else None

    def ours(h, w, b):
        return linear_cross_entropy(h, w, targets, b, counted=counted)

    def theirs(h, w, b):
        real = slice(None) if counted is None else counted.nonzero()[:, 0]
        return F.cross_entropy(F.linear(h, w, b)[real], targets[real])

    whole, everything = (hidden.detach(), weight.detach(), bias.detach()), (0, 1, 2)
    for transform in (torch.func.grad, torch.func.hessian):
        found, expected = (transform(loss, argnums=everything)(*whole) for loss in (ours, theirs))
        torch.testing.assert_close(found, expected)
    found, expected = (torch.func.jvp(loss, whole, tuple(t.cos() for t in whole)) for loss in (ours, theirs))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "all"])
def test_only_what_is_asked_for_gets_a_gradient(frozen):
    hidden, weight, _, targets = problem()
    if frozen in ("hidden", "all"):
        hidden = hidden.detach()
    if frozen in ("weight", "all"):
        weight = weight.detach()
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.requires_grad == (frozen != "all")
    if frozen != "all":
        loss.backward()
        assert (hidden.grad is None) == (frozen == "hidden")
        assert (weight.grad is None) == (frozen == "weight")


def test_without_gradients_it_is_the_same_loss():
    hidden, weight, _, targets = problem()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    assert loss == linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_at_most_twice_as_far_from_the_truth_as_dense_logits(autocast):
    """512 rows of 1000 classes, in four chunks; under autocast weights and hidden are float32 outside."""
    truth = problem((512,), 64, 1000)
    exact = linear_cross_entropy(truth[0], truth[1], truth[3])
    exact_gradients = torch.autograd.grad(exact, truth[:2])
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight, _, targets = problem((512,), 64, 1000, dtype)
    errors = []
    for loss_of in (lambda h, w: linear_cross_entropy(h, w, targets, chunk=128), lambda h, w: dense(h, w, targets)):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = loss_of(hidden, weight)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert [g.dtype for g in gradients] == [dtype, dtype]
        found = [(loss - exact).abs(), *((a - b).norm() for a, b in zip(gradients, exact_gradients, strict=True))]
        errors.append([e.item() for e in found])
    assert all(ours <= 2 * theirs + 1e-9 for ours, theirs in zip(*errors, strict=True)), errors


def test_large_logits_do_not_overflow():
    hidden, weight, _, targets = problem(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1e4, weight, targets)
    torch.testing.assert_close(loss, dense(hidden * 1e4, weight, targets))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, w, t: (h, w, t[:1]), r"targets \(1, 7\); targets must be shaped \(3, 7\)"),
        (lambda h, w, t: (h, w, t.double()), "targets are torch.float64; they must be integers"),
        (lambda h, w, t: (h, w[:, :3], t), r"weight is shaped \(11, 3\).*must be \(classes, 5\)"),
        (lambda h, w, t: (h[:0], w, t[:0]), "at least one row"),
    ],
)
def test_mistakes_are_named(change, words):
    hidden, weight, _, targets = problem()
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(*change(hidden, weight, targets))
    with pytest.raises(ValueError, match="chunk is 0"):
        linear_cross_entropy(hidden, weight, targets, chunk=0)
    with pytest.raises(ValueError, match=r"counted is torch.int64 shaped \(3, 7\); it must be torch.bool"):
        linear_cross_entropy(hidden, weight, targets, counted=targets)


def test_a_target_that_is_no_class_is_not_swallowed():
    """An error on a CPU; on a GPU, where looking would wait, NaN."""
    hidden, weight, _, targets = problem(dtype=torch.float32)
    targets[1, 2] = 11
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="out of bounds"):
            linear_cross_entropy(hidden, weight, targets)
        return
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad[1, 2].isnan().all()
    assert hidden.grad[0].isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernel itself")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 2, 63, 1000, 5000])
def test_the_kernel_is_its_plain_form_in_tritons_interpreter(columns, dtype):
    pytest.importorskip("triton")
    from skipless.ops.gpu.cross_entropy import each_row

    logits, targets = (3 * torch.randn(6, columns)).to(dtype), torch.randint(columns, (6,))
    for write in (False, True):
        ours, theirs, losses = logits.clone(), logits.clone(), torch.empty(2, 6)
        each_row(ours, targets, losses[0], 6, write)
        plain_each_row(theirs, targets, losses[1], 6, write)
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, theirs)
        assert write or torch.equal(ours, logits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernel itself")
def test_the_kernel_makes_a_target_that_is_no_class_nan():
    pytest.importorskip("triton")
    from skipless.ops.gpu.cross_entropy import each_row

    logits, losses = torch.randn(6, 5000).bfloat16(), torch.empty(6)
    each_row(logits, torch.tensor([0, -1, 5000, 3, 4, 5]), losses, 6, True)
    assert losses.isnan().tolist() == [False, True, True, False, False, False]
    assert logits.isnan().any(1).tolist() == [False, True, True, False, False, False]


@pytest.mark.gpu
def test_memory_is_a_chunk_of_logits_and_no_more():
    """16,384 rows of 32,000 classes: dense float32 logits would be 2.1 GB; the chunk here is 66 MB of bfloat16."""
    hidden = torch.randn(16_384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32_000, 256, device="cuda", requires_grad=True)
    targets = torch.randint(32_000, (16_384,), device="cuda")
    linear_cross_entropy(hidden, weight, targets, chunk=1024).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets, chunk=1024).backward()
    assert torch.cuda.max_memory_allocated() - before < 3e8


@pytest.mark.gpu
def test_it_can_be_captured_in_a_graph():
    hidden = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(100, 32, device="cuda", requires_grad=True)
    targets = torch.randint(100, (64,), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = linear_cross_entropy(hidden, weight, targets, chunk=16)
        expected = torch.autograd.grad(eager, (hidden, weight))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = linear_cross_entropy(hidden, weight, targets, chunk=16)
        gradients = torch.autograd.grad(loss, (hidden, weight))
    graph.replay()
    assert torch.equal(loss, eager)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_targets_may_be_any_integers(dtype):
    hidden, weight, targets = torch.randn(5, 8), torch.randn(11, 8, requires_grad=True), torch.tensor([0, 10, 3, 3, 7])
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, targets.to(dtype)), linear_cross_entropy(hidden, weight, targets)
    )

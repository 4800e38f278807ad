import math
from functools import cache

import numpy as np
import pytest
import torch
from tests.model.exact import kernels_by_block
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from skipless.model import kernel_maps
from skipless.model.config import ModelConfig, attention_shapes
from skipless.model.fold import fold
from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout
from skipless.theory import kernels, propagation
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit

SPA_SCHEMES = [ExponentialSPA(0.05, 0.02), UniformSPA(0.8, 0.02), ValueSkipInit()]


def build(config, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)  # orthogonal matrices are then orthogonal to this precision
    try:
        return Transformer(config, impl="reference")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scheme", SPA_SCHEMES, ids=lambda s: type(s).__name__)
def test_attention_only_networks_follow_theory_to_1e6_at_depth_36(scheme):
    """Orthogonal weights make Eq. 6 exact at finite width: from the measured Σ_0 every Σ_l follows."""
    config = ModelConfig(vocab_size=50, width=48, depth=36, heads=4, hidden=0, scheme=scheme, activation="gelu")
    model = build(config)
    tokens = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))
    measured = kernels_by_block(model, tokens)
    predicted = propagation.forward(kernel_maps.kernel_blocks(config), measured[0])
    for ours, theory in zip(measured, predicted, strict=True):
        np.testing.assert_allclose(ours, theory, atol=1e-6)


@pytest.mark.parametrize("activation", ["dks-gelu", "tat-leaky_relu"])
def test_full_vanilla_networks_follow_theory_within_monte_carlo_error(activation):
    """With MLPs the wide limit is approached like 1/√width: the mean over networks must lie within 4 standard errors
    plus a finite-width bias of 4/width per block."""
    depth, width = 16, 128
    scheme = ExponentialSPA(0.05)
    config = ModelConfig(vocab_size=64, width=width, depth=depth, heads=4, scheme=scheme, activation=activation)
    tokens = torch.arange(24)[None]
    predicted = propagation.forward(kernel_maps.kernel_blocks(config), np.eye(24))
    runs = np.array([kernels_by_block(build(config, seed, torch.float32), tokens) for seed in range(12)])
    for block in (1, depth // 2, depth):
        for measure in (lambda k: np.diagonal(k).mean(), kernels.mean_cosine):
            samples = np.array([measure(run[block]) for run in runs])
            error = samples.std(ddof=1) / np.sqrt(len(samples))
            assert abs(samples.mean() - measure(predicted[block])) < 4 * error + 4 * block / width


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_every_kind_of_block_runs_forward_and_backward(norm):
    for skip in (Skip(), Skip.normalised(0.9), Skip(1.0, 1.0), Skip(1.0, 0.2), Skip(1.0, 0.0, trainable=True)):
        config = ModelConfig(
            vocab_size=30, width=32, depth=3, heads=4, scheme=StandardAttention(), norm=norm,
            attention_skip=skip, mlp_skip=skip, activation="gelu",
        )  # fmt: skip
        model = build(config)
        loss = model(torch.randint(0, 30, (2, 12))).logsumexp(-1).mean()
        loss.backward()
        assert torch.isfinite(loss)
        trained = [n for n, p in model.named_parameters() if "residual" in n]
        assert len(trained) == (6 if skip.trainable else 0)


def test_loss_at_initialisation_is_log_vocabulary_plus_a_half():
    """Unit-variance logits: E[logsumexp] = ln V + ½, within 5 %, for a 36-block vanilla model."""
    config = ModelConfig(vocab_size=1000, width=128, depth=36, heads=4)
    model = build(config, dtype=torch.float32)
    tokens = torch.randint(0, 1000, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(1000) + 0.5, rel=0.05)


@cache
def _thirty_steps(name, rate):
    """(first, last) loss of 30 Adam steps on one batch of random tokens, at tiny width and the preset's own depth."""
    torch.manual_seed(0)
    model = Transformer(preset(name, width=64, heads=4, vocab_size=64), impl="sdpa")
    tokens = torch.randint(0, 64, (4, 33))
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


TRAINS = {
    "wikitext103/pre-ln": 1e-3,
    "wikitext103/e-spa": 1e-4,
    "wikitext103/e-spa-ln": 1e-4,
    "wikitext103/e-spa-tat": 1e-4,
    "wikitext103/e-spa-gelu": 2e-4,
    "wikitext103/u-spa": 1e-4,
    "wikitext103/v-skipinit": 1e-4,
    "wikitext103/e-spa-skip": 1e-3,
    "c4/stable": 1e-3,
    "c4/skipinit": 1e-3,
    "c4/u-spa-skip": 1e-3,
    "c4/e-spa-skip-ln": 1e-3,
}


@pytest.mark.catalogue(7)
@pytest.mark.parametrize("name", TRAINS)
def test_thirty_steps_on_one_batch_drive_the_loss_down(name):
    first, last = _thirty_steps(name, TRAINS[name])
    assert last < first - 1.0


@pytest.mark.parametrize("rate", [3e-5, 1e-4, 3e-4])
def test_standard_skipless_cannot_tell_its_inputs_apart(rate):
    """The contrast: 36 blocks of plain attention learn at most which tokens are frequent, at any rate."""
    _, skipless = _thirty_steps("wikitext103/skipless", rate)
    assert skipless > 3.3
    if rate == 1e-4:
        assert _thirty_steps("wikitext103/e-spa", rate)[1] < skipless - 1.0


def test_the_papers_large_model_builds_on_meta():
    with torch.device("meta"):
        model = Transformer(preset("wikitext103/e-spa"))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert matrices == preset("wikitext103/e-spa").matrix_parameters
    biases = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert biases == 36 * (4096 + 1024)


@pytest.mark.parametrize("name", ["e-spa", "u-spa", "mirrored", "mirrored/e-spa-readers", "pre-ln"])
def test_a_network_on_meta_runs_where_only_sizes_are_asked_for(name):
    """What counters of operations and estimates of memory do: nothing is computed, and no shape may need numbers."""
    tokens = torch.zeros(2, 9, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = Transformer(name, width=32, depth=4, heads=4, vocab_size=30)
    assert model(tokens).shape == (2, 9, 30)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.is_meta
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_a_network_of_fake_tensors_runs_too():
    """FakeTensor knows sizes and a device, and no numbers, though its device is a CPU."""
    with FakeTensorMode():
        model = Transformer("e-spa", width=32, depth=4, heads=4, vocab_size=30)
        tokens = torch.randint(0, 30, (2, 9))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        assert model(tokens).shape == (2, 9, 30)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", ["e-spa", "u-spa", "mirrored", "pre-ln"])
def test_second_derivatives_of_a_network_are_those_of_dense_logits(name, impl):
    model = Transformer(name, width=16, depth=4, heads=2, vocab_size=20, impl=impl).double()
    tokens = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.data += 0.02 * torch.randn_like(parameter)
    found = []
    for loss in (
        model(tokens[:, :-1], tokens[:, 1:]),
        torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()),
    ):
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        along = sum((slope * p.detach().cos()).sum() for slope, p in zip(slopes, parameters, strict=True))
        found.append((slopes, torch.autograd.grad(along, parameters, materialize_grads=True, allow_unused=True)))
    torch.testing.assert_close(*found)


class _Doubled(torch.nn.Module):
    """A module in a head's place that holds its weight, as an adapter does."""

    def __init__(self, inner: torch.nn.Linear):
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, None

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("kind", ["module", "hook", "sequential"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_of_the_head_as_it_is_called(kind, padded):
    """It multiplied by the head's weight, whatever stood in its place."""
    model = Transformer("e-spa", width=16, depth=4, heads=2, vocab_size=20, tied_head=False)
    if kind == "hook":
        model.head.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        model.head = _Doubled(model.head) if kind == "module" else torch.nn.Sequential(torch.nn.Linear(16, 20))
    tokens = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    real = torch.arange(8).expand(2, 8) >= 3 if padded else torch.ones(2, 8, dtype=torch.bool)
    layout = Layout.left_padded(real.long()) if padded else None
    targets = tokens[:, 1:].masked_fill(~real, -100)
    wanted = torch.nn.functional.cross_entropy(model(tokens[:, :-1], layout=layout)[real], targets[real])
    torch.testing.assert_close(model(tokens[:, :-1], targets, layout=layout), wanted)
    with pytest.raises(ValueError, match="targets run from 20 to 20; the model knows 0 … 19"):
        model(tokens[:, :-1], torch.full((2, 8), 20))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at its first jvp
@pytest.mark.parametrize("name", ["e-spa", "u-spa", "mirrored", "mirrored/e-spa-readers", "pre-ln", "v-skipinit"])
def test_transforms_of_torch_func_go_through_a_network(name):
    """Gradients of each row, directional derivatives and an ensemble: each equals what plain calls give."""
    models = [Transformer(name, width=16, depth=4, heads=2, vocab_size=20).double() for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for model in models for p in model.parameters()):
        parameter.data += 0.02 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    model, tokens = models[0], torch.randint(0, 20, (3, 9), generator=generator)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, row):
        return torch.func.functional_call(model, weights, (row[None, :-1], row[None, 1:]))

    by_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, tokens)
    direction = {name: torch.cos(p) for name, p in weights.items()}
    _, slope = torch.func.jvp(lambda weights: loss(weights, tokens[0]), (weights,), (direction,))
    for row in range(3):
        model.zero_grad()
        model(tokens[row : row + 1, :-1], tokens[row : row + 1, 1:]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(by_row[name][row], p.grad)
        if row == 0:
            plain = sum((p.grad * direction[name]).sum() for name, p in model.named_parameters())
            torch.testing.assert_close(slope, plain)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, direction[name]) for name, p in weights.items()}
        torch.testing.assert_close(forward_ad.unpack_dual(loss(duals, tokens[0])).tangent, slope)

    stacked, _ = torch.func.stack_module_state(models)
    both = torch.func.vmap(lambda weights: torch.func.functional_call(model, weights, (tokens,)))(stacked)
    torch.testing.assert_close(both, torch.stack([one(tokens) for one in models]))


def test_rotary_positions_take_the_configured_base():
    config = ModelConfig(vocab_size=30, width=32, depth=2, heads=4, activation="gelu", rope_base=500.0)
    rotation = build(config).positions(torch.zeros(1, 9, dtype=torch.long), past=3).rotation
    angles = torch.arange(3.0, 12.0)[:, None] * 500.0 ** (-torch.arange(0.0, 8.0, 2.0) / 8)
    torch.testing.assert_close(rotation.cos[0, 0], angles.cos())
    torch.testing.assert_close(rotation.sin[0, 0], angles.sin())


@pytest.mark.parametrize(("activation", "gain"), [("gelu", 1.5335304412), ("relu", math.sqrt(2)), ("dks-gelu", 1.0)])
def test_the_matrix_behind_an_activation_makes_up_for_it(activation, gain):
    """σ with σ²E[φ(z)²] = 1; GELU's second moment is .4252."""
    model = build(ModelConfig(vocab_size=30, width=32, depth=12, heads=4, activation=activation))
    up, down = model.blocks[3].mlp.inner.up.weight, model.blocks[3].mlp.inner.down.weight
    torch.testing.assert_close(down @ down.T, gain**2 * torch.eye(32).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(up.T @ up, 4 * torch.eye(32).double(), rtol=0, atol=1e-12)


def test_a_head_starts_at_unit_scale_without_bias():
    config = ModelConfig(
        vocab_size=30, width=256, depth=1, heads=4, scheme=StandardAttention(), head="token", classes=200,
        activation="gelu",
    )  # fmt: skip
    head = build(config).head
    assert not head.bias.any()
    assert head.weight.std().item() == pytest.approx(1 / 16, rel=0.02)


def test_gaussian_initialisation_is_an_option():
    model = build(ModelConfig(vocab_size=30, width=64, depth=2, heads=4, init="gaussian", activation="gelu"))
    value = model.blocks[0].attention.inner.value.weight
    assert value.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert (value @ value.T - torch.eye(64)).abs().max() > 0.1


@pytest.mark.parametrize("scheme", [ExponentialSPA(0.05), UniformSPA(0.6), ValueSkipInit(), StandardAttention()])
@pytest.mark.parametrize(("head", "shape"), [("token", (2, 16, 5)), ("pooled", (2, 5))])
def test_encoders_see_both_sides_and_have_heads(scheme, head, shape):
    config = ModelConfig(
        vocab_size=30, width=32, depth=3, heads=4, scheme=scheme, causal=False, head=head, classes=5, activation="gelu"
    )
    model = build(config)
    tokens = torch.randint(0, 30, (2, 16))
    assert model(tokens).shape == shape
    if not isinstance(scheme, ValueSkipInit):  # identity attention at the start: nothing mixes yet
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 30
        assert (model.hidden(tokens)[:, 0] - model.hidden(changed)[:, 0]).abs().max() > 1e-6


@torch.no_grad()
def test_an_unembedding_of_its_own():
    """Logits start with unit variance, as the tied ones do; it is a group of the optimiser's, and is folded with."""
    sizes = {"vocab_size": 300, "width": 64, "heads": 4, "depth": 3, "activation": "gelu"}
    tied, untied = ModelConfig(**sizes), ModelConfig(**sizes, tied_head=False)
    assert untied.matrix_parameters - tied.matrix_parameters == 300 * 64
    model, tokens = build(untied), torch.randint(300, (4, 16))
    assert model(tokens).std() / build(tied)(tokens).std() == pytest.approx(1.0, abs=0.1)
    logits = model.hidden(tokens) @ model.head.weight.T
    torch.testing.assert_close(model(tokens), logits)
    torch.testing.assert_close(
        model(tokens, tokens), torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    )
    torch.testing.assert_close(fold(model)(tokens), logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(model.generate(tokens, 3)[:, 16], logits[:, -1].argmax(-1))
    assert ModelConfig.from_json(untied.to_json()) == untied
    with pytest.raises(ValueError, match="tied_head=False with head='pooled', which has a matrix of its own"):
        ModelConfig(**sizes, head="pooled", classes=3, tied_head=False)


@pytest.mark.parametrize("head", ["lm", "token", "pooled"])
@pytest.mark.parametrize("packed", [False, True])
def test_with_targets_it_is_the_cross_entropy_of_its_logits(head, packed):
    config = ModelConfig(
        vocab_size=30, width=32, depth=2, heads=4, scheme=StandardAttention(), causal=head == "lm", head=head,
        classes=5 * (head != "lm"), activation="gelu",
    )  # fmt: skip
    model, tokens = build(config), torch.randint(0, 30, (2, 9))
    layout = Layout.packed(torch.tensor([[0] * 4 + [1] * 5] * 2)) if packed else None
    logits = model(tokens, layout=layout)
    targets = torch.randint(0, logits.shape[-1], logits.shape[:-1])
    dense = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    fused = model(tokens, targets=targets, layout=layout)
    torch.testing.assert_close(fused, dense)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (fused, dense)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_pooled_head_ignores_padding():
    config = ModelConfig(
        vocab_size=30, width=32, depth=2, heads=4, scheme=StandardAttention(), causal=False, head="pooled", classes=5,
        activation="gelu",
    )  # fmt: skip
    model, tokens = build(config), torch.randint(0, 30, (1, 9))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), tokens], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 9])
    torch.testing.assert_close(model(padded, layout=Layout.left_padded(mask)), model(tokens))


@pytest.mark.parametrize("scheme", [*SPA_SCHEMES, StandardAttention()])
@pytest.mark.parametrize("position", ["rope", "relative", "none"])
def test_packed_documents_equal_separate_ones(scheme, position):
    config = ModelConfig(vocab_size=30, width=32, depth=3, heads=4, scheme=scheme, position=position, activation="gelu")
    model = build(config)
    for parameter in model.parameters():  # away from initialisation, where queries are zero
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    first, second = torch.randint(0, 30, (1, 7)), torch.randint(0, 30, (1, 11))
    ids = torch.tensor([[0] * 7 + [1] * 11])
    packed = model(torch.cat([first, second], dim=1), layout=Layout.packed(ids))
    torch.testing.assert_close(packed, torch.cat([model(first), model(second)], dim=1))


@pytest.mark.parametrize("calibration", ["exact", "mlp-aware"])
def test_calibrated_networks_keep_unit_norms(calibration):
    config = ModelConfig(
        vocab_size=64, width=256, depth=12, heads=4, length=32, scheme=ExponentialSPA(0.05, calibration=calibration)
    )
    model = build(config, dtype=torch.float32)
    final = kernels_by_block(model, torch.arange(32)[None])[-1]
    assert np.diagonal(final).mean() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("scheme", [ExponentialSPA(0.05, 0.02, "exact"), UniformSPA(0.6, 0.02, calibration="exact")])
def test_exact_calibration_meets_what_a_norm_hands_attention(scheme):
    """MLPs with the usual skip let the stream grow; behind the norm every branch still has a unit diagonal."""
    config = ModelConfig(depth=6, length=24, scheme=scheme, norm="pre", mlp_skip=Skip(1.0, 1.0), activation="gelu")
    kernel = kernels.uniform(0.02, 24)
    for shape, block in zip(attention_shapes(config), kernel_maps.kernel_blocks(config), strict=True):
        branch = shape.dense(24) @ kernels.cosine(kernel) @ shape.dense(24).T
        np.testing.assert_allclose(np.diagonal(branch), 1.0, rtol=1e-12)
        kernel = block.forward(kernel)
    assert np.diagonal(kernel).min() > 1.9


@pytest.mark.parametrize("name", ["stable-ln", "skip-ln", "pre-ln", "e-spa-ln"])
def test_the_certificate_starts_where_the_embedding_does(name):
    """Networks that normalise a growing stream do not rescale their embedding: Σ_0 = I/d, and block 1 outweighs it."""
    config = preset(f"wikitext103/{name}", width=256, heads=4, depth=12, vocab_size=48, query_key="zero-query")
    torch.manual_seed(0)
    model, tokens, cosines = Transformer(config, impl="sdpa"), torch.arange(48)[None], []
    with torch.no_grad():
        x, positions = model.embed(tokens), model.positions(tokens)
        for block in model.each_block():
            x = block(x, positions, None)
            cosines.append(kernels.mean_cosine((x[0] @ x[0].T).double().numpy() / 256))
    reports = kernel_maps.certificate(config, kernel_maps.input_norm(config) * np.eye(48)).reports
    assert cosines[0] == pytest.approx(reports[1].mean_cosine, abs=0.05)
    assert cosines[-1] == pytest.approx(reports[-1].mean_cosine, abs=0.05)


@pytest.mark.parametrize("head", [{}, {"head": "token", "classes": 5}])
@pytest.mark.parametrize("padding", [-100, 3])
def test_padding_is_not_part_of_the_loss(head, padding):
    """The mean and its gradients are those of the real tokens alone, whatever stands at the others."""
    config = ModelConfig(vocab_size=50, width=32, depth=4, heads=2, length=16, activation="tanh", **head)
    model, mask = build(config), torch.ones(2, 16)
    mask[0, :12] = 0
    tokens, targets = torch.randint(50, (2, 16)), torch.randint(5, (2, 16))
    logits = model(tokens, layout=Layout.left_padded(mask))
    expected = torch.nn.functional.cross_entropy(logits[mask == 1], targets[mask == 1])
    slopes = torch.autograd.grad(expected, list(model.parameters()))
    loss = model(tokens, targets=targets.masked_fill(mask == 0, padding), layout=Layout.left_padded(mask))
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), slopes, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tokens_without_a_batch_are_refused():
    model = build(ModelConfig(vocab_size=50, width=32, depth=4, heads=2, length=16, activation="tanh"))
    with pytest.raises(ValueError, match=r"tokens are shaped \(4,\).*tokens\[None\]"):
        model(torch.arange(4))
    for empty in (torch.zeros(0, 4, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"tokens are shaped \(.*; give at least one row of one token"):
            model(empty)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_bytes_are_tokens_once_they_are_cast(dtype):
    model = build(ModelConfig(vocab_size=50, width=32, depth=4, heads=2, length=16, activation="tanh"))
    tokens = torch.arange(8)[None]
    for arguments, name in (((tokens.to(dtype),), "tokens"), ((tokens, tokens.to(dtype)), "targets")):
        with pytest.raises(ValueError, match=rf"{name} are {dtype}; .*torch.int64 or torch.int32: {name}.long\(\)"):
            model(*arguments)
    assert torch.equal(model(tokens.int()), model(tokens))
    assert model(tokens, tokens.int()) == model(tokens, tokens)


def test_targets_to_be_left_out_are_told_where_that_works():
    model = build(ModelConfig(vocab_size=50, width=32, depth=4, heads=2, length=16, activation="tanh"))
    with pytest.raises(ValueError, match=r"targets run from -100 to 2.*0 … 49.*Layout.*cross_entropy of the logits"):
        model(torch.arange(3)[None], torch.tensor([[-100, 1, 2]]))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["e-spa", "u-spa", "mirrored", "pre-ln"])
def test_torch_jit_traces_a_network(name):
    model, tokens = Transformer(name, vocab_size=30, width=32, depth=4, heads=4), torch.randint(30, (2, 9))
    traced = torch.jit.trace(model, (tokens,))
    assert torch.equal(traced(tokens), model(tokens))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[0.0] * 32], r"inputs_embeds are a list; they must be a tensor \(batch, T, 32\)"),
        (torch.zeros(2, 32), r"inputs_embeds are shaped \(2, 32\); they must be \(batch, T, 32\)"),
    ],
)
def test_rows_that_are_no_stream_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        Transformer(ModelConfig(width=32, depth=2, heads=2, mlp_init="mirrored"))(inputs_embeds=rows)

"""Networks of mirrored MLPs: what theory says of the kernels is true of one network, at any width and depth."""

import math

import numpy as np
import pytest
import torch
from tests.model.exact import build, check_kernels, kernels_by_block, tokens_of

from skipless.model import kernel_maps
from skipless.model.config import ModelConfig, attention_shapes, mlp_layer
from skipless.model.transformer import Transformer
from skipless.theory import kernels, propagation
from skipless.theory.propagation import MirroredMlp, Skip
from skipless.theory.schemes import ExponentialSPA, Scheme, StandardAttention, UniformSPA, ValueSkipInit

SCHEMES = {
    "e-spa": ExponentialSPA(gamma_final=0.05, repeat_rate=0.02),
    "u-spa": UniformSPA(repeat_rate=0.02),
    "v-skipinit": ValueSkipInit(),
}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
each_values = pytest.mark.parametrize("values", ["trained", "identity"])


def config_of(scheme: str | Scheme = "e-spa", **fields) -> ModelConfig:
    sizes = {"vocab_size": 64, "width": 32, "depth": 36, "heads": 4, "length": 24, "mlp_init": "mirrored"}
    chosen = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    return ModelConfig(**{**sizes, "scheme": chosen, **fields})


@each_scheme
@each_values
@pytest.mark.parametrize("activation", ["gelu", "tat-leaky_relu"])
def test_one_network_has_the_kernels_of_theory_at_every_block(scheme, values, activation):
    """Given its own Σ_0, at width 32 and over 36 blocks with MLPs; others have them on average, and only wide ones."""
    config = config_of(scheme, value_output=values, activation=activation)
    check_kernels(build(config), tokens_of(1))


@pytest.mark.parametrize("depth", [1, 108])
def test_so_it_is_at_any_depth(depth):
    check_kernels(build(config_of(depth=depth)), tokens_of(1))


def gradients(model: Transformer, tokens: torch.Tensor) -> tuple[float, dict[str, list[float]]]:
    """The loss of predicting each next token, and norms of the matrices' gradients by role, block by block."""
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    loss.backward()
    norms: dict[str, list[float]] = {}
    for name, parameter in model.blocks.named_parameters():
        if name.endswith(".weight"):
            norms.setdefault(name.split(".")[-2], []).append(float(parameter.grad.norm()))
    return loss.item(), norms


@pytest.mark.parametrize("scheme", ["e-spa", "u-spa"])
def test_gradients_are_of_one_size_from_the_first_block_to_the_last(scheme):
    """W_V, W_O, W_up and W_down within a factor of 2; W_K's are 0, since W_Q is."""
    config = config_of(scheme)
    loss, norms = gradients(build(config), tokens_of(16))
    for role in ("value", "output", "up", "down"):
        assert 0.5 < norms[role][0] / norms[role][-1] < 2.0, role
        assert 0.0 < max(norms[role]) < 3.0 * min(norms[role]), role
    assert norms["key"] == [0.0] * 36
    assert all(norm > 0.0 for norm in norms["query"])
    # logits of unit variance: log V + 1/2, give or take what 64 tokens of width 32 have in common
    assert loss == pytest.approx(math.log(64) + 0.5, abs=0.3)


def test_identity_values_leave_the_other_gradients_alike():
    config = config_of(value_output="identity")
    _, norms = gradients(build(config), tokens_of(16))
    assert set(norms) == {"query", "key", "up", "down"}
    for role in ("up", "down"):
        assert 0.5 < norms[role][0] / norms[role][-1] < 2.0, role


def test_the_certificate_of_a_mirrored_network_is_that_of_attention_alone():
    with_mlps, alone = (kernel_maps.certificate(config_of(hidden=hidden)) for hidden in (None, 0))
    assert with_mlps == alone
    assert with_mlps.verdict.kind == "preserved"


@pytest.mark.parametrize("kind", [ExponentialSPA, UniformSPA])
@pytest.mark.parametrize("calibration", ["exact", "mlp-aware"])
def test_calibrations_have_nothing_to_mend_in_a_mirrored_mlp(kind, calibration):
    """Without repeated tokens all are the paper's; with them "exact" is that of a network without MLPs."""
    ours, paper = (attention_shapes(config_of(kind(calibration=name), depth=6)) for name in (calibration, "paper"))
    for shape, other in zip(ours, paper, strict=True):
        np.testing.assert_allclose(shape.dense(24), other.dense(24), rtol=0, atol=1e-10)
    exact = kind(repeat_rate=0.02, calibration="exact")
    ours, alone = (attention_shapes(config_of(exact, depth=6, hidden=hidden)) for hidden in (None, 0))
    for shape, other in zip(ours, alone, strict=True):
        np.testing.assert_allclose(shape.dense(24), other.dense(24), rtol=0, atol=1e-10)


def test_kernels_pass_a_mirrored_mlp_both_ways():
    kernel = kernels.uniform(0.3, 5)
    assert MirroredMlp().forward(kernel) is kernel
    assert MirroredMlp().backward(2.0 * kernel, kernel) == pytest.approx(2.0 * kernel)


def test_norms_and_skips_around_a_mirrored_mlp_are_theirs():
    skip = Skip.normalised(0.6)
    layer = mlp_layer(config_of(scheme="v-skipinit", mlp_skip=skip, norm="pre"))
    kernel = 4.0 * kernels.uniform(0.3, 5)
    np.testing.assert_allclose(layer.forward(kernel), 0.36 * kernel + 0.64 * kernel / 4.0)


def test_the_start_does_not_depend_on_how_other_matrices_are_drawn():
    model = build(config_of(init="gaussian", depth=2))
    up = model.blocks[1].mlp.inner.up.weight
    torch.testing.assert_close(up.T @ up, 4.0 * torch.eye(32).double())


def test_other_networks_may_have_mirrored_mlps_too():
    """Pre-LN, as a control: the MLP's branch is then a rotation of its normalised input."""
    usual = Skip(1.0, 1.0)
    config = config_of(norm="pre", attention_skip=usual, mlp_skip=usual, scheme="v-skipinit", depth=2)
    pre_ln = config.replace(scheme=StandardAttention())
    for each in (config, pre_ln):
        block, x = next(build(each).each_block()), torch.randn(1, 7, 32).double()
        branch = block.mlp(x) - x
        torch.testing.assert_close(branch.square().mean(-1), torch.ones(1, 7).double(), atol=1e-5, rtol=0)


def test_identity_values_have_a_sixth_fewer_weights():
    trained, identity = (config_of(value_output=values) for values in ("trained", "identity"))
    blocks = [config.matrix_parameters - 64 * 32 for config in (trained, identity)]
    assert blocks[1] / blocks[0] == pytest.approx(10 / 12)
    for config in (trained, identity):
        matrices = [p for p in build(config.replace(depth=2)).parameters() if p.dim() == 2]
        assert sum(p.numel() for p in matrices) == config.replace(depth=2).matrix_parameters
    names = {name for name, _ in build(identity.replace(depth=1)).named_parameters()}
    assert not any("value" in name or "output" in name for name in names)


@each_scheme
@pytest.mark.parametrize("position", ["rope", "relative"])
@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_grouped_queries_share_keys_alone_where_values_are_the_input(scheme, position, impl):
    """The network is that of all heads whose W_K repeats the shared rows; the gradient of a shared row is their sum."""
    torch.manual_seed(0)
    config = config_of(scheme, value_output="identity", depth=3, position=position, kv_heads=2)
    grouped, whole = (Transformer(c, impl=impl).double() for c in (config, config.replace(kv_heads=4)))

    def repeated(key: torch.Tensor) -> torch.Tensor:
        return key.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)

    state = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in grouped.state_dict().items()}
    grouped.load_state_dict(state)
    whole.load_state_dict({n: repeated(t) if n.endswith("inner.key.weight") else t for n, t in state.items()})
    tokens, losses = tokens_of(2), []
    for model in (grouped, whole):
        losses.append(model(tokens[:, :-1], targets=tokens[:, 1:]))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    for (name, ours), theirs in zip(grouped.named_parameters(), whole.parameters(), strict=True):
        shared = name.endswith("inner.key.weight")
        expected = theirs.grad.unflatten(0, (2, 2, 8)).sum(1).flatten(0, 1) if shared else theirs.grad
        torch.testing.assert_close(ours.grad, expected, rtol=0, atol=1e-12)
        assert ours.grad.any()
    assert grouped.blocks[0].attention.inner.key.weight.shape == (16, 32)


def test_values_have_a_matrix_or_none():
    with pytest.raises(ValueError, match="value_output is 'none'; it must be one of 'trained', 'identity'"):
        config_of(value_output="none")


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_a_skip_around_attention_to_the_input_itself_keeps_cross_terms(norm):
    """Standard attention with W_Q = 0 and a skip: one network of no W_V and W_O has theory's kernels, with any norm.

    By sums of squares alone, which hold for W_V and W_O that mix, 6 blocks without a norm would miss the diagonal.
    """
    fields = {"value_output": "identity", "attention_skip": Skip(0.5, math.sqrt(0.75)), "norm": norm}
    config = config_of(StandardAttention(), depth=6, query_key="zero-query", hidden=0, mlp_init=None, **fields)
    model = build(config)
    for layer in model.modules():
        if isinstance(layer, torch.nn.RMSNorm):
            layer.eps = 0.0
    measured = kernels_by_block(model, tokens_of(1))
    predicted = propagation.forward(kernel_maps.kernel_blocks(config), measured[0])
    for found, expected in zip(measured, predicted, strict=True):
        assert np.abs(found - expected).max() < 1e-10 * np.abs(expected).max()


def test_spa_beside_a_skip_needs_values_that_mix():
    with pytest.raises(ValueError, match=r"ExponentialSPA.*counts on W_V and W_O.*use value_output='trained', or"):
        config_of(value_output="identity", attention_skip=Skip.normalised(0.5))
    config_of(value_output="identity", attention_skip=Skip(1.0, 0.0))  # nothing is added, so nothing is correlated

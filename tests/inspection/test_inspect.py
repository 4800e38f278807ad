"""An inspection tells the truth: which networks lose their signal, where, and which block is at fault."""

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

import skipless
from skipless.figures.inspection import inspection_figure
from skipless.figures.style import render
from skipless.hf.modeling import SkiplessForCausalLM
from skipless.inspection.inspect import inspect
from skipless.inspection.stacks import find_blocks
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory import kernels
from skipless.theory.certificate import Thresholds
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA

USUAL = Skip(1.0, 1.0)
RESIDUAL = {"attention_skip": USUAL, "mlp_skip": USUAL, "activation": "gelu", "scheme": StandardAttention()}
NETWORKS = {
    "skipless": {"scheme": StandardAttention()},
    "pre-ln": {**RESIDUAL, "norm": "pre"},
    "post-ln": {**RESIDUAL, "norm": "post", "depth": 100},
    "e-spa": {"scheme": ExponentialSPA(repeat_rate=1 / 512)},
    "u-spa": {"scheme": UniformSPA(repeat_rate=1 / 512)},
}


def network(name: str, **changes) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "width": 64, "heads": 4, "depth": 36, "length": 32}
    return Transformer(ModelConfig(**{**sizes, **NETWORKS[name], **changes}))


def tokens(rows: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


def test_skipless_standard_attention_collapses_and_the_block_is_named():
    found = inspect(network("skipless"), tokens())
    cosines = [each.cosine_mean for each in found.blocks]
    first = next(block for block, cosine in enumerate(cosines) if cosine > 0.999)
    assert (found.verdict.kind, found.verdict.block) == ("collapse", first)
    assert 5 <= first <= 15
    assert f"block {first}" in found.verdict.text
    assert "E-SPA with γ_L = 0.005" in found.advice
    assert found.blocks[20].query_key_gradient < 1e-5


def test_post_ln_collapses_at_100_blocks():
    found = inspect(network("post-ln"), tokens())
    assert found.verdict.kind == "collapse"
    assert "Pre-LN" in found.advice
    assert "β = 0.1" in found.advice


@pytest.mark.parametrize("name", ["pre-ln", "e-spa", "u-spa"])
def test_networks_that_train_are_healthy(name):
    found = inspect(network(name), tokens())
    assert found.healthy, found.verdict.text
    skipless.assert_signal_preserved(network(name), tokens())


@pytest.mark.parametrize("name", ["pre-ln", "e-spa"])
@pytest.mark.parametrize("block", [1, 5, 12])
@pytest.mark.parametrize("fault", ["scale", "uniform", "values"])
def test_a_planted_fault_is_named(name, block, fault):
    model = network(name, depth=12)
    at = model.blocks[block - 1]
    with torch.no_grad():
        if fault == "scale":
            at.register_forward_hook(lambda module, inputs, out: out * 1e-3)
        elif fault == "values":
            at.attention.inner.value.weight.zero_()
        elif name == "e-spa":
            at.attention.inner.register_forward_hook(lambda module, inputs, out: out.mean(1, keepdim=True) + 0 * out)
        else:
            at.attention.inner.query.weight.zero_()
    found = inspect(model, tokens())
    assert found.verdict.lost
    assert found.verdict.block == block, found.verdict.text


def test_theory_stands_beside_the_measurement():
    found = inspect(network("e-spa", width=256, depth=8), tokens(1, 64))
    for each in found.blocks:
        assert each.predicted["cosine"] == pytest.approx(each.cosine_mean, abs=0.05)
        assert each.predicted["norm"] == pytest.approx(each.norm_mean, rel=0.2)
        assert each.predicted["gradient"] == pytest.approx(each.gradient_mean, rel=0.35)


def test_gradients_and_kernels_equal_autograd_by_hand():
    model, ids = network("pre-ln", depth=4), tokens()
    found = inspect(model, ids, labels=ids)
    states = [model.embed(ids)]
    for block in model.blocks:
        states.append(block(states[-1], model.positions(ids)))
    logits = model.logits(model.norm(states[-1]))
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, [*states, model.blocks[1].attention.inner.key.weight])
    squares = [g.double().square().sum(-1) for g in gradients[:-1]]
    for each, state, square in zip(found.blocks, states, squares, strict=True):
        assert each.gradient_mean == pytest.approx(float(square.mean() / squares[-1].mean()), rel=1e-4)
        assert each.gradient_max == pytest.approx(float(square.max() / squares[-1].mean()), rel=1e-4)
        cosine = kernels.cosine(kernels.of_activations(state[0].detach().numpy()))
        np.testing.assert_allclose(found.kernels[each.block], cosine, atol=2e-6)
    assert found.blocks[2].parameter_gradients["key"] == pytest.approx(float(gradients[-1].norm()), rel=1e-4)
    np.testing.assert_allclose(found.locations["gradient"][1], squares[1].mean(0) / squares[-1].mean(), rtol=1e-4)


def test_the_model_is_left_as_it_was():
    model = network("pre-ln", depth=3).train()
    model.blocks[1].eval()
    for parameter in model.blocks[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    with torch.no_grad():
        inspect(model, tokens())
    assert torch.equal(torch.get_rng_state(), state)
    assert [block.training for block in model.blocks] == [True, False, True]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert (parameter.grad is None) != name.startswith("blocks.0.")
        assert not parameter._post_accumulate_grad_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_inside_the_model_leaves_no_hooks():
    model = network("pre-ln", depth=3)

    def stop(module, inputs):
        raise RuntimeError("stop")

    handle = model.blocks[2].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop"):
        inspect(model, tokens())
    handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_frozen_models_still_have_gradients_by_location():
    model = network("pre-ln", depth=3).requires_grad_(False)
    frozen = inspect(model, tokens())
    free = inspect(network("pre-ln", depth=3), tokens())
    assert [e.gradient_mean for e in frozen.blocks] == pytest.approx([e.gradient_mean for e in free.blocks])
    assert frozen.blocks[1].parameter_gradients == {}


def test_our_hugging_face_wrapper_gives_the_same_numbers():
    native = network("e-spa", depth=6)
    one, two = inspect(native, tokens()), inspect(SkiplessForCausalLM.from_native(native), tokens())
    assert one.blocks[6].cosine_mean == two.blocks[6].cosine_mean
    assert two.blocks[1].predicted is not None


def test_rows_of_unequal_padding_in_our_hugging_face_wrapper():
    model = SkiplessForCausalLM.from_native(network("e-spa", depth=6))
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[0, 20:] = 0
    found = inspect(model, {"input_ids": tokens(), "attention_mask": mask})
    alone = [inspect(model, tokens()[:1, :20]), inspect(model, tokens()[1:])]
    assert found.healthy
    assert found.blocks[6].predicted is None  # rows differ in length, and theory follows one Σ
    assert found.blocks[6].cosine_mean == pytest.approx(sum(e.blocks[6].cosine_mean for e in alone) / 2, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_a_compiled_model_is_run_eagerly():
    model = network("pre-ln", depth=3)
    plain = inspect(model, tokens())
    compiled = inspect(torch.compile(model), tokens())
    model.compile_blocks()
    blocks = inspect(model, tokens())
    for each in (compiled, blocks):
        assert each.blocks[3].cosine_mean == plain.blocks[3].cosine_mean
        assert each.blocks[3].attention_entropy == plain.blocks[3].attention_entropy


def test_the_compiler_is_not_loaded_where_nothing_is_compiled(monkeypatch):
    """It would take 100 MB and seconds."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: pytest.fail(f"{stance} loads it"))
    assert inspect(network("pre-ln", depth=3), tokens()).healthy
    assert "torch._dynamo" not in sys.modules


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_precisions_have_the_same_numbers(dtype):
    """That float64 can be inspected at all is no matter of course: torch refuses a norm in a narrower type."""
    expected, found = (inspect(network("e-spa", depth=6).to(kind), tokens()) for kind in (torch.float32, dtype))
    tolerance = 1e-4 if dtype == torch.float64 else 0.1
    for one, other in zip(expected.blocks, found.blocks, strict=True):
        assert other.cosine_mean == pytest.approx(one.cosine_mean, abs=tolerance)
        assert other.norm_mean == pytest.approx(one.norm_mean, rel=tolerance)
    assert found.verdict == expected.verdict


@pytest.mark.parametrize("keep_kernels", [True, False])
def test_the_figure_is_drawn(keep_kernels):
    found = inspect(network("skipless", depth=12), tokens(), keep_kernels=keep_kernels)
    figure = inspection_figure(found)
    assert len(figure.axes) == 8 + 1 + 9 * keep_kernels  # panels, the colour bar, kernels
    assert render(figure, ".png", dpi=40).startswith(b"\x89PNG")


def test_json_holds_everything_and_is_finite():
    data = json.loads(inspect(network("skipless", depth=5), tokens()).to_json())
    assert len(data["blocks"]) == 6
    assert np.array(data["kernels"]).shape == (6, 32, 32)
    assert np.array(data["locations"]["norm"]).shape == (6, 32)


def test_assert_signal_preserved_says_what_and_where():
    with pytest.raises(AssertionError, match=r"Rank collapse at block \d+ \(blocks"):
        skipless.assert_signal_preserved(network("skipless"), tokens())


def test_assert_signal_preserved_takes_the_arguments_of_inspect():
    model, ids = network("e-spa", depth=6), tokens()
    model.blocks[3].register_forward_hook(lambda module, args, out: 2.5 * out)
    found = skipless.assert_signal_preserved(model, ids, labels=ids)
    assert (found.verdict.kind, found.verdict.block) == ("drift", 4)
    gains = [inspect(model, ids, labels=labels).blocks[0].gradient_mean for labels in (ids, None)]
    assert found.blocks[0].gradient_mean == gains[0] != gains[1]
    with pytest.raises(AssertionError, match=r"from block 4 on squared norms leave 0\.25 … 4 times"):
        skipless.assert_signal_preserved(model, ids, allow_drift=False)
    with pytest.raises(AssertionError, match="Norms explode at block 4"):
        skipless.assert_signal_preserved(model, ids, thresholds=Thresholds(lost_norm=5.0))
    first = [f"blocks.{index}" for index in range(3)]
    assert len(skipless.assert_signal_preserved(model, ids, blocks=first, allow_drift=False).blocks) == 4


def test_norms_that_drift_because_inputs_differ_are_said_to():
    """A bright image is one row over and over, twice as long as others: no width and no calibration would help."""
    torch.manual_seed(0)
    model = skipless.Transformer("vit/mirrored", depth=4, width=64)
    plain = torch.full((1, 3, 32, 32), 250.0)
    noise = (torch.randn(3, 3, 32, 32) * 62.0 + 124.0).clamp(0, 255)
    found = inspect(model, torch.cat([plain, noise]))
    assert found.verdict.kind == "drift"
    assert "Squared norms differ as they enter" in found.advice
    assert "as those of bright and plain images do" in found.advice
    assert "SPA keeps the mean over inputs, not each" in found.advice
    for words in ("wider", "calibration"):
        assert words not in found.advice
    model, ids = network("e-spa", depth=6), tokens()
    with torch.no_grad():
        model.embedding.weight[::2] *= 3.0
        assert "as those of trained embeddings of tokens do" in inspect(model, ids).advice
    model, ids = network("e-spa", depth=6), tokens()
    model.blocks[3].register_forward_hook(lambda module, args, out: 2.5 * out)
    advice = inspect(model, ids).advice
    assert "a wider network drifts less" in advice
    assert "calibration='exact'" in advice


def test_blocks_are_found_or_named():
    model = network("pre-ln", depth=3)
    assert [name for name, _ in find_blocks(model)] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [name for name, _ in find_blocks(model, "blocks")] == ["blocks.0", "blocks.1", "blocks.2"]
    assert len(inspect(model, tokens(), blocks=["blocks.0", "blocks.1"]).blocks) == 3
    with pytest.raises(ValueError, match=r"no module 'block\.0'; did you mean 'blocks\.0'"):
        find_blocks(model, ["block.0"])
    with pytest.raises(ValueError, match="order they run"):
        inspect(model, tokens(), blocks=["blocks.1", "blocks.0"])


def test_torchs_own_encoder_with_the_batch_second():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x = torch.randn(5, 2, 16)
    found = inspect(model, x)
    assert found.locations["norm"].shape == (4, 5)
    assert found.healthy
    assert found.blocks[1].attention_spread is not None
    assert found.blocks[1].parameter_gradients["query"] > 0


def test_bad_input_is_named():
    model, ids = network("pre-ln", depth=2), tokens()
    with pytest.raises(ValueError, match="has no list of modules that each hold attention"):
        inspect(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        inspect(model, ids[:, :1])
    with pytest.raises(ValueError, match=r"labels hold 40000, but the model has 512 classes"):
        inspect(model, ids, labels=ids + 40_000 - ids.max())
    for wrapped in (200, 156):  # 156 becomes −100, which torch would ignore without a word
        with pytest.raises(ValueError, match=r"labels are torch\.int8, which holds at most 127.*512 classes"):
            inspect(model, ids, labels=torch.full_like(ids, wrapped).to(torch.int8))
    with pytest.raises(ValueError, match=r"labels hold -25536, but the model has 512 classes"):
        inspect(model, ids, labels=torch.full_like(ids, 40_000).to(torch.int16))
    with pytest.raises(ValueError, match=r"labels hold 1099511627776"):
        inspect(model, ids, labels=torch.full_like(ids, 2**40))
    with pytest.raises(ValueError, match=r"token ids are torch\.int16"):
        inspect(model, ids.short())
    with pytest.raises(ValueError, match=r"labels are torch\.float32"):
        inspect(model, ids, labels=ids.float())
    with pytest.raises(ValueError, match="token ids run from 0 to 512"):
        inspect(model, torch.tensor([[0, 512]]))
    with pytest.raises(ValueError, match=r"batch is on meta and the model on cpu; move one: batch\.to\('cpu'\)"):
        inspect(model, ids.to("meta"))
    with pytest.raises(ValueError, match=r"labels is on meta and the model on cpu; move one: labels\.to\('cpu'\)"):
        inspect(model, ids, labels=ids.to("meta"))
    with pytest.raises(ValueError, match=r"input_ids is on meta"):
        inspect(SkiplessForCausalLM.from_native(model), {"input_ids": ids.to("meta")})
    with pytest.raises(ValueError, match="leave one out"):
        inspect(model, ids, labels=ids, loss=lambda out: out.sum())
    with pytest.raises(ValueError, match=r"must be \(rows, T\)"):
        inspect(model, ids[0])
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    with pytest.raises(ValueError, match="1 location per row"):
        inspect(encoder, torch.randn(2, 1, 16))

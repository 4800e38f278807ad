"""fold: the same function with fewer weights, refusals, and what the report says."""

import json

import pytest
import torch
from safetensors.torch import save_file

from skipless.model.config import ModelConfig
from skipless.model.fold import FoldedTransformer, Folding, default_max_condition, fold
from skipless.model.generate import KVCache, decode
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit
from skipless.theory.shaping import named_activation

TOKENS = torch.randint(53, (2, 17), generator=torch.Generator().manual_seed(0))
# solved once, for 36 layers: DKS does not exist for 4
DKS = named_activation("dks-gelu", 36, Skip())
SMALL = {"activation": DKS, "vocab_size": 53, "width": 64, "depth": 4, "heads": 4, "length": 16, "query_key": "normal"}


def network(dtype=torch.float64, **fields) -> Transformer:
    """A model as training leaves it: every parameter moved off its initial value, biases and gains included."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**{**SMALL, **fields}), impl="reference").double()
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.005 if parameter.dim() == 2 else 0.1
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.to(dtype)


@torch.no_grad()
def difference(model: Transformer, folded: Transformer, **inputs) -> float:
    return float((model(TOKENS, **inputs) - folded(TOKENS, **inputs)).abs().max())


def with_condition(matrix: torch.Tensor, condition: float) -> torch.Tensor:
    u, _, v = torch.linalg.svd(matrix)
    return u @ torch.logspace(0, -torch.tensor(condition).log10(), len(matrix), dtype=matrix.dtype).diag() @ v


@pytest.mark.parametrize("streams", [("query",), ("query", "key", "value")])
def test_depth_36_keeps_its_logits(streams):
    model = network(depth=36)
    folded = fold(model, streams=streams)
    assert difference(model, folded) <= 1e-9
    first, *rest = folded.report.blocks
    assert first.saved == pytest.approx(1 / 12)
    assert all(block.saved == pytest.approx(2 / 12) for block in rest)
    # the first block reads the embedding, so that 71 of 72 matrices go
    assert folded.report.saved == pytest.approx(71 / (36 * 12))


def test_depth_36_at_the_limit_of_conditioning():
    model = network(depth=36)
    with torch.no_grad():
        for block in model.blocks:
            query = block.attention.inner.query.weight
            query.copy_(with_condition(query, 0.99 * default_max_condition(torch.float64)))
    folded = fold(model, streams=("query",))
    assert folded.folding.streams[1:] == ("query",) * 35
    assert difference(model, folded) <= 1e-9


def test_query_that_is_zero_at_initialisation():
    """The classical fold then only merges W_O; W_V, which is orthogonal, does better."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SMALL, "depth": 36, "query_key": None}), impl="reference").double()
    classical, best = fold(model, streams=("query",)), fold(model)
    assert classical.report.saved == pytest.approx(1 / 12)
    assert classical.report.blocks[1].conditions == {"query": float("inf")}
    assert "W_Q has condition number inf" in classical.report.blocks[1].why_not
    assert best.report.saved == pytest.approx(71 / (36 * 12))
    assert difference(model, classical) <= 1e-9
    assert difference(model, best) <= 1e-9


@pytest.mark.parametrize(
    "activation", ["dks-gelu", "tat-leaky_relu", "dks-leaky_relu", "dks-softplus", "gelu", "sigmoid", "relu"]
)
@pytest.mark.parametrize("mlp_bias", [True, False])
def test_every_activation_loses_its_constants(activation, mlp_bias):
    model = network(activation=named_activation(activation, 36, Skip()), mlp_bias=mlp_bias)
    folded = fold(model)
    spec = folded.blocks[0].mlp.inner.activation.spec
    assert (spec.input_scale, spec.input_shift, spec.output_shift, spec.output_scale) == (1.0, 0.0, 0.0, 1.0)
    assert difference(model, folded) <= 1e-12


SCHEMES = {
    "e-spa": ExponentialSPA(repeat_rate=0.02),
    "u-spa": UniformSPA(repeat_rate=0.02),
    "v-skipinit": ValueSkipInit(),
    "v-skipinit-per-head": ValueSkipInit(per_head=True),
    "standard": StandardAttention(),
    "alibi": StandardAttention(alibi_heads=4),
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
@pytest.mark.parametrize("position", ["rope", "relative", "none"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_scheme_and_position(scheme, position, kv_heads):
    model = network(scheme=scheme, position=position, kv_heads=kv_heads, bias_gain=True)
    assert difference(model, fold(model)) <= 1e-12


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
@pytest.mark.parametrize("activation", ["gelu", "tat-leaky_relu", "dks-leaky_relu"])
def test_mirrored_networks_fold_as_others_do(scheme, activation):
    shaped = named_activation(activation, 36, Skip())
    model = network(scheme=scheme, activation=shaped, mlp_init="mirrored")
    folded = fold(model)
    assert folded.folding.streams[1:].count(None) == 0
    assert difference(model, folded) <= 1e-12


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_without_values_of_their_own_only_the_constants_of_the_activation_are_merged(scheme, kv_heads, tmp_path):
    shaped = named_activation("tat-leaky_relu", 36, Skip())
    residual = {"attention_skip": Skip(0.0, 0.7, trainable=True)} if isinstance(scheme, StandardAttention) else {}
    values = {"value_output": "identity", "kv_heads": kv_heads}
    model = network(scheme=scheme, activation=shaped, bias_gain=True, **values, **residual)
    folded = fold(model)
    assert folded.report.saved == 0.0
    assert set(folded.folding.streams) == {None}
    spec = folded.blocks[0].mlp.inner.activation.spec
    assert (spec.output_scale, spec.negative_slope) == (1.0, shaped.negative_slope)
    assert str(folded.report).count("values are the stream itself: only the activation's constants are merged") == 4
    assert difference(model, folded) <= 1e-12
    folded.save(tmp_path / "folded.safetensors")
    loaded = FoldedTransformer.load(tmp_path / "folded.safetensors", impl="reference")
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in folded.state_dict().items())
    assert difference(folded, loaded) <= 1e-13


def test_grouped_queries_fold_their_query_alone():
    model = network(kv_heads=2)
    folded = fold(model)
    assert folded.folding.streams == (None, "query", "query", "query")
    assert folded.report.blocks[1].saved == pytest.approx(2 / 11)
    with pytest.raises(ValueError, match="'value'; here it can be one of 'query', None"):
        Folding(model.config, (None, "value", None, None))
    assert fold(model, streams=("key", "value")).report.blocks[1].why_not == "none of the allowed matrices is square"


def test_attention_only_models_merge_outputs_into_the_next_block():
    model = network(hidden=0)
    folded = fold(model)
    assert [block.saved for block in folded.report.blocks] == [0.25, 0.25, 0.25, 0.0]
    assert difference(model, folded) <= 1e-12


def test_residual_weights_are_folded():
    skip = Skip(0.0, 0.7, trainable=True)
    for hidden in (0, 96):
        model = network(scheme=StandardAttention(), attention_skip=skip, mlp_skip=Skip(0.0, 1.3), hidden=hidden)
        folded = fold(model)
        assert not any("residual" in name for name, _ in folded.named_parameters())
        assert difference(model, folded) <= 1e-12


@pytest.mark.parametrize("head", ["token", "pooled"])
def test_encoders(head):
    model = network(causal=False, head=head, classes=5)
    assert difference(model, fold(model)) <= 1e-12


def test_packed_documents():
    model = network()
    layout = Layout.packed(torch.tensor([[0] * 9 + [1] * 8, [0] * 5 + [1] * 9 + [-1] * 3]))
    assert difference(model, fold(model), layout=layout) <= 1e-12


@pytest.mark.parametrize("position", ["rope", "relative"])
def test_decoding_equals_the_full_forward(position):
    model = network(position=position)
    folded = fold(model)
    cache = KVCache(len(folded.blocks))
    # keys and values are the unfolded model's, which may therefore begin
    steps = [decode(model, TOKENS[:, :6], cache)] + [decode(folded, TOKENS[:, i : i + 1], cache) for i in range(6, 17)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(TOKENS).detach(), rtol=0, atol=1e-12)


def test_trained_models_still_agree():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SMALL, "query_key": None}), impl="reference").double()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        logits = model(TOKENS[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    before = model(TOKENS).detach()
    folded = fold(model)
    assert difference(model, folded) <= 1e-12
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    optimiser.step()
    torch.testing.assert_close(folded(TOKENS), before, rtol=0, atol=1e-12, msg="folded and unfolded share memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_good_as_unfolded(dtype):
    """Errors against float64 with the same weights, at most twice those of the unfolded model in that precision."""
    model = network(dtype, depth=12)
    folded = fold(model)
    assert folded.folding.streams[1:].count(None) == 0
    assert {p.dtype for p in folded.parameters()} == {dtype}
    unfolded_logits, folded_logits = model(TOKENS).double(), folded(TOKENS).double()
    exact = model.double()(TOKENS)
    assert (folded_logits - exact).norm() <= 2 * (unfolded_logits - exact).norm()


def test_autocast_is_as_good_as_unfolded():
    model = network(torch.float32)
    folded, exact = fold(model), model(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        assert (folded(TOKENS) - exact).norm() <= 2 * (model(TOKENS) - exact).norm()


def test_ill_conditioned_matrices_are_left_alone_and_reported():
    model = network(kv_heads=2)
    with torch.no_grad():
        query = model.blocks[2].attention.inner.query.weight
        query.copy_(with_condition(query, 1e7))
        model.blocks[3].attention.inner.query.weight[0] = 0.0
    folded = fold(model)
    assert folded.folding.streams == (None, "query", None, None)
    assert "condition number 1.0e+07" in folded.report.blocks[2].why_not
    assert folded.report.rounding == 2.0**-53 * folded.report.blocks[1].conditions["query"] < 1e-13
    assert difference(model, folded) <= 1e-12
    table = str(folded.report)
    assert "4 blocks: 180,224 weights -> 159,744" in table
    assert "W_Q has condition number 1.0e+07, over the limit" in table
    assert fold(model, max_condition=1e8).folding.streams == (None, "query", "query", None)


def test_saved_models_load_back(tmp_path):
    model = network(torch.float32, activation=named_activation("tat-leaky_relu", 36, Skip()), kv_heads=2)
    folded = fold(model)
    folded.save(tmp_path / "folded.safetensors")
    loaded = FoldedTransformer.load(tmp_path / "folded.safetensors", impl="reference")
    assert loaded.folding == folded.folding == Folding.from_dict(json.loads(json.dumps(folded.folding.to_dict())))
    assert torch.equal(loaded(TOKENS), folded(TOKENS))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    save_file(dict(model.state_dict()), tmp_path / "unfolded.safetensors")
    with pytest.raises(ValueError, match=r"no 'skipless\.folding' metadata"):
        FoldedTransformer.load(tmp_path / "unfolded.safetensors")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "pre"}, "norm='pre'"),
        ({"norm": "post"}, "norm='post'"),
        ({"attention_skip": Skip.normalised(0.5)}, r"attention_skip.shortcut=0.5 .*Only vanilla models fold"),
        ({"mlp_skip": Skip(1.0, 1.0)}, r"mlp_skip.shortcut=1.0"),
        ({"hidden": 0, "value_output": "identity"}, "there is nothing to merge; use the model as it is"),
        ({"norm": "pre", "mlp_skip": Skip(1.0, 1.0)}, r"norm='pre' .* and mlp_skip.shortcut=1.0"),
    ],
)
def test_norms_and_skips_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        fold(network(activation="gelu", **fields))


def test_other_refusals():
    model = network()
    with pytest.raises(ValueError, match="folded already"):
        fold(fold(model))
    with pytest.raises(ValueError, match="'output'; it may contain 'query', 'key', 'value'"):
        fold(model, streams=("output",))
    with pytest.raises(ValueError, match="3 streams for depth=4"):
        Folding(model.config, (None, "query", "query"))
    with pytest.raises(ValueError, match="block 0 has stream 'query'; here it can be one of None"):
        Folding(model.config, ("query", None, None, None))

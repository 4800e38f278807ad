"""Arguments of another type or value from Python: a ValueError that says so, where the argument is taken."""

import math

import pytest
import torch

import skipless
from skipless.model.config import ModelConfig
from skipless.model.fold import fold
from skipless.model.generate import Sampling
from skipless.model.transformer import Transformer
from skipless.ops.attention import shaped_attention
from skipless.theory.activations import ShapedActivation
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit
from skipless.theory.shapes import PlainShape
from skipless.training.config import DataConfig, Experiment, OptimizerConfig, TrainConfig

NAN, INF = math.nan, math.inf
FIELDS = {
    (ModelConfig, "activation"): (0, NAN, [], 1.5, b"gelu", {}, ()),
    (ModelConfig, "width"): ("x", None, 1.5, NAN, True, -1, 0, 1 << 40),
    (ModelConfig, "rope_base"): ("x", None, NAN, True, [], 0),
    (ModelConfig, "query_key_scale"): ("x", None, NAN, True, INF),
    (ModelConfig, "scheme"): ("e-spa", None, 1, []),
    (ModelConfig, "attention_skip"): ("x", None, 0.5),
    (ModelConfig, "bias_gain"): (NAN, "x", None, 1),
    (ValueSkipInit, "per_head"): ("x", 1, None, NAN, []),
    (StandardAttention, "alibi_heads"): ("x", -1, 2.5, NAN, None, True),
    (ExponentialSPA, "gamma_final"): ("x", NAN, None, -1, 0, INF, [], True),
    (ExponentialSPA, "repeat_rate"): ("x", NAN, None, -1, 1.0, INF),
    (ExponentialSPA, "calibration"): ("x", None, 1),
    (ExponentialSPA, "grid"): ("x", NAN, 8, [], (0, 4), (2, 2, 2), True, (8, "8")),
    (UniformSPA, "rho_final"): ("x", NAN, None, -1, 1.0),
    (UniformSPA, "repeat_rate"): ("x", NAN, None, -1, 1.0),
    (UniformSPA, "schedule"): ("x", None),
    (Skip, "shortcut"): ("x", NAN, None, [], INF),
    (Skip, "residual"): ("x", NAN, None),
    (Skip, "trainable"): ("x", 1, None),
    (Sampling, "temperature"): ("x", None, -1, NAN, INF, 1e-300),
    (Sampling, "top_k"): ("x", 1.5, 0, NAN),
    (Sampling, "top_p"): ("x", 0, 2, NAN),
    (OptimizerConfig, "rate"): ("x", NAN, -1, INF),
    (OptimizerConfig, "eps"): ("x", None, NAN, 0, -1),
    (OptimizerConfig, "weight_decay"): ("x", None, NAN, 1e38),
    (OptimizerConfig, "betas"): (None, 1, (1,), ("a", "b"), (NAN, 0.9)),
    (OptimizerConfig, "role_rates"): (None, 1, {"query": "x"}, {"nosuch": 1.0}),
    (OptimizerConfig, "keep_orthogonal"): (1, None, (1,), "query"),
    (OptimizerConfig, "clip"): ("x", NAN, 0),
    (OptimizerConfig, "name"): (1, None, "x"),
    (OptimizerConfig, "nesterov"): ("x", None),
    (OptimizerConfig, "newton_schulz"): ("x", None, 1),
    (TrainConfig, "steps"): ("x", None, NAN, 0, 1.5, 10**30),
    (TrainConfig, "batch_size"): ("x", None, 0),
    (TrainConfig, "seed"): (1.5, -1, 1 << 64, "x"),
    (TrainConfig, "ema"): ("x", NAN, 0, 2),
    (TrainConfig, "precision"): ("x", None, 1),
    (TrainConfig, "compile"): ("x", None, 1),
    (TrainConfig, "probe_at"): (1, ("x",), None),
    (TrainConfig, "on_divergence"): (1, "x"),
    (TrainConfig, "keep"): (NAN, 0),
    (DataConfig, "packed"): ("x", 1),
    (DataConfig, "vocab"): (-1, 0, "x"),
}
CASES = [(kind, name, value) for (kind, name), values in FIELDS.items() for value in values]


@pytest.mark.parametrize(("kind", "name", "value"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_field_of_another_type_or_value_is_refused(kind, name: str, value) -> None:
    with pytest.raises(ValueError, match=r"\S+ .*"):
        kind(**{name: value})


def test_what_is_refused_is_named() -> None:
    for (kind, name), values in FIELDS.items():
        with pytest.raises(ValueError) as error:  # noqa: PT011  (what is said is looked at below)
            kind(**{name: values[0]})
        words = str(error.value)
        assert name in words or kind is OptimizerConfig, words
    for call in (lambda: Skip.normalised("x"), lambda: ShapedActivation("gelu", input_scale=None)):
        with pytest.raises(ValueError, match="it must be a number"):
            call()
    for call in (lambda: Experiment(None), lambda: Experiment("x", model=None), lambda: ShapedActivation(1)):
        with pytest.raises(ValueError, match=r"name|model|activation"):
            call()


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    sizes = {"width": 32, "heads": 2, "depth": 3, "hidden": 64, "vocab_size": 50, "length": 16}
    return Transformer(ModelConfig(**sizes, activation="gelu")).eval()


TOKENS = torch.arange(16).reshape(2, 8)
Q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
PLAIN, ROW = PlainShape(), torch.cat([torch.full((1, 8), -INF), torch.zeros(7, 8)])
CALLS = {
    "fold(None)": lambda m: fold(None),
    "fold(text)": lambda m: fold("run"),
    "fold(config)": lambda m: fold(m.config),
    "inspect(None)": lambda m: skipless.inspect(None, TOKENS),
    "inspect(1)": lambda m: skipless.inspect(1, TOKENS),
    "inspect without a batch": lambda m: skipless.inspect(m, None),
    "inspect fractions": lambda m: skipless.inspect(m, torch.zeros(2, 3)),
    "tokens beyond": lambda m: m(TOKENS + 40),
    "tokens below": lambda m: m(TOKENS - 1),
    "tokens in a row": lambda m: m(TOKENS[0]),
    "tokens as fractions": lambda m: m(TOKENS.float()),
    "tokens as a list": lambda m: m([[1, 2]]),
    "tokens as text": lambda m: m("x"),
    "no tokens": lambda m: m(None),
    "targets beyond": lambda m: m(TOKENS, TOKENS + 60),
    "targets below": lambda m: m(TOKENS, torch.full_like(TOKENS, -100)),
    "generate(None)": lambda m: m.generate(None, 3),
    "generate beyond": lambda m: m.generate(TOKENS + 60, 3),
    "generate no tokens": lambda m: m.generate(TOKENS, 0),
    "generate 1.5 tokens": lambda m: m.generate(TOKENS, 1.5),
    "generate x tokens": lambda m: m.generate(TOKENS, "x"),
    "generate too many": lambda m: m.generate(TOKENS, 10**12),
    "generate seed": lambda m: m.generate(TOKENS, 3, seed=-1),
    "no q": lambda m: shaped_attention(None, Q, Q, PLAIN),
    "q of 3 dimensions": lambda m: shaped_attention(Q[0], Q, Q, PLAIN),
    "k of 1 dimension": lambda m: shaped_attention(Q, Q[0, 0, 0], Q, PLAIN),
    "q of NumPy": lambda m: shaped_attention(Q.numpy(), Q, Q, PLAIN),
    "q of whole numbers": lambda m: shaped_attention(Q.long(), Q.long(), Q.long(), PLAIN),
    "no shape": lambda m: shaped_attention(Q, Q, Q, None),
    "a shape by name": lambda m: shaped_attention(Q, Q, Q, "plain"),
    "gain NaN": lambda m: shaped_attention(Q, Q, Q, PLAIN, bias_gain=NAN),
    "gain by head NaN": lambda m: shaped_attention(Q, Q, Q, PLAIN, bias_gain=torch.tensor([1.0, NAN])),
    "gain text": lambda m: shaped_attention(Q, Q, Q, PLAIN, bias_gain="x"),
    "score bias −∞": lambda m: shaped_attention(Q, Q, Q, PLAIN, score_bias=torch.full((8, 8), -INF)),
    "score bias −∞ in a row": lambda m: shaped_attention(Q, Q, Q, PLAIN, score_bias=ROW),
    "score bias NaN": lambda m: shaped_attention(Q, Q, Q, PLAIN, score_bias=torch.full((8, 8), NAN)),
    "score bias text": lambda m: shaped_attention(Q, Q, Q, PLAIN, score_bias="x"),
    "no such code": lambda m: shaped_attention(Q, Q, Q, PLAIN, impl="x"),
    "a model of nothing": lambda m: Transformer(None),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_that_cannot_be_is_refused(model: Transformer, call: str) -> None:
    with pytest.raises(ValueError, match=r"\S+ .*"):
        CALLS[call](model)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("use", [fold, lambda model: model.generate(TOKENS, 3)], ids=["fold", "generate"])
def test_weights_that_are_not_finite_do_not_pass_in_silence(model: Transformer, bad: float, use) -> None:
    weight = model.blocks[1].attention.inner.value.weight.data
    before = weight[0, 0].item()
    weight[0, 0] = bad
    try:
        with pytest.raises(ValueError, match="NaN or ∞"):
            use(model)
    finally:
        weight[0, 0] = before

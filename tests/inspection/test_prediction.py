"""Theory on a device against theory itself, for every kind of layer."""

import math

import numpy as np
import pytest
import torch

from skipless.inspection.prediction import predict
from skipless.model import kernel_maps
from skipless.model.config import ModelConfig
from skipless.theory import kernels, propagation
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit

USUAL = Skip(1.0, 1.0)
NETWORKS = {
    "e-spa": {"scheme": ExponentialSPA(repeat_rate=0.05)},
    "u-spa": {"scheme": UniformSPA(0.5, repeat_rate=0.05), "norm": "post"},
    "v-skipinit": {"scheme": ValueSkipInit(), "activation": "dks-tanh"},
    "skips": {"scheme": ExponentialSPA(0.9, calibration="exact"), "attention_skip": Skip.normalised(0.98)},
    "pre-ln": {
        "scheme": StandardAttention(),
        "attention_skip": USUAL,
        "mlp_skip": USUAL,
        "norm": "pre",
        "activation": "gelu",
    },
    "growing": {  # norms reach 4⁶; ten times that, and rounding is what the two would differ by
        "scheme": StandardAttention(),
        "attention_skip": USUAL,
        "mlp_skip": USUAL,
        "activation": "gelu",
        "depth": 6,
    },
    "alibi": {"scheme": StandardAttention(alibi_heads=4), "activation": "relu"},
    "attention-only": {"hidden": 0},
    "identity values beside a skip": {
        "scheme": StandardAttention(alibi_heads=4),
        "value_output": "identity",
        "attention_skip": USUAL,
        "mlp_skip": USUAL,
        "norm": "pre",
    },
    "encoder": {"scheme": ExponentialSPA(0.1), "causal": False, "head": "token", "classes": 2},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_it_equals_the_propagation_of_theory(name):
    config = ModelConfig(**{"vocab_size": 64, "width": 32, "depth": 12, "heads": 4, "length": 24, **NETWORKS[name]})
    x = np.random.default_rng(0).normal(size=(24, 32))
    start = kernels.of_activations(x)
    layers = kernel_maps.kernel_blocks(config)
    states = propagation.forward(layers, start)
    gains = propagation.backward(layers, states)
    found = predict(layers, torch.from_numpy(start))
    assert len(found) == config.depth + 1
    for each, state, gain in zip(found, states, gains, strict=True):
        assert each["norm"] == pytest.approx(np.diagonal(state).mean(), rel=1e-9)
        assert each["cosine"] == pytest.approx(kernels.mean_cosine(state), abs=1e-9)
        assert each["gradient"] == pytest.approx(gain.mean(), rel=1e-8)


def test_it_stops_where_norms_overflow():
    config = ModelConfig(vocab_size=64, width=32, depth=12, heads=4, hidden=0, attention_skip=Skip(0.0, 1.0))
    layers = [propagation.Residual(layer, Skip(0.0, 1e100)) for layer in kernel_maps.kernel_blocks(config)]
    found = predict(layers, torch.eye(8, dtype=torch.float64))
    assert len(found) == 2
    assert math.isnan(found[0]["gradient"])

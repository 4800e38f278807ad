import pytest
import torch

from skipless.hf.modeling import SkiplessForCausalLM
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit

CASES = {
    "e-spa": {},
    "u-spa-relative": {"scheme": UniformSPA(repeat_rate=0.01), "position": "relative", "norm": "pre"},
    "v-skipinit": {"scheme": ValueSkipInit(), "position": "none"},
    "skipinit": {
        "scheme": StandardAttention(alibi_heads=4),
        "position": "none",
        "attention_skip": Skip(1.0, 0.0, trainable=True),
        "mlp_skip": Skip(1.0, 0.0, trainable=True),
        "norm": "pre",
    },
    "mirrored": {"mlp_init": "mirrored"},
    "identity-values": {"mlp_init": "mirrored", "value_output": "identity"},
    "readers": {
        "mlp_init": "mirrored",
        "value_output": "identity",
        "bias_gain": True,
        "readers": 2,
        "kv_heads": 4,
    },
    "by-head": {
        "mlp_init": "mirrored",
        "value_output": "identity",
        "bias_gain": True,
        "scheme": ExponentialSPA((0.5, 0.05, 0.05, 0.01), 0.01),
    },
    "untied": {"tied_head": False},
    "bias-gain": {"bias_gain": True, "scheme": ExponentialSPA(gamma_final=0.1, repeat_rate=0.01)},
}


def build(name: str = "e-spa", **changes) -> Transformer:
    """A small model away from its initialisation."""
    torch.manual_seed(0)
    fields = {"vocab_size": 60, "width": 32, "depth": 4, "heads": 4, "kv_heads": 2, "length": 16, "activation": "gelu"}
    model = Transformer(ModelConfig(**{**fields, **CASES[name], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(params=CASES)
def any_native(request) -> Transformer:
    return build(request.param)


@pytest.fixture
def native() -> Transformer:
    return build()


@pytest.fixture
def wrapped(native) -> SkiplessForCausalLM:
    return SkiplessForCausalLM.from_native(native)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(1))

import pytest
import torch
from torch._dynamo.utils import counters

from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.theory import kernels
from skipless.training.divergence import measure


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(preset("wikitext103/e-spa", depth=6, width=32, heads=2, vocab_size=50))


def test_kernels_are_those_of_the_first_and_last_activations(model):
    tokens = torch.randint(50, (2, 20))
    states = measure(model, tokens, step=7, most=16).states
    assert states.shape == (7, 16, 16)
    with torch.no_grad():  # no final norm: the hidden state is the last block's output
        ends = model.embed(tokens[:1, :16])[0], model.hidden(tokens[:1, :16])[0]
    for state, x in zip(states[[0, -1]], ends, strict=True):
        assert state == pytest.approx(kernels.of_activations(x.numpy()), rel=1e-5, abs=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_network_is_probed_without_compiling(model):
    tokens = torch.randint(50, (1, 16))
    expected = measure(model, tokens, step=0).states
    counters.clear()
    assert measure(model.compile_blocks(), tokens, step=0).states == pytest.approx(expected, abs=0)
    assert not counters["stats"]
    assert not counters["frames"]

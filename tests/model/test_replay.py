"""Decoding by a replayed step gives the tokens of decoding step by step."""

from collections.abc import Callable

import pytest
import torch

from skipless.model import generate as generating
from skipless.model.config import ModelConfig
from skipless.model.fold import fold
from skipless.model.generate import KVCache, ReplayedStep, Sampling, decode, generate
from skipless.model.transformer import Transformer
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit

KINDS: dict[str, dict] = {
    "e-spa": {"scheme": ExponentialSPA(0.1, 0.01)},
    "u-spa": {"scheme": UniformSPA(0.8, 0.01), "kv_heads": 2},
    "v-skipinit": {"scheme": ValueSkipInit(), "position": "none"},
    "identity-values": {"mlp_init": "mirrored", "value_output": "identity", "kv_heads": 2},
    "pre-ln": {"scheme": StandardAttention(), "norm": "pre", "attention_skip": Skip(1.0), "mlp_skip": Skip(1.0)},
}


class Rerun:
    """Stands in for CUDA: a replay runs the function again. Capturing runs nothing, as there."""

    def warm_up(self, function: Callable[[], object]) -> None:
        function()

    def capture(self, function):
        return function


def build(kind: str, **changes) -> Transformer:
    torch.manual_seed(0)
    fields = {"vocab_size": 50, "width": 64, "depth": 4, "heads": 4, "length": 16, "activation": "gelu"}
    model = Transformer(ModelConfig(**fields | KINDS[kind] | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def replayed(monkeypatch):
    """generate() as on a GPU."""
    monkeypatch.setattr(generating, "replays", lambda *_: True)
    monkeypatch.setattr(generating, "ReplayedStep", lambda model, cache: ReplayedStep(model, cache, Rerun()))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_decoding_step_by_step(kind, prompt, request):
    model = build(kind).double()
    mask = torch.ones_like(prompt)
    mask[0, :4] = mask[2, :1] = 0
    options = [{}, {"attention_mask": mask}, {"sampling": Sampling(top_k=5), "seed": 3}, {"stop": (7, 11)}]
    want = [generate(model, prompt, 25, **each) for each in options]
    request.getfixturevalue("replayed")
    assert all(
        torch.equal(generate(model, prompt, 25, **each), tokens) for each, tokens in zip(options, want, strict=True)
    )


def test_a_folded_model_too(prompt, request):
    model = fold(build("e-spa").double())
    want = generate(model, prompt, 12)
    request.getfixturevalue("replayed")
    assert torch.equal(generate(model, prompt, 12), want)


@pytest.mark.parametrize("capacity", [8, 10])
def test_recording_leaves_no_trace_and_the_last_slot_is_the_end(prompt, capacity):
    model = build("e-spa").double()
    caches = [KVCache(4, capacity) for _ in range(2)]
    for cache in caches:
        decode(model, prompt, cache)
    step = ReplayedStep(model, caches[0], Rerun())
    for token in range(capacity - 7):
        tokens = torch.full((3,), token)
        torch.testing.assert_close(step(tokens), decode(model, tokens[:, None], caches[1])[:, -1])
    with pytest.raises(
        ValueError, match=f"all {capacity} slots of the cache are filled; give KVCache a larger capacity"
    ):
        step(tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_graph_gives_the_same_logits(kind, prompt):
    model, prompt = build(kind).cuda(), prompt.cuda()
    caches = [KVCache(4, capacity=40) for _ in range(2)]
    for cache in caches:
        decode(model, prompt, cache)
    step = ReplayedStep(model, caches[0])
    for token in range(20):
        tokens = torch.full((3,), token, device="cuda")
        got, want = step(tokens).clone(), decode(model, tokens[:, None], caches[1])[:, -1]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert generate(model, prompt, 30).shape == (3, 37)

"""On a GPU: the same numbers as on a processor, attention included, and no more than a fifth more memory."""

import pytest
import torch
from torch import nn

from skipless.inspection.inspect import inspect
from skipless.inspection.load import build_family
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
USUAL = {"attention_skip": Skip(1.0, 1.0), "mlp_skip": Skip(1.0, 1.0), "norm": "pre", "activation": "gelu"}
SCHEMES = {"e-spa": {"scheme": ExponentialSPA(repeat_rate=0.05)}, "pre-ln": {"scheme": StandardAttention(), **USUAL}}


def network(name: str, impl: str = "auto", **sizes) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "width": 64, "depth": 12, "heads": 2, "length": 64, **sizes}
    model = Transformer(ModelConfig(**sizes, **SCHEMES[name]), impl=impl)
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("impl", ["auto", "flex", "triton", "sdpa", "reference"])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_equals_the_processor(name, impl, compiled):
    ids = torch.randint(0, 64, (3, 64))
    expected = inspect(network(name, "reference"), ids, labels=ids)
    model = network(name, impl).cuda()
    model = model.compile_blocks() if compiled else model
    found = inspect(model, ids.cuda(), labels=ids.cuda())
    for one, two in zip(found.blocks, expected.blocks, strict=True):
        assert one.norm_mean == pytest.approx(two.norm_mean, rel=1e-3)
        assert one.cosine_mean == pytest.approx(two.cosine_mean, abs=1e-3)
        assert one.effective_rank == pytest.approx(two.effective_rank, rel=1e-2)
        assert one.gradient_mean == pytest.approx(two.gradient_mean, rel=2e-2)
        assert one.predicted == pytest.approx(two.predicted, rel=1e-3)
    for one, two in zip(found.blocks[1:], expected.blocks[1:], strict=True):
        assert one.attention_entropy == pytest.approx(two.attention_entropy, rel=1e-3)
        assert one.attention_first == pytest.approx(two.attention_first, rel=1e-2)
        assert one.parameter_gradients == pytest.approx(two.parameter_gradients, rel=2e-2)


def test_a_model_and_a_batch_on_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"batch is on cpu and the model on cuda:0; move one: batch\.to\('cuda:0'\)"):
        inspect(network("e-spa").cuda(), torch.randint(0, 64, (2, 8)))


@pytest.mark.parametrize("arm", ["e-spa", "gpt2"])
def test_peak_memory_is_at_most_a_fifth_more(arm):
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512}
    build = (
        (lambda: build_family("gpt2", **sizes))
        if arm == "gpt2"
        else lambda: network("e-spa", width=256, vocab_size=512)
    )
    model, ids = build().cuda(), torch.randint(0, 512, (8, 256), device="cuda")

    def once() -> None:
        out = model(ids)
        logits = getattr(out, "logits", out)
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        model.zero_grad(set_to_none=True)

    def peak(work) -> int:
        work()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated()

    assert peak(lambda: inspect(model, ids, labels=ids)) <= 1.2 * peak(once)

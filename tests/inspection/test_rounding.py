"""What rounding does to a signal by depth, against the same network run twice by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from skipless.inspection.ablation import rounding
from skipless.model.presets import preset
from skipless.model.quantise import quantised
from skipless.model.transformer import Transformer

TOKENS = torch.randint(300, (2, 48), generator=torch.Generator().manual_seed(0))


def network(name: str, depth: int = 24, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(preset(f"wikitext103/{name}", width=64, heads=2, depth=depth, vocab_size=300, length=48))


def test_the_last_number_is_that_of_the_hidden_state():
    model = network("e-spa", depth=6)
    with torch.no_grad():
        exact = model.hidden(TOKENS).double()
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model.hidden(TOKENS).double()
    expected = (rounded - exact).norm() / (exact - exact.mean(1, keepdim=True)).norm()
    found = rounding(model, TOKENS)
    assert len(found) == 6
    assert found[-1] == pytest.approx(float(expected), rel=1e-9)


def test_without_skips_it_grows_with_depth_and_skips_hold_it_down():
    """In the mean over networks: without skips one draw's error is up to three times another's."""
    draws = range(4)
    e_spa, pre_ln = (
        np.mean([rounding(network(name, seed=s), TOKENS) for s in draws], 0) for name in ("e-spa", "pre-ln")
    )
    assert e_spa[-1] > 2 * e_spa[3] > 0
    assert e_spa[-1] > 3 * pre_ln[-1]


def test_float16_rounds_several_times_less():
    model = network("e-spa")
    assert rounding(model, TOKENS, "fp16")[-1] < rounding(model, TOKENS)[-1] / 4


def test_the_model_is_left_as_it_was():
    model = network("e-spa", depth=6).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rounding(model, TOKENS)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(block._forward_hooks for block in model.blocks)


def test_models_of_others_and_named_blocks():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 300}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **sizes))
    assert all(0 < each < 0.05 for each in rounding(llama, TOKENS))
    assert len(rounding(network("e-spa", depth=6), TOKENS, blocks=["blocks.1"])) == 1


def encoder(batch_first: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def test_layouts_do_not_matter():
    """Rows whose means differ: taken over anything but a row's locations, the share comes out far smaller."""
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0)) + torch.tensor([3.0, -3.0])[:, None, None]
    expected = rounding(encoder(True), x)
    assert rounding(encoder(False), x.transpose(0, 1)) == pytest.approx(expected, rel=0.05)
    assert rounding(encoder(True), x[0]) == pytest.approx(rounding(encoder(True), x[:1]), rel=0.05)


def test_padding_is_left_out():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 300}
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, pad_token_id=0, **sizes))
    ids, mask = TOKENS[:1].clone(), torch.ones(1, 48, dtype=torch.long)
    ids[:, 12:], mask[:, 12:] = 0, 0
    padded = rounding(llama, {"input_ids": ids, "attention_mask": mask})
    assert padded == pytest.approx(rounding(llama, ids[:, :12]), rel=0.02)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="use one of bf16, fp16, int8"):
        rounding(network("e-spa", depth=6), TOKENS, "fp32")
    with pytest.raises(ValueError, match="token ids run from"):
        rounding(network("e-spa", depth=6), TOKENS + 1000)
    with pytest.raises(ValueError, match="attention"):
        rounding(nn.Sequential(nn.Linear(2, 2)), TOKENS)


def test_few_bits_are_rounded_by_block_too():
    model = network("e-spa", depth=6)
    bf16, fp8, int8 = (rounding(model, TOKENS, way)[-1] for way in ("bf16", "fp8", "int8"))
    assert 0 < bf16 < int8 < fp8
    with torch.no_grad():
        exact = model.hidden(TOKENS)
        with quantised(model.blocks, "int8"):
            rounded = model.hidden(TOKENS)
    expected = (rounded - exact).norm() / (exact - exact.mean(1, keepdim=True)).norm()
    assert int8 == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match="precision is 'int9'; use one of bf16, fp16, int8"):
        rounding(model, TOKENS, "int9")

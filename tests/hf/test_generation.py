import itertools

import pytest
import torch

from skipless.hf.modeling import SkiplessForCausalLM
from skipless.model.config import ModelConfig
from skipless.model.generate import KVCache, decode, generate
from skipless.model.transformer import Transformer


@torch.no_grad()
def test_greedy_generate_equals_native_decoding_step_by_step(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native).double()
    out = wrapped.generate(tokens, max_new_tokens=12, do_sample=False)
    cache, steps = KVCache(len(any_native.blocks)), tokens
    for _ in range(12):
        logits = decode(any_native, steps[:, cache.length :], cache)
        steps = torch.cat([steps, logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(out, steps)
    assert torch.equal(out, generate(any_native, tokens, 12))
    assert torch.equal(out, wrapped.generate(tokens, max_new_tokens=12, do_sample=False, use_cache=False))


def test_left_padded_prompts(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native).double()
    mask = torch.ones_like(tokens)
    mask[0, :5] = mask[2, :17] = 0
    out = wrapped.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(out, generate(any_native, tokens, 8, attention_mask=mask))


def test_sampling_repeats_under_a_seed(wrapped, tokens):
    torch.manual_seed(1)
    first = wrapped.generate(tokens, max_new_tokens=6, do_sample=True, top_k=20, top_p=0.9, temperature=0.7)
    torch.manual_seed(1)
    second = wrapped.generate(tokens, max_new_tokens=6, do_sample=True, top_k=20, top_p=0.9, temperature=0.7)
    assert torch.equal(first, second)


@torch.no_grad()
@pytest.mark.parametrize("position", ["rope", "relative"])
def test_a_beam_as_wide_as_the_tree_finds_the_likeliest_continuation(position):
    torch.manual_seed(0)
    native = Transformer(
        ModelConfig(vocab_size=5, width=16, depth=3, heads=2, length=8, activation="gelu", position=position)
    ).double()
    for parameter in native.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    prompt = torch.tensor([[1, 3, 0, 2]])
    tree = torch.tensor(list(itertools.product(range(5), repeat=3)))
    whole = torch.cat([prompt.expand(125, -1), tree], dim=1)
    scores = native(whole).log_softmax(dim=-1)[:, 3:6].gather(-1, tree[..., None]).sum(dim=(1, 2))
    wrapped = SkiplessForCausalLM.from_native(native)
    out = wrapped.generate(
        prompt, max_new_tokens=3, num_beams=25, num_return_sequences=4, do_sample=False, length_penalty=0.0
    )
    assert torch.equal(out[:, 4:], tree[scores.topk(4).indices])


def test_beams_from_a_padded_batch_equal_each_prompt_alone(wrapped, tokens):
    wrapped.double()
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    together = wrapped.generate(tokens[:2], attention_mask=mask[:2], **options)
    assert torch.equal(together[0, 20:], wrapped.generate(tokens[:1, 7:], **options)[0, 13:])
    assert torch.equal(together[1:], wrapped.generate(tokens[1:2], **options))

import inspect

import pytest
import torch
from tests.hf.conftest import build
from transformers import DynamicCache, MistralConfig, StaticCache

from skipless.hf.configuration import SkiplessConfig
from skipless.hf.modeling import (
    SkiplessForCausalLM,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
    SkiplessModel,
)
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout
from skipless.theory.schemes import ValueSkipInit


@torch.no_grad()
def test_logits_equal_the_native_ones_bit_for_bit(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native)
    assert wrapped.dtype == torch.float32
    assert torch.equal(wrapped(tokens).logits, any_native(tokens))
    assert torch.equal(wrapped(tokens, attention_mask=torch.ones_like(tokens)).logits, any_native(tokens))


def test_the_wrapper_shares_the_native_parameters(wrapped, native):
    assert wrapped.model is native
    assert wrapped.lm_head.weight is native.embedding.weight
    assert {p.data_ptr() for p in wrapped.parameters()} == {p.data_ptr() for p in native.parameters()}


def test_building_from_a_config_initialises_as_the_native_model_does(native):
    torch.manual_seed(3)
    fresh = SkiplessForCausalLM(SkiplessConfig.from_native(native.config))
    torch.manual_seed(3)
    for name, value in Transformer(native.config).state_dict().items():
        assert torch.equal(value, fresh.model.state_dict()[name]), name


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_equals_the_native_layout_and_each_row_alone(any_native, tokens, side):
    wrapped = SkiplessForCausalLM.from_native(any_native)
    mask = torch.ones_like(tokens)
    gaps = (slice(0, 5), slice(0, 11)) if side == "left" else (slice(15, None), slice(9, None))
    mask[0, gaps[0]] = mask[2, gaps[1]] = 0
    logits = wrapped(tokens, attention_mask=mask).logits
    assert torch.equal(logits, any_native(tokens, layout=Layout.left_padded(mask)))
    for row in range(3):
        real = mask[row] == 1
        torch.testing.assert_close(logits[row, real], any_native(tokens[row : row + 1, real])[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_cache_continues_with_and_without_padding(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native).double()
    for mask in (None, torch.ones_like(tokens)):
        if mask is not None:
            mask[1, :6] = 0
        whole = wrapped(tokens, attention_mask=mask, use_cache=False)
        cache = wrapped(tokens[:, :8], attention_mask=None if mask is None else mask[:, :8]).past_key_values
        parts = []
        for end in (9, 15, 20):
            part = None if mask is None else mask[:, :end]
            start = cache.get_seq_length()
            parts.append(wrapped(tokens[:, start:end], attention_mask=part, past_key_values=cache).logits)
        assert whole.past_key_values is None
        torch.testing.assert_close(torch.cat(parts, 1), whole.logits[:, 8:], rtol=0, atol=1e-10)


def test_the_loss_is_next_token_cross_entropy(wrapped, tokens):
    labels = tokens.clone()
    labels[0, :5] = -100
    loss = wrapped(tokens, labels=labels).loss
    logits = wrapped.model(tokens)[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)


def test_gradient_checkpointing_gives_equal_gradients(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native).double().train()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    wrapped(tokens, attention_mask=mask, labels=tokens).loss.backward()
    plain = {name: p.grad.clone() for name, p in wrapped.named_parameters()}
    wrapped.zero_grad()
    wrapped.gradient_checkpointing_enable()
    calls = []
    handle = wrapped.model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    wrapped(tokens, attention_mask=mask, labels=tokens).loss.backward()
    handle.remove()
    assert len(calls) == 2
    for name, p in wrapped.named_parameters():
        assert torch.equal(p.grad, plain[name]), name
    with pytest.raises(ValueError, match="one or the other"):
        wrapped(tokens, past_key_values=DynamicCache())
    wrapped.gradient_checkpointing_disable()
    wrapped(tokens)
    assert wrapped.model.recompute is None


@torch.no_grad()
def test_hidden_states_run_from_the_embedding_to_the_final_norm(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native)
    states = wrapped(tokens, output_hidden_states=True).hidden_states
    assert len(states) == any_native.config.depth + 1
    assert torch.equal(states[0], any_native.embed(tokens))
    assert torch.equal(states[-1], any_native.hidden(tokens))
    assert wrapped(tokens).hidden_states is None
    assert torch.equal(wrapped(tokens, return_dict=False)[0], any_native(tokens))


@torch.no_grad()
def test_logits_to_keep(wrapped, tokens):
    full = wrapped(tokens).logits
    torch.testing.assert_close(wrapped(tokens, logits_to_keep=2).logits, full[:, -2:])
    torch.testing.assert_close(wrapped(tokens, logits_to_keep=torch.tensor([3, 5])).logits, full[:, [3, 5]])


@torch.no_grad()
def test_embedded_tokens_equal_tokens(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native)
    rows = wrapped.get_input_embeddings()(tokens)
    assert torch.equal(any_native(inputs_embeds=rows), any_native(tokens))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = wrapped(tokens, attention_mask=mask).logits
    assert torch.equal(wrapped(inputs_embeds=rows, attention_mask=mask).logits, expected)
    assert torch.equal(
        wrapped.generate(inputs_embeds=rows, max_new_tokens=4), wrapped.generate(tokens, max_new_tokens=4)[:, 20:]
    )


@torch.no_grad()
def test_attentions_are_the_softmax_rows_that_act(any_native, tokens):
    """Heads of the last token's attention, mixed by hand, equal the module's output; a cache changes nothing."""
    wrapped = SkiplessForCausalLM.from_native(any_native).double()
    whole = wrapped(tokens, output_attentions=True).attentions
    assert [weights.shape for weights in whole] == [(3, 4 + any_native.config.readers, 20, 20)] * 4
    torch.testing.assert_close(whole[1].sum(-1), torch.ones_like(whole[1].sum(-1)))
    taken = []
    attention = any_native.blocks[1].layers()[0]
    hook = attention.register_forward_hook(lambda _, inputs, out: taken.append((inputs[0], inputs[1], out)))
    first = wrapped(tokens[:, :15])
    rest = wrapped(tokens[:, 15:], past_key_values=first.past_key_values, output_attentions=True).attentions
    torch.testing.assert_close(rest[1], whole[1][:, :, 15:])
    wrapped(tokens)
    hook.remove()
    x, positions, out = taken[-1]
    inputs = attention.inputs(x, positions)
    here = torch.arange(20)
    mixed = inputs.bias.between(here, here)[1] * (whole[1] @ inputs.v.repeat_interleave(inputs.groups, dim=1))
    torch.testing.assert_close(attention.finish(mixed, inputs.v, mixed.dtype), out)


@torch.no_grad()
def test_a_dense_mask_means_what_its_layout_does(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native)
    mask = torch.ones_like(tokens)
    mask[0, :6] = mask[2, 15:] = 0
    seen = Layout.left_padded(mask).visible(causal=True)[:, None]
    expected = wrapped(tokens, attention_mask=mask).logits
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for dense in (seen, added, seen.long()):
        assert torch.equal(wrapped(tokens, attention_mask=dense).logits, expected)
    documents = torch.tensor([[0] * 7 + [1] * 13]).expand(3, -1)
    packed = Layout.packed(documents)
    expected = any_native(tokens, layout=packed)
    seen_packed = packed.visible(causal=True)[:, None].expand(3, -1, -1, -1)
    assert torch.equal(wrapped(tokens, attention_mask=seen_packed).logits, expected)
    cache = wrapped(tokens[:, :12], attention_mask=mask[:, :12]).past_key_values
    rest = wrapped(tokens[:, 12:], attention_mask=seen[:, :, 12:], past_key_values=cache).logits
    torch.testing.assert_close(rest[:2], wrapped(tokens, attention_mask=mask).logits[:2, 12:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_position_ids_that_start_again_pack_documents(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native)
    documents = torch.tensor([[0] * 7 + [1] * 13, [0] * 20, [0, 1, 2, 2] + [3] * 16])
    packed = Layout.packed(documents)
    logits = wrapped(tokens, position_ids=packed.query_locations).logits
    assert torch.equal(logits, any_native(tokens, layout=packed))
    torch.testing.assert_close(logits[0, 7:], any_native(tokens[:1, 7:])[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_of_a_fixed_size_equals_one_that_grows(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native).double()
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    caches = [StaticCache(config=wrapped.config, max_cache_len=32), DynamicCache()]
    for start, end in ((0, 12), (12, 13), (13, 20)):
        part = {"attention_mask": mask[:, :end]}
        outputs = [wrapped(tokens[:, start:end], past_key_values=cache, **part).logits for cache in caches]
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)


def test_position_ids_must_be_those_of_mask_and_cache(wrapped, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    right = (mask.cumsum(1) - 1).clamp(min=1)
    right[1:] = torch.arange(20)
    right[0, 4] = 0
    with torch.no_grad():
        expected = wrapped(tokens, attention_mask=mask).logits
        assert torch.equal(wrapped(tokens, attention_mask=mask, position_ids=right).logits, expected)
        wrapped(tokens, position_ids=torch.arange(20)[None])
        wrong = torch.arange(20).repeat(3, 1)
        wrong[1, 2] = 9
        with pytest.raises(ValueError, match=r"position_ids\[1, 2\] is 9"):
            wrapped(tokens, position_ids=wrong)
        with pytest.raises(ValueError, match="stands at 0"):
            wrapped(tokens, attention_mask=mask, position_ids=torch.arange(20)[None])


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_that_forgets_is_refused(wrapped, tokens, kind):
    window = MistralConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)
    cache = kind(config=window, **({"max_cache_len": 40} if kind is StaticCache else {}))
    with pytest.raises(ValueError, match=f"this {kind.__name__} keeps a sliding window"):
        wrapped.generate(tokens, past_key_values=cache, max_new_tokens=3)


def test_what_cannot_be_honoured_is_refused(wrapped, tokens):
    with pytest.raises(ValueError, match=r"must be \(3, 20\)"):
        wrapped(tokens, attention_mask=torch.ones(3, 19))
    padding = torch.arange(20).expand(3, 20) < 4
    for mask, seen in ((torch.where(padding, 0.0, -1e9), "-1e\\+09"), (1 + padding.long(), "2")):
        with pytest.raises(ValueError, match=f"attention_mask holds {seen}; it must be 1 where there is a token"):
            wrapped(tokens, attention_mask=mask)
    with pytest.raises(ValueError, match=r"input_ids are shaped \(20,\); .* input_ids\[None\] for one row"):
        wrapped(tokens[0])
    with pytest.raises(ValueError, match="not causal attention within documents"):
        wrapped(tokens, attention_mask=torch.ones(3, 1, 20, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must be \(batch, 1, 20, 20\)"):
        wrapped(tokens, attention_mask=torch.ones(3, 1, 20, 19, dtype=torch.bool))
    with pytest.raises(ValueError, match="one of the two"):
        wrapped(tokens, inputs_embeds=torch.zeros(3, 20, 32))
    with pytest.raises(ValueError, match=r"must be \(batch, T, 32\)"):
        wrapped(inputs_embeds=torch.zeros(3, 20, 31))
    with pytest.raises(NotImplementedError, match="padded on the left"):
        wrapped.generate_batch([[1, 2]])
    settings = wrapped.config.to_dict()
    with pytest.raises(ValueError, match="head='lm'"):
        SkiplessForCausalLM(SkiplessConfig(**{**settings, "head": "token", "classes": 3}))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        SkiplessForCausalLM(SkiplessConfig(**{**settings, "tie_word_embeddings": False}))


@torch.no_grad()
def test_resized_embeddings_stay_tied_and_keep_old_rows(wrapped, tokens):
    before = wrapped(tokens).logits
    wrapped.resize_token_embeddings(70, mean_resizing=False)
    assert wrapped.lm_head.weight is wrapped.model.embedding.weight
    assert wrapped.config.vocab_size == wrapped.model.config.vocab_size == 70
    after = wrapped(tokens).logits
    torch.testing.assert_close(after[..., :60], before)
    assert torch.equal(after, wrapped.model(tokens))
    assert 0.5 < wrapped.lm_head.weight[60:].std() * 32**0.5 < 1.5


@torch.no_grad()
def test_an_unembedding_of_its_own_is_resized_too(tokens):
    wrapped = SkiplessForCausalLM.from_native(build(tied_head=False))
    wrapped.resize_token_embeddings(70, mean_resizing=False)
    assert wrapped.lm_head.weight is wrapped.model.head.weight
    assert wrapped(tokens).logits.shape == wrapped.model(tokens).shape == (3, 20, 70)
    wrapped.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match="tie_word_embeddings is True and tied_head False"):
        SkiplessForCausalLM(wrapped.config)


def test_the_bare_model_gives_hidden_states(any_native, tokens):
    wrapped = SkiplessModel.from_native(any_native)
    assert torch.equal(wrapped(tokens).last_hidden_state, any_native.hidden(tokens))
    assert torch.equal(wrapped(inputs_embeds=any_native.embedding(tokens)).last_hidden_state, any_native.hidden(tokens))


@pytest.mark.parametrize("kind", [SkiplessModel, SkiplessForSequenceClassification, SkiplessForTokenClassification])
def test_tools_find_arguments_in_the_signature(kind):
    """Trainer drops columns of the data that are not there."""
    names = inspect.signature(kind.forward).parameters
    assert {"input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache"} < set(names)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
def test_classifiers_are_the_native_heads(tokens, causal):
    mask, settings = torch.ones_like(tokens), {"classes": 5, "causal": causal, "scheme": ValueSkipInit()}
    mask[0, :4] = 0
    layout = Layout.left_padded(mask)
    texts = SkiplessForSequenceClassification.from_native(build(head="pooled", **settings))
    out = texts(tokens, attention_mask=mask, labels=torch.tensor([0, 4, 2]))
    assert torch.equal(out.logits, texts.model(tokens, layout=layout))
    torch.testing.assert_close(out.loss, texts.model(tokens, torch.tensor([0, 4, 2]), layout=layout))
    words = SkiplessForTokenClassification.from_native(build(head="token", **settings))
    labels = (tokens % 5).masked_fill(mask == 0, -100)
    out = words(tokens, attention_mask=mask, labels=labels)
    assert torch.equal(out.logits, words.model(tokens, layout=layout))
    torch.testing.assert_close(out.loss, words.model(tokens, labels, layout=layout))
    assert texts.config.num_labels == words.config.num_labels == 5
    with pytest.raises(ValueError, match="head='token'"):
        SkiplessForTokenClassification.from_native(texts.model)

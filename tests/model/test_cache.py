from itertools import pairwise

import pytest
import torch

from skipless.model.config import ModelConfig
from skipless.model.generate import BlockCache, KVCache, decode
from skipless.model.transformer import Transformer
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, Scheme, StandardAttention, UniformSPA, ValueSkipInit

TOLERANCE = 1e-10
SCHEMES = {
    "e-spa": ExponentialSPA(repeat_rate=0.01),
    "u-spa": UniformSPA(repeat_rate=0.01),
    "u-spa-mlp-aware": UniformSPA(repeat_rate=0.01, calibration="mlp-aware"),
    "v-skipinit": ValueSkipInit(per_head=True),
    "standard": StandardAttention(),
    "alibi": StandardAttention(alibi_heads=4),
}


def trained(scheme: str | Scheme = "e-spa", **changes) -> Transformer:
    """A float64 model away from its initialisation, so that queries, gains and biases all matter."""
    torch.manual_seed(0)
    chosen = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    fields = {"vocab_size": 50, "width": 32, "depth": 4, "heads": 4, "kv_heads": 2, "length": 16, "activation": "gelu"}
    model = Transformer(ModelConfig(**{**fields, "scheme": chosen, **changes})).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tokens_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def in_chunks(model: Transformer, tokens: torch.Tensor, sizes: list[int], mask=None) -> torch.Tensor:
    cache = KVCache(len(model.blocks))
    masks = [None] * len(sizes) if mask is None else mask.split(sizes, dim=1)
    chunks = tokens.split(sizes, dim=1)
    return torch.cat([decode(model, t, cache, attention_mask=m) for t, m in zip(chunks, masks, strict=True)], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 28, [7, 1, 9, 11]], ids=["steps", "chunks"])
@pytest.mark.parametrize("position", ["rope", "relative", "none"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cached_logits_equal_the_full_forward_at_every_position_beyond_the_training_length(scheme, position, sizes):
    model, tokens = trained(scheme, position=position), tokens_of(2, 28)
    assert tokens.shape[1] > model.config.length
    torch.testing.assert_close(in_chunks(model, tokens, sizes), model(tokens), rtol=0, atol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"scheme": StandardAttention(), "attention_skip": Skip(1, 1), "mlp_skip": Skip(1, 1), "norm": "pre"},
        {"norm": "post"},
        {"bias_gain": True},
        {"hidden": 0},
        {"scheme": ExponentialSPA(repeat_rate=0.01, calibration="exact"), "length": 40},
        {"scheme": ExponentialSPA(0.2, 0.01, calibration="mlp-aware"), "length": 40, "activation": "tanh"},
    ],
    ids=["pre-ln", "post-norm", "bias-gain", "attention-only", "exact-calibration", "table"],
)
def test_cached_logits_equal_the_full_forward_in_other_networks(changes):
    model, tokens = trained(**changes), tokens_of(1, 40)
    torch.testing.assert_close(in_chunks(model, tokens, [5] + [1] * 35), model(tokens), rtol=0, atol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["e-spa", "u-spa", "v-skipinit", "alibi"])
@pytest.mark.parametrize("position", ["rope", "relative"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_values_without_a_matrix_are_cached_as_they_come(scheme, position, kv_heads):
    """With padding too: what is kept of a token is the stream itself, and its keys, which grouped queries share."""
    model = trained(scheme, position=position, kv_heads=kv_heads, value_output="identity", mlp_init="mirrored")
    tokens, mask = tokens_of(2, 28), torch.ones(2, 28, dtype=torch.long)
    torch.testing.assert_close(in_chunks(model, tokens, [7, 1, 9, 11]), model(tokens), rtol=0, atol=TOLERANCE)
    mask[0, :5] = 0
    logits = in_chunks(model, tokens, [12, 1, 15], mask)
    torch.testing.assert_close(logits[:1, 5:], model(tokens[:1, 5:]), rtol=0, atol=TOLERANCE)
    cache = KVCache(4, capacity=28)
    decode(model, tokens, cache)
    assert [buffer.shape for buffer in cache[0].buffers()] == [(2, kv_heads, 28, 8), (2, 4, 28, 8)]


@torch.no_grad()
@pytest.mark.parametrize("position", ["rope", "relative", "none"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_padded_rows_equal_each_row_alone(scheme, position):
    model, tokens = trained(scheme, position=position), tokens_of(3, 24)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    mask[2, :3] = mask[2, 10:12] = mask[2, 20:] = 0
    logits = in_chunks(model, tokens, [12, 1, 1, 10], mask)
    for row in range(3):
        real = mask[row] == 1
        alone = model(tokens[row : row + 1, real])
        torch.testing.assert_close(logits[row : row + 1, real], alone, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_tokens_after_a_padded_prompt_need_no_mask():
    model, tokens = trained(), tokens_of(2, 12)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, :3] = False
    cache = KVCache(4)
    decode(model, tokens[:, :8], cache, attention_mask=mask)
    logits = torch.cat([decode(model, tokens[:, i : i + 1], cache) for i in range(8, 12)], dim=1)
    torch.testing.assert_close(logits[:1], model(tokens[:1, 3:])[:, -4:], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits[1:], model(tokens[1:])[:, -4:], rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_reordered_rows_continue_as_their_sources():
    model, tokens, rows = trained(), tokens_of(3, 10), torch.tensor([2, 0, 0, 1])
    cache = KVCache(4)
    mask = torch.ones_like(tokens)
    mask[2, :4] = 0
    decode(model, tokens, cache, attention_mask=mask)
    cache.reorder(rows)
    new = tokens_of(4, 1)
    logits = decode(model, new, cache)
    for row, source in enumerate(rows.tolist()):
        alone = torch.cat([tokens[source, mask[source] == 1], new[row]])[None]
        torch.testing.assert_close(logits[row], model(alone)[0, -1:], rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_a_truncated_cache_decodes_again_from_there():
    model, tokens = trained(), tokens_of(2, 12)
    cache = KVCache(4)
    decode(model, tokens_of(2, 20), cache)
    cache.truncate(0)
    decode(model, tokens[:, :7], cache)
    decode(model, tokens_of(2, 3), cache)
    cache.truncate(7)
    assert cache.length == 7
    torch.testing.assert_close(decode(model, tokens[:, 7:], cache), model(tokens)[:, 7:], rtol=0, atol=TOLERANCE)


def test_a_truncated_cache_forgets_the_padding_that_followed():
    model, tokens = trained(), tokens_of(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 2], mask[1, 7] = 0, 0
    cache = KVCache(len(model.blocks))
    decode(model, tokens, cache, attention_mask=mask)
    cache.truncate(6)
    again = decode(model, tokens[:, 6:], cache)
    mask[1, 7] = 1
    torch.testing.assert_close(again, in_chunks(model, tokens, [9], mask)[:, 6:], rtol=0, atol=TOLERANCE)


def test_buffers_double_and_what_is_beyond_the_tokens_is_finite():
    block, token = BlockCache(), torch.ones(1, 1, 1, 2)
    places = [block.append(token, token)[0].data_ptr() for _ in range(100)]
    assert sum(before != after for before, after in pairwise(places)) == 7
    block.append(torch.nan * token, torch.nan * token)
    block.truncate(100)
    keys, values = block.buffers()
    assert keys.shape[2] == values.shape[2] == 128
    assert torch.equal(keys, values)
    assert torch.equal(keys[0, 0, :, 0], (torch.arange(128) < 100).float())


def test_capacity_is_reserved_once_and_grouped_keys_are_stored_once_per_key_head():
    model, cache = trained(), KVCache(4, capacity=32)
    decode(model, tokens_of(2, 4), cache)
    keys, _ = cache[0].append(
        torch.zeros(2, 2, 1, 8, dtype=torch.float64), torch.zeros(2, 2, 1, 8, dtype=torch.float64)
    )
    assert keys.shape == (2, 2, 5, 8)
    assert keys.untyped_storage().nbytes() == 2 * 2 * 32 * 8 * 8
    assert not keys.requires_grad


def test_last_only_gives_the_last_logits():
    model, tokens = trained(), tokens_of(2, 6)
    last = decode(model, tokens, KVCache(4), last_only=True)
    torch.testing.assert_close(last, decode(model, tokens, KVCache(4))[:, -1:], rtol=0, atol=TOLERANCE)


def test_errors_say_what_to_do():
    model, cache = trained(), KVCache(4)
    with pytest.raises(ValueError, match=r"KVCache\(4\)"):
        decode(model, tokens_of(1, 3), KVCache(3))
    with pytest.raises(ValueError, match="mask of these tokens only"):
        decode(model, tokens_of(1, 3), cache, attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="integers shaped"):
        decode(model, tokens_of(1, 3).float(), cache)
    decode(model, tokens_of(1, 3), cache)
    with pytest.raises(ValueError, match="past is 0 and the cache holds 3 locations: give past=3"):
        model(tokens_of(1, 3), caches=cache)
    with pytest.raises(ValueError, match="one KVCache per batch"):
        decode(model, tokens_of(2, 3), cache)
    encoder = Transformer(model.config.replace(causal=False, head="token", classes=3))
    with pytest.raises(ValueError, match="head='lm'"):
        decode(encoder, tokens_of(1, 3), KVCache(4))
    table = trained(scheme=ExponentialSPA(repeat_rate=0.01, calibration="exact"))
    with pytest.raises(ValueError, match="calibrated for 16"):
        decode(table, tokens_of(1, 17), KVCache(4))

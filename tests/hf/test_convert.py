"""convert: sizes carried over for random configs of each family, every change reported, refusals that say why."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    GemmaConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    SmolLM3Config,
    T5Config,
)

import skipless
from skipless.hf.configuration import SkiplessConfig
from skipless.hf.convert import Conversion, convert
from skipless.hf.tokenizer import byte_tokenizer
from skipless.model.kernel_maps import certificate
from skipless.model.transformer import Transformer
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit

SIZES = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}


def llama(depth: int = 6, heads: int = 4, kv_heads: int = 2, head_width: int = 8, hidden: int = 48, **more: Any):
    return LlamaConfig(
        hidden_size=heads * head_width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=hidden,
        **{**SIZES, **more},
    )


def neox(depth: int = 6, heads: int = 4, head_width: int = 8, hidden: int = 48, **more: Any) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        hidden_size=heads * head_width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=hidden,
        **{**SIZES, **more},
    )


def gpt2(depth: int = 6, heads: int = 4, head_width: int = 8, hidden: int | None = None, **more: Any) -> GPT2Config:
    return GPT2Config(n_embd=heads * head_width, n_layer=depth, n_head=heads, n_inner=hidden, **{**SIZES, **more})


def changed(conversion: Conversion) -> dict[str, str]:
    return {change.what: f"{change.before} → {change.after}" for change in conversion.changes}


sizes = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 40),
        "heads": st.sampled_from([1, 2, 4, 6]),
        "head_width": st.sampled_from([2, 8, 16]),
        "hidden": st.integers(1, 50).map(lambda n: 2 * n),
        "max_position_embeddings": st.integers(8, 5000),
    }
)


@given(size=sizes, kv=st.sampled_from([1, 2]), theta=st.floats(1e3, 1e6))
@settings(max_examples=15)
def test_llama_sizes(size: dict, kv: int, theta: float) -> None:
    kv_heads = kv if size["heads"] % kv == 0 else 1
    source = llama(**size, kv_heads=kv_heads, rope_theta=theta)
    config = convert(source, activation="gelu").config
    assert (config.width, config.depth, config.heads) == (source.hidden_size, size["depth"], size["heads"])
    assert (config.kv_heads, config.vocab_size, config.length) == (kv_heads, 60, size["max_position_embeddings"])
    assert config.rope_base == theta
    assert 2 * config.hidden == 3 * size["hidden"]  # as many parameters as the three matrices of SwiGLU
    assert not config.mlp_bias
    assert config.vanilla


@given(size=sizes, base=st.floats(1e3, 1e6))
@settings(max_examples=15)
def test_gpt_neox_sizes(size: dict, base: float) -> None:
    source = neox(**size, rotary_emb_base=base)
    config = convert(source, activation="gelu").config
    assert (config.width, config.depth, config.heads) == (source.hidden_size, size["depth"], size["heads"])
    assert (config.hidden, config.length, config.rope_base) == (size["hidden"], size["max_position_embeddings"], base)
    assert config.mlp_bias


@given(size=sizes, own_hidden=st.booleans())
@settings(max_examples=15)
def test_gpt2_sizes(size: dict, own_hidden: bool) -> None:
    hidden, length = (size.pop("hidden") if own_hidden else None), size.pop("max_position_embeddings")
    size.pop("hidden", None)
    source = gpt2(**size, hidden=hidden, n_positions=length)
    config = convert(source, activation="gelu").config
    assert (config.width, config.depth, config.heads) == (source.n_embd, size["depth"], size["heads"])
    assert (config.hidden, config.length) == (hidden or 4 * source.n_embd, length)


@pytest.mark.parametrize("source", [llama(), neox(), gpt2()], ids=lambda config: config.model_type)
def test_the_counterpart_runs_and_keeps_the_signal(source) -> None:
    conversion = convert(source)
    assert isinstance(conversion.model, Transformer)
    assert conversion.model is conversion.model
    assert conversion.model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 60)
    assert certificate(conversion.config).verdict.kind in ("preserved", "drift")
    assert conversion.config.shaped_activation.base == "gelu"
    assert conversion.model.blocks[0].layers()[0].query.weight.abs().max() == 0  # SPA's start, not the source's


def test_a_model_s_embedding_is_carried_over_and_nothing_else() -> None:
    model = GPT2LMHeadModel(gpt2())
    conversion = skipless.convert(model)
    assert conversion.config == convert(model.config).config
    assert "the embedding is carried over, scaled" in str(conversion)
    assert "no weight is carried over" in str(convert(model.config))
    own, rows = conversion.model.embedding.weight.detach(), model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(own.square().sum(1).mean(), torch.tensor(1.0))
    torch.testing.assert_close(own / own.norm(), rows / rows.norm())
    assert torch.equal(conversion.to_hf().lm_head.weight, own)


def test_the_tokenizer_serves_the_counterpart() -> None:
    model = convert(llama(vocab_size=256), tokenizer=byte_tokenizer()).model
    assert model.generate("abc", 2).startswith("abc")


SMALL = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (Qwen3Config, {"heads": "4 of width 128 → 4 of width 8", "norms of queries and keys": "RMSNorm → none"}),
        (Olmo2Config, {"norms": "RMSNorm after each sub-block and at the end → none"}),
        (SmolLM3Config, {"positions": "RoPE in 5 of 6 blocks → RoPE in all"}),
        (Phi3Config, {}),
        (
            GemmaConfig,
            {"heads": "4 of width 256 → 4 of width 8", "MLP": "gated gelu_pytorch_tanh, hidden 48 → gelu, hidden 72"},
        ),
    ],
    ids=lambda kind: getattr(kind, "model_type", None),
)
def test_decoders_that_differ_in_what_is_replaced(kind, seen: dict) -> None:
    source = kind(**SMALL, intermediate_size=48, pad_token_id=0, **SIZES)
    conversion = convert(AutoModelForCausalLM.from_config(source), activation="gelu")
    assert seen.items() <= changed(conversion).items()
    assert (conversion.config.heads, conversion.config.kv_heads, conversion.config.hidden) == (4, 2, 72)
    assert conversion.to_hf()(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 60)
    matrices = sum(w.numel() for w in AutoModelForCausalLM.from_config(source).parameters() if w.ndim == 2)
    assert conversion.source.matrix_parameters == matrices


def test_mirrored_targets() -> None:
    conversion = convert(llama(hidden=54), mlp_init="mirrored", value_output="identity", norm="none")
    config = conversion.config
    assert (config.mlp_init, config.value_output, config.kv_heads, config.hidden) == ("mirrored", "identity", 4, 82)
    assert changed(conversion)["MLP"] == "gated silu, hidden 54 → gelu, hidden 82"
    assert changed(conversion)["W_V and W_O"] == "2 heads of values → none: the input split into 4 heads"
    assert "starts as a rotation" in str(conversion)
    assert "Squared norms start at 1" in str(conversion)


def test_without_memory_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = convert(llama()).model
    assert model.embedding.weight.is_meta


def test_to_hf_keeps_special_tokens() -> None:
    wrapped = convert(llama()).to_hf()
    assert (wrapped.config.bos_token_id, wrapped.config.eos_token_id) == (1, 2)
    assert wrapped.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2, do_sample=False).shape[1] <= 4


def test_llama_report() -> None:
    seen = changed(convert(llama(depth=12, attention_dropout=0.1, attention_bias=True)))
    assert seen["MLP"] == "gated silu, hidden 48 → shaped gelu, hidden 72"
    assert seen["norms"] == "RMSNorm before each sub-block and at the end → none"
    assert {"skips", "attention at the start", "unembedding", "dropout", "attention biases"} < seen.keys()
    assert "positions" not in seen


def test_gpt2_report() -> None:
    seen = changed(convert(gpt2(depth=12)))
    assert seen["positions"] == "a learned vector for each → RoPE, base 10000"
    assert seen["MLP"] == "gelu_new, hidden 128 → shaped gelu, hidden 128"
    assert {"dropout", "attention biases"} < seen.keys()
    assert "unembedding" not in seen  # GPT-2 shares it too
    scaled = changed(convert(gpt2(scale_attn_by_inverse_layer_idx=True)))
    assert scaled["attention scores"].startswith("divided by the block's number")


def test_gpt_neox_report() -> None:
    seen = changed(convert(neox(rotary_pct=0.25)))
    assert seen["RoPE share"] == "0.25 of each head → all of it"
    assert "attention, then MLP" in seen["block"]
    assert "block" not in changed(convert(neox(use_parallel_residual=False)))


def test_rope_scaling_and_windows_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    scaled = convert(llama(rope_parameters=rope))
    assert (changed(scaled)["RoPE scaling"], scaled.config.rope_base) == ("linear → none", 5e5)
    small = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    mistral = MistralConfig(**small, head_dim=8, intermediate_size=48, sliding_window=16, **SIZES)
    assert changed(convert(mistral))["sliding window"] == "16 locations → all locations before"
    qwen = changed(convert(Qwen2Config(**small, intermediate_size=48, **SIZES)))
    assert "attention biases" in qwen
    assert "sliding window" not in qwen


def test_the_report_reads_well() -> None:
    text = str(convert(llama(depth=12)))
    first, kept, size, *rest = text.splitlines()
    assert first.startswith("llama → skipless")
    assert "12 blocks of width 32, 4 heads (2 for keys and values)" in kept
    assert "parameters in matrices" in size
    assert all(line.startswith("  changed  ") for line in rest)


def test_parameter_counts_agree_with_the_models() -> None:
    conversion = convert(llama(tie_word_embeddings=True))
    assert conversion.source.matrix_parameters == conversion.config.matrix_parameters
    untied = convert(llama()).source.matrix_parameters
    assert untied - conversion.source.matrix_parameters == 60 * 32
    source = gpt2(depth=2, n_positions=24)
    matrices = sum(weight.numel() for weight in GPT2LMHeadModel(source).parameters() if weight.ndim == 2)
    assert convert(source).source.matrix_parameters == matrices


@pytest.mark.parametrize("weight", [0.5, 0.9, 0.98])
def test_normalised_skips_take_a_feasible_rate(weight: float) -> None:
    conversion = convert(llama(depth=12), skip_weight=weight, norm="pre")
    skip = conversion.config.attention_skip
    assert skip == conversion.config.mlp_skip
    assert skip.shortcut**2 + skip.residual**2 == pytest.approx(1.0)
    assert "App. F" in str(conversion)
    assert changed(conversion)["norms"].endswith("→ RMSNorm before each sub-block and at the end")


@pytest.mark.parametrize(
    ("depth", "asked", "words"),
    [
        (12, {"hidden": 0}, "at 1 in every block, and need no correction"),
        (12, {"hidden": 0, "length": 1, "scheme": ExponentialSPA(calibration="exact")}, "at 1 in every block"),
        (24, {"skip_weight": 0.98}, "between {low:.2g} and {high:.3g} in every block, and need no correction"),
        (100, {"skip_weight": 0.98}, "between {low:.2g} and {high:.3g} by theory; norm='pre' corrects that"),
        (24, {"activation": "gelu"}, "between {low:.2g} and {high:.3g} by theory; norm='pre' corrects that"),
    ],
)
def test_norms_are_reported_as_theory_has_them(depth: int, asked: dict, words: str) -> None:
    conversion = convert(llama(depth=depth), **asked)
    if "{low" in words:
        reports = certificate(conversion.config).reports
        low, high = min(each.diagonal_min for each in reports), max(each.diagonal_max for each in reports)
        assert high > 1.5
        words = words.format(low=low, high=high)
    assert f"Squared norms start {words}" in str(conversion)


@pytest.mark.parametrize("scheme", [UniformSPA(0.5), ValueSkipInit(), StandardAttention(), ExponentialSPA(0.1)])
def test_any_scheme(scheme) -> None:
    conversion = convert(llama(depth=16), scheme, activation="tat-leaky_relu", hidden=64, length=32)
    assert (conversion.config.scheme, conversion.config.hidden, conversion.config.length) == (scheme, 64, 32)
    assert changed(conversion)["length"] == "2048 → 32"
    assert "hidden size as asked for; activation as asked for" in str(conversion)


def test_few_blocks_leave_the_activation_unshaped_and_say_so() -> None:
    conversion = convert(llama(depth=2))
    assert "2 blocks are too few for DKS's targets" in str(conversion)
    assert changed(convert(neox(depth=2))).get("MLP") is None  # a plain GELU of the same size stays


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (BertConfig(), "bert is an encoder"),
        (T5Config(), "t5 is an encoder-decoder"),
        (MixtralConfig(), "mixture of experts"),
        (BloomConfig(), "ALiBi"),
        (MambaConfig(), "'mamba' is not a family convert knows"),
        (Qwen2VLConfig(), r"convert\(config.text_config\)"),
        (SkiplessConfig(depth=6), "this library's own"),
        (gpt2(add_cross_attention=True), "cross-attention"),
        (llama(heads=4, head_width=3), "odd"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_refusals_say_why(source, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(source, activation="gelu")


def test_wrong_arguments_say_what_is_right() -> None:
    with pytest.raises(TypeError, match=r"AutoConfig.from_pretrained"):
        convert("meta-llama/Llama-3.2-1B")
    with pytest.raises(TypeError, match=r"ExponentialSPA\(\)"):
        convert(llama(), "e-spa")
    with pytest.raises(TypeError, match=r"tokenizer is str; .*AutoTokenizer.from_pretrained"):
        convert(llama(), tokenizer="folder")
    with pytest.raises(ValueError, match="has 256 tokens and the source knows 60"):
        convert(llama(), tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="0 ≤ α < 1"):
        convert(llama(), skip_weight=1.0)
    with pytest.raises(ValueError, match="gamma_final ≥"):
        convert(llama(), ExponentialSPA(0.005), skip_weight=0.98)
    with pytest.raises(ValueError, match="'value_output'"):
        convert(llama(), value_outputs="identity")
    with pytest.raises(ValueError, match="depth is given, but it follows from the source"):
        convert(llama(), depth=3)
    for hidden in (-5, 1.5):
        with pytest.raises(ValueError, match=f"hidden is {hidden}; it must be an integer of at least 0"):
            convert(llama(), hidden=hidden)
    with pytest.raises(ValueError, match="there is no activation ''"):
        convert(llama(), activation="")
    for activation in (3, 0):
        with pytest.raises(TypeError, match=f"activation is {activation}; give a name such as 'dks-gelu'"):
            convert(llama(), activation=activation)

"""Convert: a skipless network of the sizes of a Llama, GPT-2 or another decoder, and what differs between the two."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from skipless.hf.configuration import SkiplessConfig
from skipless.hf.modeling import SkiplessForCausalLM
from skipless.hf.tokenizer import FastTokenizer
from skipless.model import kernel_maps
from skipless.model.config import ModelConfig, attention_shapes
from skipless.model.presets import REPEAT_RATE
from skipless.model.transformer import Transformer
from skipless.schema import check_names
from skipless.theory.activations import ShapedActivation, base_name
from skipless.theory.feasibility import check_skip_weight, round_up, smallest_gamma_final
from skipless.theory.propagation import Skip
from skipless.theory.schemes import SCHEMES, ExponentialSPA, Scheme, StandardAttention, ValueSkipInit
from skipless.theory.shaping import named_activation

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ALIBI = ("bloom", "mpt")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_DEFAULT_GAMMA = 0.005
_LOCATIONS = 100  # that theory follows
# fields that follow from the source, from `scheme` or from `skip_weight`
_GIVEN = (
    "vocab_size",
    "width",
    "depth",
    "heads",
    "kv_heads",
    "scheme",
    "attention_skip",
    "mlp_skip",
    "head",
    "classes",
)


@dataclass(frozen=True)
class Change:
    """One thing that differs between the source and its counterpart, and why."""

    what: str
    before: str
    after: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} → {self.after}. {self.why}"


@dataclass(frozen=True)
class Decoder:
    """The sizes and parts of a decoder-only language model, whatever its family calls them.

    rope_base is None where positions are not rotary. own holds what only this family has and the counterpart has not.
    head_width None is the width over the heads.
    """

    family: str
    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    length: int
    gated: bool
    activation: str
    norm: str
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    rope_base: float | None
    special_tokens: dict[str, Any]
    own: tuple[Change, ...] = ()
    head_width: int | None = None
    norm_place: str = "before each sub-block and at the end"

    @property
    def matrix_parameters(self) -> int:
        """Entries of all weight matrices, as ModelConfig.matrix_parameters counts them, and of a table of positions."""
        head = self.head_width or self.width // self.heads
        attention = 2 * self.width * head * (self.heads + self.kv_heads)
        block = attention + (3 if self.gated else 2) * self.width * self.hidden
        rows = (1 if self.tied else 2) * self.vocab_size + (self.length if self.rope_base is None else 0)
        return rows * self.width + self.depth * block


@dataclass(frozen=True, eq=False)
class Conversion:
    """What convert returns: the counterpart's configuration, what was kept and what changed.

    str() is the report for people. model is built, freshly initialised, when it is first asked for; under
    `with torch.device("meta"):` it takes no memory. Where the source was a model, embedding is its matrix, scaled to
    the mean norm that networks here start with.
    """

    source: Decoder
    config: ModelConfig
    changes: tuple[Change, ...]
    special_tokens: dict[str, Any] = field(repr=False, default_factory=dict)
    embedding: Tensor | None = field(repr=False, default=None)
    tokenizer: Any = field(repr=False, default=None)

    @cached_property
    def model(self) -> Transformer:
        """The native network, freshly initialised but for an embedding that is carried over."""
        model = Transformer(self.config)
        if self.embedding is not None and not model.embedding.weight.is_meta:
            with torch.no_grad():
                model.embedding.weight.copy_(self.embedding)
        model.tokenizer = self.tokenizer
        return model

    def to_hf(self) -> SkiplessForCausalLM:
        """The same network behind transformers' interface, with the source's special token ids."""
        dtype = self.model.embedding.weight.dtype
        return SkiplessForCausalLM(
            SkiplessConfig.from_native(self.config, dtype=dtype, **self.special_tokens), native=self.model
        )

    def __str__(self) -> str:
        config, source = self.config, self.source
        before, after = source.matrix_parameters / 1e6, config.matrix_parameters / 1e6
        carried = "no weight is carried over"
        if self.embedding is not None:
            carried = "the embedding is carried over, scaled to the mean norm of a fresh one"
        lines = [
            f"{source.family} → skipless: a fresh network of the same sizes; {carried}",
            f"  kept     {config.depth} blocks of width {config.width}, {config.heads} heads ({config.kv_heads} for "
            f"keys and values), vocabulary {config.vocab_size}, length {config.length}",
            f"  size     {before:.4g}M → {after:.4g}M parameters in matrices ({100 * (after / before - 1):+.1f} %)",
        ]
        return "\n".join([*lines, *(f"  changed  {change}" for change in self.changes)])


def convert(
    source: PreTrainedConfig | PreTrainedModel,
    scheme: Scheme | None = None,
    *,
    skip_weight: float = 0.0,
    tokenizer: Any = None,
    **fields: Any,
) -> Conversion:
    """A skipless (or, with skip_weight α, normalised-skip) counterpart of a decoder: Llama, GPT-NeoX, GPT-2, Mistral,
    Qwen 2 and 3, OLMo 2, SmolLM 3, Phi 3, Gemma.

    source: a transformers config, or a model, of which the config is read and the embedding carried over: tokens mean
    the same in both, and no other weight does. tokenizer, one of transformers, stays as it is and serves the model.
    scheme None is E-SPA, with the paper's γ_L = 0.005 where α allows it.
    fields are those of ModelConfig that the source leaves open, such as norm, mlp_init="mirrored" and
    value_output="identity". activation None is DKS-GELU without skips, and GELU with them or mirrored. hidden None
    keeps the MLP's parameter count: a gated MLP of hidden h becomes a plain one of 3h/2. length None is
    max_position_embeddings. What cannot be carried over raises ValueError: encoders, encoder-decoders, mixtures of
    experts, ALiBi, unknown families.
    """
    decoder = read_decoder(_config_of(source))
    check_skip_weight(skip_weight)
    check_names(ModelConfig, fields)
    if taken := [name for name in _GIVEN if name in fields]:
        raise ValueError(
            f"{taken[0]} is given, but it follows from the source, `scheme` or `skip_weight`: leave it out"
        )
    skip = Skip.normalised(skip_weight) if skip_weight else Skip()
    mirrored = fields.get("mlp_init") == "mirrored"
    asked = {name: value for name, value in fields.items() if value is not None}
    settings: dict[str, Any] = {
        "hidden": _matched_hidden(decoder, even=mirrored),
        "length": decoder.length,
        "rope_base": decoder.rope_base or 10_000.0,
        "mlp_bias": decoder.mlp_bias,
        **asked,
        "activation": _activation(asked.get("activation"), decoder.depth, skip, mirrored),
    }
    config = ModelConfig(
        vocab_size=decoder.vocab_size,
        width=decoder.width,
        depth=decoder.depth,
        heads=decoder.heads,
        kv_heads=decoder.heads if fields.get("value_output") == "identity" else decoder.kv_heads,
        scheme=_checked(scheme) or _default_scheme(skip_weight, decoder.depth),
        attention_skip=skip,
        mlp_skip=skip,
        **settings,
    )
    attention_shapes(config)  # an infeasible scheme is refused here, not when the model is first used
    return Conversion(
        decoder,
        config,
        _changes(decoder, config, "activation" in asked),
        decoder.special_tokens,
        _embedding(source),
        None if tokenizer is None else _tokenizer(tokenizer, decoder.vocab_size),
    )


def _embedding(source: Any) -> Tensor | None:
    """A model's embedding, its rows scaled to squared norm 1 on average; None for a config, or a model without data."""
    if not isinstance(source, PreTrainedModel):
        return None
    rows = source.get_input_embeddings().weight.detach().float()
    return None if rows.is_meta else rows / rows.square().sum(dim=1).mean().sqrt()


def _tokenizer(given: Any, known: int) -> FastTokenizer:
    if not hasattr(given, "backend_tokenizer"):
        raise TypeError(
            f"tokenizer is {type(given).__name__}; give a fast one of transformers, such as "
            "AutoTokenizer.from_pretrained(folder)"
        )
    tokenizer = FastTokenizer(given)
    if tokenizer.vocab_size > known:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens and the source knows {known:,}: give the source's own"
        )
    return tokenizer


def _config_of(source: Any) -> PreTrainedConfig:
    config = getattr(source, "config", source)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"source is {type(source).__name__}; give a transformers config or model, such as "
            "AutoConfig.from_pretrained(folder)"
        )
    return config


def _checked(scheme: Any) -> Scheme | None:
    if scheme is not None and not isinstance(scheme, Scheme):
        known = ", ".join(f"{cls.__name__}()" for cls in SCHEMES.values())
        raise TypeError(f"scheme is {scheme!r}; it must be one of {known}")
    return scheme


def _default_scheme(skip_weight: float, depth: int) -> Scheme:
    """E-SPA at the paper's γ_L, or half as much again as the least that App. F allows for this skip weight."""
    least = smallest_gamma_final(skip_weight, depth)
    gamma = _DEFAULT_GAMMA if least < _DEFAULT_GAMMA else round_up(1.5 * least, 2)
    return ExponentialSPA(gamma, REPEAT_RATE)


def _activation(asked: Any, depth: int, skip: Skip, mirrored: bool) -> ShapedActivation | str:
    """The activation asked for; else DKS-GELU where it exists: a few blocks cannot reach its targets, and need none."""
    if asked is not None:
        if not (isinstance(asked, ShapedActivation | str) or callable(asked)):
            raise TypeError(f"activation is {asked!r}; give a name such as 'dks-gelu', or a ShapedActivation")
        return asked if isinstance(asked, ShapedActivation | str) else base_name(asked)
    if skip.shortcut or mirrored:
        return "gelu"
    try:
        named_activation("dks-gelu", depth, skip)
    except ValueError:
        return "gelu"
    return "dks-gelu"


def _matched_hidden(decoder: Decoder, even: bool = False) -> int:
    """The hidden width that has as many parameters as the source's MLP; mirrored units come in pairs."""
    hidden = 3 * decoder.hidden // 2 if decoder.gated else decoder.hidden
    return hidden + hidden % 2 if even else hidden


def _changes(decoder: Decoder, config: ModelConfig, activation_asked: bool) -> tuple[Change, ...]:
    changes = [_skips(config), _norms(decoder, config), _attention(config), *_heads(decoder, config)]
    changes += _mlp(decoder, config, activation_asked)
    if decoder.rope_base is None:
        why = "There is no learned table here, and rotation leaves the input's kernel to the tokens alone"
        changes.append(Change("positions", "a learned vector for each", f"RoPE, base {config.rope_base:g}", why))
    if decoder.attention_bias:
        changes.append(Change("attention biases", "trained vectors", "none", "Attention here has none"))
    if not decoder.tied:
        why = f"Networks here share it: {decoder.vocab_size * decoder.width / 1e6:.3g}M parameters fewer"
        changes.append(Change("unembedding", "a matrix of its own", "the embedding's", why))
    if config.length != decoder.length:
        changes.append(Change("length", str(decoder.length), str(config.length), "Asked for"))
    return (*changes, *decoder.own)


def _skips(config: ModelConfig) -> Change:
    skip = config.attention_skip
    if not skip.shortcut:
        return Change("skips", "x + f(x)", "f(x)", "Attention and MLP are shaped so that the signal survives without")
    after = f"{skip.shortcut:g}·x + {skip.residual:.3g}·f(x)"
    return Change("skips", "x + f(x)", after, "Weights whose squares sum to 1 keep the norm (Sec. 3.4)")


def _norms(decoder: Decoder, config: ModelConfig) -> Change:
    before = f"{decoder.norm} {decoder.norm_place}"
    if config.norm == "none":
        return Change("norms", before, "none", _start_of_norms(config))
    where = {"pre": "before each sub-block and at the end", "post": "after each sub-block"}[config.norm]
    return Change("norms", before, f"RMSNorm {where}", "Asked for")


def _start_of_norms(config: ModelConfig) -> str:
    """What theory says of squared norms before training, over all blocks and the first locations."""
    length = min(max(config.length, 2), _LOCATIONS)
    found = kernel_maps.certificate(config.replace(length=length), length=length)
    low, high = min(each.diagonal_min for each in found.reports), max(each.diagonal_max for each in found.reports)
    start = "Squared norms start " + ("at 1" if low > 0.995 and high < 1.005 else f"between {low:.2g} and {high:.3g}")
    if found.verdict.kind == "preserved":
        return f"{start} in every block, and need no correction"
    return f"{start} by theory; norm='pre' corrects that"


def _attention(config: ModelConfig) -> Change:
    scheme, skip = config.scheme, config.attention_skip.shortcut
    if isinstance(scheme, StandardAttention):
        why = "Asked for; in a deep network without skips it loses the signal (see `skipless kernels`)"
    elif isinstance(scheme, ValueSkipInit):
        why = "It starts as the identity, so that attention cannot lose the signal"
    else:
        why = "It keeps locations apart at any depth"
    if isinstance(scheme, ExponentialSPA) and skip:
        why += f"; with α = {skip:g} over {config.depth} blocks γ_L must exceed "
        why += f"{smallest_gamma_final(skip, config.depth):.3g} (App. F)"
    return Change("attention at the start", "softmax of random scores", repr(scheme), why)


def _heads(decoder: Decoder, config: ModelConfig) -> list[Change]:
    changes, width = [], config.width // config.heads
    if decoder.head_width not in (None, width):
        before = f"{decoder.heads} of width {decoder.head_width}"
        changes.append(Change("heads", before, f"{config.heads} of width {width}", "Heads here split the width evenly"))
    if config.value_output == "identity":
        after = f"none: the input split into {config.heads} heads"
        after += f"; of {config.readers} readers" if config.readers else ""
        changes.append(Change("W_V and W_O", f"{decoder.kv_heads} heads of values", after, "Asked for"))
    return changes


def _mlp(decoder: Decoder, config: ModelConfig, asked: bool) -> list[Change]:
    """What happens to the MLP: nothing to tell where neither its form nor its sizes change."""
    if not config.hidden:
        return [Change("MLP", f"hidden {decoder.hidden}", "none", "Asked for: attention only")]
    shaped = config.shaped_activation
    plain = shaped == ShapedActivation(shaped.base)
    same = not decoder.gated and (shaped.base, config.hidden) == (decoder.activation, decoder.hidden)
    if plain and same and not config.mlp_init:
        return []
    before = f"{'gated ' if decoder.gated else ''}{decoder.activation}, hidden {decoder.hidden}"
    after = f"{'' if plain else 'shaped '}{shaped.base}, hidden {config.hidden}"
    why = "; ".join(_mlp_reasons(decoder, config, plain, asked))
    return [Change("MLP", before, after, why[:1].upper() + why[1:])]


def _mlp_reasons(decoder: Decoder, config: ModelConfig, plain: bool, asked: bool) -> list[str]:
    reasons = []
    if decoder.gated:
        reasons.append("a gate multiplies two signals, for which DKS and TAT have no kernel map")
    mirrored = config.mlp_init == "mirrored"
    if config.hidden != _matched_hidden(decoder, even=mirrored):
        reasons.append("hidden size as asked for")
    elif decoder.gated:
        reasons.append("two matrices of 3/2 the hidden size hold as many parameters as three")
    if mirrored:
        reasons.append("units start in pairs of opposite sign, so that every MLP starts as a rotation, as asked for")
    if asked:
        reasons.append("activation as asked for")
    elif mirrored:
        reasons.append("for which plain GELU serves")
    elif not plain:
        reasons.append(f"the activation is solved by DKS for {config.depth} blocks, so that locations stay apart")
    elif config.mlp_skip.shortcut:
        reasons.append("with skips the paper leaves GELU as it is")
    else:
        reasons.append(f"{config.depth} blocks are too few for DKS's targets")
    return reasons


def read_decoder(config: PreTrainedConfig) -> Decoder:
    """The description of a configuration; ValueError, with the reason, for what cannot be carried over."""
    _refuse(config)
    decoder = _READERS[config.model_type](config)
    if decoder.width % decoder.heads:
        raise ValueError(
            f"{decoder.family}: hidden_size={decoder.width} is not a multiple of its {decoder.heads} heads, which here "
            "split the width evenly: set num_attention_heads in the config to a number that divides it"
        )
    return decoder


def _refuse(config: PreTrainedConfig) -> None:
    family = config.model_type
    known = ", ".join(_READERS)
    if family == "skipless":
        raise ValueError("the configuration is this library's own already; change it by config.native().replace(…)")
    if hasattr(config, "text_config"):
        raise ValueError(f"{family} has several parts; convert its decoder alone: convert(config.text_config)")
    if config.is_encoder_decoder:
        raise ValueError(f"{family} is an encoder-decoder; convert takes decoder-only language models ({known})")
    experts = next((name for name in _EXPERTS if getattr(config, name, None)), None)
    if experts:
        raise ValueError(
            f"{family} is a mixture of experts ({experts}={getattr(config, experts)}); routing has no counterpart "
            f"here: convert a dense model ({known})"
        )
    if family in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ValueError(
            f"{family} is an encoder: it attends in both directions. For a skipless encoder build "
            "ModelConfig(causal=False, head='token', classes=…); convert takes decoders"
        )
    if family in _ALIBI or getattr(config, "alibi", False):
        raise ValueError(
            f"{family} places tokens by ALiBi's biases, which SPA's own biases replace; convert reads {known}. Build "
            "ModelConfig(position='none', …), with StandardAttention(alibi_heads=…) for ALiBi itself"
        )
    if family not in _READERS:
        raise ValueError(
            f"{family!r} is not a family convert knows ({known}), and guessing could lose parts of it in silence; "
            "build a ModelConfig with its sizes"
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"{family} has add_cross_attention=True; cross-attention has no counterpart here")


def _sizes(config: Any) -> dict[str, Any]:
    """What every family has under transformers' common names."""
    return {
        "family": config.model_type,
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "depth": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "length": config.max_position_embeddings,
        "tied": config.tie_word_embeddings,
        "special_tokens": {name: getattr(config, name, None) for name in _SPECIAL},
    }


def _llama(config: Any) -> Decoder:
    """Llama, and the families that differ from it in few words: Mistral and Qwen 2 (window, biases), Qwen 3, SmolLM 3,
    OLMo 2 (norms in other places), Phi 3 and Gemma."""
    family, own = config.model_type, [*_rope_changes(config), *_window(config)]
    if family in ("qwen3", "olmo2"):
        why = "Queries and keys start at a product of 0 or near it, which nothing has to bound"
        own.append(Change("norms of queries and keys", "RMSNorm", "none", why))
    if family == "smollm3" and not all(config.no_rope_layers):
        before = f"RoPE in {sum(config.no_rope_layers)} of {config.num_hidden_layers} blocks"
        own.append(Change("positions", before, "RoPE in all", "All blocks here have the same positions"))
    own += _dropout(
        config, *(name for name in ("attention_dropout", "resid_pdrop", "embd_pdrop") if hasattr(config, name))
    )
    return Decoder(
        **_sizes(config),
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        hidden=config.intermediate_size,
        gated=True,
        activation=config.hidden_act,
        norm="RMSNorm",
        attention_bias=family == "qwen2" or getattr(config, "attention_bias", False),
        mlp_bias=getattr(config, "mlp_bias", False),
        rope_base=float(config.rope_parameters["rope_theta"]),
        own=tuple(own),
        head_width=getattr(config, "head_dim", None),
        norm_place="after each sub-block and at the end" if family == "olmo2" else Decoder.norm_place,
    )


def _gpt_neox(config: Any) -> Decoder:
    own = [*_rope_changes(config), *_dropout(config, "attention_dropout", "hidden_dropout")]
    if config.use_parallel_residual:
        why = "Blocks here are sequential: without a skip there is no sum for two branches to share"
        own.append(Change("block", "attention beside MLP, both reading the same input", "attention, then MLP", why))
    return Decoder(
        **_sizes(config),
        kv_heads=config.num_attention_heads,
        hidden=config.intermediate_size,
        gated=False,
        activation=config.hidden_act,
        norm="LayerNorm",
        attention_bias=config.attention_bias,
        mlp_bias=True,
        rope_base=float(config.rope_parameters["rope_theta"]),
        own=tuple(own),
    )


def _gpt2(config: Any) -> Decoder:
    own = _dropout(config, "attn_pdrop", "resid_pdrop", "embd_pdrop")
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        before = "unscaled" if not config.scale_attn_weights else "divided by the block's number"
        own.append(Change("attention scores", before, "divided by √(head width)", "The only scaling there is here"))
    return Decoder(
        **_sizes(config),
        kv_heads=config.num_attention_heads,
        hidden=config.n_inner or 4 * config.hidden_size,
        gated=False,
        activation=config.activation_function,
        norm="LayerNorm",
        attention_bias=True,
        mlp_bias=True,
        rope_base=None,
        own=tuple(own),
    )


_READERS: dict[str, Callable[[Any], Decoder]] = {
    "llama": _llama,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    **dict.fromkeys(("mistral", "qwen2", "qwen3", "olmo2", "smollm3", "phi3", "gemma"), _llama),
}


def _rope_changes(config: Any) -> list[Change]:
    rope, changes = config.rope_parameters, []
    if rope.get("rope_type", "default") != "default":
        why = "It stretches a trained network to longer texts; a fresh one is trained at the length it needs"
        changes.append(Change("RoPE scaling", str(rope["rope_type"]), "none", why))
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        why = "Rotation here turns the whole head"
        changes.append(Change("RoPE share", f"{share:g} of each head", "all of it", why))
    return changes


def _window(config: Any) -> list[Change]:
    window = getattr(config, "sliding_window", None)
    if not window:
        return []
    why = "SPA's attention has no window; E-SPA's decay already makes far locations faint"
    return [Change("sliding window", f"{window} locations", "all locations before", why)]


def _dropout(config: Any, *names: str) -> list[Change]:
    rates = [f"{name}={getattr(config, name):g}" for name in names if getattr(config, name)]
    why = "There is no dropout in this library; the paper's runs have none"
    return [Change("dropout", ", ".join(rates), "none", why)] if rates else []

"""Decoder configurations of transformers read into one plain description; what cannot be carried over is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ALIBI = ("bloom", "mpt")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


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

    @property
    def matrix_parameters(self) -> int:
        """Entries of all weight matrices, as ModelConfig.matrix_parameters counts them, and of a table of positions."""
        kv = self.width // self.heads * self.kv_heads
        block = 2 * self.width**2 + 2 * self.width * kv + (3 if self.gated else 2) * self.width * self.hidden
        rows = (1 if self.tied else 2) * self.vocab_size + (self.length if self.rope_base is None else 0)
        return rows * self.width + self.depth * block


def read_decoder(config: PreTrainedConfig) -> Decoder:
    """The description of a configuration; ValueError, with the reason, for what cannot be carried over."""
    _refuse(config)
    decoder = _READERS[config.model_type](config)
    head_width = getattr(config, "head_dim", None) or decoder.width // decoder.heads
    if head_width * decoder.heads != decoder.width:
        raise ValueError(
            f"{decoder.family}: {decoder.heads} heads of width {head_width} are not hidden_size={decoder.width}; heads "
            f"here split the width evenly: set head_dim={decoder.width // decoder.heads} in the config"
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


def _llama(config: Any) -> Decoder:
    """Llama, and the families that differ from it in few words: Mistral (window) and Qwen2 (biases, window)."""
    qwen = config.model_type == "qwen2"
    return Decoder(
        **_sizes(config),
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        hidden=config.intermediate_size,
        gated=True,
        activation=config.hidden_act,
        norm="RMSNorm",
        attention_bias=qwen or getattr(config, "attention_bias", False),
        mlp_bias=getattr(config, "mlp_bias", False),
        rope_base=float(config.rope_parameters["rope_theta"]),
        own=(*_rope_changes(config), *_window(config), *_dropout(config, "attention_dropout")),
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
    "mistral": _llama,
    "qwen2": _llama,
}


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

"""convert: a decoder of transformers → a fresh network of its sizes without shortcuts, and what changed on the way."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from skipless.hf.configuration import SkiplessConfig
from skipless.hf.decoders import Change, Decoder, read_decoder
from skipless.hf.modeling import SkiplessForCausalLM
from skipless.model import signal
from skipless.model.config import SCHEMES, ModelConfig, named_activation
from skipless.model.presets import REPEAT_RATE
from skipless.model.transformer import Transformer
from skipless.theory.activations import ShapedActivation
from skipless.theory.feasibility import check_skip_weight, round_up, smallest_gamma_final
from skipless.theory.propagation import NormPlacement, Skip
from skipless.theory.schemes import ExponentialSPA, Scheme, StandardAttention, ValueSkipInit

_DEFAULT_GAMMA = 0.005
_LOCATIONS = 100  # that theory follows


@dataclass(frozen=True, eq=False)
class Conversion:
    """What convert returns: the counterpart's configuration, what was kept and what changed.

    str() is the report for people. model is built, freshly initialised, when it is first asked for; under
    `with torch.device("meta"):` it takes no memory.
    """

    source: Decoder
    config: ModelConfig
    changes: tuple[Change, ...]
    special_tokens: dict[str, Any] = field(repr=False, default_factory=dict)

    @cached_property
    def model(self) -> Transformer:
        """The native network, freshly initialised."""
        return Transformer(self.config)

    def to_hf(self) -> SkiplessForCausalLM:
        """The same network behind transformers' interface, with the source's special token ids."""
        dtype = self.model.embedding.weight.dtype
        return SkiplessForCausalLM(
            SkiplessConfig.from_native(self.config, dtype=dtype, **self.special_tokens), native=self.model
        )

    def __str__(self) -> str:
        config, source = self.config, self.source
        before, after = source.matrix_parameters / 1e6, config.matrix_parameters / 1e6
        lines = [
            f"{source.family} → skipless: a fresh network of the same sizes; no weight is carried over",
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
    norm: NormPlacement = "none",
    activation: ShapedActivation | str | None = None,
    hidden: int | None = None,
    length: int | None = None,
) -> Conversion:
    """A fresh skipless (or, with skip_weight α, normalised-skip) counterpart of a Llama, GPT-NeoX or GPT-2 decoder.

    source: a transformers config, or a model, of which only the config is read. scheme None is E-SPA, with the
    paper's γ_L = 0.005 where α allows it. activation None is DKS-GELU without skips and GELU with them, as in the
    paper. hidden None keeps the MLP's parameter count: a gated MLP of hidden h becomes a plain one of 3h/2.
    length None is max_position_embeddings. Mistral and Qwen2 are read too. What cannot be carried over raises
    ValueError: encoders, encoder-decoders, mixtures of experts, ALiBi, unknown families.
    """
    decoder = read_decoder(_config_of(source))
    check_skip_weight(skip_weight)
    skip = Skip.normalised(skip_weight) if skip_weight else Skip()
    config = ModelConfig(
        vocab_size=decoder.vocab_size,
        width=decoder.width,
        depth=decoder.depth,
        heads=decoder.heads,
        kv_heads=decoder.kv_heads,
        hidden=_matched_hidden(decoder) if hidden is None else hidden,
        length=decoder.length if length is None else length,
        scheme=_checked(scheme) or _default_scheme(skip_weight, decoder.depth),
        attention_skip=skip,
        mlp_skip=skip,
        norm=norm,
        activation=_activation(activation, decoder.depth, skip),
        rope_base=decoder.rope_base or 10_000.0,
        mlp_bias=decoder.mlp_bias,
    )
    signal.attention_shapes(config)  # an infeasible scheme is refused here, not when the model is first used
    return Conversion(decoder, config, _changes(decoder, config, activation is not None), decoder.special_tokens)


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


def _activation(asked: Any, depth: int, skip: Skip) -> ShapedActivation | str:
    """As asked for; else DKS-GELU where it exists: few blocks are too few for its targets, and need no shaping."""
    if asked is not None:
        if not isinstance(asked, ShapedActivation | str):
            raise TypeError(f"activation is {asked!r}; give a name such as 'dks-gelu', or a ShapedActivation")
        return asked
    if skip.shortcut:
        return "gelu"
    try:
        named_activation("dks-gelu", depth, skip)
    except ValueError:
        return "gelu"
    return "dks-gelu"


def _matched_hidden(decoder: Decoder) -> int:
    return 3 * decoder.hidden // 2 if decoder.gated else decoder.hidden


def _changes(decoder: Decoder, config: ModelConfig, activation_asked: bool) -> tuple[Change, ...]:
    changes = [_skips(config), _norms(decoder, config), _attention(config), *_mlp(decoder, config, activation_asked)]
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
    before = f"{decoder.norm} before each sub-block and at the end"
    if config.norm == "none":
        return Change("norms", before, "none", _start_of_norms(config))
    where = {"pre": "before each sub-block and at the end", "post": "after each sub-block"}[config.norm]
    return Change("norms", before, f"RMSNorm {where}", "Asked for")


def _start_of_norms(config: ModelConfig) -> str:
    """What theory says of squared norms before training, over all blocks and the first locations."""
    length = min(max(config.length, 2), _LOCATIONS)
    found = signal.certificate(config.replace(length=length), length=length)
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


def _mlp(decoder: Decoder, config: ModelConfig, asked: bool) -> list[Change]:
    """What happens to the MLP: nothing to tell where neither its form nor its sizes change."""
    if not config.hidden:
        return [Change("MLP", f"hidden {decoder.hidden}", "none", "Asked for: attention only")]
    shaped = config.shaped_activation
    plain = shaped == ShapedActivation(shaped.base)
    if plain and not decoder.gated and (shaped.base, config.hidden) == (decoder.activation, decoder.hidden):
        return []
    before = f"{'gated ' if decoder.gated else ''}{decoder.activation}, hidden {decoder.hidden}"
    after = f"{'' if plain else 'shaped '}{shaped.base}, hidden {config.hidden}"
    why = "; ".join(_mlp_reasons(decoder, config, plain, asked))
    return [Change("MLP", before, after, why[:1].upper() + why[1:])]


def _mlp_reasons(decoder: Decoder, config: ModelConfig, plain: bool, asked: bool) -> list[str]:
    reasons = []
    if decoder.gated:
        reasons.append("a gate multiplies two signals, for which DKS and TAT have no kernel map")
    if config.hidden != _matched_hidden(decoder):
        reasons.append("hidden size as asked for")
    elif decoder.gated:
        reasons.append("two matrices of 3/2 the hidden size hold as many parameters as three")
    if asked:
        reasons.append("activation as asked for")
    elif not plain:
        reasons.append(f"the activation is solved by DKS for {config.depth} blocks, so that locations stay apart")
    elif config.mlp_skip.shortcut:
        reasons.append("with skips the paper leaves GELU as it is")
    else:
        reasons.append(f"{config.depth} blocks are too few for DKS's targets")
    return reasons

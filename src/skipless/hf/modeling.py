"""The network as a Hugging Face model: configuration, inputs, forward and generation."""

import dataclasses
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from skipless.console import near_names
from skipless.hf.tokenizer import fast_tokenizer
from skipless.model.config import ModelConfig
from skipless.model.fold import FoldedTransformer
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))


class SkiplessConfig(PreTrainedConfig):
    """Every field of ModelConfig as an attribute of the same name, in plain data, beside transformers' own.

    ModelConfig stays the only list of fields and the only check: SkiplessConfig(width=256, scheme={"kind": "e-spa"}).
    transformers' names read and write the same fields: hidden_size, num_hidden_layers, num_attention_heads,
    num_key_value_heads, intermediate_size, and max_position_embeddings for the training length, which is no limit.
    """

    model_type = "skipless"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "hidden",
        "max_position_embeddings": "length",
    }

    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        kwargs = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        native = ModelConfig.from_dict({name: kwargs.pop(name) for name in FIELDS if name in kwargs})
        _check_unknown(kwargs)
        for name, value in native.to_dict().items():
            setattr(self, name, value)
        super().__post_init__(**kwargs)

    @classmethod
    def from_native(cls, config: ModelConfig, **kwargs: Any) -> "SkiplessConfig":
        """The wrapper of a ModelConfig; kwargs are transformers' own fields, such as eos_token_id."""
        return cls(**config.to_dict(), **kwargs)

    def native(self) -> ModelConfig:
        """The ModelConfig these attributes say, checked anew."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in FIELDS})


def _check_unknown(kwargs: dict[str, Any]) -> None:
    """transformers keeps unknown names as attributes; one that is nearly a field is a slip that changes the model."""
    for name in kwargs:
        if near := near_names(name, FIELDS, cutoff=0.8):
            raise ValueError(f"SkiplessConfig has no field {name!r}; did you mean {near[0]!r}?")


class HFLayerCache:
    """One block's view of a transformers Cache: the native LayerCache."""

    def __init__(self, cache: Cache, index: int, slots: int):
        self.cache, self.index, self.slots = cache, index, slots

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.update(k, v, self.index)
        if keys.shape[2] != self.slots:
            raise ValueError(
                f"{type(self.cache).__name__} returned {keys.shape[2]} slots where {self.slots} are filled; caches "
                "of a fixed size or a sliding window do not serve skipless models: use DynamicCache, the default"
            )
        return keys, values


def layout_of(tokens: Tensor, attention_mask: Tensor | None, past: int) -> Layout | None:
    """Where the tokens stand, or None where the mask hides nothing."""
    if attention_mask is None:
        return None
    slots = past + tokens.shape[1]
    if attention_mask.dim() != 2 or attention_mask.shape[1] != slots:
        raise ValueError(
            f"attention_mask is shaped {tuple(attention_mask.shape)}; with {past} cached slots and {tokens.shape[1]} "
            f"new tokens it must be ({tokens.shape[0]}, {slots}), 1 where there is a token"
        )
    if bool((attention_mask != 0).all()):
        return None
    return Layout.left_padded(attention_mask.to(tokens.device), queries=tokens.shape[1])


def check_position_ids(position_ids: Tensor, tokens: Tensor, layout: Layout | None, past: int) -> None:
    """Raise unless they count the tokens of each row from 0: shapes are tied to absolute locations, so no others mean
    anything. At padding they may be what they like."""
    if layout is None:
        expected = torch.arange(past, past + tokens.shape[1], device=position_ids.device)[None]
        wrong = position_ids != expected
    else:
        expected = layout.query_locations.to(position_ids.device)
        documents = layout.query_documents
        real = True if documents is None else (documents >= 0).to(position_ids.device)
        wrong = (position_ids != expected) & real
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        seen, location = (int(t.expand_as(wrong)[row, column]) for t in (position_ids, expected))
        raise ValueError(
            f"position_ids[{row}, {column}] is {seen}, but by attention_mask and "
            f"cache that token stands at {location}; leave position_ids out (several documents in a row need a Layout: "
            "call the native model)"
        )


class SkiplessForCausalLM(PreTrainedModel, GenerationMixin):
    """A native language model (`.model`) that transformers can load, save, train, place on devices and generate with.

    Logits equal the native ones bit for bit. lm_head.weight is the embedding itself: the native unembedding is tied.
    Attention runs as the native model chooses (impl="auto"), whatever attn_implementation says.
    """

    config_class = SkiplessConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012  (transformers' own form)
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = False

    def __init__(self, config: SkiplessConfig, native: Transformer | None = None):
        super().__init__(config)
        settings = config.native()
        _check_supported(config, settings)
        self.model = Transformer(settings) if native is None else native
        self.lm_head = nn.Linear(settings.width, settings.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.model.embedding.weight
        self.gradient_checkpointing = False
        for parameter in self.model.parameters():
            # the native constructor has initialised them: post_init would do so a second time
            vars(parameter)["_is_hf_initialized"] = not parameter.is_meta
        self.post_init()

    @classmethod
    def from_native(cls, model: Transformer, tokenizer: Any = None) -> "SkiplessForCausalLM":
        """The wrapper of a native model, whose parameters it shares; special token ids come from the tokenizer."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {} if tokenizer is None else {name: getattr(tokenizer, name) for name in names}
        config = SkiplessConfig.from_native(model.config, dtype=model.embedding.weight.dtype, **ids)
        wrapper = cls(config, native=model)
        return wrapper.train(model.training)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but a file of weights that are not this network's, one for one, is an error.

        transformers would leave the missing ones at random, and drop those that have no place.
        """
        told = kwargs.pop("output_loading_info", False)
        model, info = cast(tuple[Any, dict], super().from_pretrained(*args, output_loading_info=True, **kwargs))
        _check_loaded(model, info, args[0] if args else kwargs.get("pretrained_model_name_or_path"))
        return (model, info) if told else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers. A folded network's matrices are not those its config tells of, so it is refused."""
        if isinstance(self.model, FoldedTransformer):
            raise ValueError(
                "this network is folded, and its config describes the unfolded one: keep it with .model.save(path), "
                "which FoldedTransformer.load reads, or save the network it was folded from"
            )
        super().save_pretrained(*args, **kwargs)

    def forward(  # noqa: PLR0913  (transformers' signature)
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits, and the next-token loss where labels (−100: ignored) are given; labels are shifted here.

        attention_mask (batch, past + T) may pad anywhere. position_ids are implied by it: others are an error.
        output_hidden_states gives depth + 1 tensors: the embedding, then each block's output, the last after the norm.
        """
        _refuse(kwargs)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        cache = self._cache(past_key_values, use_cache)
        with _recording(self.model, bool(wanted)) as states:
            hidden = self._hidden(input_ids, attention_mask, position_ids, cache)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        if wanted:
            output["hidden_states"] = (*states[:-1], hidden)
        as_tuple = not (self.config.return_dict if return_dict is None else return_dict)
        return output.to_tuple() if as_tuple else output

    def _hidden(
        self, tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> Tensor:
        past = cache.get_seq_length() if cache is not None else 0
        layout = layout_of(tokens, attention_mask, past)
        if position_ids is not None:
            check_position_ids(position_ids, tokens, layout, past)
        caches = None
        if cache is not None:
            slots = past + tokens.shape[1]
            caches = [HFLayerCache(cache, index, slots) for index in range(len(self.model.blocks))]
        checkpointing = self.gradient_checkpointing and self.training
        self.model.recompute = self._gradient_checkpointing_func if checkpointing else None
        return self.model.hidden(tokens, layout=layout, caches=caches, past=past)

    def _cache(self, given: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache to fill: the one given, or a new one where it is wanted, by default outside training.

        Gradient checkpointing runs a block twice, which would fill it twice.
        """
        if self.gradient_checkpointing and self.training:
            if given is not None:
                raise ValueError("past_key_values with gradient checkpointing in training: use one or the other")
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache(config=self.config) if use_cache and given is None else given

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; the native config follows."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = self.model.config.replace(vocab_size=embedding.num_embeddings)
        return embedding

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise what a checkpoint lacked by the native rules, which need the whole network; keep the rest."""
        named = dict(self.model.named_parameters())
        loaded = {name: p for name, p in named.items() if getattr(p, "_is_hf_initialized", False)}
        if len(loaded) == len(named):
            return
        kept = {name: p.detach().clone() for name, p in loaded.items()}
        self.model.reset_parameters()
        for name, value in kept.items():
            named[name].copy_(value)

    def _init_weights(self, module: nn.Module) -> None:
        """Rows that resize_token_embeddings adds; everything else is initialised by the native model."""
        if isinstance(module, nn.Embedding | nn.Linear):
            initialization.normal_(module.weight, mean=0.0, std=self.config.width**-0.5)


def as_pretrained(model: Transformer, tokenizer: Any) -> tuple[SkiplessForCausalLM, Any]:
    """A model of ours, whose parameters are shared, and its tokenizer as transformers knows them.

    Text ends at the tokenizer's end-of-document token, also at that of bytes, which is no special one in transformers.
    """
    fast = fast_tokenizer(tokenizer)
    wrapper = SkiplessForCausalLM.from_native(model, fast)
    wrapper.config.eos_token_id = tokenizer.end
    assert wrapper.generation_config is not None
    wrapper.generation_config.eos_token_id = tokenizer.end
    return wrapper, fast


def _check_loaded(model: SkiplessForCausalLM, info: dict[str, Any], place: Any) -> None:
    faults = [
        f"{_listed(info[kind])} {words}"
        for kind, words in (("missing_keys", "missing"), ("unexpected_keys", "without a place"))
        if info[kind]
    ]
    head, embedding = cast(Tensor, model.lm_head.weight), model.model.embedding.weight
    if head is not embedding and head.device == embedding.device != torch.device("meta"):
        faults += [] if torch.equal(head, embedding) else ["lm_head.weight other than the embedding it is tied to"]
    if faults:
        raise ValueError(
            f"the weights in {place} are not those of this network: {'; '.join(faults)}. Load them with the config "
            "they were saved with; to start another network from some of them, build it and use "
            "load_state_dict(…, strict=False)"
        )


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


@contextmanager
def _recording(model: Transformer, wanted: bool) -> Generator[list[Tensor]]:
    """While open, the list takes what enters the first block and leaves each one."""
    states: list[Tensor] = []
    hooks = []
    if wanted:
        hooks.append(model.blocks[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])))
        hooks.extend(block.register_forward_hook(lambda _, __, out: states.append(out)) for block in model.blocks)
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _refuse(kwargs: dict[str, Any]) -> None:
    """Arguments of other models that would change the result if they were ignored."""
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds is given; skipless models read input_ids")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: attention matrices are never formed; skipless.inspect measures them")


def _check_supported(config: SkiplessConfig, settings: ModelConfig) -> None:
    if settings.head != "lm":
        raise ValueError(f"head is {settings.head!r}; SkiplessForCausalLM wraps language models: head='lm'")
    if not config.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings is False; skipless models share the embedding with the unembedding: use True"
        )

"""What every Hugging Face model here shares: a native network that transformers loads, saves, runs and checkpoints."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache

from skipless.files import HASHES, check_hashes
from skipless.hf.configuration import SkiplessConfig
from skipless.hf.images import check_pixels
from skipless.hf.inputs import Placement
from skipless.model.config import Head, ModelConfig
from skipless.model.fold import FoldedTransformer
from skipless.model.transformer import Transformer
from skipless.nn.attention import ShapedAttention
from skipless.ops.layout import Layout
from skipless.ops.modes import without_autocast
from skipless.ops.reference import attend_with_weights


class Hidden(NamedTuple):
    """What the native network gives a head: X_L, the cache it filled, and what was recorded on the way."""

    last: Any  # tensors: transformers' types of outputs are narrower than what its models return
    cache: Cache | None
    layout: Layout | None
    states: Any
    attentions: Any


class SkiplessPreTrainedModel(PreTrainedModel):
    """A native network (`.model`) that transformers can load, save, train and place on devices.

    Numbers equal the native ones bit for bit. Attention runs as the native model chooses (impl="auto"), whatever
    attn_implementation says.
    """

    config_class = SkiplessConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    native_head: ClassVar[Head | None] = None  # None: whichever the config names
    of_images: ClassVar[bool | None] = None  # None: of images or of text
    _no_split_modules = ["Block"]  # noqa: RUF012  (transformers' own form)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    def __init__(self, config: SkiplessConfig, native: Transformer | None = None):
        super().__init__(config)
        from skipless.hf.recompute import RecomputedCall  # a circle: its first lines say why

        settings = self._settings(config)
        self.model = Transformer(settings) if native is None else native
        self.recomputed = RecomputedCall()
        if settings.images is not None:
            self.main_input_name = "pixel_values"
        for parameter in self.model.parameters():
            # the native constructor has initialised them: post_init would do so a second time
            vars(parameter)["_is_hf_initialized"] = not parameter.is_meta

    @classmethod
    def _settings(cls, config: SkiplessConfig) -> ModelConfig:
        """The native configuration. A classifier's head is its class's, of num_labels; the config then says so too."""
        cls._check_kind(config.images is not None)
        if cls.native_head in ("token", "pooled"):
            config.head, config.classes = cls.native_head, config.num_labels
        cls._check_head(config.head)
        return config.native()

    @classmethod
    def _check_head(cls, head: str) -> None:
        if cls.native_head not in (None, head):
            raise ValueError(f"head is {head!r}; {cls.__name__} wraps networks with head={cls.native_head!r}")

    @classmethod
    def _check_kind(cls, images: bool) -> None:
        if cls.of_images not in (None, images):
            kind, auto = ("images", "ImageClassification") if images else ("text", "CausalLM")
            raise ValueError(f"{cls.__name__} is not for a network of {kind}: AutoModelFor{auto} opens such networks")

    @classmethod
    def from_native(cls, model: Transformer, tokenizer: Any = None, *, labels: Sequence[str] | None = None) -> Any:
        """The wrapper of a native model, whose parameters it shares; special token ids come from the tokenizer.

        labels: names of a classifier's classes, in their order; None is LABEL_0, LABEL_1, ….
        """
        cls._check_kind(model.config.images is not None)
        cls._check_head(model.config.head)
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        known = {} if tokenizer is None else {name: getattr(tokenizer, name) for name in names}
        if labels is not None:
            if len(set(labels)) != model.config.classes or len(labels) != model.config.classes:
                raise ValueError(
                    f"labels are {len(set(labels))} names for {model.config.classes} classes: one for each"
                )
            known |= {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
        config = SkiplessConfig.from_native(model.config, dtype=model.embedding.weight.dtype, **known)
        wrapper = cls(config, native=model)
        return wrapper.train(model.training)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but a file of weights that are not this network's, one for one, is an error.

        transformers would leave the missing ones at random, and drop those that have no place. Heads are the exception:
        a classifier made from a language model starts with a fresh one, which transformers tells. A file that is not as
        `skipless export` wrote it, by the folder's hashes.json, is an error too.
        """
        place = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        if place is not None and Path(place).is_dir():
            check_hashes(Path(place))
        told = kwargs.pop("output_loading_info", False)
        try:
            model, info = cast(tuple[Any, dict], super().from_pretrained(*args, output_loading_info=True, **kwargs))
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                f"the weights in {place} are not of the sizes that are asked for, as transformers reports above. Load "
                "them with the config they were saved with; for another number of classes add "
                "ignore_mismatched_sizes=True to num_labels=…, and the head is drawn anew"
            ) from error
        _check_loaded(model, info, place)
        settings = model.model.config
        model.model.build_shapes(None if settings.images is None else settings.length)  # images have one length
        return (model, info) if told else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers. A folded network's matrices are not those its config tells of, so it is refused.

        The hashes of an export that it is saved over would no longer be true, and go.
        """
        if isinstance(self.model, FoldedTransformer):
            raise ValueError(
                "this network is folded, and its config describes the unfolded one: keep it with .model.save(path), "
                "which FoldedTransformer.load reads, or save the network it was folded from"
            )
        (Path(args[0] if args else kwargs["save_directory"]) / HASHES).unlink(missing_ok=True)
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, *args: Any, **kwargs: Any) -> None:
        """Nothing: transformers would save a copy of the source, of which it would load classes other than these."""

    def run(  # noqa: PLR0913  (transformers' arguments)
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        pixel_values: Tensor | None = None,
        **_: Any,
    ) -> Hidden:
        """The native network on transformers' arguments, which mean the same for every head.

        attention_mask (batch, past + T) may pad anywhere. position_ids are implied by it: others are an error, unless
        they start again at 0 for each document of a packed row. inputs_embeds are rows as get_input_embeddings() gives.
        output_hidden_states gives depth + 1 tensors: the embedding, then each block's output, the last after the norm.
        output_attentions gives each block's softmax rows; attention then runs by its dense definition, which has them.
        A network of images takes pixel_values alone, (batch, channels, side, side), normalised.
        """
        if self.model.config.images is not None:
            given = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
            inputs_embeds, use_cache = self._patches(pixel_values, given), False
        elif pixel_values is not None:
            raise ValueError("pixel_values are given to a network of text: give input_ids (batch, T)")
        x = input_ids if input_ids is not None else inputs_embeds
        if x is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give either input_ids (batch, T) or inputs_embeds (batch, T, width), one of the two")
        cache = self._cache(past_key_values, use_cache)
        placement = Placement.of(x, attention_mask, position_ids, cache, len(self.model.blocks))
        self.model.recompute = self._recompute if self._checkpointing else None
        states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        weights = self.config.output_attentions if output_attentions is None else output_attentions
        with _recording(self.model, bool(states), bool(weights)) as recorded:
            last = self.model.hidden(
                input_ids,
                inputs_embeds=inputs_embeds,
                layout=placement.layout,
                caches=placement.caches,
                past=placement.past,
            )
        return Hidden(
            last,
            cache,
            placement.layout,
            (*recorded.states[:-1], last) if states else None,
            tuple(recorded.attentions) if weights else None,
        )

    def _patches(self, pixels: Any, others: Sequence[Any]) -> Tensor:
        """The rows of the patches of normalised images: in the native network the pixels are not, and come out equal.

        The embedding is called as a module: what accelerate hangs on it has to act.
        """
        if any(each is not None for each in others):
            raise ValueError(
                "a network of images takes them alone, by name (pixel_values=…): no tokens, masks, positions or caches"
            )
        images = self.model.config.images
        assert images is not None
        check_pixels(pixels, images)
        return self.model.embedding(pixels, normalised=True)

    @property
    def _checkpointing(self) -> bool:
        return self.recomputed.gradient_checkpointing and self.training

    def _recompute(self, block: nn.Module, *arguments: Any) -> Tensor:
        return self.recomputed(block.__call__, *arguments)  # a module among the inputs would be moved by accelerate

    def _cache(self, given: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache to fill: the one given, or a new one where it is wanted, by default outside training.

        Gradient checkpointing runs a block twice, which would fill it twice.
        """
        if self._checkpointing:
            if given is not None:
                raise ValueError("past_key_values with gradient checkpointing in training: use one or the other")
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if not self.model.config.causal:  # later tokens change what earlier ones saw
            return None
        return DynamicCache(config=self.config) if use_cache and given is None else given

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = cast(nn.Embedding, value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; the native config follows."""
        if self.model.config.images is not None:
            raise ValueError("a network of images has no table of tokens to resize; its classes are num_labels")
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


def _check_loaded(model: SkiplessPreTrainedModel, info: dict[str, Any], place: Any) -> None:
    whole = model.native_head == "lm" or model.config.images is not None
    classifier = () if whole else ("model.head.",)  # which a language model's weights lack
    found = {
        "missing": {name for name in info["missing_keys"] if not name.startswith(classifier)},
        "without a place": {name for name in info["unexpected_keys"] if not name.startswith("model.head.")},
    }
    faults = [f"{_listed(names)} {words}" for words, names in found.items() if names]
    own = model.model.head if model.native_head == "lm" else None
    head, weight = model.get_output_embeddings(), (own or model.model.embedding).weight
    if head is not None and head.weight is not weight and _differ(head.weight, weight):
        faults.append("lm_head.weight other than the matrix it is a name of")
    if faults:
        raise ValueError(
            f"the weights in {place} are not those of this network: {'; '.join(faults)}. Load them with the config "
            "they were saved with; to start another network from some of them, build it and use "
            "load_state_dict(…, strict=False)"
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether they hold other numbers; those that are offloaded cannot be asked."""
    return one.device == other.device != torch.device("meta") and not torch.equal(one, other)


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


class _Recorded(NamedTuple):
    states: list[Tensor]
    attentions: list[Tensor]


@contextmanager
def _recording(model: Transformer, states: bool, attentions: bool) -> Generator[_Recorded]:
    """While open, lists take what enters the first block and leaves each one, and each block's softmax rows."""
    recorded, hooks = _Recorded([], []), []

    def attend_densely(attention: ShapedAttention, arguments: tuple, _: Tensor) -> Tensor:
        x, positions, cache = arguments
        inputs = attention.inputs(x, positions, None if cache is None else cache.held)
        with without_autocast(x.device):
            mixed, weights = attend_with_weights(inputs)
        recorded.attentions.append(weights)
        own = attention.inputs(x, positions).v
        return attention.finish(mixed, own, x.dtype)

    if states:
        hooks.append(model.blocks[0].register_forward_pre_hook(lambda _, inputs: recorded.states.append(inputs[0])))
        hooks.extend(b.register_forward_hook(lambda _, __, out: recorded.states.append(out)) for b in model.blocks)
    if attentions:
        hooks.extend(block.layers()[0].register_forward_hook(attend_densely) for block in model.each_block())
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()

"""The network as Hugging Face models: the bare one, a language model, and classifiers of texts, tokens and images."""

import logging
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.models.auto import modeling_auto
from transformers.utils.generic import can_return_tuple

from skipless.hf.configuration import IMAGE_CLASSES, TEXT_CLASSES, SkiplessConfig
from skipless.hf.images import check_labels, image_processor
from skipless.hf.inputs import filled_up, fixed_size
from skipless.hf.pretrained import SkiplessPreTrainedModel
from skipless.hf.tokenizer import fast_tokenizer
from skipless.model.transformer import Transformer

logger = logging.getLogger("skipless")


class SkiplessModel(SkiplessPreTrainedModel):
    """The network without a head: hidden states."""

    def __init__(self, config: SkiplessConfig, native: Transformer | None = None):
        super().__init__(config, native)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The last block's output after the final norm; arguments are those of `run`."""
        given = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
        hidden = self.run(*given, pixel_values=pixel_values, **kwargs)
        return BaseModelOutputWithPast(hidden.last, hidden.cache, hidden.states, hidden.attentions)


class SkiplessForCausalLM(SkiplessPreTrainedModel, GenerationMixin):
    """A language model. lm_head.weight is the embedding itself, or with tied_head=False the native head's."""

    native_head = "lm"
    of_images = False
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012  (transformers' own form)

    def __init__(self, config: SkiplessConfig, native: Transformer | None = None):
        super().__init__(config, native)
        settings = self.model.config
        if config.tie_word_embeddings != settings.tied_head:
            raise ValueError(
                f"tie_word_embeddings is {config.tie_word_embeddings} and tied_head {settings.tied_head}, but they are "
                "one setting: give tied_head alone"
            )
        self.lm_head = nn.Linear(settings.width, settings.vocab_size, bias=False, device="meta")
        weight = (self.model.head or self.model.embedding).weight
        if not weight.is_meta:  # else transformers makes them one, once it has seen that the file has this one
            self.lm_head.weight = weight
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        """lm_head is another name of the native head, which transformers is to save and load once."""
        if self.model.head is None:
            return super().get_expanded_tied_weights_keys(all_submodels)
        return {"lm_head.weight": "model.head.weight"}

    @can_return_tuple
    def forward(  # noqa: PLR0913  (transformers' signature)
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits, and the next-token loss where labels (−100: ignored) are given; labels are shifted here.

        The other arguments are those of `run`.
        """
        hidden = self.run(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            output_attentions,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden.last[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, hidden.cache, hidden.states, hidden.attentions)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,  # which transformers looks for in this signature
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers, but the mask says where tokens stand: transformers counts on from a last, padded one."""
        given = (next_sequence_length, past_key_values, attention_mask, inputs_embeds, is_first_iteration)
        inputs = cast(Any, super()).prepare_inputs_for_generation(input_ids, *given, **kwargs)
        if attention_mask is None or attention_mask.dim() != 2:
            return inputs
        ended = (attention_mask[:, -1] == 0).nonzero()[:, 0].tolist() if is_first_iteration else []
        if ended:
            logger.warning(
                "rows %s end in padding, so what is generated there continues no token; pad on the left: "
                "tokenizer.padding_side = 'left'",
                ended,
            )
        if ended or not is_first_iteration:
            inputs.pop("position_ids", None)
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **given: Any) -> Tensor | None:
        """The mask for a cache of a fixed size, of all its slots: where tokens stand says what they see."""
        return None if attention_mask is None else filled_up(attention_mask, fixed_size(given["past_key_values"]))

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: continuous batching writes the rows of several requests into one, with pages for a cache."""
        raise NotImplementedError(
            "generate_batch (continuous batching) attends through paged kernels, which do not know this network's "
            "biases; use generate with a batch padded on the left"
        )

    init_continuous_batching = continuous_batching_context_manager = generate_batch

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings
        if self.model.head is not None:  # of which lm_head is another name
            weight = cast(nn.Linear, new_embeddings).weight
            self.model.head.weight, self.model.head.out_features = weight, len(weight)


class _Classifier(SkiplessPreTrainedModel):
    """What classifiers share."""

    def __init__(self, config: SkiplessConfig, native: Transformer | None = None):
        super().__init__(config, native)
        self.num_labels = self.model.config.classes
        self.post_init()


class SkiplessForSequenceClassification(_Classifier):
    """A classifier of texts: the native pooled head, on the mean over tokens, with config.num_labels classes."""

    native_head = "pooled"
    of_images = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits (batch, num_labels), and the loss by config.problem_type where labels are given."""
        hidden = self.run(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs)
        logits: Any = self.model.logits(hidden.last, hidden.layout)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutputWithPast(loss, logits, hidden.cache, hidden.states, hidden.attentions)


class SkiplessForTokenClassification(_Classifier):
    """A classifier of tokens: the native token head, with config.num_labels classes."""

    native_head = "token"
    of_images = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits (batch, T, num_labels), and the mean cross entropy where labels (−100: ignored) are given."""
        hidden = self.run(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs)
        logits: Any = self.model.logits(hidden.last)
        loss = self.loss_function(logits, labels, self.config, **kwargs) if labels is not None else None
        return TokenClassifierOutput(loss, logits, hidden.states, hidden.attentions)


class SkiplessForImageClassification(_Classifier):
    """A classifier of images: the native pooled head, on the mean over patches, with config.num_labels classes.

    pixel_values are normalised, as the image processor of an export gives them and as every model of transformers takes
    them; the native network normalises pixels itself.
    """

    native_head = "pooled"
    of_images = True
    main_input_name = "pixel_values"
    input_modalities = "image"

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits (batch, num_labels), and the loss by config.problem_type where labels are given.

        That of single classes is the mean cross entropy, without the label smoothing that a run may have trained with.
        """
        if interpolate_pos_encoding:
            raise ValueError(
                "interpolate_pos_encoding: attention is made for this number of patches; resize the images"
            )
        hidden = self.run(
            None,
            pixel_values=pixel_values,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits: Any = self.model.logits(hidden.last)
        loss = None
        if labels is not None:
            check_labels(labels, self.num_labels)
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return ImageClassifierOutput(loss, logits, hidden.states, hidden.attentions)


for _auto, _own in (TEXT_CLASSES | IMAGE_CLASSES).items():
    if _auto != "AutoConfig":
        getattr(modeling_auto, _auto).register(SkiplessConfig, globals()[_own], exist_ok=True)


def as_pretrained(model: Transformer, tokenizer: Any, *, packed: bool = False) -> tuple[SkiplessPreTrainedModel, Any]:
    """A model of ours, whose parameters are shared, and its tokenizer, as transformers knows them.

    Text ends at the tokenizer's end-of-document token, also at one that is no special token there.
    """
    fast = fast_tokenizer(tokenizer)
    kinds = (SkiplessForCausalLM, SkiplessForSequenceClassification, SkiplessForTokenClassification)
    kind = next(kind for kind in kinds if kind.native_head == model.config.head)
    wrapper = kind.from_native(model, fast)
    wrapper.config.eos_token_id, wrapper.config.packed = tokenizer.end, packed
    if wrapper.generation_config is not None:
        wrapper.generation_config.eos_token_id = tokenizer.end
    return wrapper, fast


def images_as_pretrained(model: Transformer, labels: Sequence[str] | None) -> tuple[SkiplessPreTrainedModel, Any]:
    """A network of images, whose parameters are shared, and the processor of its pictures, as transformers knows them.

    labels are the names of its classes, where they are known.
    """
    wrapper = SkiplessForImageClassification.from_native(model, labels=labels)
    assert model.config.images is not None
    return wrapper, image_processor(model.config.images)

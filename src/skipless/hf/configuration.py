"""SkiplessConfig: a ModelConfig as transformers reads and writes it; the file by which an export finds its code."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from skipless.console import near_names
from skipless.model.config import ModelConfig
from skipless.schema import shortened

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
# What other families call the sizes: accepted nowhere in silence.
_ELSEWHERE = {
    "width": ("d_model", "n_embd", "dim", "hidden_dim", "embed_dim", "model_dim"),
    "depth": ("n_layer", "n_layers", "num_layer", "num_layers", "num_blocks", "num_hidden_layer"),
    "heads": ("n_head", "n_heads", "num_head", "num_heads", "num_attention_head"),
    "kv_heads": ("n_kv_heads", "num_kv_heads"),
    "hidden": ("n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"),
    "length": ("n_positions", "n_ctx", "max_seq_len", "block_size", "context_length"),
}
_FIELD_OF = {other: field for field, others in _ELSEWHERE.items() for other in others}

LOADER = "modeling_skipless.py"
# transformers checks the imports of this file first, and names the package where it is missing
_LOADER_TEXT = '''"""The network of this folder is code of the package skipless, which has to be installed."""

from skipless.hf import (
    SkiplessConfig,
    SkiplessForCausalLM,
    SkiplessForImageClassification,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
    SkiplessModel,
)
'''
_BARE = {"AutoConfig": "SkiplessConfig", "AutoModel": "SkiplessModel"}
TEXT_CLASSES = _BARE | {
    "AutoModelForCausalLM": "SkiplessForCausalLM",
    "AutoModelForSequenceClassification": "SkiplessForSequenceClassification",
    "AutoModelForTokenClassification": "SkiplessForTokenClassification",
}
IMAGE_CLASSES = _BARE | {"AutoModelForImageClassification": "SkiplessForImageClassification"}
# What transformers calls the sizes of images, and the fields of Images that they are.
_IMAGE_SIZES = {"image_size": "side", "patch_size": "patch", "num_channels": "channels"}
# which say nothing of images
_OF_TEXT = ("use_cache", "tie_word_embeddings", "packed", "bos_token_id", "eos_token_id", "pad_token_id")


class SkiplessConfig(PreTrainedConfig):
    """Every field of ModelConfig as an attribute of the same name, in plain data, beside transformers' own.

    ModelConfig stays the only list of fields and the only check: SkiplessConfig(width=256, scheme={"kind": "e-spa"}).
    transformers' names read and write the same fields, and stand in config.json too: hidden_size, num_hidden_layers,
    num_attention_heads, num_key_value_heads, intermediate_size, and max_position_embeddings for the training length,
    which is no limit. num_labels is the number of classes of a classifier. Of a network of images config.json also has
    image_size, patch_size and num_channels, which read `images` and cannot be set.
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
    packed: bool = False  # in training attention stayed within documents

    def __post_init__(self, **kwargs: Any):
        kwargs = self._in_own_names(kwargs)
        kwargs.pop("auto_map", None)  # to_dict writes it
        sizes = {name: kwargs.pop(name) for name in _IMAGE_SIZES if name in kwargs}
        native = ModelConfig.from_dict({name: kwargs.pop(name) for name in FIELDS if name in kwargs})
        self._check_unknown(kwargs)
        if not native.tied_head or native.images is not None:
            self.tie_word_embeddings = False
        if native.images is not None:
            self.use_cache = False
        for name, value in native.to_dict().items():
            setattr(self, name, value)
        for name, value in sizes.items():
            self._check_image_size(name, value)
        if native.classes and self.id2label is None:
            kwargs.setdefault("num_labels", native.classes)
        self._check_labels(kwargs.get("num_labels"))
        super().__post_init__(**kwargs)

    @classmethod
    def from_native(cls, config: ModelConfig, **kwargs: Any) -> "SkiplessConfig":
        """The wrapper of a ModelConfig; kwargs are transformers' own fields, such as eos_token_id."""
        return cls(**config.to_dict(), **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers. A file that names another number of classes than its head has is refused.

        Labels among kwargs are a wish for another head, and of any number.
        """
        classes, named = config_dict.get("classes"), config_dict.get("id2label")
        if classes and isinstance(named, dict) and len(named) != classes:
            raise ValueError(
                f"config.json names {len(named)} classes in id2label, and classes is {shortened(classes)}: give each "
                "class one name; for another number load it with num_labels=…, ignore_mismatched_sizes=True"
            )
        return super().from_dict(config_dict, **kwargs)

    def native(self) -> ModelConfig:
        """The ModelConfig these attributes say, checked anew."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sizes under both names, for tools that read the file, and the classes that LOADER imports."""
        common = {name: getattr(self, own) for name, own in self.attribute_map.items()}
        classes, written = TEXT_CLASSES, super().to_dict()
        if self.images is not None:
            classes = IMAGE_CLASSES
            common |= {name: self.images[own] for name, own in _IMAGE_SIZES.items()}
            for name in _OF_TEXT:
                written.pop(name, None)
        module = LOADER.removesuffix(".py")
        return written | common | {"auto_map": {auto: f"{module}.{own}" for auto, own in classes.items()}}

    def __getattr__(self, name: str) -> Any:
        """image_size, patch_size and num_channels, which a network of text has not."""
        images = vars(self).get("images")
        if name in _IMAGE_SIZES and images is not None:
            return images[_IMAGE_SIZES[name]]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, key: str, value: Any) -> None:
        if key in _IMAGE_SIZES:
            self._check_image_size(key, value)
        else:
            super().__setattr__(key, value)
            if key == "id2label" and value and vars(self).get("classes"):  # num_labels sets it too: they are one number
                super().__setattr__("classes", len(value))

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the file by which trust_remote_code=True finds this package."""
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / LOADER).write_text(_LOADER_TEXT, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, *args: Any, **kwargs: Any) -> None:
        """Nothing: transformers would save a copy of the source, of which it would load classes other than these."""

    def _in_own_names(self, given: dict[str, Any]) -> dict[str, Any]:
        """transformers' names replaced by the fields'; both may be given where they agree, as in a file."""
        named: dict[str, Any] = {}
        for name, value in given.items():
            own = self.attribute_map.get(name, name)
            if own in named and named[own] not in (None, value) and value is not None:
                raise ValueError(
                    f"{name} is {value!r} and {own} {named[own]!r}, but they are one field: give one of them"
                )
            named[own] = value if value is not None else named.get(own)
        return named

    def _check_image_size(self, name: str, value: Any) -> None:
        """Refuse a size of images that is not the network's: its places are learned, each for one patch."""
        if (images := vars(self).get("images")) is None:
            raise ValueError(f"{name} is {value!r}, but this is a network of text; one of images has images={{…}}")
        if (own := images[_IMAGE_SIZES[name]]) != value:
            raise ValueError(
                f"{name} is {value!r}, and images.{_IMAGE_SIZES[name]} {own!r}: the network takes images of one size, "
                "since it learned a place for each patch. Resize them, as the image processor of an export does"
            )

    def _check_labels(self, count: Any) -> None:
        """Refuse names of classes that are not numbered 0, 1, …: an answer's name is looked up by its number.

        transformers makes a name for each of `count` classes, for minutes where a file says ten million.
        """
        if count is not None and not (isinstance(count, int) and 0 <= count <= _MOST_LABELS):
            raise ValueError(f"num_labels is {shortened(count)}; it must lie in 0 … {_MOST_LABELS:,}")
        given = {} if self.id2label is None else self.id2label
        numbers = [str(number) for number in given] if isinstance(given, dict) else None
        if numbers is None or set(numbers) != {str(number) for number in range(len(numbers))}:
            raise ValueError(
                f"id2label is {shortened(given)}; it must have a name for each class 0, 1, …, none left out"
            )

    def _check_unknown(self, kwargs: dict[str, Any]) -> None:
        """transformers keeps unknown names as attributes; one that is nearly a field is a slip that changes a model."""
        for name in kwargs:
            if hasattr(type(self), name):
                continue
            near = near_names(name, [*FIELDS, *self.attribute_map], cutoff=0.8) or near_names(
                name, [*_FIELD_OF], cutoff=0.9
            )
            if near:
                meant = _FIELD_OF.get(near[0], near[0])
                raise ValueError(f"SkiplessConfig has no field {name!r}; did you mean {meant!r}?")


_MOST_LABELS = 1 << 20
AutoConfig.register(SkiplessConfig.model_type, SkiplessConfig, exist_ok=True)

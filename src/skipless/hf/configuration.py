"""SkiplessConfig: a ModelConfig in transformers' clothes."""

import dataclasses
import difflib
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from skipless.model.config import ModelConfig

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
        if near := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8):
            raise ValueError(f"SkiplessConfig has no field {name!r}; did you mean {near[0]!r}?")

"""Hugging Face models: from a folder that save_pretrained wrote, or a family built anew from its config."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipless.console import nearest
from skipless.files import HASHES, ChangedError, check_hashes

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("skipless")
FAMILIES = {"gpt2": "gpt2", "llama": "llama", "gpt-neox": "gpt_neox", "bert": "bert", "vit": "vit"}


def open_pretrained(folder: str | Path) -> Any:
    """The model of a folder, on the CPU, with the class its config.json names. Nothing is downloaded or unpickled.

    What `skipless export` wrote must be as it was written; any other folder is read, and said to be unverified.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; give a model object, or a folder written by save_pretrained")
    if not check_hashes(folder, "*.json"):  # the weights by our own class, which these files name
        logger.warning("%s is read unverified: it has no %s of `skipless export`", folder, HASHES)
    import transformers
    from transformers.utils import logging as transformers_logging

    import skipless.hf

    transformers_logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        named = (getattr(config, "architectures", None) or [""])[0]
        kind: Any = getattr(transformers, named, None) or getattr(skipless.hf, named, None) or _auto_class(config)
        return kind.from_pretrained(str(folder), local_files_only=True, use_safetensors=True).eval()
    except (OSError, ChangedError):  # these name the file
        raise
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".!")
        raise ValueError(
            f"{folder} does not load ({why}): its weights are damaged, cut short or not those of its config.json; save "
            "it again, a run with `skipless export RUN`"
        ) from error


def pretrained_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder that save_pretrained wrote, verified where hashes.json lists its files."""
    check_hashes(Path(folder), "*token*")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def build_family(name: str, **sizes: int) -> "nn.Module":
    """A family by name ("gpt2", "llama", "gpt-neox", "bert", "vit", or any model type transformers knows), initialised
    as transformers does. sizes are config fields, as in num_hidden_layers=12, hidden_size=256."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = FAMILIES.get(name, name)
    if kind not in CONFIG_MAPPING_NAMES:
        raise ValueError(f"transformers knows no family {name!r}; {nearest(kind, [*FAMILIES, *CONFIG_MAPPING_NAMES])}")
    special = {"bos_token_id": None, "eos_token_id": None} if "vocab_size" in sizes else {}
    config = transformers.AutoConfig.for_model(kind, **_spelt(kind, sizes), **special)
    return _auto_class(config).from_config(config).eval()


def _spelt(kind: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Sizes in the config's own words, with what follows from them: an MLP four times as wide, one key per head."""
    from transformers import CONFIG_MAPPING

    own = CONFIG_MAPPING[kind].attribute_map
    fields: dict[str, Any] = {own.get(name, name): value for name, value in sizes.items()}
    defaults = vars(CONFIG_MAPPING[kind]())
    if "hidden_size" in sizes and "intermediate_size" in defaults:
        fields.setdefault("intermediate_size", 4 * sizes["hidden_size"])
    if "num_attention_heads" in sizes and "num_key_value_heads" in defaults:
        fields.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return fields


def _auto_class(config: Any) -> Any:
    """The head that suits the family: next token, masked token or image class; else the bare model."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for mapping, kind in (
        (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
        (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, transformers.AutoModelForImageClassification),
    ):
        if config.model_type in mapping:
            return kind
    return transformers.AutoModel

"""Hugging Face models: from a folder that save_pretrained wrote, or a family built anew from its config."""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from skipless.console import nearest
from skipless.files import HASHES, ChangedError, check_hashes, mapping, read_json, reading

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("skipless")
FAMILIES = {"gpt2": "gpt2", "llama": "llama", "gpt-neox": "gpt_neox", "bert": "bert", "vit": "vit"}


def open_pretrained(folder: str | Path) -> Any:
    """The model of a folder, on the CPU, with the class its config.json names.

    Nothing is downloaded or unpickled, and no code that lies in the folder is run or asked about. What `skipless
    export` wrote must be as it was written; any other folder is read, and said to be unverified.
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
    tensors = _check_files(folder, _MODEL_FILES)
    if not tensors:
        pickled = "; pickled ones, such as pytorch_model.bin, are not read" if any(folder.glob("*.bin")) else ""
        raise ValueError(f"{folder} holds no weights (no model.safetensors){pickled}: {_SAVE_AGAIN}")
    with _without_code(folder / "config.json"):
        config = transformers.AutoConfig.from_pretrained(str(folder), **_LOCAL)
        named = (getattr(config, "architectures", None) or [""])[0]
        kind: Any = getattr(transformers, named, None) or getattr(skipless.hf, named, None)
        kind = kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else None
        kind = kind or _auto_class(config)
        blocks = getattr(config, "num_hidden_layers", None) or 0
        if not isinstance(blocks, int) or blocks > 64 * tensors:  # some share theirs
            raise ValueError(f"{blocks!r} blocks, and the weights beside it are {tensors} tensors")
    try:
        return kind.from_pretrained(str(folder), config=config, use_safetensors=True, **_LOCAL).eval()
    except ChangedError:  # which names the file
        raise
    except OSError as error:
        raise OSError(_first_line(error)) from error
    except Exception as error:
        raise ValueError(
            f"{folder} does not load ({_first_line(error)}): its weights are damaged, cut short or not those of its "
            f"config.json; {_SAVE_AGAIN}"
        ) from error


_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_SAVE_AGAIN = "save it again, a run with `skipless export RUN`"
_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def _check_files(folder: Path, names: Sequence[str] = ()) -> int:
    """Refuse, by its name, a file that transformers would stumble over; how many tensors the weights are."""
    tensors = 0
    for name in names:
        if (folder / name).is_file():
            read_json(folder / name, mapping, _SAVE_AGAIN)
    for file in sorted(folder.glob("*.safetensors")):
        with reading(file, _SAVE_AGAIN, what="is damaged, cut short or no safetensors file"):
            file.open("rb").close()  # safetensors takes one that may not be read for one that is not there
            with safe_open(file, framework="numpy") as weights:
                tensors += len(weights.keys())
    return tensors


@contextmanager
def _without_code(file: Path) -> Generator[None]:
    """In here what transformers would ask leave for is an error; so is what is wrong with the file, by its name."""
    with reading(file, _SAVE_AGAIN):
        try:
            yield
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError(f"{file} asks for code that lies beside it (auto_map), which is never run here") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".!")


def pretrained_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder that save_pretrained wrote, verified where hashes.json lists its files.

    No code that lies in the folder is run or asked about.
    """
    check_hashes(Path(folder), "*token*")
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    _check_files(Path(folder), _TOKENIZER_FILES)
    with _without_code(Path(folder) / "tokenizer_config.json"):
        try:
            return AutoTokenizer.from_pretrained(str(folder), **_LOCAL)
        except Exception:
            if (file := Path(folder) / "tokenizer.json").is_file():  # which of the two is it?
                with reading(file, _SAVE_AGAIN):
                    Tokenizer.from_file(str(file))
            raise


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

    for known, kind in (
        (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
        (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, transformers.AutoModelForImageClassification),
    ):
        if config.model_type in known:
            return kind
    return transformers.AutoModel

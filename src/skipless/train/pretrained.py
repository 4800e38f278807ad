"""Models and tokenizers in transformers' form: read from a folder, or made of ours."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipless.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from skipless.hf import SkiplessForCausalLM
    from skipless.model.transformer import Transformer


def read_pretrained(folder: str | Path) -> "SkiplessForCausalLM":
    """What save_pretrained wrote, from the disk alone, on the CPU and in evaluation mode."""
    from safetensors import SafetensorError

    from skipless.hf import SkiplessForCausalLM

    try:
        return SkiplessForCausalLM.from_pretrained(str(folder), local_files_only=True).eval()
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {folder} (*.safetensors) are damaged or cut short ({error}): write them again, for a run "
            "with `skipless export RUN`"
        ) from error


def as_pretrained(model: "Transformer", tokenizer: Tokenizer) -> "tuple[SkiplessForCausalLM, Any]":
    """A model of ours, whose parameters are shared, and its tokenizer as transformers knows them.

    Text ends at the tokenizer's end-of-document token, also at that of bytes, which is no special one in transformers.
    """
    from skipless.hf import SkiplessForCausalLM

    fast = fast_tokenizer(tokenizer)
    wrapper = SkiplessForCausalLM.from_native(model, fast)
    wrapper.config.eos_token_id = tokenizer.end
    assert wrapper.generation_config is not None
    wrapper.generation_config.eos_token_id = tokenizer.end
    return wrapper, fast


def fast_tokenizer(tokenizer: Tokenizer) -> Any:
    """The fast tokenizer with the same ids."""
    from skipless.hf import byte_tokenizer, sentencepiece_tokenizer

    inner = getattr(tokenizer, "inner", None)
    if inner is not None:
        return inner
    if tokenizer.model is None:
        return byte_tokenizer()
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(tokenizer.model)
        file.flush()
        return sentencepiece_tokenizer(file.name)

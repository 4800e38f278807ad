"""Hugging Face: importing skipless and transformers, in either order, registers these with the Auto classes.

import skipless
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

and of a network of images AutoModelForImageClassification, with AutoImageProcessor.
"""

from typing import TYPE_CHECKING

from skipless import lazy

# ruff: noqa: F401
if TYPE_CHECKING:
    from skipless.hf.configuration import SkiplessConfig
    from skipless.hf.modeling import (
        SkiplessForCausalLM,
        SkiplessForImageClassification,
        SkiplessForSequenceClassification,
        SkiplessForTokenClassification,
        SkiplessModel,
    )
    from skipless.hf.tokenizer import byte_tokenizer, export_tokenizer, sentencepiece_tokenizer

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "configuration": ["SkiplessConfig"],
        "modeling": [
            "SkiplessForCausalLM",
            "SkiplessForImageClassification",
            "SkiplessForSequenceClassification",
            "SkiplessForTokenClassification",
            "SkiplessModel",
        ],
        "tokenizer": ["byte_tokenizer", "export_tokenizer", "sentencepiece_tokenizer"],
    },
)
